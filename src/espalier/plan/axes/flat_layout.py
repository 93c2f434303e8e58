"""Layout of flat parameters: which parameters travel together, at which offsets, with how much padding. No torch.

A unit is what is exchanged at once. Where parameters are gathered layer by layer a unit is a block of the model; else
it is a bucket of some megabytes, filled in the order in which backward gives gradients (DistributedDataParallel's order
and sizes, Li et al., arXiv 2006.15704). The same functions serve the executor and its cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
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

    Pieces are taken in reverse, as backward gives their gradients. A unit closes when it has reached its bytes (the
    first of each group `FIRST_BUCKET`, if that is less), so only a single larger piece exceeds it by much.

    Args:
        pieces: the trainable parameters in the model's order.
        rule: of each piece's `group`.
    """
    done: list[Arranged] = []
    open_: dict[Hashable, list[int]] = {}
    elements: dict[Hashable, int] = {}
    largest: dict[Hashable, int] = {}
    later: set[Hashable] = set()
    for index in reversed(range(len(pieces))):
        piece = pieces[index]
        key = (piece.group, piece.element_bytes, piece.whole)
        indices = open_.setdefault(key, [])
        indices.append(index)
        law = rule(piece.group)
        elements[key] = elements.get(key, 0) + piece.elements
        largest[key] = max(largest.get(key, 0), piece.elements)
        limit = law.bucket_bytes if key in later else min(FIRST_BUCKET, law.bucket_bytes)
        if not law.bucket_bytes or elements[key] * piece.element_bytes < limit:
            continue
        # No need to deal: every owner's share is as long as the largest piece.
        if piece.whole and elements[key] < (1 - PADDING) * law.owners * largest[key]:
            continue
        unit = _closed(pieces, indices, law, elements[key])
        if unit is not None:
            done.append(unit)
            later.add(key)
            del open_[key], elements[key], largest[key]
    done += [_unit(pieces, indices, rule(pieces[indices[0]].group)) for indices in open_.values()]
    return sorted(done, key=lambda unit: -min(unit.indices))


def _closed(pieces: Sequence[Piece], indices: Sequence[int], law: BucketRule, elements: int) -> Arranged | None:
    """The unit of `indices`, which have so many `elements`; None where whole pieces leave too much padding."""
    unit = _unit(pieces, indices, law)
    return None if pieces[indices[0]].whole and unit.length - elements > PADDING * unit.length else unit


def _unit(pieces: Sequence[Piece], indices: Sequence[int], law: BucketRule) -> Arranged:
    return (_dealt if pieces[indices[0]].whole else _in_a_row)(pieces, indices, law)


def _in_a_row(pieces: Sequence[Piece], indices: Sequence[int], law: BucketRule) -> Arranged:
    """One after the other; shards may cut any of them."""
    offsets, end = [], 0
    for index in indices:
        offsets.append(end)
        end += pieces[index].elements
    return Arranged(tuple(indices), tuple(offsets), -(-end // law.multiple) * law.multiple)


def _dealt(pieces: Sequence[Piece], indices: Sequence[int], law: BucketRule) -> Arranged:
    """Dealt to equal shards, the largest first, each to the emptiest: no shard's end cuts a piece."""
    fill = [(0, owner) for owner in range(min(law.owners, len(indices)))]  # the others stay empty
    places: dict[int, tuple[int, int]] = {}
    for index in sorted(indices, key=lambda index: (-pieces[index].elements, index)):
        filled, owner = fill[0]
        places[index] = (owner, filled)
        heapq.heapreplace(fill, (filled + pieces[index].elements, owner))
    step = law.multiple // law.owners
    each = -(-max(fill)[0] // step) * step
    offsets = tuple(places[index][0] * each + places[index][1] for index in indices)
    return Arranged(tuple(indices), offsets, each * law.owners)
