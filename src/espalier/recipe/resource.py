"""What holds something to the end of a `with` block. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Resource(ABC):
    """What `with` closes at the end of its block; after an error in the block, abandons."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what it holds."""

    def abandon(self) -> None:
        """As `close`, without finishing what was begun."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()
