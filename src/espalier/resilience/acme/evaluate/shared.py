"""A checkpoint's model held once in this machine's memory, mapped by every worker.

The tensors lie in an anonymous memory file (memfd): no disk, no name to clean up, gone with the last process that has
it. Workers map it privately, so all of them read the same pages.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch
from torch import nn

from espalier.checkpoint.sharded import Checkpoints
from espalier.errors import UserError

_VERSIONS = itertools.count(1)


class Loaded:
    """A part that takes whatever state a checkpoint has for it. Has state: that state."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing of its own."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps it."""
        self.state = state


class SharedModel:
    """One model's state in a memory file. Has state: the file, until `close`."""

    def __init__(self, state: dict[str, Any], dtype: torch.dtype) -> None:
        if not hasattr(os, "memfd_create"):
            raise UserError("espalier eval --watch and --task need Linux.", do="espalier eval RUN, without them")
        self.version = next(_VERSIONS)
        """Which model this is: the next file may well have the same path."""
        self._file = os.memfd_create("espalier-eval", os.MFD_CLOEXEC)
        torch.save({name: _cast(value, dtype) for name, value in state.items()}, self.path)

    @property
    def path(self) -> str:
        """Where processes of this user open it, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @property
    def bytes(self) -> int:
        """Its size."""
        return os.fstat(self._file).st_size

    def close(self) -> None:
        """Lets go of it; those who map it still have it."""
        os.close(self._file)


def load(checkpoints: Checkpoints, step: int, dtype: torch.dtype) -> SharedModel:
    """The model of checkpoint `step`, every file of the checkpoint checked against its manifest first.

    Raises UserError when the checkpoint is not there or damaged.
    """
    part = Loaded()
    checkpoints.load({"model": part}, step)
    return SharedModel(part.state, dtype)


def attach(model: nn.Module, path: str, device: torch.device) -> nn.Module:
    """Makes `model`'s parameters those in the memory file at `path`: mapped, not copied, on the CPU."""
    state = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    model.load_state_dict(state, assign=True)
    return model.to(device).eval()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """As `nn.Module.to(dtype)` would: floating tensors only."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value
