"""What the tests of checkpoints share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from many_ranks import forks

torch.set_num_threads(1)


class Box:
    """A part that holds any state."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Events(list[dict[str, Any]]):
    def __call__(self, event: str, **fields: Any) -> None:
        self.append({"event": event, **fields})


def forked(count: int, work: Callable[[int], None]) -> None:
    """Runs `work(rank)` on `count` forked ranks."""
    forks(count, lambda channel: work(channel.rank()))
