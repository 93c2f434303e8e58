"""Decoders as other systems train them, so that their published measurements can be compared with a plan. No torch.

Activations: Korthikanti et al. (arXiv 2205.05198, equations 1-5) with Buff's terms for SwiGLU (arXiv 2401.09149); mixed
precision after ZeRO (arXiv 1910.02054): 2 bytes of parameters, 2 of gradients, 12 of fp32 master and two moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from espalier.plan.axes.sharding import StateBytes
from espalier.plan.request import Request, TrainingSystem
from espalier.recipe.cost import VALUE_BYTES, Anatomy, Cut, ExpertSizes, Number, Product, Profile, Terms, Work
from espalier.recipe.decoder_shapes import DecoderSizes

MIXED = StateBytes(2, 2, 12)
MEGATRON = StateBytes(2, 4, 12)
"""Megatron-LM sums gradients in fp32."""
FULL = StateBytes(4, 4, 8)
DOUBLE = StateBytes(8, 8, 16)
FOREACH = 4
"""Bytes per parameter of an update by torch's foreach AdamW beside its states: the roots of the second moments, in a
list. Fused, 8-bit and one-by-one updates have a tensor's at most, 0."""
LOSSES = {"plain": 3.0, "parallel": 2.0, "fused": 0.5, "chunked": 3 / 8, "fused-chunked": 1 / 16}
"""fp32 values of each logit while backward works on the loss: `plain`, the log-softmax and two gradients; `parallel`
(Megatron-LM), a softmax that was computed in place and its gradient; `fused`, a 16-bit gradient; `chunked`, all of an
eighth at a time, and no logits are kept; `fused-chunked`, a 16-bit gradient of an eighth (Liger Kernel, arXiv
2410.10989)."""


EAGER = 2.5
"""Memory traffic of norms, positions and activations as chains of operations, partly in fp32, over fused kernels'.
Assumed."""
OPERATIONS = 45.0
"""Operations that a block's eager forward pass issues in such systems, biases and dropouts included. Assumed."""
ROUTING = 30.0
"""More of them where tokens go to experts: gates, choices, counts, permutations, exchanges. Assumed."""
ACTIVATION = {"autocast": 16, "fp32": 20}
"""Bytes per column that a GELU of PyTorch operations keeps, by the bytes of a value: its input, the tangent and 1 + it
in 32 bits (autocast computes powers so), half the input, and its answer."""
SOFTMAX = {"autocast": 6, "fp32": 4}
"""Bytes per written score of PyTorch's softmax: its answer in fp32, and in 16 bits for the next product."""
FUSIONS = 0.79
"""Share of those that torch.compile's fusions leave, of GPTs up to the first batch that did not fit on five GPUs."""


