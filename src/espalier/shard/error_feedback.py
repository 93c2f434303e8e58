"""Error feedback: what lossy codecs have not sent yet, by parameter, saved with a checkpoint in a row per rank.

A rank's residual is an error of its own contribution, so a run goes on to the bit only where each rank has its own
again. On other ranks or shards only the sum of all counts: there the rank that moves a parameter takes it. Saving reads
and changes nothing, for when a run saves depends on what its saves and steps have taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import xxhash

from espalier.checkpoint.dcp_planners import RankRow, Rows, Slice
from espalier.comm.base import Traffic, traffic
from espalier.shard.sharded_state_dict import fill

if TYPE_CHECKING:
    from espalier.shard.amsp import Amsp
    from espalier.shard.flat_parameter import Flat


class Residuals:
    """The residuals by parameter. Stateful."""

    def __init__(self, sharding: Amsp, channel: dist.ProcessGroup) -> None:
        self._sharding, self._channel = sharding, channel
        self._flats = [flat for flat in sharding.flats if flat.residual is not None]

    def state_dict(self) -> dict[str, Any]:
        """This rank's row of each parameter, and the layout under which it has a meaning."""
        rank, ranks = self._channel.rank(), self._channel.size()
        rows = {}
        for flat in self._flats:
            assert flat.residual is not None
            for slot in flat.slots:
                part = flat.residual[slot.span.start : slot.span.stop]
                rows[slot.name] = RankRow.of_rank(part, slot.shape, rank, ranks)
        return {"layout": self._layout(), "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; all ranks call it. What was saved without, by another codec, begins with
        nothing."""
        own = self.state_dict()
        alike = state["layout"] == own["layout"]
        saved = {name: value for name, value in state["rows"].items() if name in own["rows"]}
        rows = {name: own["rows"][name] for name in saved}
        fill(rows, {name: _summed(value, rows[name]) for name, value in saved.items()})
        if not alike:
            for flat in self._flats:
                self._hand_over(flat)

    def _layout(self) -> str:
        """Names where each rank adds its residual to what it sends."""
        flats = [
            (flat.mesh.placement, flat.length, [(slot.name, slot.span) for slot in flat.slots]) for flat in self._flats
        ]
        spread = self._sharding.spread
        told = repr((flats, list(spread.nodes), sorted(spread.codecs.items())))
        return xxhash.xxh3_128_hexdigest(told.encode())

    def _hand_over(self, flat: Flat) -> None:
        """The sum over ranks becomes the residual of the first rank that moves it."""
        assert flat.residual is not None
        total = flat.residual.to("cpu", copy=True)
        with traffic(Traffic.CONTROL):
            dist.all_reduce(total, group=self._channel)
        flat.residual.zero_()
        replicas = flat.mesh.placement.along("replicas")
        if all(axis.coordinate(flat.mesh.rank) == 0 for axis in replicas):
            mine = slice(flat.optimizer.start, flat.optimizer.stop)
            flat.residual[mine] = total[mine].to(flat.residual.device)


def _summed(saved: Slice, own: RankRow) -> Slice:
    """One row of all the saved ones that this rank has read."""
    if not isinstance(saved, Rows):
        return saved
    return own.of(saved.local.view(len(saved.rows), own.local.numel()).sum(0))
