"""A finished run is told without its data where the recipe asks for no more than was done, and in no other case."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.cli import finished_run
from espalier.cli import main as cli
from espalier.cli.resolve_recipe import resolve
from espalier.track.events import Log
from espalier.train.run_folder import RunFolder

RECIPE = """[model]
depth = 1
[data]
path = "text.txt"
[train]
steps = 2
sequence = 8
batch_tokens = 64
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and its finished run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be " * 100)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_recipe(resolve("recipe.toml", []).recipe)
    with Log(folder.events) as log:
        log.write("end", reason="finished", seconds=1.0, steps=2)
    saved = Checkpoints(folder.checkpoints)
    saved.save(2, {}, {"step": 2}, wait=True)
    saved.abandon()
    return tmp_path


def answered(*changes: str) -> bool:
    words = ["train", "recipe.toml", *changes, "--run", "run"]
    return finished_run.answered(cli.parsers()[0].parse_args(words))


def test_the_same_command_is_told_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "text.txt").unlink()  # nothing is done with it
    assert answered()
    assert "run is finished (2 of 2 steps)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        "train.steps=3",
        "train.steps=1",
        "model.depth=2",
        "train.seed=7",
        "data.path=other.txt",
        "checkpoint.target=elsewhere",
    ],
)
def test_what_asks_for_more_or_for_another_run_is_looked_at(home: Path, change: str) -> None:
    assert not answered(change)


@pytest.mark.parametrize("lost", ["checkpoints/step-00000002/manifest.json", "events.jsonl", "run.toml"])
def test_a_run_that_lost_something_is_looked_at(home: Path, lost: str) -> None:
    (home / "run" / lost).unlink()
    assert not answered()


def test_ranks_of_another_launcher_meet_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert not answered()
