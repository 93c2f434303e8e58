"""Checkpoints: what is saved comes back bit for bit, at any number of ranks, or is not there at all."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import Box, Events, forked
from torch import nn

from espalier.checkpoint import manifest, save_and_restore
from espalier.checkpoint.save_and_restore import NICE, Checkpoints
from espalier.checkpoint.writer import Write
from espalier.recipe.errors import UserError
from many_ranks.forks import Died, outcomes

torch.set_num_threads(1)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def trained(steps: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Chance:
    """The random state of torch, as a part."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "python": random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_resumed_equals_unbroken_bit_for_bit(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        return model, kind(model.parameters(), lr=0.1)

    torch.manual_seed(1)
    model, optimizer = fresh()
    trained(3, model, optimizer)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"model": model, "optimizer": optimizer, "chance": Chance()}, {})
    unbroken = trained(3, model, optimizer)
    checkpoints.close()
    again, other = fresh()
    loaded = Checkpoints(tmp_path).load({"model": again, "optimizer": other, "chance": Chance()})
    assert loaded is not None
    assert loaded.step == 3
    assert trained(3, again, other) == unbroken
    assert same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_every_kind_of_value_comes_back_as_it_was(tmp_path: Path, scheme: str) -> None:
    state = {
        "scalars": {"int": 3, "float": 0.1, "text": "é", "nothing": None, "flag": True},
        "lists": [1, [2, "x"], (3, torch.ones(2)), {}],
        5: {"whole keys": torch.arange(6).reshape(2, 3)},
        "rng": torch.get_rng_state(),
        "python": random.Random(3).getstate(),
        "zero": torch.tensor(7.5, dtype=torch.float64),
        "bf16": torch.randn(3, 2).bfloat16(),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "none": torch.empty(0, 3),
    }
    target = f"{scheme}{tmp_path}"
    Checkpoints(target).save(7, {"box": Box(**{"state": state})}, {"tokens": 12, "why": ["a"]}, loss=1.5, wait=True)
    box = Box()
    loaded = Checkpoints(target).load({"box": box})
    assert loaded == (7, {"tokens": 12, "why": ["a"]}, [], [])
    assert same(box.state["state"], state)
    (entry,) = Checkpoints(target).entries()
    assert (entry.step, entry.loss, entry.why) == (7, 1.5, "")
    assert entry.bytes > 0


def test_no_checkpoint_gives_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "not there").load({"box": Box()}) is None
    assert Checkpoints(f"memory://{tmp_path}").load({"box": Box()}) is None


def test_what_is_saved_is_the_state_at_the_call_not_what_came_after(tmp_path: Path) -> None:
    weights, history = torch.zeros(1 << 16), [1]
    checkpoints = Checkpoints(tmp_path)
    for step in range(1, 4):
        weights.fill_(step)
        checkpoints.save(step, {"box": Box(weights=weights, history=history)}, {})
        weights.fill_(-1)
        history.append(step)
    checkpoints.close()
    for step in (2, 3):
        box = Box()
        assert Checkpoints(tmp_path).load({"box": box}, step=step)
        assert bool((box.state["weights"] == step).all())
        assert box.state["history"] == [1, *range(1, step)]


def test_staging_buffers_are_kept_from_one_save_to_the_next(tmp_path: Path) -> None:
    checkpoints, box = Checkpoints(tmp_path), Box(x=torch.ones(100))
    addresses = set()
    for step in (1, 2):
        checkpoints.save(step, {"box": box}, {})
        checkpoints.wait()
        addresses.add(checkpoints._stage._buffers["box/x"].data_ptr())
    assert len(addresses) == 1


@pytest.mark.parametrize("always", [False, True])
def test_a_save_that_training_waits_for_copies_nothing(tmp_path: Path, always: bool) -> None:
    checkpoints = Checkpoints(tmp_path)
    box = Box(x=torch.ones(100))
    checkpoints.waits = always
    checkpoints.save(1, {"box": box}, {}, wait=not always)
    assert not checkpoints.busy
    assert not checkpoints._stage._buffers
    restored = Box(x=torch.zeros(100))
    checkpoints.load({"box": restored})
    assert restored.state_dict()["x"].sum() == 100


