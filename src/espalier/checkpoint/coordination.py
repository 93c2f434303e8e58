"""Coordination of a checkpoint: every rank does its share, rank 0 combines, every rank gets the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from espalier.comm import plain_collectives
from espalier.comm.plain_collectives import RankGroup
from espalier.recipe import errors
from espalier.recipe.errors import RESUME, EspalierError, RunFailed

Given = TypeVar("Given")
Answer = TypeVar("Answer")


class Coordinator:
    """The ranks of `group` (a Gloo group of its own; its timeout bounds every wait), or one rank alone for None."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.world = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0

    def agree(
        self, phase: str, share: Callable[[], Given], combine: Callable[[list[Given]], Sequence[Answer]]
    ) -> Answer:
        """Runs `share` on every rank and `combine` on rank 0 with all results; gives each rank its answer.

        `combine` returns one answer per rank. What travels are plain values (`serialization`). An error on any rank is
        raised on all of them, so none is left waiting.
        """
        given = _attempt(phase, self.rank, share)
        if self.world == 1:
            result = given if given[1] else _attempt(phase, 0, lambda: combine([given[0]])[0])
        else:
            result = self._exchange(phase, given, combine)
        if result[1] is not None:
            raise result[1]
        return result[0]

    def _exchange(
        self, phase: str, given: tuple[Any, Any], combine: Callable[[list[Any]], Sequence[Any]]
    ) -> tuple[Any, Any]:
        gathered = plain_collectives.gather(_told(given), self.group)
        answers = None
        if gathered is not None:
            answers = [_told(answer) for answer in _answers(phase, [_heard(answer) for answer in gathered], combine)]
        return _heard(plain_collectives.scatter(answers, self.group))


def _told(result: tuple[Any, EspalierError | None]) -> tuple[Any, ...]:
    """What a rank gave or is given, as it travels: an error as words."""
    value, error = result
    return value, None if error is None else errors.words_of(error)


def _heard(answer: tuple[Any, ...]) -> tuple[Any, EspalierError | None]:
    value, words = answer
    return value, None if words is None else errors.from_words(words)


def _answers(phase: str, gathered: list[Any], combine: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    error = next((failed for _, failed in gathered if failed is not None), None)
    results: Sequence[Any] | None = None
    if error is None:
        results, error = _attempt(phase, 0, lambda: combine([value for value, _ in gathered]))
    if error is not None or results is None:
        return [(None, error)] * len(gathered)
    return [(answer, None) for answer in results]


def _attempt(phase: str, rank: int, work: Callable[[], Any]) -> tuple[Any, EspalierError | None]:
    try:
        return work(), None
    except EspalierError as error:
        return None, error
    except Exception as error:
        what = f"{phase} failed on rank {rank}: {type(error).__name__}: {error}"
        return None, RunFailed(what, do=RESUME)
