"""Memory budget: every buffer and table of a store is taken from one number of bytes, and given back."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack

from espalier.recipe.errors import UserError
from espalier.recipe.units import show_size


class Budget:
    """`size` bytes, `store.memory` of a recipe, that parts take from. Has state: what is taken, by what for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Bytes that nobody has taken."""
        return self.size - self._taken.total()

    def take(self, size: int, what: str) -> ExitStack:
        """`size` bytes for `what`, which are given back when the answer is closed.

        Raises UserError that names the least budget with which this would have worked.
        """
        with self._lock:
            if size > self.free:
                least = -(-(self._taken.total() + size) // 2**20)
                taken = ", ".join(f"{name} {show_size(count)}" for name, count in self._taken.items() if count)
                raise UserError(
                    f"store.memory = {show_size(self.size)} is too small: {what} takes {show_size(size)}, and "
                    f"{show_size(self.free)} is free.",
                    why=f"taken already: {taken}" if taken else "",
                    do=f'store.memory = "{least}MiB"',
                )
            self._taken[what] += size
        lease = ExitStack()
        lease.callback(self._give_back, size, what)
        return lease

    def _give_back(self, size: int, what: str) -> None:
        with self._lock:
            self._taken[what] -= size
