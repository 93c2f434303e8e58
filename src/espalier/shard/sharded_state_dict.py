"""Sharded state dict: a model and its optimizer as whole tensors by name; each rank writes and reads its own share.

Names and shapes are those of the model as its author wrote it, so a checkpoint resumes under any other sharding, on any
number of ranks, or in plain PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from espalier import plain_collectives
from espalier.checkpoint.dcp_planners import Slice
from espalier.comm.base import Traffic, traffic
from espalier.optim.base import Optimizer

if TYPE_CHECKING:
    from espalier.shard.amsp import Amsp
    from espalier.shard.flat_parameter import Flat, ParameterSlot


Kinds = dict[str, dict[str, tuple[torch.dtype, bool]]]
"""Parameter -> kind of state -> its dtype, and whether it is a single number."""


class ModelState:
    """Parameters (the masters, where there are any) and buffers by name. Stateful."""

    def __init__(self, sharding: Amsp) -> None:
        self._sharding = sharding

    def state_dict(self) -> dict[str, Any]:
        """Slices of the trainable parameters, frozen parameters and buffers whole."""
        self._sharding.settle()
        pieces = {
            id(slot.parameter): piece(flat, flat.own, slot) for flat in self._sharding.flats for slot in flat.slots
        }
        kept = self._sharding.model.state_dict(keep_vars=True)
        return {name: pieces[id(value)] if id(value) in pieces else _plain(value) for name, value in kept.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes values of whatever precision into what this rank owns, and brings them to everybody."""
        fill(self.state_dict(), state)
        self._sharding.adopt()


class OptimizerState:
    """The optimizer's state by `name/kind`. Stateful; all ranks call it together."""

    def __init__(self, sharding: Amsp, optimizer: Optimizer, channel: dist.ProcessGroup) -> None:
        self._sharding, self._optimizer, self._channel = sharding, optimizer, channel
        self._kinds: Kinds | None = sharding.kinds

    def state_dict(self) -> dict[str, Any]:
        """Slices of what is shaped like the parameter, and scalars, which the rank with the first element writes."""
        own = self._optimizer.state_dict()
        table: dict[str, Any] = {}
        for flat in self._sharding.flats:
            here = {moved.slot.name: moved for moved in flat.moved}
            for slot in flat.slots:
                for kind, (dtype, scalar) in self._all_kinds(own).get(slot.name, {}).items():
                    key = f"{slot.name}/{kind}"
                    moved = here.get(slot.name)
                    if moved is None:
                        empty = torch.empty(int(scalar), dtype=dtype)
                        shape = torch.Size() if scalar else slot.shape
                        table[key] = Slice(empty, shape, 0, writes=False)
                    elif scalar:
                        table[key] = Slice(own[key].view(1), torch.Size(), 0, writes=moved.owned.start == 0)
                    else:
                        table[key] = Slice(own[key].view(-1), slot.shape, moved.owned.start)
        return table

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        fill(self.state_dict(), state)

    def _all_kinds(self, own: dict[str, Any]) -> Kinds:
        """For each parameter, what states it has: also of those this rank holds nothing of."""
        if self._kinds is None:
            mine: Kinds = {}
            for key, value in own.items():
                name, kind = key.rsplit("/", 1)
                mine.setdefault(name, {})[kind] = (value.dtype, value.ndim == 0)
            with traffic(Traffic.CONTROL):
                everyone = plain_collectives.all_gather(mine, self._channel)
            self._kinds = {name: kinds for one in everyone for name, kinds in one.items()}
            if all(slot.name in self._kinds for flat in self._sharding.flats for slot in flat.slots):
                self._sharding.kinds = self._kinds  # nothing can be added: no later save needs to ask
        return self._kinds


def piece(flat: Flat, own: Tensor, slot: ParameterSlot) -> Slice:
    """This rank's part of a parameter, with the values in `own` [optimizer span]."""
    for moved in flat.moved:
        if moved.slot is slot:
            return Slice(own[moved.span.within(flat.optimizer)], slot.shape, moved.owned.start)
    return Slice(own[:0], slot.shape, 0, writes=False)


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def fill(table: dict[str, Any], state: dict[str, Any]) -> None:
    """Copies the values of `state` into the tensors and slices of `table`. Raises KeyError for a name that lacks."""
    with torch.no_grad():
        for name, target in table.items():
            source = state[name]
            if not isinstance(target, Slice):
                if isinstance(target, Tensor):
                    target.copy_(source)
            elif isinstance(source, Slice):
                if source.local.data_ptr() != target.local.data_ptr():
                    target.local.copy_(source.local)
            else:  # a whole tensor, from somewhere else
                part = source.reshape(-1)[target.start : target.start + target.local.numel()]
                target.local.copy_(part)
