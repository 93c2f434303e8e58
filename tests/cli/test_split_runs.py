"""All splits of a graph's masks: each a run, mean and deviation of their figures, resumed without training again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import espalier
from espalier.cli import main as cli
from espalier.cli import train
from espalier.recipe.errors import Interrupted, UserError

SPLITS = 3
RECIPE = """
model = { kind = "gcn", width = 8 }
data = { path = "graph.npz" }
graph = { split = "all" }
train = { steps = 3, validate_every = 3 }
plan = { trial = false, pin = { ranks = 1 } }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe for a graph whose masks are of three splits."""
    draw = np.random.default_rng(0)
    part = draw.integers(0, 3, (60, SPLITS))
    masks = {name: part == at for at, name in enumerate(("train_mask", "val_mask", "test_mask"))}
    labels = draw.integers(0, 2, 60)
    features = draw.normal(size=(60, 4)) + labels[:, None]
    edges = draw.integers(0, 60, (2, 200))
    np.savez(tmp_path / "graph.npz", edge_index=edges, x=features.astype(np.float32), y=labels, **masks)
    (tmp_path / "g.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> list[str]:
    """The overrides of the runs that are begun from here on; that with number `stop_at` is interrupted."""
    begun: list[str] = []
    fork = train.fork

    def counted(job: train.RunStart, hosts: tuple[int, ...] = ()) -> bool:
        begun.append(job.folder.path.name)
        if len(begun) - 1 == stop_at:
            raise Interrupted("Stopped.", do="go on")
        return fork(job, hosts)

    monkeypatch.setattr(train, "fork", counted)
    return begun


def test_all_splits_are_trained_once_each_and_told_by_mean_and_deviation(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        assert trained(patch, stop_at=1) == []
        assert cli.main(["train", "g.toml"]) == 130
    begun = trained(monkeypatch)
    assert cli.main(["train", "g.toml"]) == 0
    assert begun == ["split-1", "split-2"], "the first was finished"
    out = capsys.readouterr().out
    assert "mean ± standard deviation of 3 runs" in out

    figures = espalier.open_splits("runs/g")
    made = [espalier.open(f"runs/g/split-{number}") for number in range(SPLITS)]
    assert [run.recipe["graph"]["split"] for run in made] == [0, 1, 2]
    accuracies = [run.validations["test_accuracy"][-1] for run in made]
    mean, deviation = np.mean(accuracies), np.std(accuracies, ddof=1)
    assert figures["test_accuracy"] == (accuracies, pytest.approx(mean), pytest.approx(deviation))
    shown = f"{mean:.4g} ± {deviation:.2g}"
    assert shown in out
    assert shown in Path("runs/g/comparison.html").read_text()

    assert cli.main(["train", "g.toml", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert begun == ["split-1", "split-2"]
    assert table["repeated"]["test_accuracy"]["mean"] == figures["test_accuracy"].mean
    assert cli.main(["report", "runs/g"]) == 0
    assert shown in capsys.readouterr().out


def test_the_plan_counts_the_steps_of_all_splits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "g.toml"]) == 0
    assert "predicted run 9 steps" in capsys.readouterr().out
    assert cli.main(["plan", "g.toml", "graph.split=1"]) == 0
    assert "predicted run 3 steps" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--hosts", "a,b"], ["--from", "runs/other"]])
def test_runs_that_others_start_are_refused(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert cli.main(["train", "g.toml", *words]) == 2
    assert 'graph.split = "all" is not possible' in capsys.readouterr().err


def test_ranks_of_a_launcher_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert cli.main(["train", "g.toml"]) == 2
    assert 'graph.split = "all" is not possible' in capsys.readouterr().err


def test_a_folder_without_splits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no runs of splits"):
        espalier.open_splits(tmp_path)
