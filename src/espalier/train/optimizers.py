"""Optimizers as mechanisms: AdamW on all that a rank owns, or Muon on hidden matrices and AdamW on the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.optim import adamw, muon
from espalier.optim.base import OptimizerGroup, names_of, owned_by
from espalier.plan.compose import Claim
from espalier.recipe import Adamw, Muon, Recipe
from espalier.train.mechanism import Build, Mechanism

if TYPE_CHECKING:
    from espalier.plan.base import Plan

ADAMW = Claim(
    "adamw",
    question="optimizer",
    needs={"gradients are summed"},
    after={"optimizer states"},
    option="train.optimizer.kind=adamw",
)
MUON = Claim(
    "muon",
    question="optimizer",
    needs={"gradients are summed", "whole matrices"},
    forbids={"matrices are cut"},
    after={"optimizer states"},
    instead=("adamw",),
)
MATRICES = Claim("muon_matrices", question="matrices", needs={"a model"}, after={"products"})


class AdamwOnAll(Mechanism):
    """AdamW over all that the sharding leaves to this rank."""

    claim = ADAMW

    def __init__(self, options: Adamw) -> None:
        self.options = options

    def wrap(self, context: Build) -> None:
        assert context.sharding is not None
        context.optimizer = adamw.build(self.options, context.sharding.owned, context.group or OptimizerGroup)


def choose_adamw(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """AdamW, where the recipe asks for it."""
    options = recipe.train.optimizer
    return AdamwOnAll(options) if isinstance(options, Adamw) else None


class HiddenMatrices(Mechanism):
    """Names the matrices that Muon moves, before the model is sharded: no shard may cut them."""

    claim = MATRICES

    def wrap(self, context: Build) -> None:
        """Adds them to the context's."""
        assert context.model is not None
        tables = tables_of(context)
        context.matrices |= {part.name for part in owned_by(context.model) if muon.moves(part, tables)}


class MuonOnMatrices(Mechanism):
    """Muon on the hidden matrices, AdamW on the rest."""

    claim = MUON

    def __init__(self, options: Muon) -> None:
        self.options = options

    def wrap(self, context: Build) -> None:
        assert context.sharding is not None
        owned, group = context.sharding.owned, context.group or OptimizerGroup
        context.optimizer = muon.build(self.options, owned, tables_of(context), group)


def tables_of(context: Build) -> frozenset[str]:
    """Names of the model's tables and heads."""
    assert context.model is not None
    names = names_of(context.model)
    tables = context.workload.embeddings(context.model)
    return frozenset(names[parameter] for parameter in tables if parameter in names)


def choose_muon(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Muon, where the recipe asks for it."""
    options = recipe.train.optimizer
    return MuonOnMatrices(options) if isinstance(options, Muon) else None


def choose_matrices(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """The matrices it moves."""
    return HiddenMatrices() if isinstance(recipe.train.optimizer, Muon) else None
