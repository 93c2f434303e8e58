"""Layer window: parameters are brought here a few layers ahead of their use, and freed after it.

After LuWu (arXiv 2409.00918), section on the worker: pulls and pushes are two independent streams, each in order. A
layer's memory is one storage whose size becomes 0 while the layer is away, so parameters keep their identity, and what
autograd has saved of them is whole again when they are back. Where the layers wait is the client's: on optimizer nodes,
on disk, or in host memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from espalier.kernels import accelerator
from espalier.machine import malloc_trim, resource_limits
from espalier.parallel.layer_client import LayerClient, StepLost, layers_of
from espalier.plan.axes.node_cost import PUSHES
from espalier.plan.axes.node_layout import FlatLayer
from espalier.recipe import units
from espalier.recipe.errors import UserError
from espalier.recipe.units import show_size
from espalier.train.mechanism import Build

HOST = torch.device("cpu")


class HeldLayer:
    """A layer on a worker. Has state: whether its values are here, and its gradient while backward passes add to it.

    Args:
        layer: which parameters.
        parameters: those of the model; their data becomes views of `flat`.
        device: where it computes.
    """

    def __init__(self, layer: FlatLayer, parameters: Sequence[nn.Parameter], device: torch.device = HOST) -> None:
        self.layer = layer
        self.parameters = list(parameters)
        self.device = device
        self.renew()

    def renew(self) -> None:
        """In memory of its own, whatever may still be on its way into what it had."""
        self.flat = torch.empty(self.layer.numel, device=self.device)
        self.pulling: tuple[Any] | None = None
        for parameter, view in zip(self.parameters, self.layer.views(self.flat), strict=True):
            parameter.data = view
            parameter.grad = None
        self.free()

    @property
    def bytes(self) -> int:
        return 4 * self.layer.numel

    @property
    def busy(self) -> bool:
        """Whether its values are here or on their way."""
        return self.loaded or self.pulling is not None

    def make_room(self) -> Tensor:
        """Memory for the values, in which they are pulled."""
        with torch.no_grad():
            self.flat.untyped_storage().resize_(self.bytes)
        return self.flat

    def free(self) -> None:
        self.flat.untyped_storage().resize_(0)
        self.loaded = False

    def gradient(self) -> Tensor:
        """[numel] the gradients of its parameters, which lose them; zeros of those that were not used."""
        flat = torch.empty(self.layer.numel, device=self.device)
        for parameter, view in zip(self.parameters, self.layer.views(flat), strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
                parameter.grad = None
        return flat


class LayerWindow:
    """The layers that a worker holds at once. Has state: what is here or on its way, and the order of what follows.

    Args:
        client: the way to the nodes.
        layers: all layers, in the order of the client's.
        uses: of each piece of the model, the layers that it uses.
        size: how many are held at once, those on their way counted; at least the most that one piece uses.
        stays: whether layers stay between forward and backward where they have room; else all are pulled again.

    Attributes:
        step: of the values that are pulled.
        usual: the order of a training step, once known.
        stalled: seconds that this worker has waited for pulls, for pushes, and for the gradients of the others.
        pulled, pushed: bytes of parameters and gradients so far, as the worker has them.
        peak: the most bytes of parameters held at once.
    """

    def __init__(
        self,
        client: LayerClient,
        layers: Sequence[HeldLayer],
        uses: Sequence[Sequence[int]],
        size: int,
        stays: bool = True,
    ) -> None:
        self.client, self.layers, self.uses, self.size, self.stays = client, list(layers), uses, size, stays
        self.step = client.step
        self.stalled = 0.0
        self.peak = 0
        self.pulled = self.pushed = 0
        self._read = (0.0, 0, 0)
        self.usual: Sequence[int] = ()
        self._ahead: deque[int] = deque()
        self._begun: tuple[int, ...] = ()
        self._pushes: deque[tuple[Any, Tensor]] = deque()

    def begin(self, order: Sequence[int]) -> None:
        """Layers will be needed in this `order`; the first of them are pulled from now on, if they are not already."""
        if self._begun != tuple(order) or not order:
            self.prefetch(order)
        self._begun = ()

    def prefetch(self, order: Sequence[int]) -> None:
        """Pulls the first layers of the `order` that the next pass will begin with."""
        self.drop()
        self._ahead = deque(order)
        self._begun = tuple(order)
        self._advance()

    def need(self, index: int) -> None:
        """Returns when the layer is here. Layers are needed in the order of `begin`; others are pulled now."""
        layer = self.layers[index]
        if not layer.busy:
            if self._ahead and self._ahead[0] == index:
                self._ahead.popleft()
            self._pull(layer, index)
        if layer.pulling is not None:
            self._wait(*layer.pulling)
            layer.pulling = None
            layer.loaded = True

    def release(self, index: int) -> None:
        """The layer is not needed until its next turn. Where that comes before others would have its room, it stays:
        backward begins with the layers that forward ended with."""
        if self._next(index):
            self._ahead.remove(index)
        else:
            self.layers[index].free()
        self._advance()

    def _next(self, index: int) -> bool:
        """Whether the layer, if it were freed, would be pulled again at once or as soon as those before it are here."""
        room = self.size - sum(layer.busy for layer in self.layers) + 1
        for following in self._ahead:
            if following == index:
                return self.stays
            room -= not self.layers[following].busy
            if not room:
                break
        return False

    def summarize(self, index: int) -> None:
        layer = self.layers[index]
        value = layer.gradient().sum() * 0.0
        for parameter in layer.parameters:
            parameter.grad = value.expand(parameter.shape)

    def push(self, index: int) -> None:
        """Sends the layer's gradient, which is complete."""
        while len(self._pushes) >= PUSHES:
            self._wait(self._pushes.popleft()[0])
        gradient = self.layers[index].gradient()
        self._pushes.append((self.client.push(index, self.step, gradient), gradient))
        self.pushed += gradient.nbytes

    def flush(self) -> None:
        """Returns when all gradients have arrived."""
        while self._pushes:
            self._wait(self._pushes.popleft()[0])

    def drop(self) -> None:
        """Forgets what was pulled ahead and not needed."""
        self._ahead.clear()
        self._begun = ()
        for layer in self.layers:
            if layer.pulling is not None:
                self.client.wait(*layer.pulling)
                layer.pulling = None
            if layer.flat.untyped_storage().size():
                layer.free()

    # The end of a step, and of what a node that has started again does not know

    def totals(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """`LayerClient.totals` of this step, when its gradients have arrived. Raises StepLost where it has to be made
        again."""
        try:
            self.flush()
            self.drop()  # another worker may end the step before what is on its way has left the node
            begun = time.perf_counter()
            totals = self.client.totals(self.step, values)
            self.stalled += time.perf_counter() - begun
            return totals
        except StepLost as error:
            self._expect(self.step + 1, error)
            self.step -= 1  # the nodes have ended it, as the other workers decided, and this one will
            return self.client.ended(self.step)

    def move(self, scale: float, rate: float, following: float | None = None) -> None:
        """`LayerClient.move` of this step. Raises StepLost where it has to be made again."""
        if self.client.step == self.step:  # else it was ended before
            try:
                self.client.move(self.step, scale, rate, following)
            except StepLost as error:
                self._expect(self.step + 1, error)
                return
        self.step += 1

    def settle(self) -> None:
        """Returns when the nodes' files hold all steps. Raises StepLost where the last has to be made again."""
        self.drop()
        while True:
            try:
                self.client.settle(self.step)
            except StepLost as error:
                self._expect(self.step, error)
            else:
                return

    def recover(self) -> int:
        """Connects again, and forgets what was under way. The step to be made now."""
        self.step = self.client.recover()
        self._ahead.clear()
        self._pushes.clear()
        self._begun = ()
        for layer in self.layers:
            layer.renew()
        return self.step

    def _expect(self, step: int, error: StepLost) -> None:
        """Raises `error` again where the nodes do not stand at that step."""
        error.again = self.recover()
        if error.again != step:
            raise error

    def keep(self) -> None:
        """Every parameter is here from now on, in memory of its own."""

        def keep(layer: HeldLayer) -> None:
            for parameter, view in zip(layer.parameters, layer.layer.views(layer.flat), strict=True):
                parameter.data = view.clone()

        self.gather(keep)

    def gather(self, take: Callable[[HeldLayer], None]) -> None:
        """Calls `take` with every layer in turn while it is here."""
        self.begin(range(len(self.layers)))
        for index, layer in enumerate(self.layers):
            self.need(index)
            take(layer)
            self.release(index)

    def read(self) -> dict[str, float]:
        """What this worker has `pulled` and `pushed` (bytes) and how long it has `stalled` (seconds) since it was asked
        last."""
        now = (self.stalled, self.pulled, self.pushed)
        since = [total - before for total, before in zip(now, self._read, strict=True)]
        self._read = now
        return dict(zip(("stalled", "pulled", "pushed"), since, strict=True))

    @property
    def held(self) -> int:
        """Bytes of parameters that are here or on their way."""
        return sum(layer.flat.untyped_storage().size() for layer in self.layers)

    def _advance(self) -> None:
        """Pulls ahead as far as the window has room, in the order of need."""
        while self._ahead:
            layer = self.layers[self._ahead[0]]
            if sum(layer.busy for layer in self.layers) >= self.size or layer.busy:
                return
            self._pull(layer, self._ahead.popleft())

    def _pull(self, layer: HeldLayer, index: int) -> None:
        layer.pulling = (self.client.pull(index, self.step, layer.make_room()),)
        self.pulled += layer.bytes
        self.peak = max(self.peak, self.held)

    def _wait(self, handle: Any) -> None:
        begun = time.perf_counter()
        self.client.wait(handle)
        self.stalled += time.perf_counter() - begun


def window_size(layers: Sequence[FlatLayer], uses: Sequence[Sequence[int]], wanted: int, memory: float) -> int:
    """Layers held at once: `wanted` (0: of as many blocks as fit into `memory` bytes, three at most), and no fewer than
    the pieces use.

    Raises UserError where not even those fit: it says the least memory.
    """
    needed = max(len(used) for used in uses)
    largest, name = max(
        (sum(4 * layers[index].numel for index in used), layers[used[-1]].name) for used in uses if used
    )
    least = 2 * largest
    if least > memory:
        raise UserError(
            f"A worker has {show_size(memory)}, and layer {name!r} has {show_size(largest)} of parameters.",
            why=f"a worker holds one layer and its gradient at least: {show_size(least)}",
            do="smaller layers, or a worker with more memory",
        )
    blocks = [[4 * layers[index].numel for index in used] for used in uses[1:-1]]
    typical = max([4 * layer.numel for layer in layers] + [sum(sizes) for sizes in blocks])
    room = int((memory - largest) // typical) if memory != float("inf") else 3
    return max(needed, wanted or min(3, max(1, room)) * max(map(len, blocks), default=1))


def rank_memory(context: Build) -> float:
    """Bytes that this rank may hold: `plan.memory`, or its GPU's, or its part of the machine's (or container's), and no
    more than the rest of the address space that the process may have."""
    ranks = context.plan.ranks
    asked = context.recipe.plan.memory
    sharing = sum(rank.node == ranks[context.mesh.rank].node for rank in ranks)
    if asked is not None:
        most = float(units.size(asked, "plan.memory"))
    elif accelerator.is_on(context.device):
        most = float(accelerator.properties(context.device).total_memory)
    else:
        most = resource_limits.memory() / sharing
    return most if accelerator.is_on(context.device) else min(most, resource_limits.address_space())


def hold_layers(
    model: nn.Module,
    layers: Sequence[FlatLayer],
    parameters: Sequence[Sequence[nn.Parameter]],
    device: torch.device = HOST,
) -> list[HeldLayer]:
    """The layers of `model`, none of them here. Parameters on the meta device are replaced; all else goes to a
    GPU too."""
    fresh: dict[int, nn.Parameter] = {}
    for parameter in (parameter for group in parameters for parameter in group):
        made = nn.Parameter(torch.empty(0, dtype=parameter.dtype)) if parameter.is_meta else parameter
        fresh[id(parameter)] = made
    for module in model.modules():
        for name, present in module._parameters.items():
            if present is not None and id(present) in fresh:
                module._parameters[name] = fresh[id(present)]
    held_layers = [
        HeldLayer(layer, [fresh[id(parameter)] for parameter in group], device)
        for layer, group in zip(layers, parameters, strict=True)
    ]
    if device != HOST:
        model.to(device)
    return held_layers


Connect = Callable[[Build, Sequence[FlatLayer]], LayerClient]
"""Makes the connection of a worker to where its layers wait."""


def make_window(context: Build, connect: Connect, window: int = 0, stays: bool = True) -> LayerWindow:
    """The window of the context's model. Raises UserError for a model that cannot be held by layers, and where this
    rank's memory holds no layer.

    Args:
        window: layers that are here at once; 0: as many as memory has room for.
        stays: see `LayerWindow`.
    """
    model = context.model
    assert model is not None
    holders = {} if context.cut is None else context.cut.peers
    layers, uses, parameters = layers_of(model, context.workload.pieces(model), holders)
    _check_precision(parameters)
    size = window_size(layers, uses, window, rank_memory(context))
    malloc_trim.map_blocks()
    client = connect(context, layers)
    return LayerWindow(client, hold_layers(model, layers, parameters, context.device), uses, size, stays)


def _check_precision(parameters: Sequence[Sequence[nn.Parameter]]) -> None:
    """Raises UserError unless all parameters are fp32."""
    other = next((tensor.dtype for group in parameters for tensor in group if tensor.dtype != torch.float32), None)
    if other is not None:
        raise UserError(
            f"Layers hold fp32 parameters, and the model's are {str(other).removeprefix('torch.')}.",
            do='train.precision = "fp32" or "bf16"',
        )
