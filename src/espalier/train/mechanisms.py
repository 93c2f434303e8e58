"""The table of mechanisms: what a plan may put round a model, one row each. `train.trainer.build` goes through it.

A new mechanism is a folder or file of its own and one row here. Those that change the model itself, and know nothing of
ranks, stand in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from msgspec.structs import astuple
from torch import nn

from espalier.kernels import accelerator
from espalier.optim.loss_scale import LossScale
from espalier.parallel.schedule import PIPELINE
from espalier.plan import compose
from espalier.plan.axes import placement_plan
from espalier.plan.compose import Claim
from espalier.recipe import Precision, decoder_shapes, units
from espalier.recipe.errors import UserError
from espalier.train import every_step, optimizers
from espalier.train import whole_model as whole
from espalier.train.mechanism import Build, Choose, Mechanism

if TYPE_CHECKING:
    from espalier.checkpoint.base import Stateful
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe

DTYPES = dict.fromkeys(get_args(Precision), torch.float32) | {"fp64": torch.float64}
"""Precision of the parameters. With bf16 and fp16 they stay fp32 (the master weights); autocast computes in these."""

MODEL = Claim("model", question="model", changes={"a model"})
SELECTIVE = Claim(
    "recompute_selective",
    question="recompute",
    needs={"a model"},
    changes={"recomputes activations"},
    instead=("recompute_block",),
    option="train.recompute=selective",
)
BLOCK = Claim(
    "recompute_block",
    question="recompute",
    needs={"a model"},
    changes={"recomputes activations"},
    instead=("recompute_selective",),
    option="train.recompute=block",
)
BF16 = Claim("bf16", question="precision", option="train.precision=bf16")
FP16 = Claim(
    "fp16",
    question="precision",
    changes={"the loss is scaled"},
    forbids={"sums are encoded", "rows cross in few bits"},
    instead=("bf16",),
)
"""A codec keeps back what it loses of a gradient, in units of a factor that changes and of steps that are left out.
Rows in few bits cannot say that a gradient overflowed, for which a step is left out."""
TF32 = Claim("tf32", question="precision")
COMPILE = Claim(
    "compile",
    question="compile",
    needs={"a model"},
    changes={"compiles blocks"},
    after={"recompute", "attend", "route"},
)


class BuildModel(Mechanism):
    """The workload's own model, whole and with its initial weights."""

    claim = MODEL

    def __init__(self, precision: str) -> None:
        self.precision = precision

    def wrap(self, context: Build) -> None:
        """Builds it."""
        context.model = context.workload.build(context.device, DTYPES[self.precision])


class Recompute(Mechanism):
    """Activations are computed again in backward."""

    def __init__(self, mode: str) -> None:
        self.mode, self.claim = mode, {"selective": SELECTIVE, "block": BLOCK}[mode]

    def wrap(self, context: Build) -> None:
        """Tells the model."""
        assert context.model is not None
        context.workload.recompute(context.model, self.mode)


class Autocast(Mechanism):
    """Forward and backward compute in bfloat16 where that is safe (autocast)."""

    claim = BF16

    def wrap(self, context: Build) -> None:
        """Sets the context of forward passes."""
        context.forward = partial(torch.autocast, context.device.type, torch.bfloat16)


class Fp16(Mechanism):
    """Forward and backward compute in float16 where that is safe (autocast), with a scaled loss."""

    claim = FP16

    def wrap(self, context: Build) -> None:
        """Sets the context of forward passes, and the scale."""
        context.forward = partial(torch.autocast, context.device.type, torch.float16)
        context.loss_scale = LossScale()

    def state(self, context: Build, parts: Mapping[str, Stateful]) -> Mapping[str, Stateful]:
        """With the scale."""
        assert context.loss_scale is not None
        return {**parts, "loss scale": context.loss_scale}


class Tf32(Mechanism):
    """Products of fp32 matrices round their inputs to 10 bits of mantissa, which tensor cores multiply."""

    claim = TF32

    def wrap(self, context: Build) -> None:
        """Tells torch, for this process."""
        torch.set_float32_matmul_precision("high")
        accelerator.round_convolutions(True)


PRECISIONS: Mapping[str, type[Mechanism]] = {"bf16": Autocast, "fp16": Fp16, "tf32": Tf32}
"""What else than dtypes makes a precision."""


