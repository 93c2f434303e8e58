"""A checkpoint's model in shared memory: read and checked once, mapped by every evaluation worker.

The tensors lie in an anonymous memory file (memfd), which needs no disk and goes with the last process that has it.
Workers map it privately, so all of them read the same pages.
"""

from __future__ import annotations

import itertools
import os
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.recipe.errors import UserError

_VERSIONS = itertools.count(1)


class Source(NamedTuple):
    """Where a worker finds a model. `version` tells models apart, since the next may have the same path."""

    path: str
    version: int


class _AnyState:
    """A part of a checkpoint that takes whatever state there is. Has state: that."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class SharedModel:
    """The model of checkpoint `step`, its floating tensors as `dtype`. Has state: the memory file, until `close`.

    Raises UserError when the checkpoint is not there or a file of it does not match its manifest.
    """

    def __init__(self, checkpoints: Checkpoints, step: int, dtype: torch.dtype) -> None:
        if not hasattr(os, "memfd_create"):
            raise UserError("espalier eval --watch and --task need Linux.", do="espalier eval RUN, without them")
        part = _AnyState()
        checkpoints.load({"model": part}, step)
        self._file = os.memfd_create("espalier-eval", os.MFD_CLOEXEC)
        self.source = Source(f"/proc/{os.getpid()}/fd/{self._file}", next(_VERSIONS))
        torch.save({name: _cast(value, dtype) for name, value in part.state.items()}, self.source.path)

    def close(self) -> None:
        """Lets go of it; workers that map it still have it."""
        os.close(self._file)


def attach(model: nn.Module, source: Source, device: torch.device) -> nn.Module:
    """Makes `model`'s parameters those in the memory file: mapped, not copied, on the CPU."""
    state = torch.load(source.path, mmap=True, weights_only=True, map_location="cpu")
    model.load_state_dict(state, assign=True)
    return model.to(device).eval()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
