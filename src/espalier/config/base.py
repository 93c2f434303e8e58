"""What option structs have in common, and what a kind of model says of its own. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from espalier.config import Recipe
    from espalier.config.recipe_draft import Draft


class Options(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all option structs: frozen, keyword only, unknown keys are errors."""


class Choice(Options, frozen=True, tag_field="kind"):
    """Base of the alternatives of a tagged union; the key `kind` says which one is meant."""


class Model(Choice, frozen=True):
    """Base of what `[model]` may be: one struct for each `model.kind`."""


def _nothing(recipe: Recipe) -> None:
    """Refuses nothing."""


@dataclass(frozen=True)
class Kind:
    """What one kind of model says of its options. Its other half, with torch, is the `workload.Row` in `row`.

    Attributes:
        name: as people read it.
        options: what `[model]` may be; the first word of a message about them is their tag.
        row: the module that holds `ROW`, imported when a recipe asks for this kind.
        fill: fills the options that a recipe leaves open.
        check: raises UserError for options that contradict each other. Sees recipes before and after `fill`.
        section: a table of the recipe that belongs to this kind alone.
        usual: options that a table says nothing of, where they differ from what other kinds have.
        validation: what a validation costs, as a share of a training step; 0: not known.
        unit: what speed is counted in.
    """

    name: str
    options: tuple[type[Model], ...]
    row: str
    fill: Callable[[Draft], None]
    check: Callable[[Recipe], None] = _nothing
    section: str | None = None
    usual: Callable[[dict[str, Any]], dict[str, Any]] = dict
    validation: Callable[[Recipe], float] = lambda recipe: 0.0
    unit: str = "samples"

    @property
    def tags(self) -> tuple[str, ...]:
        """The values of `model.kind`."""
        return tuple(str(one.__struct_config__.tag) for one in self.options)