def test_what_writes_leaves_the_cores_to_training_unless_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, usual, plain = [], os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), Write.run

    def run(self: Write) -> int:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return plain(self)

    monkeypatch.setattr(Write, "run", run)
    monkeypatch.setattr(save_and_restore, "NICE", NICE)
    saved = Checkpoints(tmp_path)
    for step in (1, 2):
        saved.save(step, {"box": Box(weight=torch.ones(3))}, {}, wait=step == 2)
        assert step == 1 or not saved.busy
        saved.wait()
        assert not saved.busy
    assert seen == [max(NICE, usual), usual]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == usual
    assert saved.wrote > 0


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_the_last_k_and_the_best_stay(tmp_path: Path, scheme: str) -> None:
    checkpoints = Checkpoints(f"{scheme}{tmp_path}", keep=2, keep_best=True)
    for step, loss in enumerate([3.0, 1.0, 2.0, float("nan"), None, 2.5], start=1):
        checkpoints.save(step, {"box": Box(x=torch.ones(2))}, {}, loss=loss, wait=True)
    assert [entry.step for entry in checkpoints.entries()] == [2, 5, 6]


def test_a_damaged_checkpoint_does_not_count_as_one_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, keep_best=False)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, {"box": Box(x=torch.ones(2))}, {}, wait=True)
        if step == 2:
            damage(tmp_path / "step-00000002", "cut manifest")
    assert [(entry.step, entry.why == "") for entry in checkpoints.entries()] == [(3, True), (4, True)]


def test_an_old_checkpoint_that_cannot_be_deleted_is_an_incident_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise OSError("stale file handle")

    events = Events()
    checkpoints = Checkpoints(tmp_path, keep=1, on_event=events)
    checkpoints.save(1, {"box": Box()}, {}, wait=True)
    monkeypatch.setattr(checkpoints.place, "remove", refuse)
    checkpoints.save(2, {"box": Box()}, {}, wait=True)
    assert [event["event"] for event in events] == ["checkpoint", "checkpoint", "incident"]
    assert "step-00000001" in events[-1]["what"]


def test_a_log_that_cannot_be_written_surfaces_too(tmp_path: Path) -> None:
    def full(event: str, **fields: Any) -> None:
        raise UserError("The disk is full.")

    checkpoints = Checkpoints(tmp_path, on_event=full)
    with pytest.raises(UserError, match="disk is full"):
        checkpoints.save(1, {"box": Box()}, {}, wait=True)


def test_saving_after_taking_an_older_step_forgets_the_abandoned_ones(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3, keep_best=False)
    for step in (1, 2, 3):
        checkpoints.save(step, {"box": Box(x=torch.tensor(step))}, {}, wait=True)
    assert checkpoints.load({"box": Box()}, step=1)
    checkpoints.save(2, {"box": Box(x=torch.tensor(20))}, {}, wait=True)
    box = Box()
    loaded = checkpoints.load({"box": box})
    assert loaded is not None
    assert loaded.step == 2
    assert box.state["x"] == 20


