"""What spread experts cost: bytes that a rank sends, by its routing or as a planner expects them. NumPy; no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import comb
from typing import NamedTuple

import numpy as np

from espalier.recipe.cost import Cost, Number
from espalier.recipe.errors import UserError

COUNT_BYTES = 4


class Routed(NamedTuple):
    """What a rank and one of the others send each other in a layer, in rows. Numbers may be means.

    Attributes:
        experts: of the other; fresh: rows to it; again: references to rows that it has got; answers: rows back to it,
            its own tokens for the experts here.
    """

    experts: int
    fresh: Number
    again: Number
    answers: Number


@dataclass(frozen=True)
class ExpertLoad:
    """A layer as far as its messages are concerned: the width of a token and the bytes of a value; `int8`: whether rows
    go to experts in eight bits; `in_turn`: answers go back when all rows have come, as in other systems."""

    width: int
    element_bytes: int
    int8: bool = False
    in_turn: bool = False

    @property
    def row(self) -> int:
        """Bytes of a row on its way back."""
        return self.width * self.element_bytes

    @property
    def fresh(self) -> int:
        """Bytes of a row on its way to an expert."""
        return self.width + 4 if self.int8 else self.row


def sent_bytes(load: ExpertLoad, others: Sequence[Routed], forwards: float = 1.0, backward: bool = True) -> Number:
    """Payload bytes that a rank sends in a layer of a micro-batch (`mechanisms.expert_parallel.flashmoe`), as on
    its ledger.

    Forward: two counts for each expert, references, fresh rows, and answers. Backward: a weight for each entry, the
    gradients of fresh rows, and those of inputs. Nothing is padded. `forwards`: 2 where the layer is recomputed.
    """
    there, again, back = _ways(load, others)
    return forwards * (there + back) + backward * (again + back)


def _ways(load: ExpertLoad, others: Sequence[Routed]) -> tuple[Number, Number, Number]:
    """Bytes to experts forward and backward, and of answers in either pass."""
    there: Number = sum(
        2 * COUNT_BYTES * routed.experts + COUNT_BYTES * routed.again + load.fresh * routed.fresh for routed in others
    )
    again: Number = sum(
        load.element_bytes * (routed.fresh + routed.again) + load.fresh * routed.fresh for routed in others
    )
    return there, again, sum(load.row * routed.answers for routed in others)


def cost(
    load: ExpertLoad,
    others: Sequence[Routed],
    wire: Callable[..., Number],
    recomputed: float = 0.0,
    stride: Number = 1,
) -> Cost:
    """Of a layer in a micro-batch: rows to experts and answers from them cross full-duplex links at once,
    so that a pass takes as long as the larger of both, or, in turn, as both. `wire`: as in
    `plan.axes.sharding`; `recomputed`: 1 where forward runs twice; `stride`: how far the ranks of an
    expert group are apart (ranks that share matrices stand between them)."""
    there, again, back = _ways(load, others)
    ranks = len(others) + 1

    def taken(ways: Number) -> Number:
        size = ways + back if load.in_turn else np.maximum(ways, back)
        return wire("all_to_all", size * ranks / max(1, ranks - 1), ranks, stride, "experts")

    seconds = (1 + recomputed) * taken(there) + taken(again)
    return Cost({"experts": seconds}, sent={"experts": sent_bytes(load, others, 1 + recomputed)})


def placed(
    rates: Sequence[float], loads: Sequence[float], slots: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Which experts each rank holds, so that the slowest rank has done as early as it can (FlashMoE's placement by
    measured speed and memory; here the largest expert first, each to the rank that would end first with it).

    Args:
        rates: work that each rank does in a second; loads: work of each expert, of any unit, alike where not known.
        slots: experts that each rank has memory for; None: any number.

    Raises:
        UserError: fewer slots than experts.
    """
    room = [len(loads)] * len(rates) if slots is None else list(slots)
    if sum(room) < len(loads):
        raise UserError(
            f"{len(loads)} experts do not fit into memory for {sum(room)}.",
            do="more ranks (plan.pin.ep), or plan.pin.offload for states that wait elsewhere",
        )
    placement: list[list[int]] = [[] for _ in rates]
    work = [0.0] * len(rates)
    for expert in sorted(range(len(loads)), key=lambda number: -loads[number]):
        free = [rank for rank in range(len(rates)) if len(placement[rank]) < room[rank]]
        rank = min(
            free, key=lambda candidate: ((work[candidate] + loads[expert]) / rates[candidate], -rates[candidate])
        )
        placement[rank].append(expert)
        work[rank] += loads[expert]
    if len(set(loads)) == 1:  # alike: consecutive numbers
        ends = list(accumulate(map(len, placement), initial=0))
        return tuple(tuple(range(first, last)) for first, last in pairwise(ends))
    return tuple(tuple(sorted(experts)) for experts in placement)


def expected(tokens: Number, active: int, sizes: Sequence[int], me: int = 0) -> list[Routed]:
    """What rank `me` of ranks with `sizes` experts sends if every set of `active` experts is equally likely.

    A token has an expert on a rank of n experts out of E with probability 1 - C(E - n, k) / C(E, k).
    """
    every = sum(sizes)
    routed = []
    for rank, size in enumerate(sizes):
        if rank == me:
            continue
        entries = tokens * active * size / every
        answers = tokens * active * sizes[me] / every
        fresh = tokens * (1 - comb(every - size, active) / comb(every, active))
        routed.append(Routed(size, fresh, entries - fresh, answers))
    return routed
