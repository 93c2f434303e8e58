"""Layout of flat parameters: which parameters travel together, at which offsets, with how much padding. No torch.

A unit is what is exchanged at once. Where parameters are gathered layer by layer a unit is a block of the model; else
it is a bucket of some megabytes, filled in the order in which backward gives gradients (DistributedDataParallel's order
and sizes, Li et al., arXiv 2006.15704). The same functions serve the executor and its cost.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

FIRST_BUCKET = 2**20  # bytes; DistributedDataParallel's figure: the first exchange should begin early
BUCKET = 25 * 2**20  # bytes; likewise
PADDING = 0.1
"""Share of a unit of whole matrices that may be padding; it grows beyond its bytes until it is met."""


class Sized(NamedTuple):
    """Equal trainable parameters that follow one another, as far as their place in units depends on them.

    Attributes:
        elements, element_bytes: the size of each.
        block: the index of their block; None outside all.
        kind: parameters of one kind (dtype, whether it keeps its precision) may share a unit.
        matrix: an optimizer of matrices moves each as a whole.
        experts: the numbers of the experts that have an equal part of them; empty: they belong to none.
        copies: how many they are.
    """

    elements: int
    element_bytes: int
    block: int | None
    kind: tuple[str, bool]
    matrix: bool
    experts: range = range(0)
    copies: int = 1

    def of_first(self, experts: int) -> Sized:
        """Those of the first `experts` experts; all of them where they belong to none."""
        if not self.experts:
            return self
        part = self.experts[: max(0, experts - self.experts.start)]
        return self._replace(experts=part, copies=self.copies * len(part) // len(self.experts))


def runs(parameters: Sequence[Sized]) -> tuple[Sized, ...]:
    """Parameters in the model's order, equal ones that follow one another as one: of experts that have as many each."""
    equal = [first._replace(copies=len(list(run))) for first, run in groupby(parameters)]
    places = groupby(
        enumerate(equal), lambda place: (place[1]._replace(experts=range(0)), place[1].experts.start - place[0])
    )
    merged = []
    for _, run in places:
        (_, first), *others = run
        numbers = range(first.experts.start, first.experts.stop + len(others))
        merged.append(first._replace(experts=numbers, copies=first.copies * (1 + len(others))))
    return tuple(merged)


class Piece(NamedTuple):
    """Equal parameters that follow one another, as far as units care.

    Attributes:
        elements, element_bytes: the size of each.
        group: parameters of one group (dtype, device, factors, block) may share a unit.
        whole: each must lie on one rank: no shard of the optimizer's state may cut it.
        copies: how many they are.
    """

    elements: int
    element_bytes: int
    group: Any = None
    whole: bool = False
    copies: int = 1


class BucketRule(NamedTuple):
    """What a group's units must obey: their length is a multiple of `multiple`, whole pieces are dealt out among
    `owners` ranks, and a unit closes at about `bucket_bytes` (0: the group is one unit, a block gathered at once)."""

    multiple: int = 1
    owners: int = 1
    bucket_bytes: int = BUCKET


class Arranged(NamedTuple):
    """One unit: the parameters in it (by index), where each begins, and the unit's length with its padding."""

    indices: tuple[int, ...]
    offsets: tuple[int, ...]
    length: int


