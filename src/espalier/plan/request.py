"""What is asked of a planner: a recipe, the profile of its model, and what a search varies. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from espalier.plan.axes.sharding import StateBytes
from espalier.plan.base import RESIDENT, Exchange, Offload, Plan
from espalier.plan.calibration_factors import PLAIN, CostFactors
from espalier.plan.compose import Refusal
from espalier.recipe import (
    Adamw,
    Checkpoint,
    Comm,
    EveryStep,
    Faults,
    Module,
    Muon,
    Pin,
    Planning,
    Recipe,
    Train,
)
from espalier.recipe.cost import WHOLE, ExpertSizes, Profile
from espalier.recipe.serialization import Value

Kernel = Literal["auto", "flash", "efficient", "written"]
"""An attention kernel: the best the device has; FlashAttention; another that writes no scores; one that does."""


AUTO = "auto"
"""A precision that is derived: see `plan.precision`."""


class Crossing(NamedTuple):
    """How a class of traffic crosses the links of one level: see `mechanisms.codecs.hybrid_compression`.

    Attributes:
        level, codec: as in a plan's `Exchange`.
        ratio: float32 bytes over encoded bytes.
        encode, decode: float32 bytes/s.
        lossy: what is lost is kept beside the gradients.
    """

    level: Literal["inside", "between", "all"]
    codec: str
    ratio: float = 1.0
    encode: float = float("inf")
    decode: float = float("inf")
    lossy: bool = False


SUMS = frozenset({"gradients", "parameters"})
"""Classes of traffic of ranks that hold the same parameters."""


def exchanges(crossings: Mapping[str, Crossing], classes: Collection[str] = SUMS) -> tuple[Exchange, ...]:
    """Gradients, and whatever else of the `classes` that a plan sends is encoded."""
    encoded = [
        Exchange(traffic=traffic, level=way.level, codec=way.codec)
        for traffic, way in crossings.items()
        if traffic in classes
    ]
    plain = "gradients" in classes and "gradients" not in crossings
    return (Exchange(traffic="gradients"), *encoded) if plain else tuple(encoded)


def classes(shards: int, tensor: int, heads: int, context: int, stages: int) -> set[str]:
    """What ranks of a layout send one another that may be encoded."""
    sent = set(SUMS) if shards > 1 else set()
    sent |= {"activations"} if max(tensor, heads, stages) > 1 else set()
    return sent | ({"keys_values"} if context > 1 else set())


NO_RECIPE = Recipe(
    model=Module(build=""),
    train=Train(precision="fp32", optimizer=Adamw()),
    comm=Comm(codec="exact"),
    checkpoint=Checkpoint(every=1),
    faults=Faults(memory=0),
    sync=EveryStep(),
)
"""Options of a model that somebody's own loop trains: nothing is encoded or copied, and the loop saves."""