class Compile(Mechanism):
    """Each block's forward goes through `torch.compile`."""

    claim = COMPILE

    def wrap(self, context: Build) -> None:
        """Compiles the blocks."""
        assert context.model is not None
        compile_blocks(context.workload.blocks(context.model))


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compiles each block in place. Raises UserError when there is no compiler to do it with."""
    import shutil

    if not accelerator.available() and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        raise UserError(
            "train.compile = true needs a C++ compiler, and none is on the PATH.",
            do="apt-get install g++, or train.compile = false",
        )
    for block in blocks:
        # The forward alone: hooks that bring its parameters stay outside.
        block.forward = torch.compile(block.forward)


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
    changes={"the model is cut"},
)
LIMITED = Claim("limited_attention", question="attention", forbids={"attention over cut sequences"})
"""Windows, caps and scales of attention, which rings over ranks do not have."""
COPIES = Claim("faults.memory", question="copies", changes={"states are copied"})
ROLLBACK = Claim("faults.rollback", question="rollback", changes={"steps are taken back"})
HERE = {"device"}
"""Of a plan in which nothing waits elsewhere."""


class Property(Mechanism):
    """Something true of a plan that others ask for by name. Changes nothing."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim


def properties(recipe: Recipe, plan: Plan) -> list[Claim]:
    """Of a run, besides those that its mechanisms bring."""
    outer, memory = (
        plan.outer,
        recipe.faults.memory,
    )  # states that wait elsewhere are copied only where that is asked for
    asked = (
        (ENCODED, any(one.codec != "exact" and one.traffic not in ("experts", "halo") for one in plan.exchanges)),
        (NCCL, any(one.device != "cpu" for one in plan.ranks)),
        (ROLES, len(plan.trainers) < len(plan.ranks)),
        (MACHINES, len({one.node for one in plan.ranks}) > 1),
        (SINGLES, outer is not None and all(len(ranks) == 1 for ranks in outer.replicas)),
        (CUT_MATRICES, any(one.tensor > 1 for one in plan.stages)),
        (CUT_SEQUENCES, any(one.sequence > 1 for one in plan.stages)),
        (SPREAD_EXPERTS, len(plan.experts) > 1),
        (
            CUT_LAYERS,
            len({one.layers for one in plan.stages}) > 1 or plan.unequal or plan.apart,
        ),
        (COPIES, set(astuple(plan.offload)) == HERE if memory == "auto" else units.size(memory, "faults.memory") > 0),
        (LIMITED, decoder_shapes.limited(recipe.model)),
        (ROLLBACK, recipe.faults.rollback != "never"),
    )
    return [claim for claim, holds in asked if holds]


# --- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
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


def _graph(recipe: Recipe, plan: Plan) -> bool:
    return recipe.graph is not None


def _halo(recipe: Recipe, plan: Plan) -> bool:
    return recipe.graph is not None and recipe.graph.halo is not None and len(plan.trainers) > 1


def _waves(recipe: Recipe, plan: Plan) -> bool:
    return "task_waves" in plan.choices


def _sequences(recipe: Recipe, plan: Plan) -> bool:
    packed = any(data.packing == "documents" for data in recipe.data)
    return packed or any(stage.sequence > 1 for stage in plan.stages)


def _node(recipe: Recipe, plan: Plan) -> bool:
    return any(rank.role == "optimizer" for rank in plan.ranks)


def _parameters_away(recipe: Recipe, plan: Plan) -> bool:
    return plan.offload.parameters in ("host", "disk")


