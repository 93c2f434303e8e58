"""Parameter offload: a model whose layers wait on disk or in host memory with their gradients and optimizer states, and
pass through the device one after the other.

After ZeRO-Infinity (arXiv 2104.07857), in the form of LuWu's window of layers (`train.layer_window`) whose node
is a file of this process, or the memory of a GPU's host: forward and backward read a layer's values ahead of their use,
backward writes its gradient, and the optimizer takes values, gradients and states through the device extent by extent.
Of several ranks each has a file with its share of every parameter (AMSP's, arXiv 2311.00257, with all three states over
the ranks that hold it: all, but of experts that are spread): values are gathered when they were read, and gradients
summed before each rank writes its share of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier.checkpoint.base import StateDict
from espalier.checkpoint.stored_slice import StoredSlice, fill_slices
from espalier.checkpoint.tensor_slice import Slice
from espalier.comm.base import Traffic, traffic
from espalier.mechanisms.offload.optimizer import OffloadedGroup, StateFolder
from espalier.mechanisms.offload.state_file import Done
from espalier.optim import adamw
from espalier.optim.base import Optimizer, Owned, StateKinds
from espalier.parallel.layer_client import Fill, step_lost
from espalier.plan.axes.node_layout import FlatLayer
from espalier.plan.axes.offload_layout import LINE, Elements, StateExtent, StatePiece, extents
from espalier.train.layer_window import LayerWindow
from espalier.train.window_sharding import WindowSharding

if TYPE_CHECKING:
    from espalier.checkpoint.base import StatefulParts
    from espalier.recipe import Adamw

GRADIENT, VALUE = 0, 1
"""Rows of an extent; those of the optimizer's states follow."""


class LayerGroup(OffloadedGroup):
    """A torch optimizer whose parameters and gradients are in the file too. `scale`: of the gradients, in a step."""

    before = 2
    scale = 1.0

    def jobs(self) -> list[Sequence[StateExtent]]:
        """Everything has a gradient."""
        return [(extent,) for extent in self.file.extents]

    def piece(self, piece: StatePiece, rows: Tensor) -> nn.Parameter | None:
        part = nn.Parameter(rows[VALUE])
        part.grad = rows[GRADIENT] if self.scale == 1.0 else rows[GRADIENT].mul_(self.scale)
        return part

    def stored(self, number: int, row: int) -> StoredSlice:
        """See `OffloadedGroup.stored`: this rank's share."""
        parameter = self.owned[number]
        return replace(super().stored(number, row), shape=parameter.shape, start=parameter.start)

    def state_dict(self) -> StateDict:
        """See `OffloadedGroup.state_dict`: numbers are written by the rank with the first elements."""
        starts = {parameter.name: parameter.start for parameter in self.owned}
        return {
            key: value
            if isinstance(value, StoredSlice)
            else Slice(value.view(-1), torch.Size(), 0, writes=starts[key.rpartition("/")[0]] == 0)
            for key, value in super().state_dict().items()
        }

    def load_state_dict(self, state: StateDict) -> None:
        fill_slices(self.state_dict(), state)


class TensorShare(NamedTuple):
    """What a rank keeps of a tensor of a layer: elements `[start, stop)`, which begin at `at` of its flat share."""

    start: int
    stop: int
    at: int


