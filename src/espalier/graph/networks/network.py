"""Networks that are called with message blocks, and what rounds the values of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from espalier.graph.networks.base import MessageBlock, MessageBlocks, Rows
    from espalier.graph.parts.coded_rows import RowSize

QUANTIZED = "quantization"
"""Attribute of a network with quantizers: its `Quantizers`."""


class Quantizers(Protocol):
    """What rounds the values of a network (`mechanisms.few_bits.quantization.Quantization`). `packed`: rows that layers
    read are put in packages and taken out of them."""

    packed: bool

    def enters(self, block: MessageBlock, features: Tensor) -> Tensor:
        """Features of a forward pass that begins, as they are stored."""

    def pack(self, layer: nn.Module, rows: Rows, placed: dict[str, Any]) -> None:
        """Rows of all nodes, before `layer` reads them in pieces."""

    def row_size(self, model: nn.Module, at: int, size: int) -> RowSize | None:
        """Bytes of a row that layer `at` of `model` sums where it crosses between ranks as codes (values beside them
        take `size` bytes each); None: it crosses as it is."""


def quantizers_of(model: object) -> Quantizers | None:
    """Of a network that rounds its values."""
    return getattr(model, QUANTIZED, None)


class GraphNetwork(nn.Module):
    """A network of ours: it is called with features and message blocks."""

    def answers(self, features: Tensor, blocks: MessageBlocks) -> Tensor:
        """What it says of the last block's targets."""
        return self(features, blocks)
