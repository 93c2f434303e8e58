"""Tables of a recipe that mechanisms bring, a row for each. Imports no torch.

The options of a mechanism are in `options.py` of its folder, which is imported where a recipe has the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, TypeVar, get_type_hints

import msgspec

from espalier.recipe.base import ModelKind, RecipeBase, replaced

Table = dict[str, Any]
AnyRecipe = TypeVar("AnyRecipe", bound=RecipeBase)


class OptionsRow(NamedTuple):
    """The options of one table, which the core lacks, knows a part of, or reads as a base of the struct.

    Attributes:
        module: with `OPTIONS`, a struct or a union of structs with tags.
        model: the name of the kind of model to which the table belongs; empty: any.
        core: alternatives that the core has itself, by tag: for these the module is not imported.
        resumable: keys that may differ when a run is taken up again.
    """

    module: str
    model: str = ""
    core: tuple[str, ...] = ()
    resumable: tuple[str, ...] = ()

    @property
    def options(self) -> Any:
        """The struct, or the union."""
        return import_module(self.module).OPTIONS


TABLE: dict[str, OptionsRow] = {
    "graph.halo": OptionsRow("espalier.mechanisms.halo_exchange.options", "a graph model"),
    "store": OptionsRow("espalier.mechanisms.disk_batches.options", "a graph model", resumable=("disk", "device")),
    "quant": OptionsRow("espalier.mechanisms.few_bits.options", "a graph model"),
    "sync": OptionsRow("espalier.mechanisms.local_rounds.options", core=("auto", "every_step")),
}
"""By the name of the table: at the top of the recipe, or `section.table`."""


def tables_of(kind: ModelKind) -> tuple[str, ...]:
    """Tables of the recipe that belong to one kind of model alone."""
    return (*kind.sections, *(name for name, row in TABLE.items() if row.model == kind.name))


def fields(struct: Any, place: Sequence[str]) -> dict[str, Any]:
    """Options of a struct that stands at `place` in a recipe, and their types, with those that mechanisms bring."""
    hints = get_type_hints(struct)
    hints.pop("mechanisms", None)
    for name, row in TABLE.items():
        section, _, key = name.rpartition(".")
        if section == ".".join(place):
            hints[key] = hints[key] | row.options if row.core else row.options
    return hints


def get(recipe: RecipeBase, name: str) -> Any:
    """What a table says; None: the recipe does not have it."""
    options: Any = recipe
    for key in name.split("."):
        options = getattr(options, key, None)
    return recipe.mechanisms.get(name, options)


def check(recipe: RecipeBase, kind: ModelKind) -> None:
    """Raises UserError for options of mechanisms that contradict each other, or the recipe of a model of `kind`."""
    for name, row in TABLE.items():
        options = get(recipe, name)
        if options is not None and row.model in ("", kind.name):
            options.check(recipe)


def convert(table: Table, kind: type[AnyRecipe]) -> AnyRecipe:
    """The recipe of a table. Raises msgspec.ValidationError."""
    rest = {key: dict(value) if isinstance(value, dict) else value for key, value in table.items()}
    tables: dict[str, Any] = {}
    for name, row in TABLE.items():
        section, _, key = name.rpartition(".")
        above: Any = rest.get(section) if section else rest
        value = above.get(key) if isinstance(above, dict) else None
        if value is not None and not (isinstance(value, dict) and value.get("kind") in row.core):
            tables[name] = above.pop(key)
    if "mechanisms" in rest:
        raise msgspec.ValidationError("Object contains unknown field `mechanisms`")
    recipe = msgspec.convert(rest, kind, strict=True)
    for name, value in tables.items():
        options = _options(name, value)
        if name.partition(".")[0] in kind.__struct_fields__:
            recipe = replaced(recipe, name.split("."), options)
        else:
            recipe.mechanisms[name] = options
    return recipe


def to_builtins(recipe: RecipeBase) -> Table:
    """The recipe as a plain table, with the keys that are None."""
    table: Table = msgspec.to_builtins(recipe)
    return table | table.pop("mechanisms")


def _options(name: str, value: Any) -> Any:
    """The options that a table says. Raises msgspec.ValidationError with their place in the recipe."""
    try:
        return msgspec.convert(value, TABLE[name].options, strict=True)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        raise msgspec.ValidationError(f"{text} - at `$.{name}{place or '`'}") from None
