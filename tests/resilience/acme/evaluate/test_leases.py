"""Leases: whatever workers do, die of or give away, every record is taken exactly once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.resilience.acme.evaluate.leases import DEATHS, Leases
from espalier.resilience.acme.evaluate.trials import Piece


def first_cut(sizes: list[int], pieces: int) -> list[tuple[Piece, ...]]:
    ends = {str(at): [size * part // pieces for part in range(pieces + 1)] for at, size in enumerate(sizes)}
    cuts = [Piece(task, start, stop) for task, marks in ends.items() for start, stop in itertools.pairwise(marks)]
    cuts = [piece for piece in cuts if piece.records]
    return [tuple(cuts[at : at + 2]) for at in range(0, len(cuts), 2)]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 5), st.data())
def test_every_record_counts_once_whatever_happens(sizes: list[int], pieces: int, data: st.DataObject) -> None:
    leases = Leases({str(at): size for at, size in enumerate(sizes)}, first_cut(sizes, pieces))
    counted: list[tuple[str, int]] = []
    deaths = 0
    while leases.open:
        worker = data.draw(st.integers(0, 2))
        if worker not in leases.held:
            leases.take(worker)
            continue
        act = data.draw(st.sampled_from(["finish", "part", "give", "die"]))
        trial = leases.held[worker]
        if act == "die" and deaths < DEATHS - 1:
            deaths += 1
            assert not leases.lose(worker)
        elif act == "give" and sum(piece.records for piece in trial) > 1:
            last = trial[-1]
            at = data.draw(st.integers(last.start, last.stop - 1))
            leases.give_back(worker, [last._replace(start=at)])
        elif trial:
            done = list(trial)
            if act == "part":
                done[-1] = done[-1]._replace(stop=data.draw(st.integers(done[-1].start, done[-1].stop)))
            taken = [piece for piece in done if piece.records]
            for piece in leases.finish(worker, taken):
                counted += [(piece.task, record) for record in range(piece.start, piece.stop)]
        else:
            leases.finish(worker, ())
    assert sorted(counted) == sorted((str(at), record) for at, size in enumerate(sizes) for record in range(size))
    assert all(leases.complete(task) for task in leases.records)


def test_a_piece_that_ends_worker_after_worker_is_given_up_and_the_rest_goes_on() -> None:
    leases = Leases({"good": 4, "bad": 4}, [(Piece("good", 0, 4), Piece("bad", 0, 4))])
    guilty: list[str] = []
    while leases.open:
        trial = leases.take(0)
        assert trial is not None
        if any(piece.task == "bad" for piece in trial):
            guilty += leases.lose(0)
        else:
            leases.finish(0, trial)
    assert guilty == ["bad"]
    assert leases.complete("good")
    assert not leases.complete("bad")
    assert str(DEATHS) in leases.failed["bad"]


def test_handing_in_a_record_twice_is_our_mistake_and_noticed() -> None:
    leases = Leases({"a": 4}, [(Piece("a", 0, 4),), (Piece("a", 0, 4),)])
    leases.take(0)
    leases.take(1)
    leases.finish(0, [Piece("a", 0, 4)])
    with pytest.raises(AssertionError, match="done before"):
        leases.finish(1, [Piece("a", 0, 4)])


def test_another_cut_must_hold_what_waits() -> None:
    leases = Leases({"a": 4}, [(Piece("a", 0, 4),)])
    leases.renew([(Piece("a", 2, 4),), (Piece("a", 0, 2),)])
    assert leases.take(0) == (Piece("a", 2, 4),)
    with pytest.raises(AssertionError, match="lost"):
        leases.renew([])
