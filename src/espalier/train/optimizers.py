"""Optimizers as mechanisms: AdamW on all that a rank owns, or Muon on hidden matrices and AdamW on the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from espalier.optim import adamw, muon
from espalier.optim.base import OptimizerGroup, Owned, names_of, owned_by
from espalier.parallel.model_cut import Slab
from espalier.plan.compose import Claim
from espalier.recipe import Adamw, Muon
from espalier.recipe.errors import UserError
from espalier.train.mechanism import Build, Mechanism

if TYPE_CHECKING:
    from espalier.optim.cut_matrices import MatrixCut
    from espalier.parallel.workload import Workload

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
    after={"optimizer states"},
    instead=("adamw",),
)
MATRICES = Claim("muon_matrices", question="matrices", needs={"a model"}, after={"products"})


class AdamwOnAll(Mechanism):
    """AdamW over all that the sharding leaves to this rank."""

    claim = ADAMW

    def wrap(self, context: Build) -> None:
        assert context.sharding is not None
        options = context.recipe.train.optimizer
        assert isinstance(options, Adamw)
        context.optimizer = adamw.build(options, context.sharding.owned, context.group or OptimizerGroup)


class HiddenMatrices(Mechanism):
    """Names the matrices that Muon moves, before the model is sharded: no shard may cut them."""

    claim = MATRICES

    def wrap(self, context: Build) -> None:
        """Adds them to the context's."""
        assert context.model is not None
        tables = tables_of(context.workload, context.model)
        context.matrices |= {part.name for part in owned_by(context.model) if muon.moves(part, tables)}


class MuonOnMatrices(Mechanism):
    """Muon on the hidden matrices, AdamW on the rest."""

    claim = MUON

    def wrap(self, context: Build) -> None:
        assert context.model is not None
        assert context.sharding is not None
        options = context.recipe.train.optimizer
        assert isinstance(options, Muon)
        owned = context.sharding.owned
        group = context.group or OptimizerGroup
        tables = tables_of(context.workload, context.model)
        cuts = cuts_of(context, [part for part in owned if muon.moves(part, tables)])
        context.optimizer = muon.build(options, owned, tables, group, cuts)


def cuts_of(context: Build, matrices: Sequence[Owned]) -> dict[str, MatrixCut]:
    """How the `matrices` of which this rank has a part lie on the ranks that share them. All these ranks call it.

    Raises UserError where they do not have parts of the same matrices.
    """
    group = context.mesh.group("tp")
    if group is None or context.cut is None:
        return {}
    from espalier.comm import plain_collectives
    from espalier.comm.base import Traffic, traffic
    from espalier.optim.cut_matrices import MatrixCut

    slabs = {part.name: context.cut.slabs.get(part.name, Slab(part.shape, (0, 0))) for part in matrices}
    places = [(part.name, *part.tensor.shape, *slabs[part.name].offsets) for part in matrices]
    with traffic(Traffic.CONTROL):
        everyone = plain_collectives.all_gather(places, group)
    names = [[name for name, *_ in parts] for parts in everyone]
    batches = [muon.batches([torch.Size(place[1:3]) for place in parts]) for parts in everyone]
    if names != names[:1] * len(names) or batches != batches[:1] * len(batches):
        raise UserError(
            f"Muon cannot move matrices that {len(everyone)} ranks share in parts of unlike sizes.",
            why="the ranks have parts of other matrices, or in another order",
            do="plan.pin.tp = a number that divides heads and feed-forward, or train.optimizer.kind=adamw",
        )
    cuts = {}
    for part, *rows in zip(matrices, *everyone, strict=True):
        whole = slabs[part.name].shape
        if part.tensor.shape != whole:
            dim = int(part.tensor.shape[0] == whole[0])
            ends = tuple((place[3 + dim], place[3 + dim] + place[1 + dim]) for place in rows)
            cuts[part.name] = MatrixCut(whole, dim, ends, group)
    return cuts


def tables_of(workload: Workload, model: nn.Module) -> frozenset[str]:
    """Names of the model's tables and heads."""
    names = names_of(model)
    return frozenset(names[parameter] for parameter in workload.embeddings(model) if parameter in names)
