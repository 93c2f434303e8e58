"""`[halves]` of a recipe. Row: `TABLE["halves"] = OptionsRow("halves.options")`."""

from __future__ import annotations

from espalier.recipe.errors import UserError
from espalier.recipe.sections import Options, RecipeBase


class HalvesOptions(Options, frozen=True):
    """Gradients cross as float16, multiplied by `scale`."""

    scale: float = 1.0

    def check(self, recipe: RecipeBase) -> None:
        """Raises UserError where nothing would be left of a value."""
        if not self.scale > 0:
            raise UserError(f"halves.scale = {self.scale:g} is not possible.", do="halves.scale = 1.0")


OPTIONS = HalvesOptions
