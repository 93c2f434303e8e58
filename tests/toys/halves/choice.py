"""The toy codec in plans. Row: `TABLE["halves"] = ChoiceRow("halves.choice", ...)`, before `codecs`."""

from __future__ import annotations

from collections.abc import Sequence

from halves.options import HalvesOptions

from espalier.plan.ask import Ask
from espalier.plan.choice import PlanChoice
from espalier.plan.request import Request


class HalvesChoice(PlanChoice):
    """The codec of gradients, by a name that has its options."""

    def priced(self, ask: Ask) -> tuple[Request, Sequence[str]]:
        """The request with the codec."""
        options = ask.request.recipe.options(HalvesOptions)
        return ask.request.changed(codec=f"halves:{options.scale:g}") if options else ask.request, ()


CHOICE = HalvesChoice()
