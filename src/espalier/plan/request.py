"""What is asked of a planner: the model's sizes, one step's batch, and what is pinned. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from espalier.plan.axes.sharding import StateBytes
from espalier.plan.base import RESIDENT, Exchange, Offload, Plan
from espalier.plan.calibration_factors import PLAIN, CostFactors
from espalier.plan.compose import Refusal
from espalier.recipe import EveryStep, Pin, Recipe, Sync
from espalier.recipe.cost import WHOLE, ModelCosts

if TYPE_CHECKING:
    from espalier.plan.axes.flat_layout import Sized

Kernel = Literal["auto", "flash", "efficient", "written"]
"""An attention kernel: the best the device has; FlashAttention; another that writes no scores; one that does."""


AUTO = "auto"
"""A precision that is derived: see `plan.precision`."""


class Crossing(NamedTuple):
    """How one class of traffic crosses the links of one level: see `mechanisms.codecs.hybrid_compression`.

    Attributes:
        traffic, level, codec: as in a plan's `Exchange`.
        ratio: float32 bytes over encoded bytes.
        encode, decode: float32 bytes/s.
        lossy: what is lost is kept beside the gradients.
    """

    traffic: str
    level: Literal["inside", "between", "all"]
    codec: str
    ratio: float = 1.0
    encode: float = float("inf")
    decode: float = float("inf")
    lossy: bool = False


def exchanges(crossings: Iterable[Crossing]) -> tuple[Exchange, ...]:
    """Gradients, and whatever else is encoded."""
    found = tuple(Exchange(traffic=one.traffic, level=one.level, codec=one.codec) for one in crossings)
    if any(one.traffic == "gradients" for one in found):
        return found
    return (Exchange(traffic="gradients"), *found)


@dataclass(frozen=True, kw_only=True)
class Request(ModelCosts):
    """A model, a batch, and what was decided already.

    Attributes:
        parameters, trainable: numbers of parameters; tensors: of trainable tensors. What is not told here is of
            `ModelCosts`.
        matrix_parameters: parameters that Muon moves; matrix_shapes: (rows, columns, count) of them.
        recompute: the mode asked for, None to leave it to the planner.
        bucket_bytes: gradients exchanged at once; None: derived from the links (`CostInputs.bucket_bytes`).
        overlap: gradients are exchanged during backward; False: after it.
        kernel: of attention.
        experts: of each layer, of which each token has `active`; 0: none. expert_parameters: of all of a layer's.
        ep: ranks over which they are spread, as chosen; 0: not chosen. expert_rows: codec of rows on their way there.
        storage: bytes per parameter; None: what Espalier's own trainer keeps.
        temporaries: bytes per parameter that the optimizer step needs for a moment (torch's foreach AdamW: 4).
        fsdp: sharded parameters are PyTorch's FSDP's: fp32 masters and gradients, and in pipelines stages that stay
            gathered from the first micro-batch to the last.
        memory: bytes a rank may hold, where the user says less than the device has.
        redundancy: ranks that must hold each shard of the optimizer's state.
        max_devices: devices to use at most.
        headroom: leave some of a device's memory free; False for runs that were made, whatever was left.
        factors: what a calibration says of the coefficients.
        sequence_parallel: tensor ranks also share the tokens between matrices.
        refresh: how sharded parameters come back after the optimizer step: one gather, or a broadcast per owner, as in
            InternEvo, which also sums gradients whole, or reduces them to each owner in turn.
        codec: what the recipe says of that; crossings: what is encoded on its way.
        sync: when replicas are to agree; outer: copies of what a rank moves that rounds keep
        (`mechanisms.local_rounds.overlap_cost`).
        offload: what waits outside the device; free: bytes of the disk that it may wait on; None: not known.
        sizes: of the trainable tensors, in the model's order; empty: not known.
        running: bytes of buffers that every step moves.
        saves: steps between checkpoints, or `auto`; None: who trains saves by other means. write_rate: bytes/s that a
            machine writes of them at most; None: any.
        copies: bytes that copies of the state may take of a machine's memory (`faults.memory`); 0: there are none.
        recipe: whose choices the request is, where there is one: for systems that read options of their own.
        with_sequence: the same with so many tokens in a sample; None: they cannot be chosen.
        with_adapters: the same with adapters beside frozen weights (LoRA), which are stored as it is told
            (`config.Adapters.frozen`); None: the model cannot have them, or has them.
        refuses: why whoever trains cannot run a plan; None where it can. Without it all plans can be run.
    """

    parameters: int
    trainable: int
    optimizer: Literal["adamw", "muon"] = "adamw"
    tensors: int = 0
    matrix_parameters: int = 0
    matrix_shapes: Sequence[tuple[int, int, int]] = ()
    precision: str = "fp32"
    compile: bool = False
    recompute: str | None = None
    pin: Pin = field(default_factory=Pin)
    bucket_bytes: int | None = None
    overlap: bool = True
    kernel: Kernel = "auto"
    experts: int = 0
    active: int = 0
    expert_parameters: float = 0.0
    ep: int = 0
    expert_rows: str = "exact"
    storage: StateBytes | None = None
    temporaries: float = 0.0
    fsdp: bool = False
    memory: float | None = None
    redundancy: int = 1
    max_devices: int | None = None
    headroom: bool = True
    factors: CostFactors = PLAIN
    sequence_parallel: bool = True
    refresh: Literal["gather", "broadcast"] = "gather"
    codec: str = "exact"
    crossings: Sequence[Crossing] = ()
    sync: Sync = field(default_factory=EveryStep)
    outer: float = 0.0
    offload: Offload = RESIDENT
    free: float | None = None
    sizes: Sequence[Sized] = ()
    running: int = 0
    saves: int | Literal["auto"] | None = None
    write_rate: float | None = None
    copies: int | Literal["auto"] = 0
    recipe: Recipe | None = None
    with_sequence: Callable[[int], Request] | None = None
    with_adapters: Callable[[Any], Request] | None = None
    refuses: Callable[[Plan], Refusal | None] | None = None

    def crossing(self, traffic: str) -> Crossing | None:
        """How that class is encoded; None: it is not."""
        return next((one for one in self.crossings if one.traffic == traffic), None)

    @property
    def bytes_each(self) -> int:
        """Bytes of a parameter, gradient or moment as today's trainer keeps it: fp32 masters also under bf16."""
        return 8 if self.precision == "fp64" else 4

    @property
    def low(self) -> int:
        """Bytes of a value in the products' precision where that is not the masters', else 0."""
        return 2 if self.precision in ("bf16", "fp16") else 0

    @property
    def compute(self) -> int:
        """Bytes of an activation that crosses a link."""
        return self.low or self.bytes_each

    @property
    def expert_ranks(self) -> int:
        """Ranks over which the experts of a layer are spread."""
        return self.pin.ep or self.ep or 1

    @property
    def rank_experts(self) -> float:
        """Parameters of the experts of one layer on a rank that holds most."""
        return self.expert_parameters * -(-self.experts // self.expert_ranks) / max(1, self.experts)

    @property
    def recomputes(self) -> bool:
        """Whether activations may be computed again: of a decoder, also with adapters beside frozen weights."""
        return self.heads > 0 or self.frozen is not None

    @property
    def layer_parameters(self) -> float:
        """Trainable parameters of one layer on a rank."""
        whole = (self.trainable - self.outside) / max(1, self.layers)
        return whole - self.expert_parameters + self.rank_experts

    @property
    def model_flops(self) -> float:
        """FLOP of one step that count for MFU."""
        return float(self.anatomy(self.global_batch, "none", self.precision, WHOLE).whole.model_flops)
