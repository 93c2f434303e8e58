"""Layer layout of an optimizer node: tensors of each layer, and the chunks in which they are sent, kept and updated.

A layer is one flat vector, its tensors one after the other. It is cut into chunks of a bounded size, which are the unit
of a frame, of a sum, of an extent on disk and of a step of AdamW, so that the memory of a node does not depend on the
size of a layer. A tensor is cut only where it is larger than a chunk, and then at
multiples of 64 elements, so that AdamW runs the same vector instructions on a piece as on the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from espalier.optim.diloco_slowmo import METHODS, OuterMethod
from espalier.recipe import Adamw
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Push = Literal["fp32", "int16", "int8", "int8:stochastic"]
BITS = {"fp32": 32, "int16": 16, "int8": 8, "int8:stochastic": 8}
"""Bits of a pushed value."""
PUSHED: Mapping[str, Push] = {"exact": "fp32", "int8": "int8"}
"""How gradients cross the wire, by the codec of the plan's exchange."""
CHUNK = 1 << 20
"""Elements of a chunk, at most."""
ALIGNMENT = 64
LOCAL_BYTES = 40
"""Of a parameter that a worker with steps of its own reads and writes in one: values for forward, for backward and for
AdamW, the gradient, and both moments; then all but the first two again."""


@dataclass(frozen=True)
class FlatLayer:
    """One flat fp32 vector: the trainable parameters that are pulled, pushed and moved together, one after the other.

    Attributes:
        name: as messages say it.
        tensors: name and shape of each; those of two or more dims decay, others do not (`optim.adamw`).
    """

    name: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @cached_property
    def numel(self) -> int:
        return sum(prod(shape) for _, shape in self.tensors)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each tensor as a view of `flat`, [numel]."""
        views = []
        at = 0
        for _, shape in self.tensors:
            size = prod(shape)
            views.append(flat[at : at + size].view(shape))
            at += size
        return views


@dataclass(frozen=True)
class TensorPiece:
    """A tensor in a chunk, or what of it lies there: its place in the layer's list, and its elements in the chunk."""

    tensor: int
    start: int
    stop: int
    whole: bool


@dataclass(frozen=True)
class LayerChunk:
    """Consecutive elements of a layer, from `start` to `stop` of its vector."""

    layer: int
    index: int
    start: int
    stop: int
    pieces: tuple[TensorPiece, ...]

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        return f"{self.layer}/{self.index}"


@dataclass(frozen=True)
class NodeJob:
    """What a node and its workers agree on before the first step.

    Attributes:
        layers: all that this node keeps.
        optimizer: AdamW's options; rates are multiplied by the factor of each step.
        push: how gradients cross the wire.
        workers: how many the first step waits for.
        chunk: elements of a chunk, at most.
        outer: what moves the parameters in the place of AdamW, where workers push how far they went in a round.
    """

    layers: tuple[FlatLayer, ...]
    optimizer: Adamw
    push: Push = "fp32"
    workers: int = 1
    chunk: int = CHUNK
    outer: OuterMethod | None = None

    def __post_init__(self) -> None:
        if self.push not in BITS:
            raise UserError(f"push is {self.push!r}.", why=f"known are {', '.join(BITS)}", do='push = "fp32"')

    @cached_property
    def chunks(self) -> list[tuple[LayerChunk, ...]]:
        return [_chunks(number, layer, self.chunk) for number, layer in enumerate(self.layers)]

    @cached_property
    def all_chunks(self) -> list[LayerChunk]:
        """Of one layer after the other."""
        return [chunk for chunks in self.chunks for chunk in chunks]

    @property
    def largest(self) -> int:
        """Elements of the largest chunk."""
        return max((chunk.elements for chunk in self.all_chunks), default=0)

    def parts(self, nodes: int) -> list[tuple[list[int], NodeJob]]:
        """Of each of so many nodes the numbers of its layers, and its job: every layer goes to the node with the fewest
        elements."""
        parts: list[list[int]] = [[] for _ in range(nodes)]
        elements = [0] * nodes
        for number, layer in enumerate(self.layers):
            node = min(range(nodes), key=elements.__getitem__)
            parts[node].append(number)
            elements[node] += layer.numel
        return [(part, replace(self, layers=tuple(self.layers[number] for number in part))) for part in parts]


def _chunks(number: int, layer: FlatLayer, most: int) -> tuple[LayerChunk, ...]:
    """Of layer `number`, of at most so many elements."""
    chunks: list[LayerChunk] = []
    pieces: list[TensorPiece] = []
    start = at = 0

    def close() -> None:
        nonlocal start
        if at > start:
            chunks.append(LayerChunk(number, len(chunks), start, at, tuple(pieces)))
        start = at
        pieces.clear()

    for place, (_, shape) in enumerate(layer.tensors):
        size = prod(shape)
        for length in _cut(size, most):
            if at - start + length > most:
                close()
            pieces.append(TensorPiece(place, at - start, at - start + length, length == size))
            at += length
    close()
    return tuple(chunks)


def _cut(size: int, chunk: int) -> Sequence[int]:
    """Lengths of a tensor's pieces."""
    step = max(chunk // ALIGNMENT, 1) * ALIGNMENT
    return [size] if size <= chunk else [min(step, size - at) for at in range(0, size, step)]


def push_of(codecs: Collection[str], section: str) -> Push:
    """How workers push in those codecs. Raises UserError where nodes cannot add that up; `section`: where a recipe says
    it."""
    if len(codecs) > 1 or not set(codecs) <= set(PUSHED):
        raise UserError(
            f"An optimizer node cannot add up gradients in the codec {', '.join(sorted(codecs))!r}.",
            do=f"{section}.codec = {' or '.join(map(repr, PUSHED))}",
        )
    return PUSHED[next(iter(codecs))]


def outer_method(method: str, settings: Mapping[str, Any], replicas: Sequence[Sequence[int]]) -> OuterMethod:
    """How nodes move outer parameters (`plan.base.RoundsState`). Raises UserError for what they cannot do."""
    outer = replace(METHODS[method], **settings)
    if outer.delay or outer.fragments > 1:
        raise UserError(
            f"Optimizer nodes cannot run rounds of the method {method!r}.",
            why="it goes on while what it sent is on its way, in whole or in parts, and workers that hold a few layers "
            "wait for the outer parameters at the end of a round",
            do='sync.kind = "diloco", "slowmo" or "local_sgd"',
        )
    if outer.penalty != "none":
        raise UserError(
            f"Optimizer nodes cannot run rounds with sync.penalty = {outer.penalty!r}.",
            why="it is for what comes late, and nothing does",
            do='sync.penalty = "none"',
        )
    if any(len(ranks) > 1 for ranks in replicas):
        raise UserError(
            "On optimizer nodes a replica of several workers cannot take steps of its own.",
            why="every worker has its own parameters on its disk",
            do=f"sync.replicas={sum(map(len, replicas))}",
        )
    return outer
