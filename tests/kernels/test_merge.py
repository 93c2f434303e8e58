"""Partial softmaxes become the softmax of all keys, whatever the scores are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.kernels.merge import merge


def part(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from([1.0, 50.0, 2000.0]), st.randoms())
def test_parts_in_any_order_give_the_whole(sizes: list[int], scale: float, random: object) -> None:
    scores = scale * torch.randn(3, 4, sum(sizes), dtype=torch.float64)
    values = torch.randn(3, sum(sizes), 6, dtype=torch.float64)
    out, lse = torch.zeros(3, 4, 6, dtype=torch.float64), torch.full((3, 4), -torch.inf, dtype=torch.float64)
    parts = list(zip(scores.split(sizes, -1), values.split(sizes, 1), strict=True))
    random.shuffle(parts)  # type: ignore[attr-defined]
    for one in parts:
        merge(out, lse, *part(*one))
    right = part(scores, values)
    torch.testing.assert_close(out, right[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, right[1], rtol=1e-13, atol=1e-12)


def test_rows_without_keys_count_nothing() -> None:
    empty = torch.zeros(2, 3), torch.full((2,), -torch.inf)
    out, lse = torch.tensor([[1.0, 2, 3], [0, 0, 0]]), torch.tensor([0.5, -torch.inf])
    before = out.clone(), lse.clone()
    merge(out, lse, *empty)
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_first_part_is_taken_as_it_is_and_views_are_written(dtype: torch.dtype) -> None:
    room, sums = torch.zeros(2, 8, 3), torch.full((2, 8), -torch.inf)
    values = torch.randn(2, 4, 3).to(dtype)
    merge(room[:, 2:6], sums[:, 2:6], values, torch.full((2, 4), 3.0))
    assert torch.equal(room[:, 2:6], values.float())
    assert torch.equal(sums.isfinite().nonzero()[:, 1].unique(), torch.arange(2, 6))
