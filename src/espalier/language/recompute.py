"""Activation recomputation: what a block's forward pass need not keep, because backward computes it again.

`block` keeps each block's input (Chen et al., arXiv 1604.06174). `selective` also keeps the attention core's output, the
one thing that is dear to compute and cheap to keep; Korthikanti et al. (arXiv 2205.05198) draw the line the other way
round, before fused attention kernels made its scores free to keep.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from espalier.language.cache import Past
from espalier.language.gpt import GPT, Through, Turn, plainly

_aten = torch.ops.aten
ATTENTION_CORES = [
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
"""What PyTorch's fused attention becomes on each device. Another `attend` is recomputed with the rest."""


def recompute(model: GPT, mode: str) -> None:
    """Sets how the blocks of `model` are kept for backward: `none`, `block` or `selective`. Gradients are equal."""
    model.through = _MODES[mode]


def _block(block: nn.Module, x: Tensor, turn: Turn, past: Past | None) -> Any:
    if not torch.is_grad_enabled():
        return plainly(block, x, turn, past)
    return checkpoint(block, x, turn, past, use_reentrant=False, preserve_rng_state=False)


def _selective(block: nn.Module, x: Tensor, turn: Turn, past: Past | None) -> Any:
    if not torch.is_grad_enabled():
        return plainly(block, x, turn, past)
    keep = partial(create_selective_checkpoint_contexts, ATTENTION_CORES)
    return checkpoint(block, x, turn, past, use_reentrant=False, preserve_rng_state=False, context_fn=keep)


_MODES: dict[str, Through] = {"none": plainly, "block": _block, "selective": _selective}
