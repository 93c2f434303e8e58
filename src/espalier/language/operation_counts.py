"""Operation counts of a decoder: FLOP and bytes of one micro-batch, counted from the code beside it. No torch.

Causal attention is counted as half of the square (PyTorch's own counter takes the whole). Bytes kept are those autograd
holds on the CPU in eager mode; PyTorch's fused GPU kernels keep the same. With bf16 the residual stream and the norms'
inputs stay fp32 (autocast); copies of the weights are not counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from espalier.recipe.cost import VALUE_BYTES, WHOLE, Anatomy, Cut, Number, Product, Terms, TokenChunks, Work
from espalier.recipe.decoder_shapes import DecoderSizes


@dataclass(frozen=True)
class DecoderLoad:
    """One micro-batch of a decoder on one rank; `micro_batch` (sequences) and `cut` may hold NumPy arrays."""

    size: DecoderSizes
    sequence: int
    micro_batch: Any
    recompute: str
    precision: str
    cut: Cut = WHOLE

    @property
    def tokens(self) -> Number:
        """Tokens of the micro-batch that this rank computes."""
        return self.micro_batch * self.sequence / self.cut.sequence

    @property
    def compute(self) -> int:
        """Bytes of a value that products read and write."""
        return VALUE_BYTES[self.precision]

    @property
    def whole(self) -> int:
        """Bytes of a value of the residual stream, the norms and the softmax."""
        return max(4, self.compute)


@dataclass(frozen=True)
class Feed:
    """The feed-forward part of one layer: its products, and those that recomputation repeats; bytes per token moved in
    forward, kept for backward, and held beyond that while backward works on it (before any cut). `matrices`:
    parameters, where each token goes through all of them; 0: it does not."""

    products: tuple[Product, ...]
    again: tuple[Product, ...]
    moved: int
    saved: int
    working: int
    matrices: int = 0


def decoder_work(setting: DecoderLoad, feed: Feed) -> Anatomy:
    """The work of a decoder with that feed-forward part."""
    size, tokens, whole, tensor = setting.size, setting.tokens, setting.whole, setting.cut.tensor
    attention_products = (
        Product(tokens, size.width, size.query_width / tensor),  # query
        Product(tokens, size.query_width / tensor, size.width),  # out
        Product(tokens, size.width, size.kv_width / tensor, 2),  # key, value
    )
    core = 2.0 * tokens * setting.sequence * size.query_width / tensor  # 2 products x 2 FLOPs, half of the square
    products = (*attention_products, *feed.products)
    forward = sum(product.flops for product in products) + core
    repeated = sum(product.flops for product in (*attention_products, *feed.again))
    again = {"none": 0.0 * forward, "selective": repeated, "block": repeated + core}[setting.recompute] / forward
    saved = _kept(setting, feed)
    norms = 5 * size.width * whole  # read for the scale; read, written; read, written with the weight
    residual = 2 * 3 * size.width * whole
    turns = 8 * (size.query_width + size.kv_width) * setting.compute  # a copy, then five passes over halves
    tail = (size.width + 1) * whole + size.width * setting.compute  # the last norm's input, scale and output
    # The worst moment is in the head (the log-softmax and two gradients of its size) or in the last layer, when the
    # head's share is gone, the stream's gradient has come, and what was not kept has been computed again.
    whole_input = size.width * setting.compute * (1 - 1 / tensor) * setting.cut.gathered  # of the head
    in_layer = saved["none"] - saved[setting.recompute] + (feed.working + size.width * whole - tail) / tensor
    sides = sum(product.rows * (product.inner + product.columns * product.count) for product in products)
    # Query, key and value have one input, and experts' answers are summed by no matrix.
    sides = sides - tokens * size.width * (1 + (size.experts > 1))
    layer = Work(
        products=products,
        attention=core,
        moved=tokens * (2 * norms + residual + turns + feed.moved) / tensor,
        saved=tokens * saved[setting.recompute],
        transient=tokens * (in_layer - whole_input),
        put_off=setting.compute * sides,
        again=again,
        samples=setting.micro_batch,
        tokens=tokens,
        length=setting.sequence,
        head_size=size.head_size,
        chunks=_feed_chunks(setting, feed, attention_products, core) if feed.matrices else None,
    )
    head = Product(tokens, size.width, size.vocabulary / tensor)
    rest = Work(
        products=(head,),
        attention=0.0 * tokens,
        moved=tokens * (7 * size.width * whole + 2 * size.vocabulary * whole) / tensor,  # norm, embedding, log-softmax
        saved=tokens * (tail / tensor + whole_input),
        transient=tokens * (3 * size.vocabulary * whole) / tensor,
        again=0.0 * tokens,
        samples=setting.micro_batch,
        tokens=tokens,
        chunks=_loss_chunks(setting),
    )
    return Anatomy(size.layers, layer, rest)


def _feed_chunks(setting: DecoderLoad, feed: Feed, attention: tuple[Product, ...], core: Number) -> TokenChunks:
    """Of a layer: its feed-forward keeps its input, and is computed again in backward."""
    tensor = setting.cut.tensor
    tokens = setting.tokens
    mode = setting.recompute
    whole = feed.saved * tokens / tensor
    fed = sum(product.flops for product in feed.products)
    before = sum(product.flops for product in attention)
    again = fed + {"none": 0.0, "selective": before, "block": before + core}[mode]
    whole_layer = mode == "none"
    return TokenChunks(
        size=whole + feed.working * tokens / tensor,
        each=(feed.saved + feed.working) / tensor,
        saved=whole_layer * whole,
        transient=(not whole_layer) * whole + feed.working * tokens / tensor,
        # Gradients of the input, of all matrices, and of one of three as a chunk adds it.
        sums=tokens * setting.size.width * setting.compute + feed.matrices * setting.whole * 4 / 3 / tensor,
        moved=feed.matrices * setting.whole / tensor,  # backward adds to the sums: two of three passes
        again=again / (before + core + fed),
    )


def _loss_chunks(setting: DecoderLoad) -> TokenChunks:
    """Of the head: its gradients are made with the logits, chunk by chunk."""
    size = setting.size
    tokens = setting.tokens
    tensor = setting.cut.tensor
    logits = size.vocabulary * setting.whole / tensor
    words = size.vocabulary * size.width / tensor
    low = setting.compute % setting.whole  # as products give and take them
    copies = logits * (size.logit_cap is not None) + size.vocabulary * low / tensor
    return TokenChunks(
        size=tokens * logits,
        each=logits + copies,
        saved=0.0 * tokens,
        transient=3 * tokens * logits,
        sums=words * setting.whole + tokens * size.width * setting.compute,
        moved=words * 2 * (setting.whole + low) / 3,  # the head's gradient, of three passes
        again=0.0 * tokens,
        divides=True,
    )


def _kept(setting: DecoderLoad, feed: Feed) -> Terms:
    """Bytes per token that one layer keeps in each mode of recomputation."""
    size, whole, compute, tensor = setting.size, setting.whole, setting.compute, setting.cut.tensor
    norms = 2 * ((size.width + 1) * whole + size.width * compute)  # input, scale, output of both
    core = size.query_width * compute + size.heads * whole  # its output and log-sum-exp
    everything = norms + (size.query_width + 2 * size.kv_width) * compute + core + feed.saved
    gathered = 2 * size.width * compute * (1 - 1 / tensor) if setting.cut.gathered else 0.0
    # Ranks that share heads keep attention's output as they have computed it and as they got it back, and copies of
    # keys and values where these are fewer than ranks.
    heads = setting.cut.heads
    kv_heads = size.kv_heads / tensor
    copies = (heads > kv_heads) * (heads - kv_heads) * size.head_size
    exchanged = (heads > 1) * (size.width / tensor + 2 * copies) * compute
    return {
        "none": everything / tensor + gathered + exchanged,
        "selective": (size.width * whole + core) / tensor,
        "block": size.width * whole / tensor,
    }
