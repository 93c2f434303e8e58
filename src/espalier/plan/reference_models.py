"""Decoders as other systems train them, so that their published measurements can be compared with a plan. No torch.

Activations: Korthikanti et al. (arXiv 2205.05198, equations 1-5) with Buff's terms for SwiGLU (arXiv 2401.09149); mixed
precision after ZeRO (arXiv 1910.02054): 2 bytes of parameters, 2 of gradients, 12 of fp32 master and two moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from espalier.plan.axes.sharding import StateBytes
from espalier.plan.request import Request, TrainingSystem
from espalier.recipe.cost import VALUE_BYTES, Anatomy, Cut, Number, Product, Profile, Terms, Work
from espalier.recipe.decoder_shapes import DecoderSizes

MIXED = StateBytes(2, 2, 12)
MEGATRON = StateBytes(2, 4, 12)
"""Megatron-LM sums gradients in fp32."""
FULL = StateBytes(4, 4, 8)
DOUBLE = StateBytes(8, 8, 16)
FOREACH = 4
"""Bytes per parameter of an update by torch's foreach AdamW beside its states: the roots of the second moments, in a
list. Fused, 8-bit and one-by-one updates have a tensor's at most, 0."""
LOSSES = {"plain": 3.0, "parallel": 2.0, "fused": 0.5, "chunked": 3 / 8}
"""fp32 values of each logit while backward works on the loss: `plain`, the log-softmax and two gradients; `parallel`
(Megatron-LM), a softmax that was computed in place and its gradient; `fused`, a 16-bit gradient; `chunked`, all of an
eighth at a time, and no logits are kept."""


EAGER = 2.5
"""Memory traffic of norms, positions and activations as chains of operations, partly in fp32, over fused kernels'.
Assumed."""
OPERATIONS = 45.0
"""Operations that a block's eager forward pass issues in such systems, biases and dropouts included. Assumed."""