def arrange(pieces: Sequence[Piece], rule: Callable[[Any], BucketRule]) -> list[Arranged]:
    """All units, in the order in which backward completes them. A pure function of its arguments.

    Args:
        pieces: the trainable parameters in the model's order.
        rule: of each piece's `group`.
    """
    done = []
    ends = list(accumulate(piece.copies for piece in pieces))
    for stream in streams(pieces):
        law = rule(stream.group)
        spans = (range(ends[number] - pieces[number].copies, ends[number]) for number in stream.numbers)
        indices = [index for span in spans for index in reversed(span)]
        for first, after, length, times in stream.cuts(law):
            elements = [size for size, count in stream.between(first, after) for _ in range(count)]
            offsets = [0, *accumulate(elements[:-1])]
            if stream.whole:
                offsets = [owner * (length // law.owners) + filled for owner, filled in _dealt(elements, law.owners)]
            for begin in range(first, first + times * len(offsets), len(offsets)):
                done.append(Arranged(tuple(indices[begin : begin + len(offsets)]), tuple(offsets), length))
    return sorted(done, key=lambda unit: -unit.indices[-1])


class PieceStream:
    """Pieces that may share a unit, the last first, as backward gives their gradients.

    Attributes:
        group, element_bytes, whole: as in `Piece`; numbers: of its pieces among all.
        sizes: elements of each parameter of a run of equal ones.
    """

    def __init__(self, alike: tuple[Any, int, bool], pieces: Sequence[Piece], numbers: Sequence[int]) -> None:
        self.group, self.element_bytes, self.whole = alike
        self.numbers = numbers
        merged = groupby((pieces[number] for number in numbers), lambda piece: piece.elements)
        equal = [(size, sum(piece.copies for piece in run)) for size, run in merged]
        self.sizes = [size for size, _ in equal]
        self._ends = list(accumulate(count for _, count in equal))
        self._filled = list(accumulate(size * count for size, count in equal))

    def cuts(self, law: BucketRule) -> Iterator[tuple[int, int, int, int]]:
        """Its units: (begin, end, length with its padding, how many such units follow one another).

        A unit closes when it has reached its bytes (the first `FIRST_BUCKET`, if that is less), so only a single larger
        piece exceeds it by much; one of `whole` pieces when also little of it is padding. Inside a run all units but
        the first of all are alike.
        """
        begin = 0
        limit = min(FIRST_BUCKET, law.bucket_bytes)
        every = self._ends[-1]
        while begin < every:
            wanted = self._before(begin) + max(1, -(-limit // self.element_bytes))
            end = self._reaching(wanted, begin) if limit else every
            if self.whole:
                end = self._tight(begin, end, law)
            end = min(end, every)
            length = _length(self.between(begin, end), self.whole, law)
            run = self._ends[bisect_right(self._ends, begin)]  # where it ends
            times = max(1, (run - begin) // (end - begin)) if begin else 1
            yield begin, end, length, times
            begin += times * (end - begin)
            limit = law.bucket_bytes

    def between(self, begin: int, end: int) -> list[tuple[int, int]]:
        """(elements, count) of the runs of the parameters from `begin` to `end`."""
        first = bisect_right(self._ends, begin)
        last = bisect_left(self._ends, end)
        each = zip(self.sizes[first : last + 1], [begin, *self._ends[first:last]], self._ends[first:], strict=False)
        return [(size, min(stop, end) - start) for size, start, stop in each]

    def _before(self, index: int) -> int:
        """Elements of all parameters before one."""
        run = bisect_left(self._ends, index)
        return self._filled[run] - (self._ends[run] - index) * self.sizes[run]

    def _reaching(self, elements: int, begin: int) -> int:
        """The end behind `begin` before which there are so many elements; beyond all: nowhere."""
        run = bisect_left(self._filled, elements)
        if run == len(self._filled):
            return self._ends[-1] + 1
        return max(begin + 1, self._ends[run] - (self._filled[run] - elements) // self.sizes[run])

    def _tight(self, begin: int, end: int, law: BucketRule) -> int:
        """Where, from `end` on, little of a unit of whole pieces is padding; beyond all pieces: nowhere."""
        before = self._before(begin)
        while end < self._ends[-1]:
            unit = self.between(begin, end)
            filled = self._before(end)
            # Every owner's share is as long as the largest piece.
            wanted = math.ceil(before + (1 - PADDING) * law.owners * max(unit)[0])
            if filled < wanted:
                end = self._reaching(wanted, end)
                continue
            length = _length(unit, True, law)
            if length - (filled - before) <= PADDING * length:
                break
            end += 1
        return end


def streams(pieces: Sequence[Piece]) -> list[PieceStream]:
    """The pieces that may share a unit: of one group, width and wholeness."""
    numbers: dict[tuple[Any, int, bool], list[int]] = {}
    for number in reversed(range(len(pieces))):
        piece = pieces[number]
        numbers.setdefault((piece.group, piece.element_bytes, piece.whole), []).append(number)
    return [PieceStream(alike, pieces, members) for alike, members in numbers.items()]


def _length(unit: Sequence[tuple[int, int]], whole: bool, law: BucketRule) -> int:
    """Of a unit of (elements, count) with its padding."""
    if not whole:
        return -(-sum(size * count for size, count in unit) // law.multiple) * law.multiple
    step = law.multiple // law.owners
    return -(-fullest_shard(unit, law.owners) // step) * step * law.owners


def fullest_shard(unit: Sequence[tuple[int, int]], owners: int) -> int:
    """Elements of the fullest shard where (elements, count) are dealt out as `_dealt` does one by one: equal shards
    take equal pieces together, and once no two differ by more than a piece every round gives each shard one."""
    counts: dict[int, int] = {}
    for size, count in unit:
        counts[size] = counts.get(size, 0) + count
    shards = {0: owners}  # how many, by what they have
    for size in sorted(counts, reverse=True):
        left = counts[size]
        while left:
            least = min(shards)
            if left >= owners and max(shards) - least <= size:
                rounds, left = divmod(left, owners)
                shards = {filled + rounds * size: number for filled, number in shards.items()}
                continue
            taking = min(left, shards[least])
            number = shards.pop(least)
            if number > taking:
                shards[least] = number - taking
            shards[least + size] = shards.get(least + size, 0) + taking
            left -= taking
    return max(shards)


def _dealt(elements: Sequence[int], owners: int) -> list[tuple[int, int]]:
    """(owner, elements before it there) of each piece, dealt to equal shards, the largest first, each to the emptiest:
    no shard's end cuts a piece."""
    fill = [(0, owner) for owner in range(min(owners, len(elements)))]  # the others stay empty
    places = [(0, 0)] * len(elements)
    for index in sorted(range(len(elements)), key=lambda index: (-elements[index], -index)):
        filled, owner = fill[0]
        places[index] = (owner, filled)
        heapq.heapreplace(fill, (filled + elements[index], owner))
    return places
