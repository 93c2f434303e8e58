"""Hierarchical all-reduce: ranks of one machine add up uncompressed; only the exchange between machines is encoded.

Each machine's first ranks, as many as the smallest machine has, each collect one part of the tensor from the ranks
beside them; the parts are summed between machines by encoded all-reduces (`compressed_collectives`), and handed round
inside again. So a tensor is lossily encoded once for each machine and once for the sum, whatever the number of ranks,
and only a machine's own sum leaves it. After the hierarchical exchanges of AMSP (arXiv 2311.00257, section 2.5), with
hybrid compression (arXiv 2409.02423) between machines; deviation: these may have different numbers of ranks, in any
order.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from espalier.comm import plain_collectives
from espalier.comm.base import Codec, Traffic, feedback, traffic
from espalier.comm.channel import Channel
from espalier.comm.codecs import codec as codec_of
from espalier.comm.compressed_collectives import parts
from espalier.comm.multihost_probe import host
from espalier.comm.rendezvous import within
from espalier.recipe.errors import UserError


def level(nodes: Sequence[Hashable], members: Iterable[int]) -> Literal["inside", "between"]:
    """`inside` when the ranks `members`, of those whose machines are `nodes`, are on one machine."""
    return "between" if len({nodes[rank] for rank in members}) > 1 else "inside"


class Hierarchy:
    """All-reduces that are exact inside machines and encoded between them. Has state: its groups.

    Attributes:
        nodes: the machine of each rank.
    """

    def __init__(
        self,
        channel: Channel,
        nodes: Sequence[Hashable] | None = None,
        codec: str | Codec = "int8",
    ) -> None:
        """All ranks of `channel` call it alike.

        Args:
            channel: the ranks, as `connect` or `torch.distributed.new_group` gives them.
            nodes: the machine of each rank, by any names; None: as their host names and networks tell.
            codec: between machines; see `comm.codec`.

        Raises:
            UserError: the ranks gave different arguments, `nodes` is not one for each rank, or there is no such codec.
        """
        names, chosen, name = _agreed(channel, nodes, codec)
        self.nodes = names
        by_node = [[rank for rank, name in enumerate(names) if name == node] for node in dict.fromkeys(names)]
        mine = next(ranks for ranks in by_node if channel.rank() in ranks)
        self._ranks = len(names)
        self._carriers = min(map(len, by_node))
        self._seat = mine.index(channel.rank())
        self._inside = within(channel, mine, f"{name} inside")
        self._between: Channel | None = None
        if self._seat < self._carriers:
            self._between = within(channel, [ranks[self._seat] for ranks in by_node], f"{name} between")
            if len(by_node) > 1:
                self._between.use(Traffic.GRADIENTS, chosen)

    def all_reduce(self, tensor: Tensor, residual: Tensor | None = None, average: bool = False) -> None:
        """The sum (or mean) of all ranks' `tensor`, in place and with the same bits on all. Returns when it is there.

        Args:
            tensor: any shape; of one shape and dtype on all ranks. Integers, and parts of less than 16 KiB, are exact.
            residual: float32 (float64 for float64) of as many elements, zeros at first, this rank's: what is lost
                between machines is kept there and added to what is sent next. None: no feedback.
            average: divide by the number of ranks; for floats.

        Raises:
            UserError: the residual has not the tensor's size, or integers are to be averaged.
            PeerLost: a rank did not answer in time. RunFailed: a message was damaged.
        """
        _check(tensor, residual, average)
        flat = tensor.detach().reshape(-1)
        ends = parts(flat.numel(), self._carriers)
        sizes = [stop - start for start, stop in pairwise(ends)] + [0] * (self._inside.size() - self._carriers)
        with traffic(Traffic.GRADIENTS), torch.no_grad():
            total = self._collected(flat, sizes)
            if self._between is not None and total.numel():
                part = None if residual is None else residual.view(-1)[ends[self._seat] : ends[self._seat + 1]]
                with feedback(part):
                    self._between.allreduce([total]).wait()
                total = total / self._ranks if average else total
            whole = self._handed_round(total, sizes)
        tensor.detach().copy_(whole.view(tensor.shape))

    def _collected(self, flat: Tensor, sizes: list[int]) -> Tensor:
        """The machine's sum of this rank's part, in rank order; nothing for a rank that carries none. `sizes`: of the
        parts of all its ranks."""
        members = self._inside.size()
        mine = sizes[self._seat]
        if members == 1:
            return flat.clone()
        rows = flat.new_empty(members * mine)
        self._inside.alltoall_base(rows, flat, [mine] * members, sizes).wait()
        return rows.view(members, mine).sum(0, dtype=rows.dtype)

    def _handed_round(self, total: Tensor, sizes: list[int]) -> Tensor:
        """All parts, from the ranks of this machine that carry them."""
        members = self._inside.size()
        if members == 1:
            return total
        whole = total.new_empty(sum(sizes))
        self._inside.alltoall_base(whole, total.repeat(members), sizes, [total.numel()] * members).wait()
        return whole


def _check(tensor: Tensor, residual: Tensor | None, average: bool) -> None:
    if average and not tensor.is_floating_point():
        raise UserError(f"The mean of {tensor.dtype} was asked for.", do="all_reduce it as float32")
    if residual is not None and (residual.numel() != tensor.numel() or not residual.is_contiguous()):
        raise UserError(
            f"The residual has {residual.numel()} values for a tensor of {tensor.numel()}.",
            do=f"torch.zeros({tensor.numel()}), kept for this tensor from step to step",
        )


def _agreed(channel: Channel, nodes: Sequence[Hashable] | None, codec: str | Codec) -> tuple[list[str], Codec, str]:
    """The machine of each rank and the codec, once all have said the same, and a name that nothing else bears. Raises
    UserError on all ranks."""
    name = codec if isinstance(codec, str) else codec.name
    given = None if nodes is None else [str(node) for node in nodes]
    with traffic(Traffic.CONTROL):
        gathered = plain_collectives.all_gather((given, name, host(), secrets.token_hex(8)), channel)
    for index, what in enumerate(("nodes", "codec")):
        odd = next((rank for rank, entry in enumerate(gathered) if entry[index] != gathered[0][index]), None)
        if odd is not None:
            first, other = (_shown(gathered[rank][index]) for rank in (0, odd))
            raise UserError(
                f"Ranks disagree about {what}: rank 0 has {first}, rank {odd} has {other}.",
                do="give every rank the same arguments",
            )
    if given is not None and len(given) != channel.size():
        raise UserError(
            f"nodes has {len(given)} entries for {channel.size()} ranks.",
            do="one name for each rank, in rank order, or none at all",
        )
    return given or [entry[2] for entry in gathered], codec_of(codec), f"hierarchy {gathered[0][3]}"


def _shown(value: Any) -> str:
    """An argument in a message: of many machines the first."""
    return f"{value[:8]}{' …' * (len(value) > 8)}" if isinstance(value, list) else str(value)
