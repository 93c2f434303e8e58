"""Cross entropy of chosen rows, plain and compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from espalier.kernels.base import operation
from espalier.kernels.buffer_pool import BUFFERS

LEAST = 1 << 14
"""Logits from which on the kernel pays."""


@operation("cross_entropy")
def cross_entropy(logits: Tensor, labels: Tensor, chosen: Tensor | None = None) -> Tensor:
    """The sum over rows `chosen` (int64, each once; None: all) of logits [rows, classes]; a label -1 counts nothing."""
    rows = logits if chosen is None else logits[chosen]
    return functional.cross_entropy(rows, labels, ignore_index=-1, reduction="sum")


def _fits(logits: Tensor, labels: Tensor, chosen: Tensor | None = None) -> bool:
    return logits.dtype in (torch.float32, torch.float64) and logits.numel() >= LEAST


@cross_entropy.fast("cpu", wins=_fits)
def row_by_row(logits: Tensor, labels: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Softmax and logarithm while a row is in registers; backward makes the softmax again."""
    rows = torch.arange(len(labels)) if chosen is None else chosen
    return _Entropy.apply(logits, labels, rows)


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        from espalier.kernels import cross_entropy_cpu

        logits, labels, rows = logits.contiguous(), labels.contiguous(), rows.contiguous()
        sums = torch.zeros(cross_entropy_cpu.PIECES, dtype=torch.float64)
        cross_entropy_cpu.sums_of(sums, logits, labels, rows)
        if sums.isinf().any() and int(labels.max()) >= logits.shape[1]:
            raise IndexError(f"Label {int(labels.max())} is out of bounds for {logits.shape[1]} classes.")
        ctx.save_for_backward(logits, labels, rows)
        return sums.sum().to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        from espalier.kernels import cross_entropy_cpu

        logits, labels, rows = ctx.saved_tensors
        made = BUFFERS.empty(tuple(logits.shape), logits.dtype)
        cross_entropy_cpu.gradients(made, logits, labels, rows, float(gradients[0]))
        return made, None, None
