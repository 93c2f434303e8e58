"""Workload registry: looks up a recipe's kind of model. The only place where kinds are looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from espalier.parallel.workload import Progress, Workload
from espalier.recipe import Recipe, defaults, model_kinds
from espalier.recipe.base import Derivation, ModelKind
from espalier.train.workload_row import Opening, Row

Waiting = Callable[[str], AbstractContextManager[Progress]]
"""Shows what is waited for."""


@dataclass(frozen=True)
class Resolved:
    """A recipe with nothing left open, and why each derived value is what it is."""

    recipe: Recipe
    derivations: Sequence[Derivation] = ()
    folder: Path | None = None
    """Where the recipe's file lies: a foreign module may lie beside it."""
    data: Any = None
    """What was opened to derive it."""
    trust: bool = False
    """The user trusts who made the run: what can run code is read too (`--trust`)."""
    frozen: Path | None = None
    """See `Opening.frozen`."""
    reads: bool = True
    """Whether the data itself is read, see `Opening.reads`."""


def silently(what: str) -> AbstractContextManager[Progress]:
    """Waits without a word."""
    return nullcontext(lambda done, total: None)


def row(recipe: Recipe) -> Row:
    """The row of the recipe's kind of model, imported now."""
    return row_of(model_kinds.of(recipe.model))


def row_of(kind: ModelKind) -> Row:
    """The row of a kind of model, imported now."""
    row_of_kind = import_module(kind.row).ROW
    assert isinstance(row_of_kind, Row)
    return row_of_kind


def settle(
    recipe: Recipe,
    folder: Path | None,
    waiting: Waiting = silently,
    frozen: Path | None = None,
    trust: bool = False,
) -> Resolved:
    """Derives what a recipe leaves open; `folder`: where its file lies; `frozen`: see `Opening.frozen`; `trust`: see
    `Resolved.trust`."""
    kind = row(recipe)
    with waiting(kind.reading) as progress:
        prepared = kind.prepare(recipe, Opening(folder, progress, frozen=frozen))
    resolved, derivations = defaults.resolve(prepared.recipe, vocabulary=prepared.vocabulary)
    return Resolved(resolved, [*prepared.derivations, *derivations], folder, prepared.data, trust, frozen)


def open_workload(resolved: Resolved, waiting: Waiting = silently) -> Workload:
    """The workload of a resolved recipe, its data opened (built on first use)."""
    kind = row(resolved.recipe)
    with waiting(kind.reading) as progress:
        opening = Opening(resolved.folder, progress, resolved.data, resolved.frozen, resolved.reads)
        return kind.open(resolved.recipe, opening)
