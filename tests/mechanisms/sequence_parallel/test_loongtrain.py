"""Attention over cut sequences equals attention on one device: outputs and all gradients, whatever the cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import many_ranks
from espalier.mechanisms.sequence_parallel import SequenceSlots, attend


class Case(NamedTuple):
    """One cut of one attention."""

    context: int
    heads: int
    window: int
    kv_heads: int = 2
    causal: bool = True
    length: int = 24
    documents: Any = None
    query_heads: int = 4
    shares: tuple[float, ...] = ()
    head_shares: tuple[float, ...] = ()


def inputs(case: Case, dtype: torch.dtype = torch.float64, batch: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(batch, heads, case.length, 8) for heads in (case.query_heads, case.kv_heads, case.kv_heads)]
    shapes.append(shapes[0])
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def reference(case: Case, query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output and gradients on one device."""
    leaves = [one.detach().clone().requires_grad_() for one in (query, key, value)]
    group = case.query_heads // case.kv_heads
    wide = [leaves[0], *(one.repeat_interleave(group, 1) for one in leaves[1:])]
    mask = torch.ones(case.length, case.length, dtype=torch.bool)
    mask = (mask.tril() if case.causal else mask)[None, None]
    if case.documents is not None:
        labels = torch.tensor(case.documents)
        mask = mask & (labels[:, None, :, None] == labels[:, None, None, :])
    out = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def cut(channel: Any, cases: list[tuple[Case, tuple[Tensor, ...]]]) -> list[list[Tensor]]:
    """Of each case the output and the gradients of this rank's tokens."""
    return [cut_one(channel, *one) for one in cases]


def cut_one(channel: Any, case: Case, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    slots = slots_of(case)
    query, key, value, gradient = (slots.take(one, channel.rank(), 2) for one in tensors)
    leaves = [one.detach().clone().requires_grad_() for one in (query, key, value)]
    documents = None if case.documents is None else torch.tensor(case.documents)
    out = attend(*leaves, causal=case.causal, documents=documents, slots=slots, window=case.window)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def slots_of(case: Case) -> SequenceSlots:
    return SequenceSlots(case.length, case.context, case.heads, case.causal, case.shares, case.head_shares)


def errors(cases: list[Case], dtype: torch.dtype = torch.float64, run: Any = many_ranks.forks) -> dict[Case, float]:
    """The largest error of outputs and gradients of each case, relative to the largest value. One fork for all."""
    given = [(case, inputs(case, dtype)) for case in cases]
    found = run(cases[0].context * cases[0].heads, cut, given)
    largest = {}
    for number, (case, tensors) in enumerate(given):
        parts = [slots_of(case).join([one[number][index] for one in found], 2).double() for index in range(4)]
        right = reference(case, *(one.double() for one in tensors))
        largest[case] = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(parts, right, strict=True))
    return largest


def cuts(ranks: int) -> list[Case]:
    return [
        Case(context, ranks // context, window)
        for context in range(1, ranks + 1)
        if ranks % context == 0
        for window in range(1, context + 1)
        if context % window == 0
    ]


def documents(length: int) -> tuple[tuple[int, ...], ...]:
    """Of two rows: long ones beside short ones, and beside one of one token."""
    rows = ((5, 1, length - 9, 3), (length // 2, length - length // 2))
    return tuple(tuple(label for label, size in enumerate(row) for _ in range(size)) for row in rows)


def variants(case: Case) -> list[Case]:
    """A cut with key-value heads below, at and above its rows, lengths that nothing divides, masks and documents."""
    found = [case._replace(kv_heads=heads, causal=causal) for heads in (1, 2, 4) for causal in (True, False)]
    odd = [case._replace(length=length, causal=causal) for length in (29, 17) for causal in (True, False)]
    packed = [one._replace(documents=documents(one.length)) for one in (case, *odd)]
    uneven = [
        case._replace(query_heads=heads, kv_heads=kv, length=31) for heads, kv in ((6, 3), (5, 1), (10, 2), (9, 3))
    ]
    fast = case._replace(shares=(3.0, *(1.0,) * (case.context - 1)), length=50)
    slow_head = case._replace(head_shares=(*(2.0,) * (case.heads - 1), 1.0), query_heads=8, length=37)
    return [*found, *odd, *packed, *uneven, fast, slow_head]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_cut_equals_one_device(ranks: int) -> None:
    cases = [
        one for case in cuts(ranks) for one in variants(case) if ranks < 8 or one.query_heads >= 8 or one.heads < 5
    ]
    found = errors(cases)
    assert max(found.values()) < 1e-12, {case: error for case, error in found.items() if error >= 1e-12}


@pytest.mark.slow
def test_single_precision_is_as_good_as_on_one_device() -> None:
    assert max(errors([one for case in cuts(4) for one in variants(case)], torch.float32).values()) < 2e-6


def test_documents_of_a_batch_are_those_of_each_row() -> None:
    """Rows with the same documents are computed together, others one by one."""
    alike = documents(24)[:1] * 2
    found = errors([Case(2, 1, 2, documents=alike), Case(2, 1, 2, documents=documents(24))])
    assert max(found.values()) < 1e-12
