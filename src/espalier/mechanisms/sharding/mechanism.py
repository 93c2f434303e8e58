"""Sharded states as a mechanism: the plan's units put round the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from espalier.mechanisms.sharding.amsp import Amsp
from espalier.plan.axes import placement_plan as spreading
from espalier.train.mechanism import Build, Mechanism

if TYPE_CHECKING:
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe


LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of sharded parameters, beside fp32 masters, by the precision of a plan."""


class ShardedStates(Mechanism):
    """Parameters, gradients and optimizer states, each over its own number of the ranks that hold the same model."""

    record = "amsp"

    def __init__(self, plan: Plan) -> None:
        self.claim = spreading.claim(plan.units)

    def wrap(self, context: Build) -> None:
        """Makes the sharding."""
        assert context.model is not None
        mesh = context.mesh
        if context.cut is not None and context.cut.peers:
            from espalier.mechanisms.sharding.layer_holders import RaggedStates

            nodes = [rank.node for rank in context.plan.ranks]
            context.sharding = RaggedStates(context.model, mesh, spread(context), context.cut, nodes)
        else:
            channel = mesh.same_parameters if context.cut is None else mesh.same_parameters or mesh.alone
            context.sharding = Amsp(context.model, channel, spread(context), context.cut)
        for parameter in context.model.parameters():
            if not parameter.requires_grad:  # what is not sharded leaves the host's memory now
                parameter.data = parameter.data.to(context.device)


def spread(context: Build) -> spreading.Spread:
    """How the plan lays the states of the context's model on the ranks."""
    recipe = context.recipe
    plan = context.plan
    mesh = context.mesh
    assert context.model is not None
    low = LOW.get(plan.precision) if any(unit.optimizer for unit in plan.units) else None
    nccl = context.device.type == "cuda" and not plan.staged  # finds the way through machines by itself
    ranks = mesh.mesh.same_parameters(mesh.rank)
    return spreading.Spread(
        factors=spreading.factors(plan.units),
        nodes=() if nccl else [plan.ranks[rank].node for rank in ranks],
        blocks=context.workload.blocks(context.model),
        whole=context.matrices,
        low=low,
        bucket_bytes=plan.bucket,
        codecs=spreading.codecs(plan.exchanges, recipe.comm.nonfinite == "stop"),
        prefetch=plan.prefetch,
        weights=context.weights,
    )


def choose(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Always: with factors of 1 it is plain data parallel."""
    return ShardedStates(plan)
