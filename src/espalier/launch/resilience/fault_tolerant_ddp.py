"""Fault-tolerant data parallelism in any loop: training goes on when a replica dies, and takes one back without losing
a step.

Every step is one exchange of the gradients among the living (`mechanisms.local_rounds.membership`). Where one
fails, those left agree who
they are and exchange the same gradients again: the step counts, as the mean of those who took part. One that comes back
is sent model and optimizer by a peer, compared by hash, and joins with the next step. torchft (BSD-3) has the same aim
by another way, a quorum at each step by a central server; here the replicas' own store is enough, which must outlive
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from espalier.comm.codecs import codec
from espalier.mechanisms.local_rounds.membership import MemberGroup, MemberReport, Members
from espalier.recipe.errors import UserError

GRACE = 0.5
"""Seconds after the first sign of a death in which survivors report; over slow links give the crew more."""


class GuardedPart(Protocol):
    """What has a state that travels: a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Takes back what `state_dict` gave."""


class Guard:
    """One replica among others, any of which may die at any moment. `guard` makes one. Has state.

    Attributes:
        step: of the next update, the same on all replicas.
        lost, back: how often others were lost and came back.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, crew: MemberGroup, more: Mapping[str, GuardedPart]
    ) -> None:
        self.optimizer = optimizer
        self.parts: dict[str, GuardedPart] = {"model": model, "optimizer": optimizer, **more}
        self.parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        kinds = {(parameter.dtype, parameter.device) for parameter in self.parameters}
        if len(kinds) != 1:
            raise UserError(
                f"A guard needs parameters of one kind, here are {sorted(map(str, kinds)) or 'none'}.",
                why="gradients travel as one tensor",
                do="bring the model to one dtype and device",
            )
        self.step = self.lost = self.back = 0
        self._averaged = False
        self.members = Members(crew, codec("exact"), self._changed)
        if crew.returns:
            self._take(self.members.taken_in())
        else:
            self.members.spread([*model.parameters(), *model.buffers()])
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.average()),
            optimizer.register_step_post_hook(lambda *_: self._stepped()),
        ]

    @property
    def place(self) -> tuple[int, int]:
        """This replica's number among the living, and how many these are: its part of the next batch."""
        members = self.members.members
        return members.index(self.members.crew.member), len(members)

    @torch.no_grad()
    def average(self) -> None:
        """Puts the mean of the living replicas' gradients in the place of this one's. `optimizer.step` does it where
        the loop has not (before clipping, say).

        A parameter without a gradient counts as zeros where another replica has one.

        Raises PeerLost: the others gave this replica up, or the store is gone.
        """
        if self._averaged:
            return
        member = self.members.coming(1)
        if member is not None:
            self.members.take_in(member, self._state)
        flat = self._gradients()
        arrived = self.members.arrive(self.members.launch(flat, None, MemberReport()))
        total = arrived.total
        count = len(self.parameters)
        there = total[-count:].tolist()
        sums = total[:-count].div_(arrived.weight)
        parts = sums.split([parameter.numel() for parameter in self.parameters])
        for parameter, part, somewhere in zip(self.parameters, parts, there, strict=True):
            parameter.grad = part.view_as(parameter) if somewhere else None
        self._averaged = True

    def _gradients(self) -> Tensor:
        """[all elements + parameters]: gradients, zeros where there are none, then for each whether there is one."""
        first = self.parameters[0]
        there = [float(parameter.grad is not None) for parameter in self.parameters]
        parts = [
            (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).reshape(-1)
            for parameter in self.parameters
        ]
        return torch.cat([*parts, torch.tensor(there, dtype=first.dtype, device=first.device)])

    def _stepped(self) -> None:
        self.step += 1
        self._averaged = False

    def _state(self) -> dict[str, Any]:
        return {"step": self.step, **{name: part.state_dict() for name, part in self.parts.items()}}

    def _take(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    def _changed(self, lost: tuple[int, ...], members: tuple[int, ...]) -> None:
        self.lost += len(lost)
        self.back += not lost

    def close(self) -> None:
        """Leaves the others, who go on without this replica."""
        for hook in self._hooks:
            hook.remove()
        self.members.close()


def guard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    crew: MemberGroup,
    more: Mapping[str, GuardedPart] | None = None,
) -> Guard:
    """Makes a loop on every replica one data-parallel run that survives any of them.

    Train as usual while `run.step < steps`, on the part of a batch that `run.place` says; `optimizer.step` averages.
    Running statistics (BatchNorm) stay each replica's own, and gradients do not travel during backward.

    Args:
        model, optimizer: on every replica; the first one's parameters and buffers go to all.
        crew: who they are and the store where they met, served by a process that outlives them. With `returns=True`
            this replica was lost, and takes model, optimizer and step from the others. Its `grace` bounds the pause of
            the survivors; `GRACE` is enough on one machine.
        more: what else has a state (a scheduler), by name, the same on all.

    Raises:
        UserError: parameters of several dtypes or devices, or none.
        PeerLost: it returns, and nobody let it in.
    """
    return Guard(model, optimizer, crew, more or {})
