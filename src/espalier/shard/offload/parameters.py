"""Parameter offload: a model whose layers wait on disk with their gradients and optimizer states, and pass through
memory one after the other.

After ZeRO-Infinity (arXiv 2104.07857), in the form of LuWu's window of layers (`shard.luwu.window`) whose node is a
file of this process: forward and backward read a layer's values ahead of their use, backward writes its gradient, and
the optimizer takes values, gradients and states through memory extent by extent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from espalier.optim import adamw
from espalier.optim.base import Optimizer, Owned, StateKinds
from espalier.shard.luwu.base import Fill, Layer, step_lost
from espalier.shard.luwu.mechanism import NodeSharding
from espalier.shard.offload.layout import Elements, Extent, Piece, extents
from espalier.shard.offload.optimizer import OffloadedGroup, StateFolder
from espalier.shard.sharded_state_dict import fill as fill_from

if TYPE_CHECKING:
    from espalier.checkpoint.base import Stateful
    from espalier.config import Adamw

GRADIENT, VALUE = 0, 1
"""Rows of an extent; those of the optimizer's states follow."""


class LayerGroup(OffloadedGroup):
    """A torch optimizer whose parameters and gradients are in the file too. `scale`: of the gradients, in a step."""

    before = 2
    scale = 1.0

    def jobs(self) -> list[Sequence[Extent]]:
        """Everything has a gradient."""
        return [(extent,) for extent in self.file.extents]

    def piece(self, piece: Piece, rows: Tensor) -> nn.Parameter | None:
        """See `OffloadedGroup.piece`."""
        part = nn.Parameter(rows[VALUE])
        part.grad = rows[GRADIENT] if self.scale == 1.0 else rows[GRADIENT].mul_(self.scale)
        return part


class DiskNode:
    """See `shard.luwu.base.Client`: the node is a file of this process. Has state: the file, and norms of gradients.

    Args:
        layers: of the model.
        options: of AdamW; resolved.
        fill: writes the initial values of a layer.
        folder: where the file is made.
    """

    def __init__(self, layers: Sequence[Layer], options: Adamw, fill: Fill, folder: StateFolder) -> None:
        self.step, self._layers = 0, layers
        self._extents: list[list[Extent]] = []
        self._norms: dict[int, list[Tensor]] = {}
        self._folder = folder
        nothing = torch.zeros(())
        owned = [
            Owned(name, nn.Parameter(nothing.expand(shape)), torch.Size(shape))
            for layer in layers
            for name, shape in layer.tensors
        ]
        made = adamw.build(options, owned, self._group)
        assert isinstance(made, LayerGroup), "a model has parameters"
        self.group = made
        for index, layer in enumerate(layers):
            values = torch.empty(layer.numel)
            fill(index, values)
            for arrived in self._store(index, VALUE, values):
                arrived()
        folder.tier.meter.read()

    def _group(self, optimizer: torch.optim.Optimizer, owned: Sequence[Owned], kinds: StateKinds) -> LayerGroup:
        number = offset = 0
        for layer in self._layers:
            sizes = [(number + k, owned[number + k].shape.numel()) for k in range(len(layer.tensors))]
            rows = LayerGroup.before + len(kinds.shaped)
            self._extents.append(extents(Elements(sizes, 4), rows, self._folder.chunk, offset))
            number, offset = number + len(sizes), offset + sum(one.bytes for one in self._extents[-1])
        every = [extent for found in self._extents for extent in found]
        self.file = self._folder.file(owned, every, kept=VALUE)
        return LayerGroup(optimizer, owned, kinds, self.file)

    def _parts(self, layer: int, flat: Tensor) -> list[tuple[Extent, Tensor]]:
        found = self._extents[layer]
        return list(zip(found, flat.split([extent.used // 4 for extent in found]), strict=True))

    def _store(self, layer: int, row: int, flat: Tensor) -> list[Callable[[], None]]:
        return [self.file.store(extent, row, part) for extent, part in self._parts(layer, flat)]

    def pull(self, layer: int, step: int, out: Tensor) -> Any:
        """Begins to read a layer."""
        return [self.file.fetch(extent, VALUE, part) for extent, part in self._parts(layer, out)]

    def push(self, layer: int, step: int, tensor: Tensor) -> Any:
        """Begins to write a layer's gradient."""
        self._norms[layer] = [torch.linalg.vector_norm(view) for view in self._layers[layer].views(tensor)]
        return self._store(layer, GRADIENT, tensor)

    def wait(self, handle: Any) -> None:
        """Returns when it is done."""
        for done in handle:
            done()

    def totals(self, step: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """The values as they are: there is one worker; and the norms."""
        norms = [one for layer in range(len(self._layers)) for one in self._norms[layer]]
        self._norms.clear()
        return values, torch.stack(norms)

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

    def skip(self, step: int) -> None:
        """The gradients are written anew."""

    def settle(self, step: int) -> None:
        """Every step has ended when it returns."""

    def close(self) -> None:
        """The file has no name, so it ends with the process."""


class DiskSharding(NodeSharding):
    """See `NodeSharding`. Checkpoints hold the whole state, which no other process has."""

    def parts(self, optimizer: Optimizer) -> Mapping[str, Stateful]:
        """See `Sharding.parts`: under the names of a model in memory."""
        node = self.client
        assert isinstance(node, DiskNode)
        return {"model": LayersOnDisk(self, node), "optimizer": node.group}


class LayersOnDisk:
    """The model's parameters, where they wait, and its buffers. Stateful."""

    def __init__(self, sharding: DiskSharding, node: DiskNode) -> None:
        self._sharding, self._node = sharding, node

    def state_dict(self) -> dict[str, Any]:
        """By name; a tied parameter under all its names."""
        held = [one for layer in self._sharding.window.layers for one in layer.parameters]
        stored = {id(one): self._node.group.stored(number, VALUE) for number, one in enumerate(held)}
        kept = self._sharding.model.state_dict(keep_vars=True)
        return {name: stored.get(id(value), value) for name, value in kept.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self._sharding.window.drop()
        fill_from(self.state_dict(), state)
        self._node.file.settle()
