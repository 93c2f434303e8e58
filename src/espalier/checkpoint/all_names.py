"""A rank's part of a checkpoint under the names of the whole model, where other ranks hold other parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from espalier.checkpoint.base import StateDict
from espalier.checkpoint.tensor_slice import Slice
from espalier.comm import plain_collectives
from espalier.comm.base import Traffic, traffic
from espalier.comm.plain_collectives import RankGroup

if TYPE_CHECKING:
    from espalier.checkpoint.base import Stateful


class AllNames:
    """A part of a checkpoint with the names of the whole model: this rank has nothing of what others hold. Stateful.

    Args:
        part: of what this rank holds.
        group: the ranks that hold the rest, all of which call this together.
    """

    def __init__(self, part: Stateful, group: RankGroup) -> None:
        self._part = part
        self._group = group

    def state_dict(self) -> StateDict:
        """Slices of what is here, and empty ones of what is not."""
        local = self._part.state_dict()
        mine = {
            name: (list(value.size()), str(value.dtype))
            for name, value in local.items()
            if isinstance(value, Tensor | Slice)
        }
        with traffic(Traffic.CONTROL):
            everyone = plain_collectives.all_gather(mine, self._group)
        entries: StateDict = {}
        for names in everyone:
            for name, (shape, dtype) in names.items():
                if name not in entries:
                    entries[name] = self._entry(local.get(name), torch.Size(shape), dtype, name, everyone)
        return entries | {name: value for name, value in local.items() if name not in mine}

    def _entry(self, local: Any, shape: torch.Size, dtype: str, name: str, everyone: list[Any]) -> Any:
        if local is None:
            nothing = torch.empty(0, dtype=getattr(torch, dtype.removeprefix("torch.")))
            return Slice(nothing, shape, 0, writes=False)
        alone = sum(name in names for names in everyone) == 1
        return Slice(local.detach().reshape(-1), shape, 0) if isinstance(local, Tensor) and alone else local

    def load_state_dict(self, state: StateDict) -> None:
        """Takes what is this rank's."""
        local = self._part.state_dict()
        self._part.load_state_dict({name: _whole(state[name], like) for name, like in local.items()})


def _whole(value: Any, like: Any) -> Any:
    return value.local.view(like.shape) if isinstance(like, Tensor) and isinstance(value, Slice) else value


class OwnNames:
    """A part that takes of a saved state what it has itself: what was not saved stays as it began, and what it does not
    have is left out. Of runs whose tasks come and go. Stateful."""

    def __init__(self, part: Stateful) -> None:
        self._part = part

    def state_dict(self) -> StateDict:
        return self._part.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Takes the entries that are in both, at any depth of names."""
        self._part.load_state_dict(_common(self._part.state_dict(), state))


def _common(local: Any, saved: Any) -> Any:
    if isinstance(local, dict) and isinstance(saved, dict):
        return {name: _common(value, saved[name]) if name in saved else value for name, value in local.items()}
    return local if isinstance(local, list) and len(local) != len(saved) else saved
