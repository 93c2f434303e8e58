"""The rate at which checkpoints are written: limited on disks and stores, measured, and the same bytes at any."""

import io
import math
import random
import time

import pytest
import torch

from espalier import recipe as config
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.checkpoint.write_rate import LimitedStream, WriteLimit
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import UserError

SIZE = 2_000_000


class Part:
    def __init__(self, value: float = 0.0) -> None:
        self.state = {"x": torch.full((SIZE // 4,), value)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def save(target, rate=math.inf):
    """Seconds, and the event."""
    told = []
    saved = Checkpoints(target, on_event=lambda name, **fields: told.append(fields))
    saved.rate = rate
    begun = time.monotonic()
    saved.save(1, {"part": Part(2.0)}, {}, wait=True)
    return time.monotonic() - begun, told[0] if told else {}


@pytest.mark.parametrize("target", ["folder", "memory://rate"])
def test_a_limit_is_kept_and_told_and_what_was_saved_comes_back(tmp_path, target):
    target = target if "://" in target else tmp_path / target
    rate = 8e6
    seconds, event = save(target, rate)
    assert event["bytes"] >= SIZE
    assert event["bytes"] / rate * 0.95 <= seconds
    assert event["rate"] <= 1.05 * rate
    part = Part()
    assert Checkpoints(target).load({"part": part}).step == 1
    assert torch.equal(part.state["x"], torch.full((SIZE // 4,), 2.0))


def test_without_a_limit_the_rate_is_measured(tmp_path):
    seconds, event = save(tmp_path)
    assert event["bytes"] / seconds <= event["rate"] < math.inf


def test_any_pieces_are_the_whole(monkeypatch):
    monkeypatch.setattr("espalier.checkpoint.write_rate.PIECE", 7)
    data, file = random.Random(1).randbytes(1000), io.BytesIO()
    stream = LimitedStream(file, WriteLimit(1e9))
    for at in range(0, 1000, 93):
        stream.write(data[at : at + 93])
    assert file.getvalue() == data
    assert stream.tell() == 1000
    other = io.BytesIO()
    WriteLimit(1e9).copy(io.BytesIO(data), other)
    assert other.getvalue() == data


@pytest.mark.parametrize("rate", ["0", "fast"])
def test_a_rate_that_writes_nothing_is_refused(rate):
    with pytest.raises(UserError, match=r"checkpoint\.rate"):
        defaults.resolve(recipe_file.from_table({"data": {"path": "x"}, "checkpoint": {"rate": rate}}))
    assert config.Checkpoint().rate is None
