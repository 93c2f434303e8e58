"""`[reversed_batches]` of a recipe. Row: `TABLE["reversed_batches"] = OptionsRow("reversed_batches.options")`."""

from __future__ import annotations

from espalier.recipe.errors import UserError
from espalier.recipe.sections import Options, RecipeBase


class ReversedBatchesOptions(Options, frozen=True):
    """Micro-batches run from the last to the first; `keep`: how many stay first."""

    keep: int = 0

    def check(self, recipe: RecipeBase) -> None:
        """Raises UserError for a number below 0."""
        if self.keep < 0:
            raise UserError(f"reversed_batches.keep = {self.keep} is not possible.", do="reversed_batches.keep = 0")


OPTIONS = ReversedBatchesOptions
