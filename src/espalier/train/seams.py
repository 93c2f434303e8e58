"""Seams: fields of a model, with plain defaults, that a mechanism replaces by functions that know the ranks.

`attend(query, key, value, where)` of a decoder (see `parallel.attend`), `aggregate(block, rows, ...)` of a graph
network
(see `graph.networks.base`), `route(x, chosen, weights, experts)` of a mixture of experts (see `parallel.expert_map`),
`total(counts)`, which adds up what a module counts of whole sequences, and the module `feed_forward(x)` of a dense
decoder's block (see `mechanisms.token_chunks`). A module says which of its fields
belong to which seam: `seams = {"attend": ("attend",)}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from espalier.recipe.errors import UserError
from espalier.train.mechanism import Build, Mechanism

if TYPE_CHECKING:
    from torch import nn

Seam = Literal["attend", "aggregate", "route", "total", "feed_forward"]


def fields_of(model: nn.Module, seam: Seam) -> list[tuple[nn.Module, str]]:
    """(module, field) of every place of `seam` in a model."""
    return [(module, field) for module in model.modules() for field in dict(getattr(module, "seams", {})).get(seam, ())]


def expert_numbers(model: nn.Module) -> dict[str, int]:
    """The expert that each parameter of a mixture's experts belongs to, by the parameter's name."""
    return {
        f"{place}.experts.{name}": int(name.partition(".")[0])
        for place, module in model.named_modules()
        if "route" in dict(getattr(module, "seams", {}))
        for name, _ in module.get_submodule("experts").named_parameters()
    }


class Filled(Mechanism):
    """The Protocol of a mechanism that fills one seam. Its claim's question is the seam's name."""

    seam: Seam

    def replacement(self, context: Build, module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        """What `module` is to call instead of `plain`, which it calls now."""
        raise AssertionError("a seam is filled by a subclass")

    def wrap(self, context: Build) -> None:
        """Fills the seam wherever the model has it. Raises UserError when it has none."""
        assert context.model is not None
        places = fields_of(context.model, self.seam)
        if not places:
            raise UserError(
                f"{type(context.model).__name__} has no seam {self.seam!r}, which {self.claim.name} fills.",
                do=f"another model, or a plan without {self.claim.name}",
            )
        for module, field in places:
            setattr(module, field, self.replacement(context, module, getattr(module, field)))
