"""Where each state of a flat unit lies: nested shards of parameters, gradients and optimizer states. Pure arithmetic.

After AMSP (arXiv 2311.00257): the three factors are chosen apart from one another, but each divides the next, so a
shard of parameters holds whole shards of gradients, and these whole shards of optimizer states. What a reduce-scatter
leaves on a rank is then what its optimizer takes, and what the optimizer moves is a part of the rank's own parameters.

The ranks form a mesh whose axes are, from the finest: the ranks that split parameters, those that split gradients
further, those that split optimizer states further, and the replicas of all that. Where a machine ends in the middle of
an axis, the axis is two: first inside the machine, then between machines, so that only what must cross a link crosses
it. A tensor is exchanged along one axis after the other; in all a rank sends the bytes of one flat collective.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from espalier.recipe.errors import UserError

State = Literal["params", "grads", "optimizer", "replicas"]
STATES: tuple[State, ...] = ("params", "grads", "optimizer", "replicas")


class ShardFactors(NamedTuple):
    """Over how many ranks each state is split: 1 is a whole copy on every rank."""

    params: int = 1
    grads: int = 1
    optimizer: int = 1

    def check(self, ranks: int, where: str = "shard") -> ShardFactors:
        """Itself, if params | grads | optimizer | ranks. Raises UserError naming the pair and the nearest value."""
        chain = [*zip(STATES, self, strict=False), ("the number of ranks", ranks)]
        for (inner, few), (outer, many) in itertools.pairwise(chain):
            if few < 1 or many % few:
                near = min((d for d in range(1, many + 1) if many % d == 0), key=lambda d: (abs(d - few), d))
                raise UserError(
                    f"{where}: {inner} = {few} does not divide {outer} = {many}.",
                    why="each shard of one state must hold whole shards of the next: params, grads, optimizer, ranks",
                    do=f"{inner} = {near}",
                )
        return self


class Axis(NamedTuple):
    """`size` ranks, `stride` apart, among which `state` is split (or, for replicas, held several times)."""

    state: State
    size: int
    stride: int

    def coordinate(self, rank: int) -> int:
        """Where `rank` stands on this axis."""
        return rank // self.stride % self.size

    def members(self, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` in this axis only, in order."""
        first = rank - self.coordinate(rank) * self.stride
        return tuple(first + index * self.stride for index in range(self.size))


class Span(NamedTuple):
    """Elements `[start, start + length)` of a flat unit."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        """The first element behind it."""
        return self.start + self.length

    def within(self, other: Span) -> slice:
        """This span in a buffer that holds `other`."""
        return slice(self.start - other.start, self.stop - other.start)


@dataclass(frozen=True)
class Placement:
    """The mesh of one set of factors, from the finest axis (neighbouring ranks) to the coarsest."""

    ranks: int
    factors: ShardFactors
    axes: tuple[Axis, ...]
    by_level: bool = False
    """Whether the axes lead through machines first and then between them."""

    def along(self, *states: State) -> tuple[Axis, ...]:
        """The axes of some states, finest first."""
        return tuple(axis for axis in self.axes if axis.state in states)

    @property
    def multiple(self) -> int:
        """What a flat unit's length must be a multiple of: all shards are then equal, the split of a reduction over
        replicas in several machines included."""
        split = self.along("replicas")
        inner = split[0].size if len(split) > 1 else 1
        return self.factors.optimizer * inner

    def spans(self, rank: int, length: int) -> Iterator[tuple[Axis, Span, Span]]:
        """(axis, the span before it, the span after it) as a tensor of `length` is split along one axis after the
        other: after the last axis of a state, the span is what `rank` holds of it."""
        span = Span(0, length)
        for axis in self.axes:
            each = span.length // axis.size
            inner = Span(span.start + axis.coordinate(rank) * each, each)
            yield axis, span, inner
            span = inner

    def held(self, rank: int, length: int, state: State) -> Span:
        """What `rank` holds of a state of a unit of `length` elements."""
        span = Span(0, length)
        for axis, _, inner in self.spans(rank, length):
            if STATES.index(axis.state) <= STATES.index(state):
                span = inner
        return span


def place(factors: ShardFactors, nodes: Sequence[int]) -> Placement:
    """The mesh of `factors` on ranks whose machines are `nodes` (one number each; ranks of a machine follow one
    another). Raises UserError when the factors do not nest or do not divide the ranks."""
    ranks = len(nodes)
    factors.check(ranks)
    sizes = (
        factors.params,
        factors.grads // factors.params,
        factors.optimizer // factors.grads,
        ranks // factors.optimizer,
    )
    each = per_node(nodes)
    stride = 1
    axes = []
    for state, size in zip(STATES, sizes, strict=True):
        near = int(inside(size, stride, each))
        for part in (near, size // near):
            if part > 1:
                axes.append(Axis(state, part, stride))
            stride *= part
    return Placement(ranks, factors, tuple(axes), by_level=1 < each < ranks)


def per_node(nodes: Sequence[int]) -> int:
    """Ranks on each machine, or 1 where machines have different numbers (then no axis is divided at their ends)."""
    runs: list[list[int]] = []
    for node in nodes:
        if not runs or runs[-1][0] != node:
            runs.append([node, 0])
        runs[-1][1] += 1
    counts = {count for _, count in runs}
    return counts.pop() if len(counts) == 1 and len({node for node, _ in runs}) == len(runs) else 1


def level(nodes: Sequence[Hashable], members: Iterable[int]) -> Literal["inside", "between"]:
    """`inside` when the ranks `members`, of those whose machines are `nodes`, are on one machine."""
    return "between" if len({nodes[rank] for rank in members}) > 1 else "inside"


def inside(size: Any, stride: Any, each: Any) -> Any:
    """How many of the `size` ranks of an axis, `stride` apart, lie inside a machine of `each` ranks (NumPy arrays
    allowed): as many as divide both."""
    return np.where(each % np.asarray(stride) == 0, np.gcd(size, np.maximum(1, each // np.asarray(stride))), 1)
