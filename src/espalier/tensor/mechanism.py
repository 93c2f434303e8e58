"""Tensor parallelism as a mechanism: ranks share every matrix of the model (Megatron-LM, arXiv 1909.08053).

How they do is declared by the workload as roles, or by the model itself in the ecosystem's form (`tp_plan`, `_tp_plan`;
Hugging Face): patterns name modules, with `*` for a number, and styles say how each is cut; the residual stream is then
whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from espalier.compose import Claim
from espalier.errors import UserError
from espalier.mechanism import Build, Mechanism
from espalier.parallel.model_cut import ModelCut
from espalier.tensor.cut import check, cut_model, found
from espalier.tensor.stream import Stream
from espalier.workload import Role

if TYPE_CHECKING:
    from espalier.checkpoint.base import Stateful
    from espalier.config import Recipe
    from espalier.parallel.mesh import ProcessMesh
    from espalier.plan.base import Plan

CLAIM = Claim(
    "tensor_parallel",
    question="products",
    needs={"a model"},
    changes={"products of cut matrices", "matrices are cut"},
    forbids={"compiles blocks"},
    after={"attend", "aggregate", "route", "recompute", "precision"},
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
        model, mesh = context.model, context.mesh
        assert model is not None
        assert mesh.replica is not None
        context.cut = context.cut or ModelCut(mesh.replica)
        share(model, context.workload.roles(model), mesh, context.cut, self.regather)

    def state(self, context: Build, parts: Mapping[str, Stateful]) -> Mapping[str, Stateful]:
        """What a codec keeps back is of this rank's matrices: others that are cut alike take it up again."""
        own = f"feedback of matrices {context.mesh.coordinates.tp}"
        return {own if name == "feedback" else name: part for name, part in parts.items()}


def share(
    model: nn.Module, roles: Mapping[str, Role] | None, mesh: ProcessMesh, cut: ModelCut, regather: bool = False
) -> None:
    """Cuts `model` over the mesh's tensor ranks, by `roles` or (None) by the plan that it carries. Raises UserError."""
    group = mesh.group("tp")
    if group is None:
        return  # only other stages have several
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


# --- the plan that a model carries itself --------------------------------------------------------------------------

OWN_PLAN = (
    "The module's own plan says which matrices ranks share; what they send one another is not in the prediction.",
)
"""What is said of a plan with such a cut."""
STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "table",
    "colwise_gather_output": "words",
    "colwise_rep": "words",
    "replicated_with_grad_allreduce": "partial",
}
"""Styles of the ecosystem's plans to kinds of roles."""


def declared(model: nn.Module) -> dict[str, Role]:
    """The roles that the model's own plan gives its modules.

    Raises UserError for a model that has none, or one with a style that is not known.
    """
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    kind = type(model).__name__
    if not plan:
        raise UserError(
            f"{kind} does not say how ranks may share its matrices.",
            why="tensor parallelism needs a plan of its modules: which are cut by columns and which by rows",
            do=f'{kind}._tp_plan = {{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}, or tp = 1',
        )
    roles = {}
    for pattern, style in dict(plan).items():
        if style not in STYLES:
            raise UserError(
                f"The tensor-parallel plan of {kind} says {style!r} of {pattern}, which is not known.",
                why=f"known are {', '.join(STYLES)}",
                do="tp = 1, or a plan of those",
            )
        roles[pattern] = Role(STYLES[style])
    return roles


def check_ranks(model: nn.Module, ranks: int) -> None:
    """Raises UserError where so many ranks cannot share the model's matrices by the plan that it carries: says why, and
    the nearest number that can."""
    check(found(model, declared(model)), ranks)
    check_heads(model, ranks)


def check_heads(model: nn.Module, ranks: int) -> None:
    """Raises UserError where ranks cannot have equal numbers of whole heads, as such a model's own code counts them."""
    config = getattr(model, "config", None)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and heads % ranks:
        near = max(count for count in range(1, ranks) if heads % count == 0)
        raise UserError(f"tp = {ranks} ranks cannot share {heads} heads equally.", do=f"tp = {near}")
