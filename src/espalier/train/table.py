"""The table of mechanisms: what a plan may put round a model, one row each, and what may run together.

A new mechanism is a folder of its own and one row here. `train.build` applies them in the order that `ordered` finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import astuple

from espalier.parallel.schedule import PIPELINE
from espalier.plan import compose
from espalier.plan.axes import placement_plan
from espalier.plan.compose import Claim
from espalier.recipe import decoder_shapes, units
from espalier.train import build, every_step, optimizers, whole_model
from espalier.train.mechanism import Choose, Mechanism

if TYPE_CHECKING:
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe

# --- what a plan says of itself, for others to need or forbid ------------------------------------------------------

ENCODED = Claim("codecs", question="codec", changes={"sums are encoded"})
NCCL = Claim("nccl", question="transport", changes={"waits cannot be ended", "computes on GPUs"})
ROLES = Claim("roles", question="roles", changes={"ranks of other roles"})
SINGLES = Claim("single_ranks", question="replicas", changes={"replicas of one rank"})
MACHINES = Claim("machines", question="machines", changes={"several machines"})
CUT_MATRICES = Claim(
    "cut_matrices",
    question="tensor",
    needs={"products of cut matrices"},
    changes={"the model is cut"},
)
CUT_SEQUENCES = Claim(
    "cut_sequences",
    question="sequence",
    needs={"attention over cut sequences"},
    changes={"the model is cut"},
)
CUT_LAYERS = Claim(
    "cut_layers",
    question="layers",
    needs={"a schedule of stages"},
    changes={"the model is cut"},
)
SPREAD_EXPERTS = Claim(
    "spread_experts",
    question="experts",
    needs={"tokens reach their experts"},
    changes={"experts are spread"},
)
LIMITED = Claim("limited_attention", question="attention", forbids={"attention over cut sequences"})
"""Windows, caps and scales of attention, which rings over ranks do not have."""
WHOLE_NORMS = Claim("norms_of_all_heads", question="norms", forbids={"matrices are cut"})
"""Norms of queries and keys over all heads, of which a rank would have some."""
COPIES = Claim("faults.memory", question="copies", changes={"states are copied"})
ROLLBACK = Claim("faults.rollback", question="rollback", changes={"steps are taken back"})
SUMMED = ("gradients", "outer_step")
"""Classes of traffic whose codecs keep back what they lose."""
HERE = {"device"}
"""Of a plan in which nothing waits elsewhere."""


class Property(Mechanism):
    """Something true of a plan that others ask for by name. Changes nothing."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim


def properties(recipe: Recipe, plan: Plan) -> list[Claim]:
    """Of a run, besides those that its mechanisms bring."""
    memory = recipe.faults.memory
    sums = [exchange for exchange in plan.exchanges if exchange.traffic in SUMMED]
    holds = {
        ENCODED: any(exchange.codec != "exact" for exchange in sums),
        NCCL: any(rank.device != "cpu" for rank in plan.ranks),
        ROLES: len(plan.trainers) < len(plan.ranks),
        MACHINES: len({rank.node for rank in plan.ranks}) > 1,
        SINGLES: {len(ranks) for ranks in plan.replicas} == {1},
        CUT_MATRICES: _cut_matrices(recipe, plan),
        CUT_SEQUENCES: any(stage.sequence > 1 for stage in plan.stages),
        SPREAD_EXPERTS: _experts(recipe, plan),
        CUT_LAYERS: _stages(recipe, plan) or _waves(recipe, plan),
        # States that wait elsewhere are copied only where that is asked for.
        COPIES: set(astuple(plan.offload)) == HERE if memory == "auto" else units.size(memory, "faults.memory") > 0,
        LIMITED: decoder_shapes.limited(recipe.model),
        WHOLE_NORMS: getattr(recipe.model, "family", None) in decoder_shapes.WHOLE_NORMS,
        ROLLBACK: recipe.faults.rollback != "never",
    }
    return [claim for claim, true in holds.items() if true]


