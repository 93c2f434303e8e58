"""Layout of flat parameters: which parameters travel together, at which offsets, with how much padding. No torch.

A unit is what is exchanged at once. Where parameters are gathered layer by layer a unit is a block of the model; else
it is a bucket of some megabytes, filled in the order in which backward gives gradients (DistributedDataParallel's order
and sizes, Li et al., arXiv 2006.15704). The same functions serve the executor and its cost.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

FIRST_BUCKET = 2**20  # bytes; DistributedDataParallel's figure: the first exchange should begin early
BUCKET = 25 * 2**20  # bytes; likewise
PADDING = 0.1
"""Share of a unit of whole matrices that may be padding; it grows beyond its bytes until it is met."""


class Sized(NamedTuple):
    """A trainable parameter as far as its place in units depends on it.

    Attributes:
        elements, element_bytes: its size.
        block: the index of its block; None outside all.
        kind: parameters of one kind (dtype, whether it keeps its precision) may share a unit.
        matrix: an optimizer of matrices moves it as a whole.
        expert: the number of the expert that it belongs to; -1: to none.
    """

    elements: int
    element_bytes: int
    block: int | None
    kind: tuple[str, bool]
    matrix: bool
    expert: int = -1


class Piece(NamedTuple):
    """One parameter as far as units care.

    Attributes:
        elements, element_bytes: its size.
        group: parameters of one group (dtype, device, factors, block) may share a unit.
        whole: it must lie on one rank: no shard of the optimizer's state may cut it.
    """

    elements: int
    element_bytes: int
    group: Any = None
    whole: bool = False


class BucketRule(NamedTuple):
    """What a group's units must obey: their length is a multiple of `multiple`, whole pieces are dealt out among
    `owners` ranks, and a unit closes at about `bucket_bytes` (0: the group is one unit, a block gathered at once)."""

    multiple: int = 1
    owners: int = 1
    bucket_bytes: int = BUCKET


class Arranged(NamedTuple):
    """One unit: the pieces in it (by index), where each begins, and the unit's length with its padding."""

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
    for (group, element_bytes, whole), indices in streams(pieces).items():
        elements, law = [pieces[index].elements for index in indices], rule(group)
        for first, after, length, times in cuts(elements, element_bytes, whole, law):
            offsets = [0, *accumulate(elements[first : after - 1])]
            if whole:
                dealt = _dealt(elements[first:after], law.owners)
                offsets = [owner * (length // law.owners) + filled for owner, filled in dealt]
            for begin in range(first, first + times * len(offsets), len(offsets)):
                done.append(Arranged(tuple(indices[begin : begin + len(offsets)]), tuple(offsets), length))
    return sorted(done, key=lambda unit: -unit.indices[-1])


def streams(pieces: Sequence[Piece]) -> dict[tuple[Any, int, bool], list[int]]:
    """Indices of the pieces that may share a unit, by group, width and wholeness: the last piece first, as backward
    gives their gradients."""
    indices: dict[tuple[Any, int, bool], list[int]] = {}
    for index in reversed(range(len(pieces))):
        piece = pieces[index]
        indices.setdefault((piece.group, piece.element_bytes, piece.whole), []).append(index)
    return indices


def cuts(
    elements: Sequence[int], element_bytes: int, whole: bool, law: BucketRule
) -> Iterator[tuple[int, int, int, int]]:
    """Units of a stream of pieces of so many `elements`: (begin, end, length with its padding, how many such units
    follow one another).

    A unit closes when it has reached its bytes (the first `FIRST_BUCKET`, if that is less), so only a single larger
    piece exceeds it by much; one of `whole` pieces when also little of it is padding. Of equal pieces all units are
    alike but the first and the last.
    """
    ends, equal = list(accumulate(elements)), min(elements) == max(elements)
    begin, before, limit = 0, 0, min(FIRST_BUCKET, law.bucket_bytes)
    while begin < len(elements):
        end = bisect_left(ends, before + max(1, -(-limit // element_bytes)), begin) + 1 if limit else len(elements)
        if whole:
            end = _tight(elements, ends, begin, end, law)
        end = min(end, len(elements))
        length = _length(elements[begin:end], whole, law)
        times = (len(elements) - begin) // (end - begin) if equal and begin else 1
        yield begin, end, length, times
        begin += times * (end - begin)
        before, limit = ends[begin - 1], law.bucket_bytes


def _tight(elements: Sequence[int], ends: Sequence[int], begin: int, end: int, law: BucketRule) -> int:
    """Where, from `end` on, little of a unit of whole pieces is padding; beyond all pieces: nowhere."""
    before = ends[begin - 1] if begin else 0
    while end < len(elements):
        # Every owner's share is as long as the largest piece.
        wanted = before + (1 - PADDING) * law.owners * max(elements[begin:end])
        if ends[end - 1] < wanted:
            end = bisect_left(ends, wanted, end) + 1
            continue
        length = _length(elements[begin:end], True, law)
        if length - (ends[end - 1] - before) <= PADDING * length:
            break
        end += 1
    return end


def _length(elements: Sequence[int], whole: bool, law: BucketRule) -> int:
    """Of a unit with its padding."""
    if not whole:
        return -(-sum(elements) // law.multiple) * law.multiple
    step = law.multiple // law.owners
    if min(elements) == max(elements):
        most = -(-len(elements) // law.owners) * elements[0]
    else:
        dealt = _dealt(elements, law.owners)
        most = max(filled + size for (_, filled), size in zip(dealt, elements, strict=True))
    return -(-most // step) * step * law.owners


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