@dataclass(frozen=True)
class ReferenceDecoder:
    """A published decoder and how its system computes it.

    `gated`: SwiGLU's three matrices instead of two. `fused`: attention that never writes its scores (FlashAttention).
    `sequence_parallel`: tensor ranks share the tokens between matrices. `keeps_shards`: of the inputs they gather they
    keep their shares only, as Megatron-LM does (arXiv 2205.05198, section 4.2.2). `eager`: norms, positions and
    activations are chains of PyTorch operations (as in Llama's code) instead of fused kernels (as in Megatron-LM's).
    `loss`: one of `LOSSES`; empty: `parallel` where ranks share matrices, else `plain`.
    """

    size: DecoderSizes
    sequence: int
    gated: bool = True
    fused: bool = True
    sequence_parallel: bool = True
    keeps_shards: bool = True
    eager: bool = False
    loss: str = ""

    @property
    def layer_parameters(self) -> int:
        """Of one block: attention, feed-forward, two norms (of a GPT with biases, which are not counted)."""
        size = self.size
        matrices = 3 if self.gated else 2
        feed = matrices * size.width * size.feed_forward * size.experts
        return 2 * size.width * (size.width + size.kv_width) + feed + 2 * size.width

    @property
    def outside(self) -> int:
        """Embedding, head unless tied, last norm."""
        return (1 if self.size.tied else 2) * self.size.vocabulary * self.size.width + self.size.width

    def anatomy(self, micro_batch: Any, recompute: str, precision: str, cut: Cut) -> Anatomy:
        """Operations and bytes of one micro-batch on one rank."""
        size, tensor = self.size, cut.tensor
        tokens = micro_batch * self.sequence / cut.sequence
        value = VALUE_BYTES.get(precision, 2)
        inner, rows = size.feed_forward / tensor, tokens * size.active
        up = Product(rows, size.width, inner, 2 if self.gated else 1)
        projections = (
            Product(tokens, size.width, (size.width + 2 * size.kv_width) / tensor),
            Product(tokens, size.width / tensor, size.width),
        )
        moved, scores = self._moved(value, cut)
        core = 2.0 * tokens * self.sequence * size.width / tensor * (1 if self.fused else 2)
        products = (*projections, up, Product(rows, inner, size.width))
        linear = sum(product.flops for product in products)
        # Selective: with written scores only the core is done again; with FlashAttention every other product.
        selective = linear / 2 if self.fused else core
        again = {"none": 0.0 * linear, "selective": selective, "block": linear + core}[recompute] / (linear + core)
        saved = self._saved(value, cut)
        layer = Work(
            products=products,
            attention=core,
            moved=tokens * (moved + scores),
            saved=tokens * saved[recompute],
            transient=tokens * (saved["none"] - saved[recompute] if recompute != "none" else 0.0),
            again=again,
            samples=micro_batch,
            tokens=tokens,
            issued=OPERATIONS,
            moved_again=scores / (moved + scores) if recompute == "selective" and not self.fused else None,
        )
        return Anatomy(size.layers, layer, self._rest(micro_batch, tokens, value, tensor))

    def _rest(self, micro_batch: Any, tokens: Number, value: int, tensor: Number) -> Work:
        size = self.size
        logits = tokens * size.vocabulary / tensor
        stream = tokens * size.width * value
        return Work(
            products=(Product(tokens, size.width, size.vocabulary / tensor),),
            attention=0.0 * tokens,
            moved=4 * stream + logits * (value + 2 * 4),
            saved=2 * stream + logits * value * (self.loss != "chunked"),
            transient=logits * max(4, value) * self._loss(tensor),
            again=0.0 * tokens,
            samples=micro_batch,
            tokens=tokens,
        )

    def _loss(self, tensor: Number) -> Number:
        """Full-precision values of each logit that its loss needs."""
        return LOSSES[self.loss] if self.loss else np.where(np.asarray(tensor) > 1, LOSSES["parallel"], LOSSES["plain"])

    def _saved(self, value: int, cut: Cut) -> Terms:
        """Bytes per token that one layer keeps, by recomputation."""
        size, tensor = self.size, cut.tensor
        scale, width, kv = value / 2, size.width, size.kv_width
        inputs = 4 * width  # of both products that are cut by columns
        shared = 4 * width  # of both norms
        if self.gated:
            inside = (2 * (width + 2 * kv) + 4 * width) + size.active * 8 * size.feed_forward
            dropout = 0
        else:
            inside = 2 * (width + 2 * kv) + 2 * width + 4 * size.feed_forward
            dropout = 2 * width
        scores = 0.0 if self.fused else 5.0 * size.heads * self.sequence
        split = tensor if self.sequence_parallel else 1
        whole = inputs / (1 if cut.gathered and not self.keeps_shards else split)
        linear = scale * (whole + (shared + dropout) / split + inside / tensor)
        everything = linear + scale * scores / tensor
        block = scale * 2 * width / split
        half = scale * (4 * width / split + (width + 2 * kv + width + 2 * size.feed_forward) / tensor)
        return {"none": everything, "selective": half if self.fused else linear, "block": block}

    def _moved(self, value: int, cut: Cut) -> tuple[Number, Number]:
        """Bytes per token that a layer's forward pass reads and writes: outside products and the attention core, and
        in the core where it writes its scores."""
        size, tensor = self.size, cut.tensor
        split = tensor if self.sequence_parallel else 1
        stream = 14 * size.width * value / split  # two norms, two residuals, dropouts
        turned = 4 * (size.width + size.kv_width) * value / tensor
        feed = (5 if self.gated else 3) * size.active * size.feed_forward * value / tensor
        # scale, mask, softmax and dropout of the written scores
        scores = 0.0 if self.fused else 4.0 * size.heads * self.sequence * value / tensor
        return (EAGER if self.eager else 1.0) * (stream + turned + feed), scores

    def request(self, samples: int, precision: str, **more: Any) -> Request:
        """The planner's request for a step of `samples` samples; `more`: see `Request.changed`."""
        size = self.size
        parameters = size.layers * self.layer_parameters + self.outside
        profile = Profile(
            parameters=parameters,
            trainable=parameters,
            tensors=10 * size.layers + 3,
            global_batch=samples,
            tokens_per_sample=float(self.sequence),
            anatomy=self.anatomy,
            layers=size.layers,
            outside=self.outside,
            tables=1 if size.tied else 2,
            heads=size.heads,
            kv_heads=size.kv_heads,
            width=size.width,
            kv_width=size.kv_width,
        )
        system = TrainingSystem(
            storage={"fp32": FULL, "tf32": FULL, "fp64": DOUBLE}.get(precision, MIXED),
            temporaries=FOREACH,
            fsdp=True,
            sequence_parallel=self.sequence_parallel,
            headroom=False,
        )
        return Request(profile=profile, system=system).changed(precision=precision, **more)
