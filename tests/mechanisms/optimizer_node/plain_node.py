"""The plain form of an optimizer node: all state in this process, gradients added in rank order, torch's own AdamW."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from espalier.optim import adamw
from espalier.optim.base import Owned
from espalier.parallel.layer_client import Fill
from espalier.plan.axes.node_layout import FlatLayer
from espalier.recipe import Adamw


class PlainNode:
    """Of `workers` threads, each of which has a `PlainClient`."""

    def __init__(self, layers: Sequence[FlatLayer], options: Adamw, fill: Fill, workers: int = 1) -> None:
        self.layers, self.workers, self.step = list(layers), workers, 0
        self.flats = [torch.empty(layer.numel) for layer in layers]
        for index, flat in enumerate(self.flats):
            fill(index, flat)
        owned = [
            Owned(name, nn.Parameter(view), torch.Size(shape))
            for layer, flat in zip(layers, self.flats, strict=True)
            for (name, shape), view in zip(layer.tensors, layer.views(flat), strict=True)
        ]
        self.owned, self.optimizer = owned, adamw.build(options, owned)
        self.gradients: dict[int, dict[int, Tensor]] = {}
        self.values: dict[int, Tensor] = {}
        self.bytes: Counter[str] = Counter()
        self.pulled: list[tuple[int, int]] = []
        self.barrier = threading.Barrier(workers)
        self.changed = threading.Condition()

    def summed(self) -> None:
        for index, layer in enumerate(self.layers):
            parts = self.gradients[index]
            total = torch.stack([parts[rank] for rank in range(self.workers)]).sum(0) if self.workers > 1 else parts[0]
            names = {name for name, _ in layer.tensors}
            own = [one for one in self.owned if one.name in names]
            for one, view in zip(own, layer.views(total), strict=True):
                one.tensor.grad = view
        self.gradients.clear()

    def apply(self, scale: float, rate: float) -> None:
        if scale != 1.0:
            torch._foreach_mul_([one.tensor.grad for one in self.owned], scale)
        self.optimizer.step(rate)


class PlainClient:
    """See `parallel.layer_client.Client`."""

    def __init__(self, node: PlainNode, rank: int = 0) -> None:
        self.node, self.rank = node, rank

    @property
    def step(self) -> int:
        return self.node.step

    def pull(self, layer: int, step: int, out: Tensor) -> Any:
        with self.node.changed:
            assert step == self.node.step, "a layer is pulled of the step that the node is at"
            out.copy_(self.node.flats[layer])
            self.node.pulled.append((self.rank, layer))
            self.node.bytes["pulled"] += out.nbytes

    def push(self, layer: int, step: int, tensor: Tensor) -> Any:
        with self.node.changed:
            assert step == self.node.step
            own = self.node.gradients.setdefault(layer, {})
            assert self.rank not in own, "a gradient is pushed once a step"
            own[self.rank] = tensor.clone()
            self.node.bytes["pushed"] += tensor.nbytes

    def wait(self, handle: Any) -> None:
        assert handle is None

    def totals(self, step: int, values: Tensor) -> tuple[Tensor, Tensor]:
        self.node.values[self.rank] = values.clone()
        if self.node.barrier.wait() == 0:
            self.node.summed()
        self.node.barrier.wait()
        sums = torch.stack([self.node.values[rank] for rank in range(self.node.workers)]).sum(0)
        return sums, torch.stack([torch.linalg.vector_norm(one.tensor.grad) for one in self.node.owned])

    def move(self, step: int, scale: float, rate: float, following: float | None = None) -> None:
        if self.node.barrier.wait() == 0:
            self.node.apply(scale, rate)
            self.node.step = step + 1
        self.node.barrier.wait()

    def settle(self, step: int) -> None:
        assert step == self.node.step

    def read(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is open."""
