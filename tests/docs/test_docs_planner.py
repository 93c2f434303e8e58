"""The constants, factors and examples of docs/planner.md and docs/measured/planner.md are those of the code."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from espalier.machine import cluster
from espalier.plan import (
    calibration_factors,
    collective_time,
    cost_inputs,
    device_model,
    layouts,
    memory_model,
    precision,
    reference_models,
    request,
    search,
    step_time,
)
from espalier.plan.axes import offload
from espalier.plan.axes.sharding import Division, StateSizes, cost
from espalier.plan.measurements import score
from espalier.plan.measurements.table import read
from espalier.recipe import units

calibration = importlib.import_module("espalier.plan.calibration")
PAGE = Path(__file__).parents[2] / "docs" / "planner.md"
COST_MODEL = PAGE.parent / "measured" / "planner.md"
MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        *(calibration, memory_model, collective_time, cost_inputs, reference_models, search, step_time),
        device_model,
        offload,
        precision,
    )
}
NAMES = {**MODULES, "score": score, "cluster": cluster, "request": request, "layouts": layouts}
IN_FACTORS = {"calibration.PRIOR", "calibration.LOWEST"}
"""Constants whose values stand in the table of factors."""
SCALES = {"B": units.size, "s": units.seconds}


def table(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, cells stripped of spaces."""
    text = COST_MODEL.read_text(encoding="utf-8").partition(f"# {heading}\n")[2]
    found = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert found is not None, heading
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in found[0].splitlines()]
    return rows[2:]


def value(text: str) -> Any:
    """A number, a tuple, or a size or time with its unit."""
    text = text.replace("`", "").replace(",", "") if "(" not in text else text.replace("`", "")
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        written = text.replace(" ", "")
        return SCALES[written[-1]](written) if written[-1] in SCALES else float(Fraction(written))


def flat(found: Any) -> list[float]:
    return [one for part in found for one in flat(part)] if isinstance(found, list | tuple) else [float(found)]


def numeric(found: Any) -> bool:
    if isinstance(found, dict):
        return bool(found) and all(numeric(one) for one in found.values())
    if isinstance(found, tuple | list):
        return bool(found) and all(numeric(one) for one in found)
    return isinstance(found, int | float) and not isinstance(found, bool)


def constants(module: ModuleType) -> list[str]:
    """Names of the numeric constants that a module defines itself; of tables, one for each key."""
    assigned = [
        target.id
        for node in ast.parse(inspect.getsource(module)).body
        for target in (node.targets if isinstance(node, ast.Assign) else ())
        if isinstance(target, ast.Name) and target.id.isupper()
    ]
    short, found = module.__name__.rpartition(".")[2], []
    for name in assigned:
        held, full = getattr(module, name), f"{short}.{name}"
        if numeric(held) and full not in IN_FACTORS:
            found += [f'{full}["{key}"]' for key in held] if isinstance(held, dict) else [full]
    return found


CONSTANTS = {row[0].replace("`", ""): row for row in table("Constants")}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_on_the_page_is_the_codes(name: str) -> None:
    assert flat(eval(name, dict(NAMES))) == pytest.approx(flat(value(CONSTANTS[name][1])), rel=1e-12)


@pytest.mark.parametrize("module", MODULES)
def test_every_constant_of_the_code_is_on_the_page(module: str) -> None:
    missing = [name for name in constants(MODULES[module]) if name not in CONSTANTS]
    assert not missing, f"docs/measured/planner.md, Constants: add {', '.join(missing)}"


def test_every_constant_says_what_it_is_and_where_it_comes_from() -> None:
    assert all(len(row) == 4 and all(row) for row in CONSTANTS.values())


def test_the_table_of_factors_is_the_codes() -> None:
    rows = {row[0].replace("`", ""): row for row in table("Calibration")}
    factors = calibration_factors.CostFactors
    assert list(rows) == list(factors.__struct_encode_fields__)  # as files have them
    for name, row in zip(factors.__struct_fields__, rows.values(), strict=True):
        if name not in calibration.PRIOR:
            assert row[2:] == ["–", "–", "–"], name
            continue
        most = calibration.EXPOSED if name == "exposed" else calibration.RANGE[1]
        told = [float(cell) for cell in row[2:]]
        assert told == [calibration.PRIOR[name], calibration.LOWEST.get(name, calibration.RANGE[0]), most], name


def test_the_example_of_states_is_what_the_code_says() -> None:
    rows = table("Worked example: states of LLaMA-7B")
    assert len(rows) == 8
    for params, grads, optimizer, said in rows:
        split = Division(int(params), int(grads), int(optimizer), 64)
        found = cost(StateSizes(reference_models.MIXED, elements=6_738_415_616), split).memory_bytes
        held = sum(found[name] for name in ("params", "grads", "optimizer"))
        assert f"{held / 2**30:.2f}" == said


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_measurement_files_shown_are_read(tmp_path: Path) -> None:
    (shown,) = (text for text in fenced("text") if text.startswith("gpus,"))
    for name, text in (("a.csv", shown), ("a.jsonl", fenced("json")[0])):
        (tmp_path / name).write_text(text, encoding="utf-8")
        found = read(tmp_path / name)
        assert len(found.rows) == 1
        assert found.rows[0].measurement.step_seconds
        assert int(found.rows[0].measurement.layout.world) == 8


def test_the_calls_shown_answer_for_the_recipe_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,), (machines, recipe) = fenced("python"), fenced("toml")
    (tmp_path / "recipe.toml").write_text(recipe, encoding="utf-8")
    (tmp_path / "cluster.toml").write_text(machines, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    shown: list[Any] = []
    exec(code, {"print": lambda *said: shown.extend(said)})
    took, peak, executable = shown
    assert 0 < took < 3600
    assert 6_738_415_616 < peak <= 60 * 2**30
    assert isinstance(executable, bool)
