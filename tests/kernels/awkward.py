"""Rows that make a top-k err: ties, infinities, NaNs, outliers, subnormals, zeros after a ReLU."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTHS = (16, 17, 31, 32, 33, 100, 255, 256, 257, 1000, 1025, 8193)


def hard_rows(width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """[13, width]; rows 5 and 6 hold NaNs."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(13, width, generator=made)
    x[1] = 0
    x[2].relu_()
    x[3, ::5], x[3, 1::5] = torch.inf, -torch.inf
    x[4] = (2 * x[4]).round()
    x[5, ::7], x[5, 1] = torch.nan, torch.inf
    x[6] = torch.nan
    x[7] = -torch.inf
    x[8, 0] = 3e38
    x[9] *= 1e-40
    x[10] = torch.exp(80 * torch.rand(width, generator=made) - 40)
    x[11] = 1e5 * x[11].exp()
    x[12] = -x[2]
    return x.to(dtype)


def shares(width: int) -> list[int]:
    """Values of k from 1 to width - 1."""
    return sorted({1, 2, width // 8 + 1, width // 3, width // 2, width - 1} & set(range(1, width)))


def assert_right(x: Tensor, k: int, found: tuple[Tensor, Tensor], *, falling: bool = False) -> None:
    """The values are those of torch.topk, each at its column; columns rise, or values fall."""
    values, columns = found
    expected = torch.topk(x, k).values
    assert columns.dtype is torch.int64
    assert values.dtype is x.dtype
    assert values.shape == columns.shape == expected.shape
    assert same(x.gather(-1, columns), values)
    assert same(values if falling else values.sort(dim=-1, descending=True).values, expected)
    distinct = columns.sort(dim=-1).values if falling else columns
    assert (distinct.diff(dim=-1) > 0).all()


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(0.25), other.nan_to_num(0.25))


_REAL_THREADS = torch.get_num_threads


def pretend_threads(number: int) -> None:
    """Makes kernels use `number` threads while torch keeps its one: a child forked after torch's own pool has worked
    would hang at its first parallel operation."""
    torch.get_num_threads = _REAL_THREADS if number == _REAL_THREADS() else lambda: number
