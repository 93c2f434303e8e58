"""Control message: the one small all-reduce of a step, with totals, used-parameter flags and the squared gradient
norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._C._distributed_c10d import AllreduceOptions

from espalier.comm.base import Traffic, traffic
from espalier.shard.placement_plan import flags_per_value

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


class ControlMessage:
    """One step's sum. Has state: the vector under way.

    Args:
        channel: the ranks.
        totals: float64, summed in place; None: nothing.
        used: whether this rank used each trainable parameter.
        device: where the vector lies.
    """

    def __init__(
        self, channel: dist.ProcessGroup, totals: Tensor | None, used: Sequence[bool], device: torch.device
    ) -> None:
        self._channel, self._totals, self._count, self._device = channel, totals, len(used), device
        per = int(flags_per_value(channel.size()))
        self._digits = np.int64(channel.size() + 1) ** np.arange(per, dtype=np.int64)
        flags = np.zeros(-(-len(used) // per) * per, dtype=np.int64)
        flags[: len(used)] = used
        self._counts = torch.from_numpy(flags.reshape(-1, per) @ self._digits).double()
        self._vector = torch.empty(0)
        self._work: Any = None

    def launch(self, square: float = 0.0) -> None:
        """Begins the sum. `square`: this rank's part of a squared norm."""
        parts = [torch.tensor([square], dtype=torch.float64), self._counts]
        if self._totals is not None:
            parts.append(self._totals)
        self._vector = torch.cat(parts).to(self._device)
        with traffic(Traffic.CONTROL):
            self._work = self._channel.allreduce([self._vector], AllreduceOptions())

    def wait(self) -> tuple[list[bool], float]:
        """Whether any rank used each parameter, and the summed square; the totals are summed in place."""
        self._work.wait()
        summed = self._vector.cpu()
        counts = summed[1 : 1 + len(self._counts)].numpy().astype(np.int64)
        if self._totals is not None:
            self._totals.copy_(summed[1 + len(self._counts) :])
        used = (counts[:, None] // self._digits % (self._channel.size() + 1) > 0).reshape(-1)[: self._count]
        return used.tolist(), float(summed[0])
