"""Recipe draft: a recipe whose open options are being filled, each with its reason. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from espalier.config import Recipe


class Derivation(Struct, frozen=True):
    """One option the recipe left open: its dotted key, the value it got, and why."""

    key: str
    value: bool | int | float | str
    reason: str


class Draft:
    """A recipe being filled. Has state: the recipe so far and what was derived. `vocabulary`: the tokenizer's tokens,
    where they are known."""

    def __init__(self, recipe: Recipe, vocabulary: int | None = None) -> None:
        self.recipe = recipe
        self.vocabulary = vocabulary
        self.found: list[Derivation] = []

    def get(self, key: str) -> Any:
        """The value at a dotted key."""
        value: Any = self.recipe
        for name in key.split("."):
            value = getattr(value, name)
        return value

    def fill(self, key: str, value: bool | int | float | str, reason: str) -> None:
        """Sets `key` where it is None, and notes why."""
        if self.get(key) is None:
            self.recipe = _replaced(self.recipe, key.split("."), value)
            self.found.append(Derivation(key, value, reason))

    def rates(self, adamw: float, reason: str) -> None:
        """The learning rates of either optimizer."""
        if self.get("train.optimizer").__struct_config__.tag == "adamw":
            self.fill("train.optimizer.learning_rate", adamw, reason)
            return
        muon = "Muon's steps have the same size at every width: 0.02 (its author's)"
        self.fill("train.optimizer.learning_rate", 0.02, muon)
        self.fill("train.optimizer.adamw.learning_rate", adamw, reason)


def _replaced(struct: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    return msgspec.structs.replace(struct, **{name: _replaced(getattr(struct, name), rest, value) if rest else value})
