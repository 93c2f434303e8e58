"""Anybody's `nn.Module`: its options, and what a recipe leaves open of them. Imports no torch."""

from __future__ import annotations

from msgspec import field

from espalier.recipe.base import Draft, Model, ModelKind


class Module(Model, frozen=True, tag="module"):
    """Anybody's `nn.Module`: `build = "package.module:function"` returns (model, dataset, loss)."""

    build: str
    arguments: dict[str, bool | int | float | str] = field(default_factory=dict)


def _fill(draft: Draft) -> None:
    draft.fill("train.sequence", 1, "a module's samples have no length known here: one sample counts as one token")
    draft.fill("train.batch_tokens", 64 * draft.get("train.sequence"), "64 samples")
    draft.fill("train.steps", 1000, "nothing is known of the module: a thousand steps")
    draft.rates(1e-3, "nothing is known of the module: a usual rate")


KIND = ModelKind(name="a module", options=(Module,), row="espalier.module", fill=_fill)
