"""Watching checkpoints: each once, none missed, damage skipped and said, a vanished folder is an end with a reason."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_tasks import Made, model, workers
from torch import nn

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.evaluate import checkpoint_watcher
from espalier.evaluate.checkpoint_watcher import CheckpointWatcher, Update
from espalier.evaluate.worker_pool import Workers
from espalier.recipe.errors import RunFailed, UserError
from espalier.track import events
from espalier.track.events import Log


def trained(step: int) -> nn.Module:
    """Other weights at every step."""
    made = model()
    made.bias.data.fill_(float(step))
    return made


class Home:
    """A run folder, and training in it."""

    def __init__(self, path: Path, workers: Workers) -> None:
        self.workers = workers
        self.path = path / "run"
        self.log = Log(self.path / "events.jsonl")
        self.log.write("run", step=0)
        self.checkpoints = Checkpoints(self.path / "checkpoints", keep=1, keep_best=False, on_event=self.log.write)
        self.task = Made("made", 5)

    def save(self, step: int) -> None:
        self.checkpoints.save(step, {"model": trained(step)}, {"step": step}, wait=True)

    def end(self, reason: str = "finished") -> None:
        self.log.write("end", reason=reason)

    def watcher(self) -> CheckpointWatcher:
        return CheckpointWatcher(self.path, Checkpoints(self.path / "checkpoints"), torch.float32, {"made": self.task})

    def watch(self, once: bool = False) -> Iterator[Update]:
        with self.watcher() as watcher:
            yield from watcher.run(self.workers, once)

    def evaluated(self) -> list[tuple[int, str]]:
        return [(event["step"], event["metric"]) for event in self.figures()]

    def figures(self) -> list[events.Event]:
        return [event for event in events.read(self.path / "events.jsonl") if event["event"] == "eval"]


@pytest.fixture(scope="module")
def one_worker() -> Iterator[Workers]:
    with workers([Made("made", 5)], count=1) as made:
        yield made


@pytest.fixture
def home(tmp_path: Path, one_worker: Workers) -> Home:
    return Home(tmp_path, one_worker)


def results(told: Iterator[Update]) -> list[int]:
    return [one.step for one in told if one.result is not None]


@pytest.mark.slow
def test_each_checkpoint_is_evaluated_once_also_by_a_watch_begun_again(home: Home) -> None:
    home.save(2)
    telling = home.watch()
    assert next(one for one in telling if one.result).step == 2
    # Training keeps one checkpoint only: these come while the watch is at work, and go before it gets to them.
    home.save(4)
    next(telling)
    next(one for one in telling if one.text.startswith("Waiting") or one.result)
    home.save(6)
    home.end()
    assert results(telling) == [6]
    assert [step for step, metric in home.evaluated() if metric == "value"] == [2, 4, 6]
    assert results(home.watch()) == []
    assert len(home.evaluated()) == 6
    assert not list((home.path / "eval" / "held").iterdir())  # nothing is kept that training has deleted


def test_the_figures_are_those_of_the_checkpoints_own_weights(home: Home) -> None:
    home.checkpoints.keep = 9
    for step in (2, 4, 6):
        home.save(step)
    home.end()
    results(home.watch())
    found = {event["step"]: event["value"] for event in home.figures() if event["metric"] == "value"}
    x = torch.arange(5.0)[:, None] / 7
    with torch.no_grad():
        assert found == {step: pytest.approx(float(trained(step)(x).mean()), rel=1e-6) for step in (2, 4, 6)}


def test_what_a_killed_watch_held_is_evaluated_by_the_next(home: Home) -> None:
    home.save(2)
    with home.watcher() as first:
        first._hold()
    home.save(4)
    home.end()
    assert not (home.path / "checkpoints" / "step-00000002").exists()
    assert results(home.watch()) == [2, 4]


def test_a_watch_killed_between_two_figures_adds_the_missing_one(home: Home) -> None:
    home.save(2)
    home.end()
    assert results(home.watch()) == [2]
    log = home.path / "events.jsonl"
    lines = log.read_text().splitlines()
    last = max(at for at, line in enumerate(lines) if '"event":"eval"' in line)
    log.write_text("\n".join(lines[:last] + lines[last + 1 :]) + "\n")
    assert results(home.watch()) == [2]
    assert sorted(home.evaluated()) == [(2, "odd"), (2, "value")]


def test_another_question_under_the_same_name_is_asked_of_all_checkpoints(home: Home) -> None:
    home.save(2)
    home.end()
    results(home.watch())
    home.task = replace(home.task, content="other")
    assert results(home.watch()) == [2]


@pytest.mark.parametrize("file", ["manifest.json", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_skipped_and_said_once(home: Home, file: str) -> None:
    home.checkpoints.keep = 9
    for step in (2, 4):
        home.save(step)
    home.end()
    damaged = home.path / "checkpoints" / "step-00000002" / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(bytes(content))
    for _ in range(2):
        told = list(home.watch())
        assert any("not evaluated" in one.text and "damaged" in one.text for one in told)
    assert {step for step, _ in home.evaluated()} == {4}
    said = [event for event in events.read(home.path / "events.jsonl") if event["event"] == "incident"]
    assert [event["step"] for event in said] == [2]


def test_once_takes_the_newest_good_checkpoint_and_needs_one(home: Home) -> None:
    with pytest.raises(UserError, match="no checkpoint"):
        list(home.watch(once=True))
    home.checkpoints.keep = 9
    for step in (2, 4):
        home.save(step)
    (home.path / "checkpoints" / "step-00000004" / "manifest.json").write_text("{}")
    assert results(home.watch(once=True)) == [2]


def test_a_checkpoint_deleted_before_it_was_seen_is_named(home: Home, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint_watcher, "POLL", 0.01)
    home.save(2)
    telling = home.watch()
    assert any(one.text.startswith("Waiting") for one in telling)
    for step in (4, 6):  # nobody looks meanwhile, and one is kept
        home.save(step)
    home.end()
    told = list(telling)
    assert [one.step for one in told if "deleted it before" in one.text] == [4]
    assert {step for step, _ in home.evaluated()} == {2, 6}


def test_an_interrupted_run_is_waited_for(home: Home, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint_watcher, "POLL", 0.01)
    home.save(2)
    home.end("interrupted")
    telling = home.watch()
    assert any(one.text.startswith("The run was interrupted") for one in telling)
    home.log.write("run", step=2)
    home.save(4)
    home.end()
    assert results(telling) == [4]


def test_a_folder_that_vanishes_ends_the_watch_with_the_reason(home: Home, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint_watcher, "POLL", 0.01)
    home.save(2)
    telling = home.watch()
    assert next(one for one in telling if one.result).step == 2
    shutil.rmtree(home.path)
    with pytest.raises(RunFailed, match="is gone"):
        list(telling)


def test_two_watches_of_one_run_are_one_too_many(home: Home) -> None:
    with home.watcher(), pytest.raises(UserError, match="another process"):
        home.watcher()
    with home.watcher():
        pass
