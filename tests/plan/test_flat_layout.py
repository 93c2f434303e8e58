"""Equal parameters that count as one lie as they do one by one: cuts, dealing, lengths, and the fullest rank."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from espalier.plan.axes import flat_layout
from espalier.plan.axes.flat_layout import PADDING, BucketRule, Piece, Sized, arrange, fullest_shard, runs
from espalier.plan.axes.sharding import Lengths, Rules
from espalier.plan.axes.state_holders import fullest


def singly(parameters: Sequence[Sized]) -> list[Sized]:
    """Each as many times as it counts, every expert by itself."""
    return [
        sized._replace(copies=1, experts=range(expert, expert + 1) if sized.experts else range(0))
        for sized in parameters
        for expert in sized.experts or range(1)
        for _ in range(sized.copies // len(sized.experts or range(1)))
    ]


def dealt(elements: Sequence[int], owners: int) -> list[int]:
    """Elements of each shard: the largest piece first, each to the emptiest, the first of equal ones."""
    shards = [0] * owners
    for size in sorted(elements, reverse=True):
        shards[shards.index(min(shards))] += size
    return shards


def length_of(elements: Sequence[int], whole: bool, law: BucketRule) -> int:
    if not whole:
        return -(-sum(elements) // law.multiple) * law.multiple
    step = law.multiple // law.owners
    return -(-max(dealt(elements, law.owners)) // step) * step * law.owners


def units_of(
    elements: Sequence[int], element_bytes: int, whole: bool, law: BucketRule
) -> Iterator[tuple[int, int, int]]:
    """(begin, end, length) of the units of pieces, one by one."""
    begin, limit = 0, min(flat_layout.FIRST_BUCKET, law.bucket_bytes)
    while begin < len(elements):
        end = begin + 1 if limit else len(elements)
        while end < len(elements) and sum(elements[begin:end]) < -(-limit // element_bytes):
            end += 1
        while whole and end < len(elements):
            filled, length = sum(elements[begin:end]), length_of(elements[begin:end], True, law)
            wide = (1 - PADDING) * law.owners * max(elements[begin:end])
            if filled >= wide and length - filled <= PADDING * length:
                break
            end += 1
        yield begin, end, length_of(elements[begin:end], whole, law)
        begin, limit = end, law.bucket_bytes


def drawn(draw: random.Random, experts: int = 5) -> list[Sized]:
    """Blocks of unequal tensors and equal experts, some of two tensors, some of tensors of several lengths."""
    sizes = [draw.choice([1, 3, 8, 40, 41, 100, 300]) for _ in range(4)]
    each = draw.choice([[7, 7, 7], [9, 4], [40], [8, 8, 3]])
    parameters: list[Sized] = [Sized(sizes[0], 4, None, ("float", True), False)]
    for block in range(draw.randrange(1, 5)):
        for size in sizes * draw.choice([1, 2]):
            low, matrix = draw.random() < 0.8, draw.random() < 0.7
            times = draw.choice([1, 1, 1, 4])
            parameters += [Sized(size, 4, block, ("float", low), matrix)] * times
        for expert in range(experts):
            parameters += [Sized(size, 4, block, ("float", True), True, range(expert, expert + 1)) for size in each]
    return [*parameters, Sized(sizes[0], 4, None, ("float", True), False)]


@pytest.mark.parametrize("seed", range(3))
def test_equal_pieces_are_dealt_as_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        sizes = [draw.randrange(1, draw.choice([3, 60, 10**7])) for _ in range(draw.randrange(1, 6))]
        unit = [(size, draw.randrange(1, draw.choice([2, 8, 90]))) for size in sizes * draw.choice([1, 2])]
        owners = draw.randrange(1, 40)
        singles = [size for size, count in unit for _ in range(count)]
        assert fullest_shard(unit, owners) == max(dealt(singles, owners)), (unit, owners)
        places = flat_layout._dealt(singles, owners)
        filled = [before + size for (_, before), size in zip(places, singles, strict=True)]
        assert max(filled) == fullest_shard(unit, owners)


@pytest.mark.parametrize("seed", range(4))
def test_units_of_equal_pieces_are_those_of_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_layout, "FIRST_BUCKET", 500)
    draw = random.Random(seed)
    for _ in range(60):
        counted = [
            Piece(draw.choice([3, 8, 40, 41, 300]), 4, "", draw.random() < 0.5, draw.choice([1, 1, 2, 30]))
            for _ in range(draw.randrange(1, 12))
        ]
        owners = draw.choice([1, 2, 3, 8])
        law = BucketRule(owners * draw.choice([1, 2, 5]), owners, draw.choice([0, 300, 1600, 10**6]))
        singles = [piece._replace(copies=1) for piece in counted for _ in range(piece.copies)]
        rule = {"": law}.__getitem__
        arranged = arrange(counted, rule)
        assert arranged == arrange(singles, rule)
        for whole in (False, True):
            indices = [index for index in reversed(range(len(singles))) if singles[index].whole == whole]
            elements = [singles[index].elements for index in indices]
            wanted = [(tuple(indices[a:b]), length) for a, b, length in units_of(elements, 4, whole, law)]
            units = [(unit.indices, unit.length) for unit in arranged if singles[unit.indices[0]].whole == whole]
            assert units == sorted(wanted, key=lambda unit: -unit[0][-1])


def test_parameters_as_runs_are_the_same_parameters() -> None:
    for seed in range(60):
        parameters = drawn(random.Random(seed))
        assert singly(runs(parameters)) == parameters
    alike = [Sized(7, 4, 0, ("float", True), True, range(n // 3, n // 3 + 1)) for n in range(12)]
    assert runs(alike) == (alike[0]._replace(experts=range(4), copies=12),)


@pytest.mark.parametrize("seed", range(3))
def test_lengths_and_the_fullest_rank_of_runs_are_those_of_single_parameters(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(12):
        parameters = drawn(draw)
        for ep, stages, chunks in [(1, 1, 1), (2, 1, 1), (5, 1, 1), (2, 2, 1), (3, 2, 2)]:
            on_rank = fullest(runs(parameters), ep, stages, chunks)
            single = fullest(parameters, ep, stages, chunks)
            assert singly(on_rank) == single
            assert all(sized.experts.stop <= -(-5 // ep) for sized in single)
            for _ in range(6):
                owners = draw.choice([1, 2, 4])
                limit = draw.choice([600, 1200, 10**6])
                rules = Rules(draw.random() < 0.5, owners * draw.choice([1, 2]), owners, limit)
                rules = rules._replace(limit=0) if rules.gathered else rules
                whole = draw.random() < 0.7
                kinds = [
                    [
                        (units.low, sorted(zip(*(row.repeat(units.times).tolist() for row in units[2:4]), strict=True)))
                        for units in Lengths(tensors, whole).of(rules)
                    ]
                    for tensors in (on_rank, single)
                ]
                assert kinds[0] == kinds[1]
                arranged = Lengths(on_rank, whole).arranged(rules)
                assert sum(unit.length for unit in arranged) == sum(size for _, rows in kinds[0] for size, _ in rows)
