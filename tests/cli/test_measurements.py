"""Earlier runs and files give the planner measurements: steps after warm-up, the largest memory, the plan's layout."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import espalier
from espalier.cli import main as cli
from espalier.cli.measurements import from_run, measurements
from espalier.machine import cluster as clusters
from espalier.plan import base
from espalier.plan.calibration import Batch, calibrate
from espalier.plan.calibration_factors import PLAIN
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import UserError
from espalier.track.events import Log
from espalier.train import request_from_recipe
from espalier.train.run_folder import RunFolder

CLUSTER = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"'


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of two ranks, its log still empty."""
    table = {"model": {"depth": 2}, "train": {"steps": 20, "sequence": 128, "batch_tokens": 2048}}
    recipe, _ = defaults.resolve(recipe_file.from_table(table))
    plan = base.Plan(ranks=(base.Rank(share=(0, 8)), base.Rank(share=(8, 16))), micro_batch=4, recompute="block")
    found = RunFolder(tmp_path)
    found.write(recipe, clusters.loads(CLUSTER), plan)
    return found


def log(folder: RunFolder, seconds: list[float]) -> None:
    with Log(folder.events) as events:
        events.write("run", step=0, steps=len(seconds))
        for step, taken in enumerate(seconds, 1):
            events.write("step", step=step, seconds=taken, memory=2**30 + step, loss=1.0)


def test_a_run_is_one_measurement_of_its_plan(folder: RunFolder) -> None:
    log(folder, [9.0, 9.0, *[0.5] * 9, *[0.7] * 9])
    found = from_run(folder.path)
    assert found.step_seconds == pytest.approx(0.6), "the two slow steps of the warm-up are left out"
    assert found.peak_bytes == 2**30 + 20
    assert (found.layout.dp, found.layout.micro_batch, found.layout.recompute) == (2, 4, "block")
    assert found.request.profile.parameters == request_from_recipe.of_recipe(folder.read()).profile.parameters
    assert measurements(folder.path)[0].step_seconds == found.step_seconds


def test_a_repeated_step_counts_once_as_it_was_last(folder: RunFolder) -> None:
    log(folder, [5.0, 5.0, 5.0])
    log(folder, [1.0, 1.0, 1.0])
    assert from_run(folder.path).step_seconds == 1.0


def test_an_earlier_run_calibrates(folder: RunFolder) -> None:
    log(folder, [1.0] * 10)
    plain = float(Batch([from_run(folder.path)]).predict(PLAIN)[0][0])
    folder.events.unlink()
    log(folder, [1.5 * plain] * 10)
    found = measurements(folder.path)
    calibrated = Batch(found).predict(calibrate(found).factors)[0][0]
    assert abs(calibrated / (1.5 * plain) - 1) < 0.1


def test_the_library_and_the_command_line_calibrate_on_a_run_alike(
    folder: RunFolder, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    log(folder, [0.3] * 10)
    asked = msgspec.structs.replace(folder.read().plan, calibration=str(folder.path))
    recipe = msgspec.structs.replace(folder.read(), plan=asked)
    home = tmp_path_factory.mktemp("asked")
    (home / "recipe.toml").write_text(recipe_file.dump(recipe))
    (home / "cluster.toml").write_text(CLUSTER)
    found = espalier.make_plan(home / "recipe.toml", home / "cluster.toml")
    assert cli.main(["plan", str(home / "recipe.toml"), "--cluster", str(home / "cluster.toml"), "--json"]) == 0
    assert base.dumps(found) == capsys.readouterr().out
    assert found.predicted is not None
    assert found.predicted.sources["coefficients"] == f"calibrated on {folder.path}"


def test_what_holds_no_measurement_is_refused(folder: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> None:
    log(folder, [])
    with pytest.raises(UserError, match="no measured step"):
        measurements(folder.path)
    with pytest.raises(UserError, match="no run in"):
        measurements(tmp_path_factory.mktemp("none"))
    with pytest.raises(UserError, match="cannot be read: it is not there"):
        measurements(folder.path / "none.csv")


def test_a_file_in_other_units_is_refused_with_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    head = "gpus,global_batch,micro_batch,hidden,heads,layers,seq,tp,dp,pp,iter_ms"
    path.write_text(f"{head}\n8,32,2,2048,16,24,1024,2,2,2,0.6\n")
    with pytest.raises(UserError, match="milliseconds"):
        measurements(path)
