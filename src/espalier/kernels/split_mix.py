"""SplitMix64 (Steele et al., OOPSLA 2014): numbers that look random, as a hash of what they are drawn for."""

from __future__ import annotations

from typing import Any

import numpy as np


def mixed(word: Any) -> Any:
    """The finaliser: uint64 to uint64, numbers in kernels (`njit`) or NumPy arrays."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
