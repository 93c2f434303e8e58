"""Kind of model: what each says of its own options, and the `Draft` of a recipe that it fills. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from espalier.recipe.errors import UserError
from espalier.recipe.sections import Model, RecipeBase

__all__ = ["Derivation", "Draft", "Model", "ModelKind", "RecipeBase"]


FAR = 30.0
"""Learning rates so many times above or below the derived one are noted."""


class Derivation(Struct, frozen=True):
    """One option the recipe left open: its dotted key, the value it got, and why."""

    key: str
    value: bool | int | float | str
    reason: str


class Draft:
    """A recipe being filled. Has state: the recipe so far and what was derived. `vocabulary`: the tokenizer's tokens,
    where they are known."""

    def __init__(self, recipe: RecipeBase, vocabulary: int | None = None) -> None:
        self.recipe = recipe
        self.vocabulary = vocabulary
        self.derivations: list[Derivation] = []

    def get(self, key: str) -> Any:
        value: Any = self.recipe
        for name in key.split("."):
            value = getattr(value, name)
        return value

    def fill(self, key: str, value: Any, reason: str) -> None:
        """Sets `key` where it is None, and notes why; and that a learning rate is given which is FAR from it."""
        given = self.get(key)
        if given is None:
            self.recipe = replaced(self.recipe, key.split("."), value)
            self.derivations.append(Derivation(key, value, reason))
        elif key.endswith("learning_rate") and not value / FAR < given < value * FAR:
            reason = f"given, which is {given / value:.3g} x the {value} that would be derived: {reason}"
            self.derivations.append(Derivation(key, given, reason))

    def rates(self, adamw: float, reason: str, share: float = 1.0, because: str = "") -> None:
        """The learning rates of either optimizer, times `share`, which is `because`."""
        adamw, reason = float(f"{share * adamw:.3g}"), reason + because
        if self.get("train.optimizer").__struct_config__.tag == "adamw":
            self.fill("train.optimizer.learning_rate", adamw, reason)
            return
        muon = "Muon's steps have the same size at every width: 0.02 (its author's)"
        self.fill("train.optimizer.learning_rate", float(f"{share * 0.02:.3g}"), muon + because)
        self.fill("train.optimizer.adamw.learning_rate", adamw, reason)


def replaced(struct: Any, path: list[str], value: Any) -> Any:
    """`struct` with another `value` at a path of keys."""
    name, *rest = path
    return struct.changed(**{name: replaced(getattr(struct, name), rest, value) if rest else value})


def with_optimizer(table: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """A recipe's table with the `usual` optimizer, where it names none."""
    train = table.get("train", {})
    given = train.get("optimizer", {}) if isinstance(train, dict) else None
    if not isinstance(given, dict) or "kind" in given:
        return table
    return {**table, "train": {**train, "optimizer": {**usual, **given}}}


def refuse_mixture_and_recompute(recipe: RecipeBase, what: str) -> None:
    """Raises UserError for several [data] tables and for recomputation, of a recipe for `what`."""
    if len(recipe.data) > 1:
        raise UserError(f"The recipe of {what} has one [data] table; this one has {len(recipe.data)}.", do="keep one")
    if recipe.train.recompute not in (None, "none"):
        raise UserError(f"train.recompute = {recipe.train.recompute!r} is not possible for {what}.", do='"none"')


def _nothing(recipe: RecipeBase) -> None:
    """Refuses nothing."""


@dataclass(frozen=True)
class ModelKind:
    """What one kind of model says of its options. Its other half, with torch, is the `workload_row.Row` in `row`.

    Attributes:
        name: as people read it.
        options: what `[model]` may be; the first word of a message about them is their tag.
        row: the module that holds `ROW`, imported when a recipe asks for this kind.
        fill: fills the options that a recipe leaves open.
        check: raises UserError for options that contradict each other. Sees recipes before and after `fill`.
        sections: tables of the recipe that belong to this kind alone.
        usual: options that a table says nothing of, where they differ from what other kinds have.
        validation: what a validation costs, in training steps (while `train.validate_tokens` is open: the dearest);
            0: not known.
        unit: what speed is counted in.
        data: data of this kind that every machine has; empty: `data.path` may mean anything.
    """

    name: str
    options: tuple[type[Model], ...]
    row: str
    fill: Callable[[Draft], None]
    check: Callable[[RecipeBase], None] = _nothing
    sections: tuple[str, ...] = ()
    usual: Callable[[dict[str, Any]], dict[str, Any]] = dict
    validation: Callable[[RecipeBase], float] = lambda recipe: 0.0
    unit: str = "samples"
    data: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        """The values of `model.kind`."""
        return tuple(str(choice.__struct_config__.tag) for choice in self.options)
