"""What survives? Every part that has state is a Stateful; a checkpoint is a name -> Stateful table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

StateDict = dict[str, Any]
"""Tensors and plain values of a part, by name; tensors that are sharded are DTensors."""


@runtime_checkable
class Stateful(Protocol):
    """A part whose state is saved and restored (the same two methods as torch's own Stateful)."""

    def state_dict(self) -> StateDict:
        """Tensors and plain values; tensors that are sharded are DTensors."""

    def load_state_dict(self, state: StateDict) -> None:
        """Takes back what `state_dict` gave, possibly from another number of ranks."""


StatefulParts = Mapping[str, Stateful]
"""What a checkpoint holds, by name."""
