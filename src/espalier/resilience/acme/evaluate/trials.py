"""Tasks cut into trials: big ones by part, small ones merged; every record of every task in exactly one trial.

After Acme (arXiv 2403.07648): "split big datasets, merge small ones". A record is the smallest piece of a task (one
question, or one micro-batch of held-out text); cuts lie between records, so results do not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from espalier.resilience.acme.evaluate.packing import Times
from espalier.resilience.acme.evaluate.priors import Prior

ROUNDS = 8
"""Trials for each worker, at least: list scheduling is then within 1 + 1/ROUNDS of the work per worker."""

SHORTEST = 0.2
"""Seconds below which cutting a task further costs more (a message and a file) than it brings."""


class Piece(NamedTuple):
    """Records `[start, stop)` of a task, and how many workers died on it."""

    task: str
    start: int
    stop: int
    deaths: int = 0

    @property
    def records(self) -> int:
        """How many."""
        return self.stop - self.start


Trial = tuple[Piece, ...]
"""What a worker does in one go."""


def cut(pieces: Iterable[Piece], priors: Mapping[str, Prior], workers: int) -> list[Trial]:
    """Trials that hold `pieces`: parts of about 1 / (workers * ROUNDS) of all seconds, small ones merged.

    `priors` has every task's seconds per record.
    """
    pieces = list(pieces)
    expected = sum(piece.records * priors[piece.task].inference for piece in pieces)
    target = max(SHORTEST, expected / (workers * ROUNDS))
    parts = [part for piece in pieces for part in _parts(piece, priors[piece.task].inference, target)]
    big = [part for part in parts if part.records * priors[part.task].inference > target / 4]
    small = [part for part in parts if part.records * priors[part.task].inference <= target / 4]
    return [*((part,) for part in big), *_merged(small, priors, target / 2)]


def shared(rest: Sequence[Piece]) -> tuple[Trial, Trial]:
    """(kept, given away): `rest`, what a worker has not begun yet, by records in two; the larger half is kept."""
    keep = (sum(piece.records for piece in rest) + 1) // 2
    kept, given = [], []
    for piece in rest:
        middle = min(piece.stop, piece.start + max(0, keep))
        keep -= piece.records
        kept += [piece._replace(stop=middle)] if middle > piece.start else []
        given += [piece._replace(start=middle)] if middle < piece.stop else []
    return tuple(kept), tuple(given)


def times(trial: Trial, priors: Mapping[str, Prior]) -> Times:
    """The seconds `trial` should take."""
    return Times(
        sum(piece.records * priors[piece.task].inference for piece in trial),
        sum(piece.records * priors[piece.task].metric for piece in trial),
    )


def _parts(piece: Piece, seconds: float, target: float) -> list[Piece]:
    count = max(1, min(piece.records, math.ceil(piece.records * seconds / target)))
    ends = [piece.start + piece.records * at // count for at in range(count + 1)]
    return [piece._replace(start=ends[at], stop=ends[at + 1]) for at in range(count)]


def _merged(parts: Sequence[Piece], priors: Mapping[str, Prior], target: float) -> list[Trial]:
    """First fit, the longest first, into trials of at most `target` seconds."""
    trials: list[tuple[float, list[Piece]]] = []
    for part in sorted(parts, key=lambda one: -one.records * priors[one.task].inference):
        seconds = part.records * priors[part.task].inference
        for at, (filled, content) in enumerate(trials):
            if filled + seconds <= target:
                trials[at] = (filled + seconds, [*content, part])
                break
        else:
            trials.append((seconds, [part]))
    return [tuple(content) for _, content in trials]