class LatentAttention(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), in columns: of compressed `queries` (0: they are
    not) and of compressed keys and values (`latent`); of each head's keys without (`plain`) and with positions
    (`rotary`), and of its values."""

    queries: int
    latent: int
    plain: int
    rotary: int
    value: int


class LowRank(NamedTuple):
    """Adapters of a rank beside `targets` (arXiv 2106.09685); frozen matrices take so many bytes a parameter."""

    rank: int
    targets: tuple[str, ...]
    frozen: float

    @property
    def coded(self) -> bool:
        """Frozen matrices are codes. bitsandbytes then keeps the input of every product (0.41 to 0.43, `MatMul4Bit`
        and `MatMul8bitLt`), and makes a matrix whole in fp16, of which a copy in bf16 is multiplied."""
        return self.frozen < VALUE_BYTES["bf16"]


@dataclass(frozen=True)
class ReferenceDecoder:
    """A published decoder and how its system computes it.

    `gated`: SwiGLU's three matrices instead of two. `fused`: attention that never writes its scores (FlashAttention).
    `sequence_parallel`: tensor ranks share the tokens between matrices. `keeps_shards`: of the inputs they gather they
    keep their shares only, as Megatron-LM does (arXiv 2205.05198, section 4.2.2). `rotates`: queries and keys with
    positions are kept beside the product that they were cut from. `eager`: norms, positions and
    activations are chains of PyTorch operations (as in Llama's code) instead of fused kernels (as in Megatron-LM's).
    `operations`: what chains of them keep: `kernels` as Megatron-LM's, with its dropout; `fused` ones, where a SwiGLU
    keeps its inputs and its answer alone; or PyTorch's, `compiled` or not, where a GPT writes its scores. `loss`: of
    `LOSSES`; empty: `parallel` where ranks share matrices, else `plain`. `spread`: ranks that share the experts.
    `graphs`: all operations but those of routing are issued as CUDA graphs.
    """

    size: DecoderSizes
    sequence: int
    gated: bool = True
    fused: bool = True
    sequence_parallel: bool = True
    keeps_shards: bool = True
    rotates: bool = False
    eager: bool = False
    operations: Literal["kernels", "fused", "eager", "compiled"] = "kernels"
    loss: str = ""
    latent: LatentAttention | None = None
    adapters: LowRank | None = None
    spread: int = 1
    graphs: bool = False

    @property
    def merged(self) -> bool:
        """Whether its kernels do a residual with its norm, an activation with its product, and a loss in one pass."""
        return self.loss in ("fused", "chunked", "fused-chunked")

    @property
    def layer_parameters(self) -> int:
        """Of one block: attention, feed-forward, two norms (of a GPT with biases, which are not counted)."""
        return sum(rows * columns * count for rows, columns, count, _ in self.matrices) + 2 * self.size.width

    @property
    def expert_parameters(self) -> int:
        """Of all experts of a block."""
        size = self.size
        return (3 if self.gated else 2) * size.width * size.feed_forward * size.experts

    @property
    def adapter_parameters(self) -> int:
        """Of a block's adapters."""
        low = self.adapters
        size = self.size
        up = dict.fromkeys(("gate", "up") if self.gated else ("up",), (size.width, size.feed_forward))
        ends: dict[str, tuple[int, int]] = {
            "query": (size.width, self._heads_columns[0]), "key": (size.width, size.kv_width),
            "value": (size.width, size.kv_width), "out": (self._heads_columns[1], size.width),
            "down": (size.feed_forward, size.width), **up,
        }  # fmt: skip
        return 0 if low is None else sum(low.rank * sum(ends[target]) for target in low.targets if target in ends)

    @property
    def _heads_columns(self) -> tuple[int, int]:
        """Columns of a token's queries, and of what attention answers."""
        size = self.size
        latent = self.latent
        if latent is None:
            return size.query_width, size.query_width
        return size.heads * (latent.plain + latent.rotary), size.heads * latent.value

    @property
    def matrices(self) -> list[tuple[int, int, int, str]]:
        """A block's matrices: rows, columns, how many, and what they are part of."""
        size, latent, (queries, answers) = self.size, self.latent, self._heads_columns
        width = size.width
        up = 2 if self.gated else 1
        inputs = [(width, queries + 2 * size.kv_width, 1, "attention")]
        if latent is not None:
            compressed = latent.queries or queries
            inputs = [(width, compressed + latent.latent + latent.rotary, 1, "attention")]
            inputs += [(latent.queries, queries, 1, "attention")] * (latent.queries > 0)
            inputs += [(latent.latent, size.heads * (latent.plain + latent.value), 1, "attention")]
        shared = [(width, size.shared, up, "shared up"), (size.shared, width, 1, "shared down")] * (size.shared > 0)
        experts = (width, size.feed_forward, up * size.experts, "up"), (size.feed_forward, width, size.experts, "down")
        return [*inputs, (answers, width, 1, "out"), *experts, *shared]

    @property
    def outside(self) -> int:
        """Embedding, head unless tied, last norm."""
        return (1 if self.size.tied else 2) * self.size.vocabulary * self.size.width + self.size.width

    def anatomy(self, micro_batch: Any, recompute: str, precision: str, cut: Cut) -> Anatomy:
        """Operations and bytes of one micro-batch on one rank."""
        size = self.size
        tensor = cut.tensor
        tokens = micro_batch * self.sequence / cut.sequence
        value = VALUE_BYTES.get(precision, 2)
        products = tuple(self._product(matrix, tokens, tensor) for matrix in self.matrices)
        moved, scores, back = self._moved(value, cut)
        core = 1.0 * tokens * self.sequence * sum(self._heads_columns) / tensor * (1 if self.fused else 2)
        linear = sum(product.flops for product in products)
        # Selective: with written scores only the core is done again; with FlashAttention every other product.
        selective = linear / 2 if self.fused else core
        again = {"none": 0.0 * linear, "selective": selective, "block": linear + core}[recompute] / (linear + core)
        saved = self._saved(value, cut)
        copies = 0.0
        if self.adapters is not None and self.adapters.coded:
            copies = 2 * value * max(rows * columns for rows, columns, *_ in self.matrices) / tensor
        layer = Work(
            products=products,
            attention=core,
            moved=tokens * (moved + scores),
            moved_back=tokens * back,
            saved=tokens * saved[recompute],
            transient=tokens * (saved["none"] - saved[recompute] if recompute != "none" else 0.0) + copies,
            again=again,
            samples=micro_batch,
            tokens=tokens,
            issued=OPERATIONS * (not self.graphs) + ROUTING * (size.experts > 1),
            length=self.sequence,
            head_size=size.head_size,
            moved_again=scores / (moved + scores) if recompute == "selective" and not self.fused else None,
        )
        return Anatomy(size.layers, layer, self._rest(micro_batch, tokens, value, tensor))

    def _product(self, matrix: tuple[int, int, int, str], tokens: Number, tensor: Number) -> Product:
        """What a matrix multiplies. A frozen one has one gradient, not two."""
        rows, columns, count, part = matrix
        frozen = self.adapters is not None
        size = self.size
        active = tokens
        grouped = size.experts > 1 and part in ("up", "down")
        if grouped:
            active = tokens * (size.active * self.spread / size.experts)
            count = count // self.spread
        cut = (tensor, 1) if part in ("out", "down", "shared down") else (1, tensor)
        return Product(active, rows / cut[0], columns / cut[1], count, leaf=frozen, grouped=grouped)

    def _rest(self, micro_batch: Any, tokens: Number, value: int, tensor: Number) -> Work:
        size = self.size
        logits = tokens * size.vocabulary / tensor
        stream = tokens * size.width * value
        return Work(
            products=(Product(tokens, size.width, size.vocabulary / tensor, leaf=self.adapters is not None),),
            attention=0.0 * tokens,
            moved=4 * stream + logits * (value if self.merged else value + 2 * 4),
            saved=2 * stream + logits * value * (not self.loss.endswith("chunked")),
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
        size = self.size
        tensor = cut.tensor
        scale = value / 2
        width = size.width
        split = tensor if self.sequence_parallel else 1
        queries, answers = self._heads_columns
        cores = self._core_columns
        feed = size.active * size.feed_forward + size.shared
        inputs = 4 * width  # of both products that are cut by columns
        shared = 4 * width  # of both norms
        chained = 2 * (self.gated and self.operations != "fused")
        inside = 2 * cores + (2 + chained) * answers + (4 + 2 * self.gated + chained) * feed
        inside += 2 * (queries + size.kv_width) * self.rotates
        dropout = 2 * width * (self.operations == "kernels" and not self.gated)
        if self.adapters is not None and not self.adapters.coded:
            inputs = inputs - self._unused(inputs)
            inside = inside - 2 * feed * ("down" not in self.adapters.targets)
        whole = inputs / (1 if cut.gathered and not self.keeps_shards else split)
        linear = scale * (whole + (shared + dropout) / split + inside / tensor)
        scores = 0.0 if self.fused else scale * 5.0 * size.heads * self.sequence / tensor
        if self.operations in ("eager", "compiled") and not (self.fused or self.gated):
            left = FUSIONS if self.operations == "compiled" else 1.0
            # Under autocast three products and one each round their own copy of a norm's answer.
            precision, casts = ("autocast", 4) if value < 4 else ("fp32", 2)
            chains = (8 + casts * value) * width + value * (cores + answers) + ACTIVATION[precision] * feed
            linear = left * chains / tensor
            scores = left * SOFTMAX[precision] * size.heads * self.sequence / tensor
        block = scale * 2 * width / split
        half = scale * (4 * width / split + (cores + answers + 2 * feed) / tensor)
        return {"none": linear + scores, "selective": half if self.fused else linear, "block": block}

    def _unused(self, inputs: int) -> int:
        """Bytes per token of inputs of frozen products that no adapter needs either."""
        assert self.adapters is not None
        targets = self.adapters.targets
        return inputs // 2 * (2 - bool({"query", "key", "value"} & {*targets}) - bool({"gate", "up"} & {*targets}))

    @property
    def _core_columns(self) -> int:
        """Columns of a token's queries, keys and values, and of what they are made from."""
        size = self.size
        latent = self.latent
        queries, answers = self._heads_columns
        if latent is None:
            return queries + 2 * size.kv_width
        return 2 * queries + answers + 2 * (latent.queries + latent.latent + latent.rotary)

    def _moved(self, value: int, cut: Cut) -> tuple[Number, Number, Number]:
        """Bytes per token that a layer reads and writes: in forward outside products and the attention core, and in the
        core where it writes its scores; in backward."""
        size = self.size
        tensor = cut.tensor
        split = tensor if self.sequence_parallel else 1
        queries, answers = self._heads_columns
        feed = (size.active * size.feed_forward + size.shared) * value / tensor
        scores = 0.0 if self.fused else size.heads * self.sequence / tensor
        if self.operations == "kernels" and not self.gated:
            # Megatron-LM's: norms, residuals with bias and dropout, whose masks are bytes, answers of heads together,
            # GELU with bias; softmax with mask, dropout. Backward sums gradients of biases too.
            moved = (10 * value + 2) * size.width / split + 2 * value * answers / tensor + 2 * feed
            columns = 2 * answers + 3 * (queries + 2 * size.kv_width)
            back = (22 * value + 2) * size.width / split + value * columns / tensor + 4 * feed
            return moved, (4 * value + 1) * scores, back + (5 * value + 1) * scores
        stream = (10 if self.merged else 14) * size.width * value / split  # two norms, two residuals, dropouts
        turned = 4 * (queries + size.kv_width) * value / tensor
        moved = (EAGER if self.eager else 1.0) * (stream + turned + (5 - 2 * self.merged if self.gated else 2) * feed)
        scores = 4.0 * value * scores  # scale, mask, softmax and dropout
        # A token is copied for each of its experts, those of all ranks are sorted, and the same way back.
        permuted = (2 + 6 * size.active) * size.width * value / split * (size.experts > 1)
        return moved + permuted, scores, 2 * (moved + scores) + permuted

    def request(self, samples: int, precision: str, **more: Any) -> Request:
        """The planner's request for a step of `samples` samples; `more`: see `Request.changed`."""
        size = self.size
        adapters = self.adapters
        weights = size.layers * self.layer_parameters + self.outside
        trained = weights
        outside = self.outside
        frozen = None
        if adapters is not None:
            trained = size.layers * self.adapter_parameters
            outside = 0
            tables = self.outside * min(VALUE_BYTES[precision], max(2.0, adapters.frozen))
            frozen = int(size.layers * self.layer_parameters * adapters.frozen + tables)
        profile = Profile(
            parameters=weights if frozen is None else weights + trained,
            trainable=trained,
            tensors=10 * size.layers + 3,
            global_batch=samples,
            tokens_per_sample=float(self.sequence),
            anatomy=self.anatomy,
            layers=size.layers,
            outside=outside,
            tables=1 if size.tied else 2,
            heads=size.heads,
            kv_heads=size.kv_heads,
            width=size.width,
            kv_width=size.kv_width if self.latent is None else sum(self._heads_columns) // 2,
            frozen=frozen,
            facts={"expert_parallel": ExpertSizes(size.experts, size.active, self.expert_parameters)},
        )
        system = TrainingSystem(
            storage={"fp32": FULL, "tf32": FULL, "fp64": DOUBLE}.get(precision, MIXED),
            temporaries=FOREACH,
            fsdp=True,
            adds=False,
            sequence_parallel=self.sequence_parallel,
            headroom=False,
        )
        return Request(profile=profile, system=system).changed(precision=precision, **more)
