"""Table of the kinds of model, a row for each. Imports no torch.

A row names the module of its `KIND`, whose other half is imported when a recipe asks for it; docs/workloads.md adds
one step by step.
"""

from __future__ import annotations

from importlib import import_module

from espalier.recipe.base import Model, ModelKind

ROWS = (
    "espalier.recipe.decoder_defaults",
    "espalier.recipe.modules",
    "espalier.recipe.graphs",
    "espalier.recipe.multitask",
    "espalier.recipe.scenes",
)

KINDS: tuple[ModelKind, ...] = tuple(import_module(row).KIND for row in ROWS)


def of(model: Model) -> ModelKind:
    """The kind that `model` is of."""
    return next(kind for kind in KINDS if isinstance(model, kind.options))


def tagged(tag: object) -> ModelKind | None:
    """The kind that `model.kind` = `tag` asks for, None when there is none."""
    return next((kind for kind in KINDS if tag in kind.tags), None)
