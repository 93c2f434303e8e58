"""Buffer synchronisation: running statistics are rank 0's after every step, as in PyTorch's own data parallel training
(`DistributedDataParallel`, `broadcast_buffers`).

Only buffers that are saved with the model and that the first step changed on some rank are sent: tables that stay as
they are cost nothing. One that begins to change later remains each rank's own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier.comm.base import Traffic, traffic
from espalier.shard.broadcast_init import hashed


class BufferSync:
    """The moving buffers of `model`. Has state: which they are, once a step was made.

    Args:
        model: the same on every rank.
        channel: the ranks, all of which call `spread` after the same steps.
    """

    def __init__(self, model: nn.Module, channel: dist.ProcessGroup) -> None:
        saved = model.state_dict(keep_vars=True).keys()
        self._buffers = [buffer for name, buffer in model.named_buffers() if name in saved and buffer.numel()]
        self._channel = channel
        self._moving: list[list[Tensor]] | None = None
        self.begins()

    def begins(self) -> None:
        """What the buffers hold now is the same everywhere, and no step's doing."""
        # batch_norm leaves no trace in their version counters
        self._before = [hashed([buffer]) for buffer in self._buffers]

    @torch.no_grad()
    def spread(self) -> None:
        """Gives every rank what rank 0's moving buffers hold."""
        if not self._buffers:
            return
        if self._moving is None:
            self._moving = self._found()
        with traffic(Traffic.PARAMETERS):
            for buffers in self._moving:
                together = torch.cat([buffer.reshape(-1) for buffer in buffers])
                dist.broadcast(together, group=self._channel, group_src=0)
                for buffer, values in zip(buffers, together.split([one.numel() for one in buffers]), strict=True):
                    buffer.copy_(values.view(buffer.shape))

    def _found(self) -> list[list[Tensor]]:
        """The buffers that some rank has changed, those of one type together."""
        moved = [float(hashed([one]) != before) for one, before in zip(self._buffers, self._before, strict=True)]
        told = torch.tensor(moved, device=self._buffers[0].device)
        with traffic(Traffic.CONTROL):
            dist.all_reduce(told, group=self._channel)
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for buffer, count in zip(self._buffers, told.tolist(), strict=True):
            if count:
                kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        return list(kinds.values())
