"""What a mechanism costs: seconds, bytes held, bytes sent. The currency in which parts are compared.

Every number may be a NumPy array: one call then prices a whole grid of layouts. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

Number = Any  # float or numpy array of floats, broadcast together
Terms = Mapping[str, Number]
"""Amounts by what they are of."""

VALUE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a value that products read and write, by precision."""


@dataclass(frozen=True)
class Product:
    """A dense matrix product [rows, inner] x [inner, columns], done `count` times in one forward pass. `leaf`: its left
    side is data, which backward makes no gradient of; `frozen`: its right side has none, as it is not trained;
    `grouped`: some rows of it have other matrices than others, as of experts."""

    rows: Number
    inner: Number
    columns: Number
    count: Number = 1
    leaf: bool = False
    frozen: bool = False
    grouped: bool = False

    @property
    def flops(self) -> Number:
        """Multiplications and additions of all `count` products."""
        return 2.0 * self.rows * self.inner * self.columns * self.count


@dataclass(frozen=True)
class TokenChunks:
    """What of a `Work` need not be there for all tokens at once, and what it costs to compute some at a time.

    Attributes:
        size: bytes that are there for all tokens otherwise (logits, inner activations), once each.
        each: bytes that a token of a chunk takes.
        saved, transient: bytes that `Work` then has less of.
        sums: bytes held beside the chunk: gradients that chunks add to.
        moved: bytes read and written for each chunk, as `Work.moved`; again: in place of `Work.again`.
        divides: every product is one of the chunks.
    """

    size: Number
    each: Number
    saved: Number
    transient: Number
    sums: Number
    moved: Number
    again: Number
    divides: bool = False


@dataclass(frozen=True)
class Work:
    """What one micro-batch asks of a device, before the device is named.

    Attributes:
        products: dense products of the forward pass; the backward pass does each of them twice.
        attention: FLOPs of the attention core in the forward pass (causal: half of the square); backward 2.5 times.
        moved: bytes read and written in the forward pass by everything else (norms, elementwise, softmax of the head).
        saved: bytes of activations kept until backward.
        transient: further bytes at the worst moment (logits and their gradient).
        put_off: bytes kept where gradients of weights come later than those of inputs: both sides of their products.
        again: products and attention run once more in backward because of recomputation, as a share of forward (0..1).
        samples: samples (sequences) in the micro-batch; tokens: tokens (or nodes, rays) in it.
        issued: operations the host issues in an eager forward pass; 0 when not counted.
        moved_again: share of `moved` that recomputation repeats; None: as `again`.
        moved_back: bytes read and written in backward; None: twice those of forward.
        length, head_size: positions that attention sees, and the width of its heads; 0 where there is none.
        reading: seconds of a core in which the micro-batch is made, beside the step where a core is free.
        chunks: what is otherwise where it is computed some tokens at a time; None: it cannot be.
    """

    products: tuple[Product, ...]
    attention: Number
    moved: Number
    saved: Number
    transient: Number
    again: Number
    samples: Number
    tokens: Number
    issued: Number = 0.0
    moved_again: Number = None
    moved_back: Number = None
    put_off: Number = 0.0
    length: Number = 0
    head_size: Number = 0
    reading: Number = 0.0
    chunks: TokenChunks | None = None

    @property
    def forward_flops(self) -> Number:
        """FLOPs of one forward pass."""
        return sum((product.flops for product in self.products), 0.0) + self.attention

    @property
    def model_flops(self) -> Number:
        """FLOPs that count for MFU: forward and backward once, recomputation not counted (attention 2x in backward)."""
        return 3.0 * self.forward_flops - sum(product.flops for product in self.products if product.frozen)


@dataclass(frozen=True)
class Cut:
    """How one replica of a model is cut among ranks. Arrays allowed.

    Attributes:
        tensor: ranks that share every matrix by columns or rows (and the tokens between those matrices).
        sequence: ranks that share the tokens, each with whole matrices.
        gathered: the whole inputs of matrices cut by columns are kept for backward (Megatron's sequence parallelism,
            arXiv 2205.05198); False: only each rank's share, gathered once more in backward (Buff's FSP).
        heads: of the ranks that share the tokens, those that share attention's heads: they exchange queries, keys,
            values and its output (DeepSpeed Ulysses).
    """

    tensor: Number = 1
    sequence: Number = 1
    gathered: bool = True
    heads: Number = 1


