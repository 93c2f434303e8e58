"""A part of the model that travels at once: live tensors, the outer parameters behind them, and what is under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.errors import UserError
from espalier.sync.choices import Choices
from espalier.sync.members import Arrived, Flight
from espalier.sync.update import Sum, Update


@dataclass
class Fragment:
    """See the module. Has state.

    Attributes:
        live: the tensors that the inner optimizer moves.
        views: the same places in `x`.
        base: with `parameters`: x as it was where the fragment under way began.
        flight: under way; arrived: a flight that is here already (taken up from a checkpoint).
        due: local steps until the flight is used; None: at the fragment's next departure.
        age: local steps since it departed.
        own: with `eager`: what this replica's difference in the flight under way is; the live tensors have it already.
    """

    live: list[Tensor]
    x: Tensor
    views: list[Tensor]
    update: Update
    residual: Tensor | None
    base: Tensor | None = None
    flight: Flight | None = None
    arrived: Arrived | None = None
    due: int | None = None
    age: int = 0
    own: Tensor | None = None


def split(live: Sequence[Tensor], fragments: int) -> list[list[Tensor]]:
    """Tensors in order, cut into `fragments` parts of about equal size. Raises UserError: fewer tensors than parts."""
    if fragments > len(live):
        raise UserError(
            f"sync.fragments = {fragments}, and the model has {len(live)} tensors.", do=f"sync.fragments={len(live)}"
        )
    whole = sum(tensor.numel() for tensor in live)
    parts: list[list[Tensor]] = [[]]
    done = 0
    for index, tensor in enumerate(live):
        missing = fragments - len(parts)
        if parts[-1] and missing and (done >= len(parts) * whole / fragments or len(live) - index <= missing):
            parts.append([])
        parts[-1].append(tensor)
        done += tensor.numel()
    return parts


def fragment_of(live: list[Tensor], choices: Choices, lossy: bool, total: Sum | None) -> Fragment:
    """A fragment at rest, its outer parameters the live ones. Raises UserError: tensors of several kinds."""
    kinds = {(tensor.dtype, tensor.device) for tensor in live}
    if len(kinds) > 1:
        raise UserError(
            f"Parameters of several kinds travel together: {sorted(map(str, kinds))}.",
            do="bring the model to one dtype and device",
        )
    x = torch.cat([tensor.detach().reshape(-1) for tensor in live])
    cuts = [0]
    for tensor in live:
        cuts.append(cuts[-1] + tensor.numel())
    residual = torch.zeros_like(x) if lossy else None
    return Fragment(
        [tensor.detach() for tensor in live], x, views_of(x, live), Update(x, choices, cuts, total), residual
    )


def views_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Parts of `flat` in the shapes of `like`."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