def damage(path: Path, how: str) -> None:
    target = path / (manifest.NAME if "manifest" in how else "__0_0.distcp")
    content = bytearray(target.read_bytes())
    if how.startswith("flip"):
        content[len(content) // 2] ^= 1
        target.write_bytes(content)
    elif how.startswith("cut"):
        target.write_bytes(content[: len(content) // 2])
    else:
        target.unlink()


@pytest.mark.parametrize("how", [f"{verb} {what}" for verb in ("flip", "cut", "lose") for what in ("data", "manifest")])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_taken(tmp_path: Path, how: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(step, {"box": Box(x=torch.full((1000,), step))}, {"n": step}, wait=True)
    damage(tmp_path / "step-00000002", how)
    events, box = Events(), Box()
    loaded = Checkpoints(tmp_path, on_event=events).load({"box": box})
    assert loaded is not None
    assert (loaded.step, loaded.meta) == (1, {"n": 1})
    assert [name for name, _ in loaded.skipped] == ["step-00000002"]
    assert events[0]["event"] == "incident"
    assert "step-00000002" in events[0]["what"]
    assert bool((box.state["x"] == 1).all())
    with pytest.raises(UserError, match="step-00000002"):
        Checkpoints(tmp_path).load({"box": box}, step=2)


def test_when_nothing_is_good_the_run_does_not_begin_anew_in_silence(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, {"box": Box(x=torch.ones(3))}, {}, wait=True)
    damage(tmp_path / "step-00000001", "cut data")
    with pytest.raises(UserError, match=r"No checkpoint .* can be used"):
        Checkpoints(tmp_path).load({"box": Box()})


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(10, {"box": Box()}, {}, wait=True)
    with pytest.raises(UserError, match="there: 10"):
        Checkpoints(tmp_path).load({"box": Box()}, step=11)


def test_a_part_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, {"model": nn.Linear(2, 3)}, {}, wait=True)
    with pytest.raises(UserError, match="The run's model does not take"):
        Checkpoints(tmp_path).load({"model": nn.Linear(2, 4)})


def test_a_part_the_checkpoint_lacks_is_left_alone_and_said(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, {"a": Box(x=1)}, {}, wait=True)
    new = Box(y=2)
    loaded = Checkpoints(tmp_path).load({"a": Box(), "new": new})
    assert loaded is not None
    assert loaded.absent == ["new"]
    assert new.state == {"y": 2}


def test_leftovers_of_a_killed_save_go_with_the_next_save_but_not_with_a_reader(tmp_path: Path) -> None:
    left = tmp_path / "step-00000009.tmp"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    assert Checkpoints(tmp_path).load({"box": Box()}) is None
    assert left.exists()
    Checkpoints(tmp_path).save(1, {"box": Box()}, {}, wait=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_store_without_rename_shows_no_checkpoint_before_its_manifest(tmp_path: Path) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    target = f"memory://{tmp_path}"
    Checkpoints(target).save(1, {"box": Box(x=torch.ones(2))}, {}, wait=True)
    MemoryFileSystem().pipe_file(f"{tmp_path}/step-00000002/__0_0.distcp", b"half")
    loaded = Checkpoints(target).load({"box": Box()})
    assert loaded is not None
    assert loaded.step == 1
    assert not loaded.skipped
    Checkpoints(target).save(3, {"box": Box()}, {}, wait=True)
    assert not MemoryFileSystem().exists(f"{tmp_path}/step-00000002")


def test_an_unknown_scheme_and_keeping_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.target"):
        Checkpoints("nosuch://bucket")
    with pytest.raises(UserError, match=r"checkpoint\.keep"):
        Checkpoints(tmp_path, keep=0)


def test_a_full_disk_surfaces_at_the_next_call_and_spoils_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the writer meets it in the same call."""

    def work(_: int) -> None:
        checkpoints = Checkpoints(tmp_path / "run")
        checkpoints.save(1, {"box": Box(x=torch.ones(10))}, {}, wait=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        checkpoints.save(2, {"box": Box(x=torch.ones(1 << 18))}, {})
        with pytest.raises(UserError, match="disk is full"):
            checkpoints.save(3, {"box": Box(x=torch.ones(10))}, {})
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000001"]
        box = Box()
        loaded = checkpoints.load({"box": box})
        assert loaded is not None
        assert loaded.step == 1
        checkpoints.save(4, {"box": Box(x=torch.ones(10))}, {}, wait=True)

    forked(1, work)


def test_a_target_that_is_a_file_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("a file")
    with pytest.raises(UserError, match="Cannot write"):
        Checkpoints(tmp_path / "target").save(1, {"box": Box()}, {}, wait=True)


def test_a_killed_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, {"box": Box(x=torch.zeros(1 << 20))}, {}, wait=True)
    for pause in (0.0, 0.002, 0.005, 0.01, 0.02):

        def work(_: object, pause: float = pause) -> None:
            Checkpoints(tmp_path).save(2, {"box": Box(x=torch.ones(1 << 20))}, {})
            time.sleep(pause)
            os.kill(os.getpid(), signal.SIGKILL)

        assert outcomes(1, work) == [Died(signal.SIGKILL)]
        box = Box()
        loaded = Checkpoints(tmp_path).load({"box": box})
        assert loaded is not None
        assert not loaded.skipped
        assert bool((box.state["x"] == loaded.step - 1).all())


def test_the_event_says_what_was_written(tmp_path: Path) -> None:
    events = Events()
    checkpoints = Checkpoints(tmp_path, on_event=events)
    blocked = checkpoints.save(4, {"box": Box(x=torch.ones(1000))}, {})
    checkpoints.close()
    (event,) = events
    (entry,) = checkpoints.entries()
    assert (event["event"], event["step"], event["bytes"], event["path"]) == ("checkpoint", 4, entry.bytes, entry.path)
    assert 0 < event["blocked"] <= blocked
    assert entry.bytes >= 4000