TABLE: tuple[Choose, ...] = (
    lambda recipe, plan: Recompute(plan.recompute) if plan.recompute != "none" else None,
    lambda recipe, plan: PRECISIONS[plan.precision]() if plan.precision in PRECISIONS else None,
    lambda recipe, plan: Compile() if plan.compile else None,
    Row("tensor_parallel.mechanism", lambda recipe, plan: any(stage.tensor > 1 for stage in plan.stages)),
    optimizers.choose_matrices,
    Row("pipeline.mechanism", _stages, "choose_stages"),
    Row("pipeline.mechanism", _stages),
    Row("task_waves.waves", _waves, "choose_towers"),
    Row("task_waves.waves", _waves),
    optimizers.choose_muon,
    Row("local_rounds.outer_rounds", lambda recipe, plan: plan.outer),
    Row("sequence_parallel.loongtrain", _sequences),
    Row("expert_parallel.mechanism", lambda recipe, plan: len(plan.experts) > 1),
    Row("pattern_attention.token_parallel", _halo),
    Row("halo_exchange.halo_parallel", _halo),
    Row("pattern_attention.reformation", _graph),
)
"""Rows that a recipe or a plan asks for."""
AWAY: tuple[Choose, ...] = (
    Row(
        "optimizer_node.mechanism",
        lambda recipe, plan: _node(recipe, plan) or _parameters_away(recipe, plan),
        "choose_skeleton",
    ),
    Row("optimizer_node.mechanism", _node),
    Row("optimizer_node.mechanism", _node, "choose_optimizer"),
    Row(
        "pipeline.vertical",
        lambda recipe, plan: _node(recipe, plan) or _parameters_away(recipe, plan),
    ),
    Row("offload.mechanism", _parameters_away, "choose_parameters"),
    Row(
        "offload.mechanism",
        lambda recipe, plan: plan.offload.parameters != "device" or plan.offload.optimizer != "device",
        "choose_optimizer",
    ),
    Row("offload.mechanism", lambda recipe, plan: plan.offload.activations != "device", "choose_activations"),
)
"""Rows for plans in which something waits elsewhere than on the device of its rank."""
PLAIN: tuple[Choose, ...] = (
    lambda recipe, plan: BuildModel(plan.precision),
    Row("sharding.mechanism", lambda recipe, plan: True),
    optimizers.choose_adamw,
    whole.choose,
    every_step.choose,
)
"""Rows for questions that none of the others answers."""


KNOWN = (
    placement_plan.WHOLE,
    optimizers.ADAMW,
    every_step.CLAIM,
    SELECTIVE,
    BLOCK,
    BF16,
    PIPELINE,
)
"""What a refusal may offer beside what the recipe has."""


def chosen(recipe: Recipe, plan: Plan, table: Sequence[Choose] = TABLE) -> list[Mechanism]:
    """The mechanisms that `recipe` and `plan` ask for, and the plain ones beside them."""
    away = set(astuple(plan.offload)) != HERE or len(plan.trainers) < len(plan.ranks)
    rows = (*AWAY, *table) if away else table
    found = [one for row in rows if (one := row(recipe, plan)) is not None]
    answered = {one.claim.question for one in found}
    plain = [one for row in PLAIN if (one := row(recipe, plan)) is not None]
    found += [one for one in plain if one.claim.question not in answered]
    return [*found, *map(Property, properties(recipe, plan))]


def ordered(recipe: Recipe, plan: Plan, table: Sequence[Choose] = TABLE) -> tuple[Mechanism, ...]:
    """The same in the order in which they are applied. Raises UserError when they cannot run together."""
    found = chosen(recipe, plan, table)
    names = compose.require((one.claim for one in found), known=KNOWN)
    return tuple(sorted(found, key=lambda one: names.index(one.claim.name)))


# --- what a run may do beside it -----------------------------------------------------------------------------------

STAY_ALIKE = Claim(
    "stay_alike",
    question="recovery",
    forbids={
        "states are cut",
        "states are on disk",
        "the model is cut",
        "sums are encoded",
        "replicas differ between rounds",
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


def refusal(recipe: Recipe, plan: Plan, *beside: Claim) -> compose.Refusal | None:
    """Why the mechanisms of a plan cannot run, with those `beside` them; None: they can."""
    found = _composed(frozenset((*(one.claim for one in chosen(recipe, plan)), *beside)))
    return found if isinstance(found, compose.Refusal) else None


@lru_cache(maxsize=4096)
def _composed(claims: frozenset[Claim]) -> compose.Composition | compose.Refusal:
    """The planner asks of the same mechanisms again and again."""
    return compose.compose(claims, known=KNOWN)


def accepts(recipe: Recipe, plan: Plan, claim: Claim) -> bool:
    """Whether `claim` can stand beside the mechanisms of a plan."""
    return refusal(recipe, plan, claim) is None


def require_beside(recipe: Recipe, plan: Plan, claim: Claim) -> None:
    """Raises UserError, with the reason, where `claim` cannot stand beside the mechanisms of a plan."""
    compose.require([*(one.claim for one in chosen(recipe, plan)), claim], known=KNOWN)


def recovery(recipe: Recipe, plan: Plan) -> Literal["", "alike", "rounds"]:
    """How ranks that are left after a failure go on: see the claims above; empty: they start again."""
    if accepts(recipe, plan, STAY_ALIKE):
        return "alike"
    return "rounds" if accepts(recipe, plan, STAY_BY_ROUNDS) else ""
