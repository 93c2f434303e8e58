"""What goes between an evaluation and its workers are a few types, and nothing that runs."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Pipe
from typing import Any

import numpy as np
import pytest
import torch

from espalier.resilience.acme.evaluate import workers
from espalier.resilience.acme.evaluate.trials import Piece
from espalier.resilience.acme.evaluate.workers import At, Done, Given, Infer, Score, Scored, Share, Wrong

PIECE = Piece("task", 3, 7, 1)
SPRUNG: list[int] = []


class Trap:
    """Unpickling it runs a function."""

    def __reduce__(self) -> Any:
        return SPRUNG.append, (1,)


@pytest.mark.parametrize(
    "word", [At("task", 3, 0.5), Given((PIECE,)), Done((PIECE, PIECE), {"task": 1.0}), Wrong("task", "it\nfailed")]
)
def test_a_word_arrives_as_it_was_said(word: workers.Word) -> None:
    ours, theirs = Pipe()
    workers.tell(theirs, word)
    assert workers.heard(ours) == word


@pytest.mark.parametrize("order", [Share(), Infer((PIECE,), "/proc/1/fd/3", 2, "raw"), Score(PIECE, "raw")])
def test_an_order_arrives_as_it_was_given(order: workers.Order) -> None:
    ours, theirs = Pipe()
    workers.tell(ours, order)
    assert workers._ordered(theirs) == order


def test_scalars_of_numpy_and_torch_are_numbers() -> None:
    ours, theirs = Pipe()
    sums = [{"a": (np.float64(0.1), np.int64(2)), "b": (torch.tensor(1.5), 1)}, {"a": (float("inf"), 0.0)}]
    workers.tell(theirs, Scored(PIECE, sums, 0.5))  # type: ignore[arg-type]
    said = workers.heard(ours)
    assert said == Scored(PIECE, [{"a": (0.1, 2.0), "b": (1.5, 1.0)}, {"a": (float("inf"), 0.0)}], 0.5)


@pytest.mark.parametrize(
    "data", [b"", b"\xdd\xff\xff\xff\xff", b"x" * 100, pickle.dumps(Trap()), pickle.dumps("share")]
)
def test_other_bytes_are_no_word_and_run_nothing(data: bytes) -> None:
    ours, theirs = Pipe()
    theirs.send_bytes(data)
    with pytest.raises(OSError, match="no word"):
        workers.heard(ours)
    assert SPRUNG == []
