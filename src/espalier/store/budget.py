"""Memory budget: every buffer and table of a store is taken from one number of bytes, and given back."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Self

from espalier.recipe.errors import UserError
from espalier.recipe.units import show_size


class Budget:
    """`size` bytes that parts take from. Has state: what is taken, by what for.

    Args:
        size: bytes in all.
        option: what users call it, for errors.
    """

    def __init__(self, size: int, option: str = "store.memory") -> None:
        self.size = size
        self.option = option
        self._taken: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Bytes that nobody has taken."""
        return self.size - self._taken.total()

    @property
    def taken(self) -> dict[str, int]:
        """Bytes by what they were taken for."""
        return {what: size for what, size in self._taken.items() if size}

    def take(self, size: int, what: str) -> Lease:
        """`size` bytes for `what`. Raises UserError that names the least budget with which this would have worked."""
        with self._lock:
            if size > self.free:
                least = -(-(self._taken.total() + size) // 2**20)
                taken = ", ".join(f"{name} {show_size(count)}" for name, count in self.taken.items())
                raise UserError(
                    f"{self.option} = {show_size(self.size)} is too small: {what} takes {show_size(size)}, and "
                    f"{show_size(self.free)} is free.",
                    why=f"taken already: {taken}" if taken else "",
                    do=f'{self.option} = "{least}MiB"',
                )
            self._taken[what] += size
        return Lease(self, size, what)

    def _give_back(self, size: int, what: str) -> None:
        with self._lock:
            self._taken[what] -= size


class Lease:
    """Bytes taken from a budget until `give_back`, or until the end of a `with`."""

    def __init__(self, budget: Budget, size: int, what: str) -> None:
        self._budget = budget
        self.size = size
        self.what = what

    def give_back(self) -> None:
        """Returns the bytes; calling it again returns nothing more."""
        self._budget._give_back(self.size, self.what)
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()