WHOLE = Cut()
"""Not cut at all."""


@dataclass(frozen=True)
class Anatomy:
    """The work of one micro-batch on one rank, by where it may be cut: `layers` equal layers, and everything else."""

    layers: int
    layer: Work
    rest: Work
    """Embedding, last norm, head and loss."""

    @property
    def whole(self) -> Work:
        """The work of a rank that has all layers."""
        layer, rest, layers = self.layer, self.rest, self.layers
        forward = layers * layer.forward_flops + rest.forward_flops
        repeated = layers * layer.again * layer.forward_flops + rest.again * rest.forward_flops
        return Work(
            products=(*(replace(product, count=product.count * layers) for product in layer.products), *rest.products),
            attention=layers * layer.attention + rest.attention,
            moved=layers * layer.moved + rest.moved,
            saved=layers * layer.saved + rest.saved,
            transient=_larger(layer.transient, rest.transient),
            again=repeated / forward,
            samples=rest.samples,
            tokens=rest.tokens,
            issued=layers * layer.issued + rest.issued,
            length=layer.length,
            head_size=layer.head_size,
        )


def _larger(left: Number, right: Number) -> Number:
    if isinstance(left, int | float) and isinstance(right, int | float):
        return max(left, right)
    import numpy as np

    return np.maximum(left, right)


@dataclass(frozen=True)
class Cost:
    """Costs of one part of one step on one rank, by name of the part.

    Attributes:
        seconds: part of the step (`forward`, `backward`, `all_reduce` …) to seconds.
        memory_bytes: kind of memory (`params`, `grads`, `optimizer`, `activations` …) to bytes.
        sent: traffic class (`gradients`, `params` …) to payload bytes that leave the rank.
        sources: any of those names to where its number comes from.
    """

    seconds: Terms = field(default_factory=dict)
    memory_bytes: Terms = field(default_factory=dict)
    sent: Terms = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            _sum(self.seconds, other.seconds),
            _sum(self.memory_bytes, other.memory_bytes),
            _sum(self.sent, other.sent),
            {**self.sources, **other.sources},
        )

    def times(self, factor: Number) -> Cost:
        """The cost of doing the same `factor` times: seconds and bytes sent grow, bytes held do not."""
        return Cost(_scale(self.seconds, factor), self.memory_bytes, _scale(self.sent, factor), self.sources)


def in_turn(*rates: float) -> float:
    """Bytes/s of stages that one thread does one after the other, each at its own rate."""
    seconds = sum(1 / rate for rate in rates)
    return 1 / seconds if seconds else float("inf")


def _sum(left: Terms, right: Terms) -> Terms:
    return {key: left.get(key, 0.0) + right.get(key, 0.0) for key in (*left, *(k for k in right if k not in left))}


def _scale(terms: Terms, factor: Number) -> Terms:
    return {key: value * factor for key, value in terms.items()}


def ring_bytes(operation: str, size: Number, ranks: Number) -> Number:
    """Payload bytes that leave one rank (of a broadcast: the root), the figure of the byte ledger.

    `operation`: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send` or `ring` (one step).
    """
    others = (ranks - 1) / ranks
    shares = {
        "all_reduce": 2 * others,
        "all_gather": others,
        "reduce_scatter": others,
        "all_to_all": others,
        "broadcast": ranks > 1,
        "send": 1,
        "ring": 1,
    }
    return size * shares[operation]


Carried = Callable[[str, Number, Number, Number, Number], Number]
"""(operation, bytes of the whole tensor, ranks, their distance, bytes of a value) -> bytes that leave a rank."""


def uncoded(operation: str, size: Number, ranks: Number, stride: Number, width: Number) -> Number:
    """What is `Carried` without a codec."""
    return ring_bytes(operation, size, ranks)


