"""The table of mechanisms: what a plan may put round a model, one row each. `trainer.build` goes through it.

A new mechanism is a folder or file of its own and one row here. Those that change the model itself, and know nothing of
ranks, stand in this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal, get_args

import torch
from msgspec.structs import astuple
from torch import nn

import espalier.shard.luwu.mechanism as luwu
from espalier import accelerator, compose, units
from espalier.compose import Claim
from espalier.config import GraphTransformer, Precision
from espalier.errors import UserError
from espalier.experts import mechanism as expert_parallel
from espalier.mechanism import Build, Choose, Mechanism
from espalier.optim import adamw, muon
from espalier.optim.loss_scale import LossScale
from espalier.sequence import loongtrain
from espalier.shard import mechanism as sharded_states
from espalier.shard import placement_plan
from espalier.shard.offload import mechanism as offload
from espalier.stages import mechanism as pipelined
from espalier.stages import spindle, vertical, whole
from espalier.sync import every_step, outer_rounds
from espalier.tensor import mechanism as tensor_parallel

if TYPE_CHECKING:
    from espalier.checkpoint.base import Stateful
    from espalier.config import Recipe
    from espalier.plan.base import Plan

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
        (CUT_LAYERS, len({one.layers for one in plan.stages}) > 1 or plan.unequal or bool(plan.waves)),
        (COPIES, set(astuple(plan.offload)) == HERE if memory == "auto" else units.size(memory, "faults.memory") > 0),
        (LIMITED, loongtrain.limited(recipe)),
        (ROLLBACK, recipe.faults.rollback != "never"),
    )
    return [claim for claim, holds in asked if holds]


def _reformation(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Imports graphs only for a transformer of theirs."""
    if recipe.graph is None or not isinstance(recipe.model, GraphTransformer):
        return None
    from espalier.graph.torchgt import reformation

    return reformation.choose(recipe, plan)


def _halo(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Imports graphs only where one is cut."""
    if recipe.graph is None or recipe.graph.halo is None:
        return None
    from espalier.graph import halo_parallel
    from espalier.graph.torchgt import token_parallel

    return token_parallel.choose(recipe, plan) or halo_parallel.choose(recipe, plan)


# --- the table -----------------------------------------------------------------------------------------------------

TABLE: tuple[Choose, ...] = (
    lambda recipe, plan: Recompute(plan.recompute) if plan.recompute != "none" else None,
    lambda recipe, plan: PRECISIONS[plan.precision]() if plan.precision in PRECISIONS else None,
    lambda recipe, plan: Compile() if plan.compile else None,
    tensor_parallel.choose,
    muon.choose_matrices,
    pipelined.choose_stages,
    pipelined.choose,
    spindle.choose_towers,
    spindle.choose,
    muon.choose,
    outer_rounds.choose,
    loongtrain.choose,
    expert_parallel.choose,
    _halo,
    _reformation,
)
"""Rows that a recipe or a plan asks for."""
AWAY: tuple[Choose, ...] = (
    luwu.choose_skeleton,
    luwu.choose,
    luwu.choose_optimizer,
    vertical.choose,
    offload.choose_parameters,
    offload.choose_optimizer,
    offload.choose_activations,
)
"""Rows for plans in which something waits elsewhere than on the device of its rank."""
PLAIN: tuple[Choose, ...] = (
    lambda recipe, plan: BuildModel(plan.precision),
    sharded_states.choose,
    adamw.choose,
    whole.choose,
    every_step.choose,
)
"""Rows for questions that none of the others answers."""


KNOWN = (placement_plan.WHOLE, adamw.CLAIM, every_step.CLAIM, SELECTIVE, BLOCK, BF16, pipelined.PIPELINE)
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
