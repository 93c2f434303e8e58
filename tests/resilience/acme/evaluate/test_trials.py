"""Cuts of tasks: every record once, none too long, small ones together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from espalier.resilience.acme.evaluate.priors import Prior
from espalier.resilience.acme.evaluate.trials import ROUNDS, SHORTEST, Piece, cut, shared, times

TASKS = st.lists(st.tuples(st.integers(1, 300), st.floats(1e-6, 2.0)), min_size=1, max_size=12)


def records(trials) -> list[tuple[str, int]]:
    return sorted((piece.task, at) for trial in trials for piece in trial for at in range(piece.start, piece.stop))


@given(TASKS, st.integers(1, 9))
def test_a_cut_holds_every_record_once_and_no_trial_is_longer_than_it_must_be(tasks, workers: int) -> None:
    priors = {str(at): Prior(seconds, 0.0, 1) for at, (_, seconds) in enumerate(tasks)}
    pieces = [Piece(str(at), 0, count) for at, (count, _) in enumerate(tasks)]
    trials = cut(pieces, priors, workers)
    assert records(trials) == records([tuple(pieces)])
    target = max(SHORTEST, sum(count * seconds for count, seconds in tasks) / (workers * ROUNDS))
    longest = max(seconds for _, seconds in tasks)
    assert all(times(trial, priors).inference <= target + longest for trial in trials)


def test_small_tasks_share_a_trial() -> None:
    priors = {name: Prior(0.001, 0.0, 1) for name in "abcdef"}
    assert len(cut([Piece(name, 0, 10) for name in priors], priors, 2)) == 1


@given(st.lists(st.integers(1, 9), max_size=5))
def test_what_is_shared_is_about_half_and_nothing_is_lost(sizes: list[int]) -> None:
    rest = [Piece(str(at), 3, 3 + size) for at, size in enumerate(sizes)]
    kept, given_away = shared(rest)
    assert records([kept, given_away]) == records([tuple(rest)])
    assert 0 <= len(records([kept])) - len(records([given_away])) <= 1