@dataclass(frozen=True)
class PartCost:
    """What a part of a task costs: a tower on the task's batch, or its head. See `parallel.workload.TaskNode`.

    Attributes:
        task, node: which; key: of both, `needs`: keys of the parts whose outputs it takes.
        operators: how many; the following are of one of them.
        tower: whose parameters it uses.
        rows: samples of the task's batch; whole: they cannot be divided.
        flops: forward and backward of one sample; launches: operations that are issued.
        parameters: bytes of them; saved, output: bytes of activations of one sample, kept for backward and handed on.
        seconds: measured, forward and backward on one thread: samples -> seconds; empty: not measured.
        forward: share of these that the forward pass takes; a third where it was not measured.
    """

    task: str
    node: str
    operators: int
    needs: tuple[str, ...]
    tower: str
    rows: int
    whole: bool = False
    flops: float = 0.0
    launches: int = 0
    parameters: float = 0.0
    saved: float = 0.0
    output: float = 0.0
    seconds: Mapping[int, float] = field(default_factory=dict)
    forward: float = 1 / 3

    @property
    def key(self) -> str:
        """Its name among the parts of all tasks."""
        return f"{self.task}.{self.node}"


@dataclass(frozen=True)
class Tally:
    """A model counted.

    Attributes:
        parameters, trainable: numbers of parameters; tensors: of trainable tensors.
        matrices: how many hidden matrices are trained, by (rows, columns).
        sizes: `plan.axes.flat_layout.Sized` of the trainable tensors, in the model's order, equal ones that follow one
            another as one with their count; empty: not known.
        untrained: the same of the frozen tensors of blocks, as they are stored.
        running: floating-point and whole numbers in buffers that every step moves.
    """

    parameters: int
    trainable: int
    tensors: int = 0
    matrices: Counter[tuple[int, int]] = field(default_factory=Counter)
    sizes: Sequence[Any] = ()
    untrained: Sequence[Any] = ()
    running: tuple[int, int] = (0, 0)

    @property
    def hidden(self) -> int:
        """Parameters of the hidden matrices, which Muon moves."""
        return sum(rows * columns * count for (rows, columns), count in self.matrices.items())

    def with_more(self, other: Tally, times: int) -> Tally:
        """This model grown `times` times by what `other` has beyond it."""
        return Tally(
            self.parameters + times * (other.parameters - self.parameters),
            self.trainable + times * (other.trainable - self.trainable),
            self.tensors + times * (other.tensors - self.tensors),
            Counter({s: self.matrices[s] + times * (n - self.matrices[s]) for s, n in other.matrices.items()}),
        )


class ExpertSizes(NamedTuple):
    """Experts of each layer: how many in total, how many each token has, and the parameters of all of a layer's.
    `tensors`: all of the model, as `plan.axes.flat_layout.Sized`, given how many ranks share its matrices; None: not
    known."""

    total: int = 0
    active: int = 0
    parameters: float = 0.0
    tensors: Callable[[int], Sequence[Any]] | None = None

    def on_rank(self, ranks: int) -> float:
        """Parameters of a layer's on the rank that holds most of them."""
        return self.parameters * -(-self.total // ranks) / self.total


@dataclass(frozen=True, kw_only=True)
class Profile(Tally):
    """What a step of a model on its data is made of.

    Attributes:
        global_batch: samples per step; tokens_per_sample: tokens (nodes, rays) in one.
        anatomy: (micro_batch, recompute, precision, cut) -> Anatomy; micro_batch and cut may hold NumPy arrays.
        layers: equal blocks of the model; outside: trainable parameters outside them, in `tables` tables (2: embedding
            and head).
        heads, kv_heads, width, kv_width: of a decoder; 0: a model that cannot be cut.
        remarks: what was decided of the data already, in sentences; on_gpus: those that are others on GPUs.
        tasks: trained together.
        tensor: ranks that share a module's matrices by its own plan, as pinned; the search takes no other number.
        loaded: bytes of libraries that only this kind of workload loads, in host memory.
        frozen: bytes of weights that are not trained and in no checkpoint; None: they are in it, as parameters are.
        facts: what single systems are to know, by their names in `plan.choice`.
        sparse: bytes of a step's gradients over those of the same encoded by `comm.sparse`; 1: few are zero.
    """

    global_batch: int
    tokens_per_sample: float
    anatomy: Callable[[Any, str, str, Cut], Anatomy]
    layers: int = 1
    outside: int = 0
    tables: int = 1
    heads: int = 0
    kv_heads: int = 0
    width: int = 0
    kv_width: int = 0
    remarks: Sequence[str] = ()
    on_gpus: Mapping[str, str] = field(default_factory=dict)
    tasks: int = 1
    tensor: int = 1
    loaded: int = 0
    frozen: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    sparse: float = 1.0
