"""Tensor parallelism as a mechanism: ranks share every matrix of the model (Megatron-LM, arXiv 1909.08053).

How they do is declared by the workload as roles, or by the model itself in the ecosystem's form (`tp_plan`, `_tp_plan`;
Hugging Face): patterns name modules, with `*` for a number, and styles say how each is cut; the residual stream is then
whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from espalier.comm.base import Traffic
from espalier.parallel.model_cut import ModelCut
from espalier.parallel.tensor_roles import check_heads, declared
from espalier.parallel.workload import Role
from espalier.plan.compose import Claim
from espalier.train.mechanism import Build, Mechanism

if TYPE_CHECKING:
    from espalier.checkpoint.base import StatefulParts
    from espalier.parallel.mesh import ProcessMesh
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe

CLAIM = Claim(
    "tensor_parallel",
    question="products",
    needs={"a model"},
    changes={"products of cut matrices", "matrices are cut"},
    forbids={"compiles blocks"},
    after={"attend", "aggregate", "recompute", "precision"},
)
"""Compilers do not see the exchanges inside a block."""


class TensorParallel(Mechanism):
    """Each rank of a group has some columns or rows of every matrix, whole heads and some words."""

    claim = CLAIM
    record = "buff"

    def __init__(self, regather: bool) -> None:
        self.regather = regather

    def wrap(self, context: Build) -> None:
        """Cuts the model, which was built whole: its initial weights are the same whatever the cut."""
        model = context.model
        mesh = context.mesh
        assert model is not None
        assert mesh.replica is not None
        context.cut = context.cut or ModelCut(mesh.replica)
        mesh.encode(Traffic.ACTIVATIONS, mesh.group("tp"), context.plan)
        share(model, context.workload.roles(model), mesh, context.cut, self.regather)

    def state(self, context: Build, parts: StatefulParts) -> StatefulParts:
        """What a codec keeps back is of this rank's matrices: others that are cut alike take it up again."""
        own_feedback = f"feedback of matrices {context.mesh.coordinates.tp}"
        return {own_feedback if name == "feedback" else name: part for name, part in parts.items()}


def share(
    model: nn.Module, roles: Mapping[str, Role] | None, mesh: ProcessMesh, cut: ModelCut, regather: bool = False
) -> None:
    """Cuts `model` over the mesh's tensor ranks, by `roles` or (None) by the plan that it carries. Raises UserError."""
    group = mesh.group("tp")
    if group is None:
        return  # only other stages have several
    from espalier.mechanisms.tensor_parallel.cut import cut_model
    from espalier.mechanisms.tensor_parallel.stream import Stream

    sharded = roles is not None and any(role.kind == "partial" for role in roles.values())
    if roles is None:
        roles = declared(model)
        check_heads(model, group.size())
    stream = Stream(group, sharded, regather)
    cut_model(model, roles, stream, mesh, cut)
    if sharded:
        cut.stream = stream


def choose(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Where a stage of the plan has several ranks to a matrix."""
    if any(stage.tensor > 1 for stage in plan.stages):
        return TensorParallel(plan.algorithm == "fsp")
    return None
