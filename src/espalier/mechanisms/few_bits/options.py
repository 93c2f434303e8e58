"""`[quant]`: features, messages, sums and weights of a graph network in few bits. Imports no torch."""

from __future__ import annotations

import math

from espalier.recipe import units
from espalier.recipe.errors import UserError
from espalier.recipe.graphs import MessagesModel
from espalier.recipe.sections import Choice, RecipeBase


class Quant(Choice, frozen=True):
    """Features, messages, sums and weights of a graph network in few bits, while training and after.

    `target`: bytes that the codes of features may take (default: 2 bits a value); `bits`: of a feature, learned from
    there on, with `uniform` as they are; `weights`, `messages`, `aggregates`: bits of the matrices, of rows that were
    multiplied and are about to be summed, and of the sums (0: not quantized). `fp32`: also trains the network without
    quantization, at the end, so that the report shows its figure (default: where that takes seconds).
    """

    target: str | int | None = None
    bits: float = 4.0
    weights: int = 4
    messages: int = 4
    aggregates: int = 0
    fp32: bool | None = None

    def check(self, recipe: RecipeBase) -> None:
        """Raises UserError for bits that cannot be, and for those that a network of your own cannot have."""
        for name, least in (("bits", 1), ("weights", 2), ("messages", 2), ("aggregates", 2)):
            bits = getattr(self, name)
            if not least <= bits <= 8 and not (bits == 0 and name != "bits"):
                raise UserError(
                    f"quant.{name} = {bits} is not possible.",
                    why=f"a value takes {least} to 8 bits" + ("" if name == "bits" else "; 0: it is not quantized"),
                    do=f"quant.{name} = 4",
                )
        if isinstance(recipe.model, MessagesModel) and self.aggregates:
            raise UserError(
                f'quant.aggregates = {self.aggregates} is not possible with model.kind = "messages".',
                why="sums are made inside layers that are not ours: rows that they read are rounded, and "
                "their matrices",
                do="quant.aggregates = 0",
            )
        if self.target is not None:
            units.size(self.target, "quant.target")


class A2q(Quant, frozen=True, tag="a2q"):
    """A width and a step for each node; graphs that are classified whole share a bank of them (arXiv 2302.00193)."""

    by_node = True


class Mega(Quant, frozen=True, tag="mega"):
    """A width and a step for each in-degree, so that nodes nobody has seen have one (arXiv 2311.09775)."""


class Uniform(Quant, frozen=True, tag="uniform"):
    """One width, which is given, and one step for each layer, learned from the quantization error. It begins as LSQ's
    does (arXiv 1902.08153)."""

    def check(self, recipe: RecipeBase) -> None:
        """Raises UserError also for a target, and for parts of a bit."""
        if self.target is not None:
            raise UserError(
                'quant.target has no effect with quant.kind = "uniform".',
                why="quant.bits are the bits of every value",
                do='quant.bits, or quant.kind = "a2q"',
            )
        super().check(recipe)
        if self.bits != int(self.bits):
            raise UserError(
                f'quant.bits = {self.bits} is not possible with quant.kind = "uniform".',
                why="all values have as many bits, and no value has a part of one",
                do=f'quant.bits = {math.ceil(self.bits)}, or quant.kind = "a2q", whose widths differ',
            )


OPTIONS = A2q | Mega | Uniform