# --- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MechanismRow:
    """What a folder of `mechanisms` answers, imported only for plans that it may have an answer to.

    Attributes:
        module: below `espalier.mechanisms`; function: its `Choose`.
        when: whether it is asked, of (recipe, plan).
    """

    module: str
    when: Callable[[Recipe, Plan], Any]
    function: str = "choose"

    def __call__(self, recipe: Recipe, plan: Plan) -> Mechanism | None:
        """The answer; None: it has none."""
        if not self.when(recipe, plan):
            return None
        choose: Choose = getattr(import_module(f"espalier.mechanisms.{self.module}"), self.function)
        return choose(recipe, plan)


def _stages(recipe: Recipe, plan: Plan) -> bool:
    return len({stage.layers for stage in plan.stages}) > 1 or plan.unequal


def _halo(recipe: Recipe, plan: Plan) -> bool:
    return recipe.graph is not None and recipe.graph.halo is not None and len(plan.trainers) > 1


def _waves(recipe: Recipe, plan: Plan) -> bool:
    return "task_waves" in plan.choices


def _chunks(recipe: Recipe, plan: Plan) -> bool:
    return "token_chunks" in plan.choices


def _cut_matrices(recipe: Recipe, plan: Plan) -> bool:
    return any(stage.tensor > 1 for stage in plan.stages)


def _experts(recipe: Recipe, plan: Plan) -> bool:
    return plan.layout.ep > 1


def _sequences(recipe: Recipe, plan: Plan) -> bool:
    packed = any(data.packing == "documents" for data in recipe.data)
    return packed or any(stage.sequence > 1 for stage in plan.stages)


def _node(recipe: Recipe, plan: Plan) -> bool:
    return bool(plan.optimizer_nodes)


def _frozen_away(recipe: Recipe, plan: Plan) -> bool:
    return plan.offload.frozen != "device"


def _parameters_away(recipe: Recipe, plan: Plan) -> bool:
    return plan.offload.parameters in ("host", "disk")


TABLE: tuple[Choose, ...] = (
    build.choose_recompute,
    build.choose_precision,
    build.choose_compile,
    MechanismRow("token_chunks.mechanism", _chunks, "choose_loss"),
    MechanismRow("token_chunks.mechanism", _chunks),
    MechanismRow("tensor_parallel.mechanism", _cut_matrices),
    optimizers.choose_matrices,
    MechanismRow("pipeline.mechanism", _stages, "choose_stages"),
    MechanismRow("pipeline.mechanism", _stages),
    MechanismRow("task_waves.wave_schedule", _waves, "choose_towers"),
    MechanismRow("task_waves.wave_schedule", _waves),
    optimizers.choose_muon,
    MechanismRow("local_rounds.outer_rounds", lambda recipe, plan: plan.replicas),
    MechanismRow("sequence_parallel.attention_2d", _sequences),
    MechanismRow("expert_parallel.mechanism", _experts),
    MechanismRow("pattern_attention.token_parallel", _halo),
    MechanismRow("halo_exchange.halo_parallel", _halo),
    MechanismRow("pattern_attention.edge_dropping", lambda recipe, plan: getattr(recipe.model, "recall", 1) < 1),
    MechanismRow("few_bits.over_ranks", lambda recipe, plan: "quant" in recipe.mechanisms and _halo(recipe, plan)),
)
"""Rows that a recipe or a plan asks for."""
AWAY: tuple[Choose, ...] = (
    lambda recipe, plan: build.ModelSkeleton() if _node(recipe, plan) or _parameters_away(recipe, plan) else None,
    MechanismRow("optimizer_node.mechanism", _node),
    MechanismRow("optimizer_node.mechanism", _node, "choose_optimizer"),
    MechanismRow(
        "pipeline.layerwise_schedule",
        lambda recipe, plan: _node(recipe, plan) or _parameters_away(recipe, plan),
    ),
    MechanismRow("offload.mechanism", _frozen_away, "choose_frozen"),
    MechanismRow("offload.mechanism", _parameters_away, "choose_parameters"),
    MechanismRow(
        "offload.mechanism",
        lambda recipe, plan: plan.offload.parameters != "device" or plan.offload.optimizer != "device",
        "choose_optimizer",
    ),
    MechanismRow("offload.mechanism", lambda recipe, plan: plan.offload.activations != "device", "choose_activations"),
)
"""Rows for plans in which something waits elsewhere than on the device of its rank."""
PLAIN: tuple[Choose, ...] = (
    build.choose_model,
    MechanismRow("sharding.mechanism", lambda recipe, plan: True),
    optimizers.choose_adamw,
    whole_model.choose,
    every_step.choose,
)
"""Rows for questions that none of the others answers."""


