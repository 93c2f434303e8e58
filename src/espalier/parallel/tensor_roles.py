"""Which matrices of a model ranks may share, by the roles of a workload or by the plan that a module carries itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from espalier.parallel.workload import Role
from espalier.recipe.errors import UserError


def even(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """Of `count` things, those of `rank`: `[first, last)`."""
    return count * rank // ranks, count * (rank + 1) // ranks


DIM = {"column": 0, "columns": 0, "table": 0, "words": 0, "row": 1, "rows": 1}
"""The dimension of `weight` that each kind of module is cut along."""


class ModuleWithRole(NamedTuple):
    """A module, its role, and how many rows or columns it has that can be divided."""

    name: str
    module: Any
    role: Role
    total: int

    def share(self, rank: int, ranks: int) -> tuple[int, int]:
        """What a rank has of it: `[first, last)` along the dimension that is cut."""
        if self.role.share is not None:
            return self.role.share(rank, ranks)
        return even(self.total, rank, ranks)

    def fits(self, ranks: int) -> bool:
        shares = [self.share(rank, ranks) for rank in range(ranks)]
        return all(first < last for first, last in shares)


def modules_with_roles(model: nn.Module, roles: Mapping[str, Role]) -> list[ModuleWithRole]:
    """The modules that have a role. Raises UserError for one of a class that cannot have it, and where none has any."""
    made = []
    modules: Iterable[tuple[str, Any]] = model.named_modules()
    for name, module in modules:
        pattern = next((pattern for pattern in roles if fnmatchcase(name, pattern)), None)
        if pattern is not None:
            dim = DIM.get(roles[pattern].kind)
            if dim is not None:
                _refuse_other(name, module, roles[pattern])
            made.append(ModuleWithRole(name, module, roles[pattern], 0 if dim is None else module.weight.shape[dim]))
    if not any(found_role.role.kind in DIM for found_role in made):
        raise UserError(
            f"None of the modules that ranks are to share is in {type(model).__name__}.",
            why=f"its plan names {', '.join(roles)}",
            do="the names of `model.named_modules()`, with * for a number",
        )
    return made


def _refuse_other(name: str, module: nn.Module, role: Role) -> None:
    """Raises UserError for a module that computes something else than what is cut."""
    kinds = (nn.Linear, nn.Embedding) if role.kind == "table" else (nn.Linear,)
    plain = any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)
    if not plain or getattr(module, "max_norm", None) is not None:
        raise UserError(
            f"Ranks cannot share {name}: {type(module).__name__} is no plain {' or '.join(k.__name__ for k in kinds)}.",
            why="its own forward is not known",
            do="leave it out of the tensor-parallel plan, or tp = 1",
        )


def check(parts: Sequence[ModuleWithRole], ranks: int) -> None:
    """Raises UserError where some rank would get nothing of a matrix: names it, and the nearest number of ranks."""
    cut = [part for part in parts if part.role.kind in DIM]
    for part in cut:
        if not part.fits(ranks):
            near = max(count for count in range(1, ranks) if all(other.fits(count) for other in cut))
            raise UserError(
                f"tp = {ranks} ranks cannot share {part.name or 'the model'}: its {part.role.unit} do not divide.",
                do=f"tp = {near}",
            )


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
    check(modules_with_roles(model, declared(model)), ranks)
    check_heads(model, ranks)


def check_heads(model: nn.Module, ranks: int) -> None:
    """Raises UserError where ranks cannot have equal numbers of whole heads, as such a model's own code counts them."""
    config = getattr(model, "config", None)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and heads % ranks:
        near = max(count for count in range(1, ranks) if heads % count == 0)
        raise UserError(f"tp = {ranks} ranks cannot share {heads} heads equally.", do=f"tp = {near}")