@dataclass(frozen=True)
class TrainingSystem:
    """How a system stores and computes; the defaults are Espalier's trainer.

    Attributes:
        storage: bytes per parameter; None: what Espalier's trainer keeps.
        temporaries: bytes per parameter that the optimizer step needs for a moment (torch's foreach AdamW: 4).
        fsdp: sharded parameters are PyTorch's FSDP's: fp32 masters and gradients, and in pipelines stages that stay
            gathered from the first micro-batch to the last.
        overlap: gradients are exchanged during backward; False: after it.
        kernel: of attention.
        sequence_parallel: tensor ranks also share the tokens between matrices.
        refresh: how sharded parameters come back after the optimizer step: one gather, or a broadcast per owner, as in
            InternEvo, which also sums gradients whole, or reduces them to each owner in turn.
        slack: share of a GPU's bytes that its allocator holds beside them; None: as is assumed of any.
        stall: further seconds of a pipeline's hand-over, in which host and device wait.
        adds: gradients of a micro-batch are added to those before by operations of their own, not by
            the products that make them.
        stages: layers of each rank of a pipeline, where they are not as equal as can be.
        headroom: leave some of a device's memory free; False for runs that were made, whatever was left.
    """

    storage: StateBytes | None = None
    temporaries: float = 0.0
    fsdp: bool = False
    overlap: bool = True
    kernel: Kernel = "auto"
    sequence_parallel: bool = True
    refresh: Literal["gather", "broadcast"] = "gather"
    slack: float | None = None
    stall: float = 0.0
    adds: bool = True
    stages: tuple[int, ...] = ()
    headroom: bool = True


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a plan is asked for: the recipe with its options, the model's profile, and what neither of them says.

    Attributes:
        profile: what a step of the model on its data is made of.
        system: how it is trained, where that is not Espalier.
        ep: ranks over which experts are spread, as chosen; 0: not chosen.
        offload: what waits outside the device; free: bytes of the disk that it may wait on; None: not known.
        crossings: how each class of traffic that is encoded crosses the links.
        outer: copies of what a rank moves that rounds keep (`mechanisms.local_rounds.cost`).
        factors: what a calibration says of the coefficients.
        refuses: why whoever trains cannot run a plan; None where it can. Without it all plans can be run.
        request_of: the request of another recipe on the same data; None: its model cannot be made anew.
    """

    profile: Profile
    recipe: Recipe = NO_RECIPE
    system: TrainingSystem = TrainingSystem()
    ep: int = 0
    offload: Offload = RESIDENT
    free: float | None = None
    crossings: Mapping[str, Crossing] = field(default_factory=dict)
    outer: float = 0.0
    factors: CostFactors = PLAIN
    refuses: Callable[[Plan], Refusal | None] | None = None
    request_of: Callable[[Recipe], Request] | None = None

    def changed(self, **changes: Any) -> Request:
        """The same question with other fields, other tables of the recipe or options of its `train`, `plan` and
        `comm`, counts of the profile or habits of the system, each by its own name."""
        made = self
        for name, value in changes.items():
            made = _replaced(made, (*_PLACES.get(name, ()), name), value)
        return made

    @property
    def pin(self) -> Pin:
        """Decisions taken out of the planner's hands."""
        return self.recipe.plan.pin

    @property
    def precision(self) -> str:
        return self.recipe.train.precision

    @property
    def recompute(self) -> str | None:
        """The mode asked for; None leaves it to the planner."""
        return self.pin.recompute or self.recipe.train.recompute

    @property
    def muon(self) -> bool:
        """Whether Muon moves the hidden matrices."""
        return isinstance(self.recipe.train.optimizer, Muon)

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
    def experts(self) -> ExpertSizes:
        return self.profile.facts.get("expert_parallel", ExpertSizes())

    @property
    def expert_ranks(self) -> int:
        """Ranks over which the experts of a layer are spread."""
        return self.pin.ep or self.ep or 1

    @property
    def layer_parameters(self) -> float:
        """Trainable parameters of one layer on a rank, of experts on one that holds most."""
        whole = (self.profile.trainable - self.profile.outside) / max(1, self.profile.layers)
        ranks = self.expert_ranks
        return whole if ranks == 1 else whole - self.experts.parameters + self.experts.on_rank(ranks)

    @property
    def model_flops(self) -> float:
        """FLOP of one step that count for MFU."""
        profile = self.profile
        return float(profile.anatomy(profile.global_batch, "none", self.precision, WHOLE).whole.model_flops)


def _replaced(whole: Any, path: tuple[str, ...], value: Any) -> Any:
    """`whole` with another `value` at the end of `path`."""
    if not path:
        return value
    part = {path[0]: _replaced(getattr(whole, path[0]), path[1:], value)}
    return whole.changed(**part) if isinstance(whole, Value) else replace(whole, **part)


_PLACES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(Recipe.__struct_fields__, ("recipe",)),
    **dict.fromkeys(Train.__struct_fields__, ("recipe", "train")),
    **dict.fromkeys(Planning.__struct_fields__, ("recipe", "plan")),
    **dict.fromkeys(Comm.__struct_fields__, ("recipe", "comm")),
    **{part.name: ("profile",) for part in fields(Profile)},
    **{part.name: ("system",) for part in fields(TrainingSystem)},
}
"""Where `Request.changed` finds a name that is no field of its own."""
