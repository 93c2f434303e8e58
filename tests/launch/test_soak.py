"""A long run holds no more at its end than after its warm-up."""

import ctypes
from pathlib import Path

import pytest
import torch
from struck import Struck, recipe_of

from espalier.machine.peak_memory import bytes_held
from espalier.train import trainer

STEPS, WARM = 20_000, 2_000
FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class Heap(ctypes.Structure):
    """`mallinfo2` of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


def memory_of(device: torch.device) -> dict[str, int]:
    """Anonymous and shared pages now, and the bytes that malloc has given out."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Heap
    heap = library.mallinfo2()
    return {"memory": bytes_held(), "used": heap.uordblks + heap.hblkhd}


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_what_a_run_holds_is_flat_within_a_percent_over_twenty_thousand_steps(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What malloc has given out, and the anonymous and shared pages of the process."""
    monkeypatch.setattr(trainer, "memory_of", memory_of)
    table = {"train": {"steps": STEPS, "validate_every": 1000}, "checkpoint": {"every": 1000}}
    run = Struck(recipe_of(corpus, **table), 2, tmp_path / "run", memory=1 << 26).run()
    steps = {event["step"]: event for event in run.all("step")}
    assert len(steps) == STEPS
    assert steps[STEPS]["used"] <= 1.01 * steps[WARM]["used"]
    assert steps[STEPS]["memory"] <= 1.01 * steps[WARM]["memory"]
