"""Quantized graph: what quantizers are told of the graph at hand, of what training sees of it, and of the graph that a
network was trained on where it is another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from espalier.graph.data.graph import Signs, signed
from espalier.graph.sampling.neighbor_sampler import symmetric_root
from espalier.mechanisms.few_bits.bit_allocator import BankBits, BitAllocator, DegreeBits, NodeBits, UniformBits
from espalier.mechanisms.few_bits.options import Mega, Quant, Uniform

if TYPE_CHECKING:
    from espalier.graph.data.graph import Array, Graph


@dataclass(frozen=True)
class QuantizedGraph:
    """What quantizers are told of a graph.

    Attributes:
        graph: the one at hand; whole: small graphs are classified, each of them new.
        trained: nodes of the graph that the network was trained on, where it is another; places: which of them each
            node is, -1: none (None: they are the same, or nobody asks).
        stored: features wait on disk, in a format of their own.
        hidden: nodes that training does not see; seen: the graph without their edges (None: as `graph`).
        signs: `data.signed` of the features that the network was trained on; empty: those at hand.
        steps: of training.
    """

    graph: Graph
    whole: bool = False
    trained: int | None = None
    places: Array | None = None
    stored: bool = False
    hidden: Array | None = None
    seen: Graph | None = None
    signs: Signs = ()
    steps: int = 0

    def __deepcopy__(self, memo: object) -> QuantizedGraph:
        """The same: it does not change."""
        return self

    def allocator(self, options: Quant, bits: float) -> BitAllocator:
        """By the kind of the options; learned widths begin higher for higher degrees (a bank's for larger values)."""
        nodes = self.trained or self.graph.nodes
        degrees = self.degrees(training=True)
        places = None if self.places is None else torch.from_numpy(self.places)
        allocator: BitAllocator
        match options:
            case Uniform():
                return UniformBits(nodes, bits)
            case Mega():
                shown = self.shown
                allocator = DegreeBits(degrees if shown is None else degrees[shown], bits, rows=nodes)
            case _ if self.whole:
                allocator = BankBits(nodes, bits)
            case _:
                hidden = None if self.hidden is None or places is not None else torch.from_numpy(self.hidden)
                allocator = NodeBits(nodes, bits, places, hidden)
        entries = len(allocator.counts)
        by_node = isinstance(allocator, NodeBits) and len(degrees) == entries
        allocator.spread(degrees if by_node else torch.arange(entries))
        return allocator

    @cached_property
    def shown(self) -> Tensor | None:
        """bool [nodes]: those that training sees; None: all."""
        if self.hidden is None:
            return None
        mask = torch.ones(self.graph.nodes, dtype=torch.bool)
        mask[torch.from_numpy(self.hidden)] = False
        return mask

    @cached_property
    def input_signed(self) -> bool | None:
        """See `data.signed`; also None, which leaves features as they are: they are on disk."""
        if self.signs:
            return self.signs[0]
        if self.graph.partition is not None:
            return self.graph.partition.signed
        return None if self.stored else signed(self.graph.features)

    def degrees(self, training: bool = False) -> Tensor:
        """int64 [nodes]: edges into each node; `training`: those that training sees."""
        graph = self.seen if training and self.seen is not None else self.graph
        there = graph.partition
        degrees = graph.degrees() if there is None or there.degrees is None else there.degrees
        return torch.from_numpy(degrees.astype(np.int64))

    def root(self, training: bool = False) -> Tensor:
        """float32 [nodes]: see `neighbor_sampler.symmetric_root`; `training`: of the edges that training sees."""
        graph = self.seen if training and self.seen is not None else self.graph
        there = graph.partition
        return torch.from_numpy(symmetric_root(graph) if there is None or there.root is None else there.root)
