"""The largest values of every row of 1,024 and where they stand: sparse gradients (Deep Gradient Compression,
arXiv 1712.01887), found by RTop-K (arXiv 2409.00822). What is left out must be carried over by error feedback.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from espalier.comm.codec_input import bytes_of, check_length, floats, shaped
from espalier.kernels import rtopk
from espalier.kernels.base import aligned
from espalier.recipe.errors import UserError

ROW = 1024
"""Values among which the largest are chosen; a column takes two bytes."""


class Topk:
    """`topk:ratio`. Takes float32, bfloat16, float16 and float64; what is kept is kept in float32.

    Args:
        ratio: share of the values to keep, above 0 and at most 1: at least one of every row.

    Raises:
        UserError: another ratio.
    """

    lossless = False
    fixed = True

    def __init__(self, ratio: float) -> None:
        if not 0 < ratio <= 1:
            raise UserError(f"topk keeps a share of {ratio:g}.", why="it is above 0 and at most 1", do="topk:0.01")
        self.ratio = float(ratio)
        self.each = max(1, round(self.ratio * ROW))
        self.name = f"topk:{ratio:g}"

    def encode(self, tensor: Tensor) -> Tensor | None:
        """[n] to bytes: the values of all rows, then their columns. None where a value is not finite.

        Raises UserError for other dtypes.
        """
        values = floats(tensor, self.name)
        if not bool(values.isfinite().all()):
            return None
        values_kept = []
        columns = []
        whole = values.numel() // ROW * ROW
        for rows in (values[:whole].view(-1, ROW), values[whole:].view(1, -1)):
            if rows.numel():
                _, chosen = rtopk(rows.abs(), min(self.each, rows.shape[1]))
                values_kept.append(bytes_of(rows.gather(1, chosen)))
                columns.append(bytes_of(chosen.to(torch.int16)))
        return torch.cat([values.new_empty(0, dtype=torch.uint8), *values_kept, *columns])

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """What was kept, and zeros. Raises RunFailed where bytes lack or a column is out of its row."""
        check_length(wire, self.wire_bytes(like.numel(), 0), self.name)
        length = like.numel()
        values = torch.zeros(length)
        count = self._kept(length)
        wire = aligned(wire)
        top_values = wire[: 4 * count].view(torch.float32)
        columns = wire[4 * count :].view(torch.int16).long()
        whole = length // ROW
        block = torch.arange(count) // self.each if self.each else columns
        places = columns + block.clamp(max=whole) * ROW
        if count and (int(columns.min()) < 0 or int(places.max()) >= length):
            check_length(wire[:0], wire.numel(), self.name)
        return shaped(values.scatter_(0, places, top_values), like)

    def _kept(self, elements: Any) -> Any:
        rest = elements % ROW
        tail = rest - (rest > self.each) * (rest - self.each)
        return elements // ROW * self.each + tail

    def wire_bytes(self, elements: Any, element_bytes: int) -> Any:
        """Six for each that is kept."""
        return 6 * self._kept(elements)
