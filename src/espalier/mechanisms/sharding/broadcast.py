"""Broadcast from rank 0: the initial parameters, where the ranks' differ, and running statistics after every step.

Buffers as in PyTorch's own data parallel training (`DistributedDataParallel`, `broadcast_buffers`). Only those that are
saved with the model and that the first step changed on some rank are sent: tables that stay as they are cost nothing.
One that begins to change later remains each rank's own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from espalier.comm import plain_collectives
from espalier.comm.base import Traffic, traffic
from espalier.recipe.errors import UserError


def same_start(model: nn.Module, channel: dist.ProcessGroup) -> bool:
    """Gives every rank rank 0's parameters and buffers. Returns whether anything had to be sent.

    Raises:
        UserError: the models differ in a name, shape, dtype or in what is frozen; names the first difference.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    devices = [device.type for device in channel._device_types]
    places = [tensor.device for _, tensor in tensors if tensor.device.type != "cpu"]
    where = torch.device("cpu") if not devices or "cpu" in devices or not places else places[0]
    with torch.no_grad():
        looks = [
            f"{name}: {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            f"{'' if tensor.requires_grad else ', no gradient'}"
            for name, tensor in tensors
        ]
        form = xxhash.xxh64("\n".join(looks).encode()).intdigest() >> 1  # 63 bits: fits int64
        values = hashed([tensor for _, tensor in tensors]) >> 1
        forms, hashes = _all([form, values], channel, where)
        if len(set(forms)) > 1:
            _explain(looks, channel)
        if len(set(hashes)) == 1:
            return False
        _send([tensor for _, tensor in tensors], channel, where)
    return True


def hashed(tensors: list[Tensor]) -> int:
    """XXH3-64 of their elements."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        if tensor.numel():
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.intdigest()


def _all(numbers: list[int], channel: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Every rank's numbers: one list over the ranks per number."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = mine.new_empty(channel.size() * len(numbers))
    with traffic(Traffic.CONTROL):
        dist.all_gather_single(everyone, mine, group=channel)
    return everyone.view(channel.size(), -1).t().tolist()


def _explain(looks: list[str], channel: dist.ProcessGroup) -> None:
    with traffic(Traffic.CONTROL):
        everyone = plain_collectives.all_gather(looks, channel)
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for first_line, two in zip([*first, "nothing more"], [*other, "nothing more"], strict=False):
            if first_line != two:
                raise UserError(
                    f"The model differs between ranks: rank 0 has '{first_line}' where rank {rank} has '{two}'.",
                    why="data parallel ranks add up gradients parameter by parameter, so all must hold the same model",
                    do="build the model from the same recipe and code on every rank",
                )
    raise AssertionError("the hashes differ and the lists do not")


def _send(tensors: list[Tensor], channel: dist.ProcessGroup, device: torch.device) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    under_way = []
    with traffic(Traffic.PARAMETERS):
        for tensor in tensors:
            if tensor.numel():
                plain = tensor.detach().contiguous()
                plain = plain if device.type == "cpu" else plain.to(device)
                under_way.append((channel.broadcast([plain], options), plain, tensor))
    for work, plain, tensor in under_way:
        work.wait()
        if plain.data_ptr() != tensor.data_ptr():
            tensor.copy_(plain)


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
                for buffer, values in zip(buffers, together.split([buffer.numel() for buffer in buffers]), strict=True):
                    buffer.copy_(values.view(buffer.shape))

    def _found(self) -> list[list[Tensor]]:
        """The buffers that some rank has changed, those of one type together."""
        moved = [float(hashed([buffer]) != before) for buffer, before in zip(self._buffers, self._before, strict=True)]
        summed = torch.tensor(moved, device=self._buffers[0].device)
        with traffic(Traffic.CONTROL):
            dist.all_reduce(summed, group=self._channel)
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for buffer, count in zip(self._buffers, summed.tolist(), strict=True):
            if count:
                kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        return list(kinds.values())
