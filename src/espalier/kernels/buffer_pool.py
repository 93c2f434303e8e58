"""Buffer pool: memory of a result, kept for the next result of the same size.

A large result comes fresh from the system otherwise, and is filled with zeros page by page before a kernel overwrites
it: for 40 MB that took as long as the product itself. A buffer is given out again once nothing refers to it.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEAST = 1 << 22
"""Bytes from which on it pays; C's allocator keeps smaller ones. NumPy asks for large pages from here on."""
MOST = 1 << 28
"""Bytes kept in all."""


class Buffers:
    """Buffers that are free, by size. Has state: they, and a reference to each result that is still in use."""

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}
        self._used: dict[int, weakref.ref[Any]] = {}
        self._bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that is not filled."""
        size = math.prod(shape) * dtype.itemsize
        if size < LEAST:
            return torch.empty(shape, dtype=dtype)
        kind = np.dtype(str(dtype).removeprefix("torch."))
        try:
            base = self._free[size].pop()
            self._bytes -= size
        except (KeyError, IndexError):
            base = np.empty(size, np.uint8)
        result = base.view(kind).reshape(shape)
        key = id(result)
        self._used[key] = weakref.ref(result, lambda _: self._back(key, base))
        return torch.from_numpy(result)

    def _back(self, key: int, base: Any) -> None:
        """Called when the last tensor on `base` is gone."""
        del self._used[key]
        if self._bytes + base.nbytes <= MOST:
            self._bytes += base.nbytes
            self._free.setdefault(base.nbytes, []).append(base)


BUFFERS = Buffers()
