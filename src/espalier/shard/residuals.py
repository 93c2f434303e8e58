"""What lossy codecs have not sent yet, as whole tensors by parameter: saved with a checkpoint, resharded with them.

A rank's residual is an error of its own contribution, so only the sum of all ranks' counts: that is what is saved. With
each save the ranks hand their residuals over to the one that moves the parameter, and go on from there, as they would
after resuming: a resumed run has the bits of the unbroken one, at any number of ranks it has the same sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from espalier.checkpoint.slices import Slice
from espalier.comm.base import Traffic, traffic
from espalier.shard.state import fill

if TYPE_CHECKING:
    from espalier.shard.amsp import Amsp
    from espalier.shard.flat import Flat


class Residuals:
    """The residuals by parameter. Stateful; all ranks call it together."""

    def __init__(self, sharding: Amsp, channel: dist.ProcessGroup) -> None:
        self._sharding, self._channel = sharding, channel

    def state_dict(self) -> dict[str, Any]:
        """Slices of the sum over ranks; the residuals are handed over on the way."""
        table: dict[str, Any] = {}
        for flat in self._flats():
            own = self._handed_over(flat)
            here = {moved.slot.name: moved for moved in flat.moved}
            for slot in flat.slots:
                moved = here.get(slot.name)
                if moved is None:
                    table[slot.name] = Slice(own[:0], slot.shape, 0, writes=False)
                else:
                    part = own[moved.span.within(flat.optimizer)]
                    table[slot.name] = Slice(part, slot.shape, moved.owned.start)
        return table

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave. Parameters that were saved without (another codec) begin with nothing."""
        table = self.state_dict()
        fill({name: value for name, value in table.items() if name in state}, state)
        for flat in self._flats():
            for moved in flat.moved:
                if moved.slot.name in state:
                    self._mine(flat)[moved.span.within(flat.optimizer)] = table[moved.slot.name].local

    def _flats(self) -> list[Flat]:
        return [flat for flat in self._sharding.flats if flat.residual is not None]

    def _handed_over(self, flat: Flat) -> Tensor:
        """[optimizer span] the sum over ranks, which from now on is the residual of the first rank that moves it."""
        assert flat.residual is not None
        total = flat.residual.to("cpu", copy=True)
        with traffic(Traffic.CONTROL):
            dist.all_reduce(total, group=self._channel)
        flat.residual.zero_()
        own = total[flat.optimizer.start : flat.optimizer.stop].clone()
        self._mine(flat).copy_(own)
        return own

    def _mine(self, flat: Flat) -> Tensor:
        """[optimizer span] of the residual where this rank is the first of those that move it; else nowhere."""
        assert flat.residual is not None
        span = flat.residual[flat.optimizer.start : flat.optimizer.stop]
        replicas = flat.mesh.placement.along("replicas")
        first = all(axis.coordinate(flat.mesh.rank) == 0 for axis in replicas)
        return span if first else torch.empty_like(span)