def shares(layer: FlatLayer, rank: int, ranks: int) -> list[TensorShare]:
    """Of each tensor, whole cache lines; the last ranks have less."""
    parts = []
    at = 0
    for _, shape in layer.tensors:
        size = prod(shape)
        each = size if ranks == 1 else -(-size // (ranks * LINE)) * LINE
        start = min(size, rank * each)
        stop = min(size, (rank + 1) * each)
        parts.append(TensorShare(start, stop, at))
        at += stop - start
    return parts


class OffloadNode:
    """See `parallel.layer_client.Client`: the node is a file of this process, or its memory. Has state:
    that, and norms of
    gradients.

    Args:
        layers: of the model.
        options: of AdamW; resolved.
        fill: writes the initial values of a layer.
        folder: where the file is made, or what gives memory.
        channels: of each layer, the ranks that have a share of it; None: this one has all. One of them has all ranks;
            empty: there is one rank.

    Attributes:
        channel: all ranks; None: there is one.
    """

    def __init__(
        self,
        layers: Sequence[FlatLayer],
        options: Adamw,
        fill: Fill,
        folder: StateFolder,
        channels: Sequence[dist.ProcessGroup | None] = (),
    ) -> None:
        self.step = 0
        self._layers = layers
        self._channels = channels or [None] * len(layers)
        counts = [1 if channel is None else channel.size() for channel in self._channels]
        self.channel = self._channels[counts.index(max(counts))]
        self.apart = [channel is not self.channel for channel in self._channels]
        self._shares = [
            [shares(layer, rank, ranks) for rank in range(ranks)] for layer, ranks in zip(layers, counts, strict=True)
        ]
        self._own = [
            by_rank[0 if channel is None else channel.rank()]
            for by_rank, channel in zip(self._shares, self._channels, strict=True)
        ]
        self._extents: list[list[StateExtent]] = []
        self._norms: dict[int, list[Tensor]] = {}
        self._folder = folder
        nothing = torch.zeros((), device=folder.device)
        owned = [
            Owned(
                name, nn.Parameter(nothing.expand(shape if ranks == 1 else (stop - start,))), torch.Size(shape), start
            )
            for layer, local_shares, ranks in zip(layers, self._own, counts, strict=True)
            for (name, shape), (start, stop, _) in zip(layer.tensors, local_shares, strict=True)
        ]
        made = adamw.build(options, owned, self._group)
        assert isinstance(made, LayerGroup), "a model has parameters"
        self.group = made
        for index, layer in enumerate(layers):
            values = torch.empty(layer.numel)
            fill(index, values)
            for arrived in self._store(index, VALUE, self._share(index, values)):
                arrived()
        folder.meter.read()

    def _group(self, optimizer: torch.optim.Optimizer, owned: Sequence[Owned], kinds: StateKinds) -> LayerGroup:
        number = offset = 0
        for layer in self._layers:
            sizes = [(number + k, owned[number + k].tensor.numel()) for k in range(len(layer.tensors))]
            rows = LayerGroup.before + len(kinds.shaped)
            self._extents.append(extents(Elements(sizes, 4), rows, self._folder.chunk, offset))
            number = number + len(sizes)
            offset = offset + sum(extent.bytes for extent in self._extents[-1])
        every = [extent for layer_extents in self._extents for extent in layer_extents]
        self.file = self._folder.file(owned, every, fixed_rows=VALUE)
        return LayerGroup(optimizer, owned, kinds, self.file)

    def _parts(self, layer: int, flat: Tensor) -> list[tuple[StateExtent, Tensor]]:
        layer_extents = self._extents[layer]
        return list(zip(layer_extents, flat.split([extent.used // 4 for extent in layer_extents]), strict=True))

    def _store(self, layer: int, row: int, flat: Tensor) -> list[Done]:
        return [self.file.store(extent, row, part) for extent, part in self._parts(layer, flat)]

    def _share(self, layer: int, flat: Tensor) -> Tensor:
        """What this rank keeps of a layer's values, one after the other."""
        if self._channels[layer] is None:
            return flat
        whole = self._layers[layer].views(flat)
        return torch.cat(
            [tensor.view(-1)[share.start : share.stop] for tensor, share in zip(whole, self._own[layer], strict=True)]
        )

    def pull(self, layer: int, step: int, out: Tensor) -> Any:
        """Begins to read a layer."""
        if self._channels[layer] is None:
            return [self.file.fetch(extent, VALUE, part) for extent, part in self._parts(layer, out)]
        room = max(
            rank_shares[-1].at + rank_shares[-1].stop - rank_shares[-1].start for rank_shares in self._shares[layer]
        )
        local = torch.empty(room, device=out.device)
        last = self._own[layer][-1]
        parts = self._parts(layer, local[: last.at + last.stop - last.start])
        return [
            *(self.file.fetch(extent, VALUE, part) for extent, part in parts),
            partial(self._gather, layer, local, out),
        ]

    def _gather(self, layer: int, local: Tensor, out: Tensor) -> None:
        """Fills `out` with what all ranks have read of a layer. They gather layers in the same order."""
        gathered = [torch.empty_like(local) for _ in self._shares[layer]]
        with traffic(Traffic.PARAMETERS):
            dist.all_gather(gathered, local, group=self._channels[layer])
        views = self._layers[layer].views(out)
        for values, shared in zip(gathered, self._shares[layer], strict=True):
            for view, (start, stop, at) in zip(views, shared, strict=True):
                view.view(-1)[start:stop].copy_(values[at : at + stop - start])

    def push(self, layer: int, step: int, tensor: Tensor) -> Any:
        """Begins to write a layer's gradient, summed over the ranks."""
        if (channel := self._channels[layer]) is not None:
            with traffic(Traffic.GRADIENTS):
                dist.all_reduce(tensor, group=channel)
        self._norms[layer] = [torch.linalg.vector_norm(view) for view in self._layers[layer].views(tensor)]
        return self._store(layer, GRADIENT, self._share(layer, tensor))

    def wait(self, handle: Any) -> None:
        """Returns when it is done."""
        for done in handle:
            done()

    def totals(self, step: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """The values, summed over the ranks, and the norms: those which all of them know, and that of all others."""
        squares = [
            torch.stack(norms).double().square().sum() / len(self._shares[layer])
            for layer, norms in self._norms.items()
            if self.apart[layer]
        ]
        summed = torch.cat([values, *(square.view(1).to(values) for square in squares)])
        norms = [norm for layer, apart in enumerate(self.apart) if not apart for norm in self._norms[layer]]
        self._norms.clear()
        if self.channel is not None and summed.numel():
            with traffic(Traffic.CONTROL):
                dist.all_reduce(summed, group=self.channel)
        totals = summed.split([len(values), len(squares)])
        others = [totals[1].sum().sqrt().to(norms[0])] * bool(squares)
        return totals[0], torch.stack([*norms, *others])

    def ended(self, step: int) -> tuple[Tensor, Tensor]:
        """Nothing ends a step but `move`."""
        raise step_lost(self.step)

    def recover(self) -> int:
        """The file is of this process: no step of it is lost."""
        return self.step

    def move(self, step: int, scale: float, rate: float, following: float | None = None) -> None:
        """One optimizer step."""
        self.group.scale = scale
        self.group.step(rate)
        self.step = step + 1

    def settle(self, step: int) -> None:
        """Every step has ended when it returns."""

    def read(self) -> Mapping[str, float]:
        """The folder has a meter of its own."""
        return {}

    def close(self) -> None:
        """The file has no name, so it ends with the process."""


class OffloadSharding(WindowSharding):
    """See `WindowSharding`. Checkpoints hold the state, of which every rank writes and reads its share.

    Args:
        routes: what takes part in each exchange of tokens with experts, in the order of a forward pass.
    """

    def __init__(self, model: nn.Module, window: LayerWindow, routes: Sequence[Callable[[], None]] = ()) -> None:
        super().__init__(model, window)
        assert isinstance(window.client, OffloadNode)
        self.together = window.client.channel is not None
        self.routes = routes
        self._spread = [any(window.client.apart[layer] for layer in layers) for layers in window.uses]

    def idle(self, times: int) -> None:
        """See `Sharding.idle`: layers are gathered in the order of a forward pass; tokens may go to experts here."""
        for _ in range(times if self.together else 0):
            self.window.begin([layer for layers in self.window.uses for layer in layers])
            routes = iter(self.routes)
            for layers, spread in zip(self.window.uses, self._spread, strict=True):
                for layer in layers:
                    self.window.need(layer)
                if spread:
                    next(routes)()
                for layer in layers:
                    self.window.release(layer)

    def parts(self, optimizer: Optimizer) -> StatefulParts:
        """See `Sharding.parts`: under the names of a model in memory."""
        node = self.client
        assert isinstance(node, OffloadNode)
        return {"model": OffloadedLayers(self, node), "optimizer": node.group}


class OffloadedLayers:
    """The model's parameters, where they wait, and its buffers. Stateful."""

    def __init__(self, sharding: OffloadSharding, node: OffloadNode) -> None:
        self._sharding = sharding
        self._node = node

    def state_dict(self) -> StateDict:
        """By name; a tied parameter under all its names."""
        parameters = [parameter for layer in self._sharding.window.layers for parameter in layer.parameters]
        stored = {id(parameter): self._node.group.stored(number, VALUE) for number, parameter in enumerate(parameters)}
        tensors = self._sharding.model.state_dict(keep_vars=True)
        return {name: stored.get(id(value), value) for name, value in tensors.items()}

    def load_state_dict(self, state: StateDict) -> None:
        """Takes back what `state_dict` gave."""
        self._sharding.window.drop()
        fill_slices(self.state_dict(), state)
        self._node.file.settle()
