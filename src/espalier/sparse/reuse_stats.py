"""Reuse statistics, compiled for the CPU: how many different rows, pages or tiles consecutive rows of a matrix read."""

from __future__ import annotations

from typing import Any

import numpy as np

from espalier.kernels.numba_compile import jit


@jit("uint64(uint64[::1], uint32[::1], uint32[::1], uint32[::1], uint64, uint64)")
def touched(indptr: Any, indices: Any, old: Any, new: Any, window: Any, page: Any) -> Any:
    """Sum over windows of `window` rows of the different pages of `page` columns that their entries lie on.

    Row `place` of the ordered matrix is row old[place]; its column c is the ordered matrix's column new[c].
    """
    one = np.uint64(1)
    nodes = np.uint64(len(old))
    seen = np.zeros(nodes // page + one, np.uint32)
    count, stamp = np.uint64(0), np.uint32(0)
    for place in range(nodes):
        stamp = np.uint32(place // window + one)
        node = np.uint64(old[place])
        for entry in range(indptr[node], indptr[node + one]):
            at = np.uint64(new[indices[entry]]) // page
            if seen[at] != stamp:
                seen[at] = stamp
                count += one
    return count
