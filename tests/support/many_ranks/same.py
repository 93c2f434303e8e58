"""Compares nested results and names the first place where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Default relative bound by dtype: a few hundred roundings.
_BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def same(left: Any, right: Any, *, bitwise: bool = False, relative: float | None = None) -> None:
    """Raises AssertionError naming the first difference between `left` and `right`.

    Args:
        left: tensors, arrays, numbers, text, and mappings, sequences and dataclasses of them.
        right: what it should be.
        bitwise: floating-point values must agree in every bit (NaN equals the same NaN, -0.0 differs from 0.0).
        relative: allowed largest difference over a tensor, as a share of the largest magnitude in `right`;
            default 1e-12 for float64, 1e-5 for float32, 5e-3 for float16, 4e-2 for bfloat16. Integers must be equal.

    >>> same({"a": [1, 2.0]}, {"a": [1, 2.0 + 1e-15]})
    >>> same({"a": [1, 2]}, {"a": [1, 3]})
    Traceback (most recent call last):
    AssertionError: ['a'][1]: 2 is not 3
    """
    _compare(left, right, "", bitwise, relative)


def _compare(left: Any, right: Any, path: str, bitwise: bool, relative: float | None) -> None:
    where = path or "the value"
    if isinstance(left, np.ndarray | np.generic):
        left = torch.from_numpy(np.array(left))
    if isinstance(right, np.ndarray | np.generic):
        right = torch.from_numpy(np.array(right))
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        _tensors(left.detach(), right.detach(), path, bitwise, relative)
        return
    if isinstance(left, float) and isinstance(right, float):
        double = torch.tensor([left, right], dtype=torch.float64)
        _tensors(double[0], double[1], path, bitwise, relative)
        return
    if type(left) is not type(right) and not (_plain(left) and _plain(right)):
        raise AssertionError(f"{where}: {_name(left)} is not {_name(right)}")
    for key, first, other in _children(left, right, where):
        _compare(first, other, f"{path}{key}", bitwise, relative)


def _children(left: Any, right: Any, where: str) -> list[tuple[str, Any, Any]]:
    if isinstance(left, Mapping):
        missing = [key for key in (*left, *right) if (key in left) != (key in right)]
        if missing:
            raise AssertionError(f"{where}: key {missing[0]!r} is only on one side")
        return [(f"[{key!r}]", left[key], right[key]) for key in right]
    if is_dataclass(left) and not isinstance(left, type):
        return [(f".{field.name}", getattr(left, field.name), getattr(right, field.name)) for field in fields(left)]
    if isinstance(left, Sequence) and not isinstance(left, str | bytes):
        if len(left) != len(right):
            raise AssertionError(f"{where}: {len(left)} items, not {len(right)}")
        return [(f"[{index}]", first, other) for index, (first, other) in enumerate(zip(left, right, strict=True))]
    if not left == right:
        raise AssertionError(f"{where}: {left!r} is not {right!r}")
    return []


def _tensors(left: Tensor, right: Tensor, path: str, bitwise: bool, relative: float | None) -> None:
    where = path or "the value"
    for name in ("shape", "dtype"):
        first = getattr(left, name)
        other = getattr(right, name)
        if first != other:
            raise AssertionError(f"{where}: {name} {first} is not {other}")
    left = left.cpu().contiguous()
    right = right.cpu().contiguous()
    if bitwise or not (left.is_floating_point() or left.is_complex()):
        wrong = (_bits(left) != _bits(right)).view(*left.shape, -1).any(-1) if left.numel() else left.new_zeros(0)
        _report(wrong, left, right, where, "" if not left.is_floating_point() else " in every bit")
        return
    bound = relative if relative is not None else _BOUNDS.get(left.dtype, 1e-5)
    scale = right[right.isfinite()].abs().max().item() if right.isfinite().any() else 0.0
    close = torch.isclose(left, right, rtol=0.0, atol=bound * scale, equal_nan=True)
    _report(~close, left, right, where, f" within {bound:g} of the largest, {scale:g}")


def _report(wrong: Tensor, left: Tensor, right: Tensor, where: str, how: str) -> None:
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        place = f"{where}{list(first)}" if first else where
        raise AssertionError(
            f"{place}: {left[first].item()!r} is not {right[first].item()!r}{how} "
            f"({int(wrong.sum())} of {wrong.numel()} values differ)"
        )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | Mapping | list | tuple) and not isinstance(value, bool)


def _name(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:80]
