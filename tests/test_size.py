"""The scripts that count the source: nodes beside their budgets, names at the top, arrows between rooms."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LINES, ARROWS = script("lines"), script("arrows")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Three rooms and two mechanisms; `plan` imports upward for type checkers, and in a function."""
    files = {
        "__init__.py": "",
        "recipe/base.py": "SIZE = 1\n",
        "plan/base.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from top.train import Trainer\n",
        "plan/axes/tensor.py": "def cost():\n    from top.mechanisms.tensor_parallel import cut\n    return cut\n",
        "train/__init__.py": "import top.plan.base\nfrom top.recipe import base\nfrom top.recipe.base import SIZE\n",
        "mechanisms/tensor_parallel/cut.py": "from top.mechanisms.codecs import zfp\n",
        "mechanisms/codecs/zfp.py": "x = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / "top" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "top"


def test_a_mechanism_counts_with_its_part_of_the_planner(package: Path) -> None:
    rooms, mechanisms = LINES.count(package)
    assert mechanisms["codecs"] == LINES.nodes(package / "mechanisms/codecs/zfp.py") == 5
    planner = LINES.nodes(package / "plan/axes/tensor.py")
    assert mechanisms["tensor_parallel"] == LINES.nodes(package / "mechanisms/tensor_parallel/cut.py") + planner
    assert rooms["plan"] == LINES.nodes(package / "plan/base.py") + planner
    assert rooms.total() == sum(LINES.nodes(path) for path in package.rglob("*.py"))


def test_what_is_over_its_limit_is_said_and_limits_only_fall() -> None:
    limits = {"espalier": 100_000, "mechanisms": {"offload": 35_000, "large": 50_000, "deleted": 35_000}}
    sizes = Counter(offload=36_000, large=45_000, fresh=12_001)
    said = LINES.excess(100_001, sizes, limits)
    assert [re.findall(r"[\d,]*\d", sentence)[:2] for sentence in said] == [
        ["100,001", "100,000"],
        ["36,000", "35,000"],
        ["12,001", "12,000"],
    ]
    assert not LINES.excess(100_000, Counter(offload=35_000, large=50_000, fresh=12_000), limits)
    assert LINES.lowered(90_000, sizes, limits) == {
        "espalier": 90_000,
        "mechanisms": {"offload": 35_000, "large": 45_000},
    }
    assert LINES.lowered(110_000, Counter(offload=1, large=1), limits) == {
        "espalier": 100_000,
        "mechanisms": {"offload": 35_000, "large": 35_000},
    }


def test_every_part_of_the_planner_belongs_to_a_mechanism_that_is_there() -> None:
    axes = {path.stem for path in (LINES.PACKAGE / "plan" / "axes").glob("[!_]*.py")}
    folders = {path.parent.name for path in (LINES.PACKAGE / "mechanisms").glob("*/__init__.py")}
    limits = json.loads(LINES.FILE.read_text(encoding="utf-8"))
    assert axes == set(LINES.PLANNER)
    assert set(LINES.PLANNER.values()) <= folders
    assert set(limits["mechanisms"]) <= folders


def test_an_arrow_is_a_pair_of_rooms_however_they_import(package: Path) -> None:
    pairs = ARROWS.arrows(package)
    assert pairs == {
        ("plan", "train"): 1,
        ("plan", "mechanisms/tensor_parallel"): 1,
        ("train", "plan"): 1,
        ("train", "recipe"): 2,
        ("mechanisms/tensor_parallel", "mechanisms/codecs"): 1,
    }
    assert ARROWS.names(package) == ["mechanisms", "plan", "recipe", "train"]
    line = {"mechanisms": 0, "train": 1, "plan": 2, "recipe": 3}
    assert set(ARROWS.upward(pairs, line)) == {
        ("plan", "train"),
        ("plan", "mechanisms/tensor_parallel"),
        ("mechanisms/tensor_parallel", "mechanisms/codecs"),
    }


def test_rooms_are_joined_by_at_most_300_arrows() -> None:
    pairs = ARROWS.arrows(ARROWS.PACKAGE)
    assert ("cli", "recipe") in pairs
    assert len(pairs) <= ARROWS.ARROWS == 300


def test_the_tests_are_in_the_tree_of_the_source() -> None:
    """Rooms of `tests` are those of the package, but for what belongs to no single one."""
    package = ROOT / "src" / "espalier"
    of_no_room = {"accelerators", "bench", "cases", "docs", "faults", "golden", "readers", "story", "support"}
    of_no_room |= {"together", "toys"}
    rooms = {path.name for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    assert {room for room in rooms - of_no_room if not (package / room).is_dir()} == set()
    tested = {path.parent.name for path in (ROOT / "tests" / "mechanisms").glob("*/test_*.py")}
    assert tested == {path.parent.name for path in (package / "mechanisms").glob("*/README.md")}