KNOWN = (
    placement_plan.WHOLE,
    optimizers.ADAMW,
    every_step.CLAIM,
    build.SELECTIVE,
    build.BLOCK,
    build.BF16,
    PIPELINE,
)
"""What a refusal may offer beside what the recipe has."""


def chosen(recipe: Recipe, plan: Plan, table: Sequence[Choose] = TABLE) -> list[Mechanism]:
    """The mechanisms that `recipe` and `plan` ask for, and the plain ones beside them."""
    away = set(astuple(plan.offload)) != HERE or len(plan.trainers) < len(plan.ranks)
    mechanisms = _answers(recipe, plan, (*AWAY, *table) if away else table)
    answered = {mechanism.claim.question for mechanism in mechanisms}
    plain = [mechanism for mechanism in _answers(recipe, plan, PLAIN) if mechanism.claim.question not in answered]
    return [*mechanisms, *plain, *map(Property, properties(recipe, plan))]


def _answers(recipe: Recipe, plan: Plan, rows: Sequence[Choose]) -> list[Mechanism]:
    return [mechanism for row in rows if (mechanism := row(recipe, plan)) is not None]


def claims(recipe: Recipe, plan: Plan) -> list[Claim]:
    """Of the mechanisms that `recipe` and `plan` ask for."""
    return [mechanism.claim for mechanism in chosen(recipe, plan)]


def ordered(recipe: Recipe, plan: Plan, table: Sequence[Choose] = TABLE) -> tuple[Mechanism, ...]:
    """The same in the order in which they are applied. Raises UserError when they cannot run together."""
    mechanisms = chosen(recipe, plan, table)
    names = compose.require((mechanism.claim for mechanism in mechanisms), known=KNOWN)
    return tuple(sorted(mechanisms, key=lambda mechanism: names.index(mechanism.claim.name)))


# --- what a run may do beside it -----------------------------------------------------------------------------------

STAY_ALIKE = Claim(
    "stay_alike",
    question="recovery",
    forbids={
        "states are cut",
        "states are on disk",
        "frozen weights wait in host memory",
        "the model is cut",
        "experts are spread",
        "sums are encoded",
        "replicas differ between rounds",
        "rows outlive a step",
        "ranks of other roles",
        "waits cannot be ended",
    },
)
"""After a failure the surviving ranks go on from their own state, which the replacement copies: all hold the same."""
STAY_BY_ROUNDS = Claim(
    "stay_by_rounds",
    question="recovery",
    needs={"replicas of one rank"},
    forbids={"states are on disk", "states on nodes", "waits cannot be ended"},
)
"""Surviving replicas finish their round without the lost one, and let its replacement in at the next."""
APPLIED = Claim(
    "apply",
    question="caller",
    forbids={
        "recomputes activations",
        "compiles blocks",
        "ranks of other roles",
        "a schedule of stages",
        "attention over cut sequences",
        "the loss is scaled",
    },
)
"""Somebody's own loop round a model whose blocks only its author knows (`espalier.apply`)."""


def refusal(recipe: Recipe, plan: Plan, *others: Claim) -> compose.Refusal | None:
    """Why the mechanisms of a plan cannot run with `others`; None: they can."""
    composition = _composition(frozenset((*claims(recipe, plan), *others)))
    return composition if isinstance(composition, compose.Refusal) else None


_composition = lru_cache(maxsize=4096)(partial(compose.compose, known=KNOWN))
"""The planner asks of the same mechanisms again and again."""


def require_beside(recipe: Recipe, plan: Plan, claim: Claim) -> None:
    """Raises UserError, with the reason, where `claim` cannot stand beside the mechanisms of a plan."""
    compose.require([*claims(recipe, plan), claim], known=KNOWN)


def recovery(recipe: Recipe, plan: Plan) -> Literal["", "alike", "rounds"]:
    """How ranks that are left after a failure go on: see the claims above; empty: they start again."""
    if refusal(recipe, plan, STAY_ALIKE) is None:
        return "alike"
    return "rounds" if refusal(recipe, plan, STAY_BY_ROUNDS) is None else ""
