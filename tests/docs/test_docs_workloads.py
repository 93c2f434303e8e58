"""docs/workloads.md followed to the letter: its folder and its one row make a kind of model that all verbs know."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "workloads.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a copy of the package in which the page was followed, a recipe, and points."""
    package = tmp_path / "copy" / "espalier"
    partial = shutil.ignore_patterns("*.pyc.*", "*.tmp.*")  # which other workers are writing
    shutil.copytree(
        ROOT / "src" / "espalier", package, ignore=partial
    )  # with its bytecode, which takes seconds to make
    options, workload = blocks("python")
    (package / "curve").mkdir()
    (package / "curve" / "__init__.py").write_text('"""How is a curve found?"""\n')
    (package / "curve" / "options.py").write_text(options)
    (package / "curve" / "workload.py").write_text(workload)
    (diff,) = blocks("diff")
    kept = "".join(line[1:] + "\n" for line in diff.splitlines() if not line.startswith("+"))
    added = [line for line in diff.splitlines() if line.startswith("+")]
    assert len(added) == 1, "one row"
    kinds = (package / "recipe" / "model_kinds.py").read_text()
    assert kept in kinds
    followed = "".join(line[1:] + "\n" for line in diff.splitlines())
    (package / "recipe" / "model_kinds.py").write_text(kinds.replace(kept, followed))
    (recipe,) = blocks("toml")
    (tmp_path / "recipe.toml").write_text(recipe + '[plan]\ntrial = false\ncluster = "machine.toml"\n')
    (tmp_path / "machine.toml").write_text('[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n')
    points = "\n".join(f"{x / 50} {1 + x / 25}" for x in range(-50, 50))
    (tmp_path / "points.txt").write_text(points + "\n")
    return tmp_path


FORKS = """
import json, sys
from pathlib import Path
import torch._dynamo  # else each fork with an optimizer imports it
from programs import forked
done = [forked(Path.cwd(), *words) for words in json.loads(sys.argv[1])]
print(json.dumps([(one.returncode, one.stdout, one.stderr) for one in done]))
"""


def espalier(home: Path, *commands: str) -> list[tuple[int, str, str]]:
    """The exit code, and what was printed, of each command line: forks of one program that has imported the copy."""
    paths = os.pathsep.join(map(str, (home / "copy", ROOT / "tests" / "story")))
    done = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps([one.split() for one in commands])],
        cwd=home, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return list(map(tuple, json.loads(done.stdout)))


def test_a_kind_of_model_is_one_folder_and_one_row(home: Path) -> None:
    train = "train recipe.toml plan.pin.ranks=2"
    answers = espalier(
        home, train, "predict runs/recipe 0.5 --json", "report runs/recipe", "plan recipe.toml model.degre=2"
    )
    assert [code for code, *_ in answers] == [0, 0, 0, 2], answers[0][2]
    (_, told, _), (_, predicted, _), _, (*_, refused) = answers
    assert "model.degree" in told
    assert "2 ranks" in told
    assert "power  factor" in told
    run = home / "runs" / "recipe"
    steps = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if '"event":"step"' in line]
    assert [one["step"] for one in steps] == [1, 2, 3, 4, 5]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert "answer" in json.loads(predicted)
    assert ">power</th>" in (run / "report.html").read_text()
    assert "did you mean model.degree" in refused
    (home / "points.txt").write_text("0 0\n" * 40)
    ((code, _, again),) = espalier(home, f"{train} train.steps=6")
    assert code == 2
    assert "points.txt has changed since" in again
