"""Sums over a whole graph on a GPU: by gathered messages or by torch.sparse, whichever was measured to be faster."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from espalier.graph.networks import base
from espalier.graph.networks.base import MessageBlock
from espalier.kernels import accelerator
from espalier.recipe import cache_dir
from espalier.sparse import CSR

SMALL = 1 << 20
"""Edges times columns below which a product is a matter of microseconds, whatever the order or form."""
MOST = 1 << 31
"""Edges from which on torch.sparse's offsets of int32 do not suffice."""
BOTH_WAYS = "y = form(x); torch.autograd.grad(y, x, y.detach())"
TURNS = 3
"""Timed runs of each form, after two that are not counted."""
SENTENCE = (
    "Format: CSR; messages are gathered, or from a million edges times columns on summed by torch.sparse where that is "
    "measured to be faster on the GPU; steps are priced as one pass over the edges (CBM's kernels are for processors)."
)
"""What a plan says of it."""


def product(block: MessageBlock, rows: Tensor, start: Tensor | None, adjacency: CSR) -> Tensor:
    """See `base.aggregate`; `adjacency` is the block as a matrix."""
    width = rows.shape[1]
    form = "gathered"
    if block.edges * width >= SMALL and block.edges < MOST:
        form = block.forms.get(f"fastest of {width}", lambda: fastest(block, rows, adjacency))
    if form == "gathered":
        return base.aggregate(block, rows, start)
    sums: Tensor = TorchProduct.apply(adjacency, rows)
    return sums if start is None else sums + start


class TorchProduct(torch.autograd.Function):
    """adjacency·rows by torch.sparse, differentiable in `rows`."""

    @staticmethod
    def forward(ctx: Any, adjacency: CSR, rows: Tensor) -> Tensor:
        ctx.adjacency = adjacency
        weights = adjacency.weights(rows.dtype)
        values = rows.new_ones(adjacency.entries) if weights is None else weights
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            arrays = adjacency.indptr.int(), adjacency.indices, values
            return torch.sparse_csr_tensor(*arrays, adjacency.shape, check_invariants=False) @ rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, TorchProduct.apply(ctx.adjacency.transposed, gradients[0])


def fastest(block: MessageBlock, rows: Tensor, adjacency: CSR) -> str:
    """The name of the form that takes least, forward and backward, for rows such as these.

    Seconds are kept in the cache, by device, torch, sizes and dtype: a run that is resumed takes the same form, and has
    the same bits.
    """
    device = accelerator.properties(rows.device).name if accelerator.is_on(rows) else "cpu"
    case = [device, torch.__version__, rows.dtype, rows.shape, block.targets, block.edges]
    place = cache_dir.cache_folder() / "products" / f"{cache_dir.hashed(case)}.json"
    seconds = cache_dir.table(place)
    if not seconds:
        forms = {"gathered": partial(base.aggregate, block), "torch.sparse": partial(TorchProduct.apply, adjacency)}
        with torch.enable_grad():
            known = {"torch": torch, "x": rows.detach().requires_grad_()}
            for name, form in forms.items():
                seconds[name] = Timer(BOTH_WAYS, globals={**known, "form": form}).timeit(TURNS).mean
        cache_dir.keep_made(place, lambda file: cache_dir.write_atomic(file, msgspec.json.encode(seconds)))
    return min(seconds, key=lambda name: seconds[name])
