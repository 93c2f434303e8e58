"""Sharded optimizer: a torch optimizer over the pieces a rank updates; its state is saved and loaded whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier.checkpoint.base import StateDict
from espalier.comm import plain_collectives
from espalier.comm.base import Traffic, traffic
from espalier.mechanisms.sharding.amsp import Amsp
from espalier.mechanisms.sharding.flat_parameter import FlatParameter, MovedPiece, ParameterSlot


class OptimizerPieces:
    """Between an optimizer's whole state and this rank's part of it. Has state: the optimizer's parameters as given.

    Args:
        optimizer: changed in place: its parameters, its state, and its `state_dict` and `load_state_dict`.
        sharding: the model, spread.
        channel: the ranks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sharding: Amsp, channel: dist.ProcessGroup) -> None:
        self.optimizer = optimizer
        self.sharding = sharding
        self.channel = channel
        self._moved = {id(moved.slot.parameter): (flat, moved) for flat in sharding.flats for moved in flat.moved}
        self._flat = {id(slot.parameter): (flat, slot) for flat in sharding.flats for slot in flat.slots}
        self._given = [list(group["params"]) for group in optimizer.param_groups]
        self._own_state_dict = optimizer.state_dict
        self._own_load = optimizer.load_state_dict
        before = dict(optimizer.state)
        optimizer.state.clear()
        for group, given in zip(optimizer.param_groups, self._given, strict=True):
            group["params"] = [piece for parameter in given for piece in self._pieces(parameter)]
        for parameter in (parameter for given in self._given for parameter in given):
            for piece in self._pieces(parameter):
                if parameter in before:
                    optimizer.state[piece] = {
                        kind: self._cut(parameter, value) for kind, value in before[parameter].items()
                    }
        optimizer.state_dict = self.state_dict  # type: ignore[method-assign]
        optimizer.load_state_dict = self.load_state_dict  # type: ignore[method-assign, assignment]

    def _pieces(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        """What this rank moves of a parameter: one tensor, or none."""
        if id(parameter) not in self._flat:
            return [parameter]
        moved = self._moved.get(id(parameter))
        return [] if moved is None else [moved[1].owned.tensor]

    def _cut(self, parameter: nn.Parameter, value: Any) -> Any:
        """This rank's part of a state: of what is shaped like the parameter, its piece."""
        moved = self._moved.get(id(parameter))
        if moved is None or not isinstance(value, Tensor):
            return value
        if self.sharding.cut is not None:
            value = self.sharding.cut.part(moved[1].slot.name, value, moved[1].slot.shape)
        if value.shape != moved[1].slot.shape:
            return value
        owned = moved[1].owned
        span = moved[1].span
        return value.reshape(-1)[owned.start : owned.start + span.length].view(owned.tensor.shape).clone()

    # --- out ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """torch's own table, with whole tensors, on every rank. All ranks call it."""
        kinds = self._kinds()
        table: dict[int, StateDict] = {}
        numbers = {
            id(parameter): n for n, parameter in enumerate(parameter for given in self._given for parameter in given)
        }
        for flat in self.sharding.flats:
            for kind in sorted({kind for slot in flat.slots for kind in kinds.get(slot.name, {})}):
                self._gather(flat, kind, kinds, table, numbers)
        for given in self._given:
            for parameter in given:
                if id(parameter) not in self._flat and parameter in self.optimizer.state:
                    table[numbers[id(parameter)]] = dict(self.optimizer.state[parameter])
        groups = []
        first = 0
        for group, given in zip(self.optimizer.param_groups, self._given, strict=True):
            plain = {name: value for name, value in group.items() if name != "params"}
            groups.append(plain | {"params": list(range(first, first + len(given)))})
            first += len(given)
        return {"state": dict(sorted(table.items())), "param_groups": groups}

    def _kinds(self) -> dict[str, dict[str, Any]]:
        """Parameter -> kind -> the dtype of a state shaped like it, or the value of one that is not; of all ranks."""
        mine: dict[str, dict[str, Any]] = {}
        for flat in self.sharding.flats:
            for moved in flat.moved:
                for kind, value in self.optimizer.state.get(moved.owned.tensor, {}).items():
                    alike = isinstance(value, Tensor) and value.shape == moved.owned.tensor.shape and value.ndim > 0
                    mine.setdefault(moved.slot.name, {})[kind] = value.dtype if alike else value
        with traffic(Traffic.CONTROL):
            everyone = plain_collectives.all_gather(mine, self.channel)
        return {name: kinds for rank_kinds in reversed(everyone) for name, kinds in rank_kinds.items()}

    def _gather(
        self, flat: FlatParameter, kind: str, kinds: StateDict, table: dict[int, Any], numbers: dict[int, int]
    ) -> None:
        values = [(slot, kinds.get(slot.name, {}).get(kind)) for slot in flat.slots]
        dtype = next((value for _, value in values if isinstance(value, torch.dtype)), None)
        whole = None
        if dtype is not None:
            local = torch.zeros(flat.optimizer.length, dtype=dtype, device=flat.full.device)
            for moved in flat.moved:
                self._lay(local, flat, moved, kind)
            whole = self.sharding.whole(flat, local)
        for slot, value in values:
            if id(slot.parameter) in numbers and value is not None:
                state = table.setdefault(numbers[id(slot.parameter)], {})
                shaped = whole is not None and isinstance(value, torch.dtype)
                state[kind] = self._part(whole, slot) if whole is not None and shaped else value

    def _part(self, whole: Tensor, slot: ParameterSlot) -> Tensor:
        part = whole[slot.span.start : slot.span.stop].view(slot.shape).clone()
        return part if self.sharding.cut is None else self.sharding.cut.whole(slot.name, part)

    def _lay(self, local: Tensor, flat: FlatParameter, moved: MovedPiece, kind: str) -> None:
        value = self.optimizer.state.get(moved.owned.tensor, {}).get(kind)
        if isinstance(value, Tensor) and value.shape == moved.owned.tensor.shape:
            local[moved.span.within(flat.optimizer)].copy_(value.reshape(-1))

    # --- in ----------------------------------------------------------------------------------------------------------

    def load_state_dict(self, table: StateDict) -> None:
        """Takes a table of whole tensors, from any sharding or from plain PyTorch."""
        given = [parameter for group in self._given for parameter in group]
        state: dict[int, Any] = {}
        place = {}
        number = 0
        for parameter in given:
            for _ in self._pieces(parameter):
                place[id(parameter)] = number
                number += 1
        names = [name for group in table["param_groups"] for name in group["params"]]
        for name, parameter in zip(names, given, strict=True):
            if id(parameter) in place and name in table["state"]:
                state[place[id(parameter)]] = {
                    kind: self._cut(parameter, value) for kind, value in table["state"][name].items()
                }
        groups = []
        for group, members in zip(table["param_groups"], self._given, strict=True):
            groups.append({**group, "params": [place[id(member)] for member in members if id(member) in place]})
        self._own_load({"state": state, "param_groups": groups})
