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
from espalier.recipe import Adamw, Muon, decoder_shapes, units
from espalier.recipe.data_table import data_table
from espalier.train import build, every_step, optimizers, whole_model
from espalier.train.mechanism import Choose, Mechanism

if TYPE_CHECKING:
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe

# --- what a plan says of itself, for others to need or forbid ------------------------------------------------------

CLAIMS = {name: Claim(name, **claim) for name, claim in data_table(__file__).items()}
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
    asked = 0 if memory == "auto" else units.size(memory, "faults.memory")
    sums = [exchange for exchange in plan.exchanges if exchange.traffic in SUMMED]
    holds = {
        "codecs": any(exchange.codec != "exact" for exchange in sums),
        "nccl": any(rank.device != "cpu" for rank in plan.ranks),
        "roles": len(plan.trainers) < len(plan.ranks),
        "machines": len({rank.node for rank in plan.ranks}) > 1,
        "single_ranks": {len(ranks) for ranks in plan.replicas} == {1},
        "cut_matrices": _cut_matrices(recipe, plan),
        "cut_sequences": any(stage.sequence > 1 for stage in plan.stages),
        "spread_experts": _experts(recipe, plan),
        "cut_layers": _stages(recipe, plan) or _waves(recipe, plan),
        # States that wait elsewhere are copied only where that is asked for.
        "faults.memory": set(astuple(plan.offload)) == HERE if memory == "auto" else asked > 0,
        "limited_attention": decoder_shapes.limited(recipe.model),
        "norms_of_all_heads": getattr(recipe.model, "family", None) in decoder_shapes.WHOLE_NORMS,
        "faults.rollback": recipe.faults.rollback != "never",
    }
    return [CLAIMS[name] for name, true in holds.items() if true]


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


def _parameters_away(recipe: Recipe, plan: Plan) -> bool:
    return plan.offload.parameters in ("host", "disk")


TABLE: tuple[Choose, ...] = (
    lambda recipe, plan: build.Recompute(plan.recompute) if plan.recompute != "none" else None,
    lambda recipe, plan: build.PRECISIONS[plan.precision]() if plan.precision in build.PRECISIONS else None,
    lambda recipe, plan: build.Compile() if plan.compile else None,
    MechanismRow("token_chunks.mechanism", _chunks, "choose_loss"),
    MechanismRow("token_chunks.mechanism", _chunks),
    MechanismRow("tensor_parallel.mechanism", _cut_matrices),
    lambda recipe, plan: optimizers.HiddenMatrices() if isinstance(recipe.train.optimizer, Muon) else None,
    MechanismRow("pipeline.mechanism", _stages, "choose_stages"),
    MechanismRow("pipeline.mechanism", _stages),
    MechanismRow("task_waves.wave_schedule", _waves, "choose_towers"),
    MechanismRow("task_waves.wave_schedule", _waves),
    lambda recipe, plan: optimizers.MuonOnMatrices() if isinstance(recipe.train.optimizer, Muon) else None,
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
    MechanismRow("offload.mechanism", lambda recipe, plan: plan.offload.frozen != "device", "choose_frozen"),
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
    lambda recipe, plan: build.BuildModel(),
    MechanismRow("sharding.mechanism", lambda recipe, plan: True),
    lambda recipe, plan: optimizers.AdamwOnAll() if isinstance(recipe.train.optimizer, Adamw) else None,
    lambda recipe, plan: whole_model.WholeModel(),
    lambda recipe, plan: every_step.DataParallel(),
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

APPLIED = CLAIMS["apply"]


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
    """How ranks that are left after a failure go on: see `stay_alike` and `stay_by_rounds`; empty: they start again."""
    if refusal(recipe, plan, CLAIMS["stay_alike"]) is None:
        return "alike"
    return "rounds" if refusal(recipe, plan, CLAIMS["stay_by_rounds"]) is None else ""
