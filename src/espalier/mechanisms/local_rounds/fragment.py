"""A part of the model that travels at once: live tensors, the outer parameters behind them, and what is under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from espalier.checkpoint.base import StateDict
from espalier.mechanisms.local_rounds.membership import MemberReport, OuterSum, PendingSum
from espalier.optim.diloco_slowmo import OuterMethod
from espalier.optim.outer_optimizer import OuterUpdate, Sum
from espalier.recipe.errors import UserError


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
    update: OuterUpdate
    residual: Tensor | None
    base: Tensor | None = None
    flight: PendingSum | None = None
    arrived: OuterSum | None = None
    due: int | None = None
    age: int = 0
    own_change: Tensor | None = None

    def common_state(self) -> StateDict:
        """What is the same on all replicas; nothing is on its way any more."""
        part: StateDict = {"x": self.x, "update": self.update.state_dict()}
        if self.arrived is not None:
            part["total"] = self.arrived.total
            part["notes"] = {str(member): list(note) for member, note in self.arrived.notes.items()}
            if self.base is not None:
                part["base"] = self.base
        return part

    def load_common(self, part: Mapping[str, Any]) -> None:
        """Takes back what `common_state` gave."""
        self.x.copy_(part["x"])
        self.update.load_state_dict(part["update"])
        self.base = self.flight = self.arrived = None
        if "total" in part:
            # Who asked to stop, or was called, was so in the attempt that is over.
            notes = {
                int(member): MemberReport(*note)._replace(stop=0.0, called=0.0)
                for member, note in part["notes"].items()
            }
            self.arrived = OuterSum(part["total"].clone(), notes, 0.0)
            self.base = part["base"].clone() if "base" in part else None

    def own_state(self, live: bool) -> StateDict:
        """What is this replica's; `live`: with the tensors that the inner optimizer moves."""
        part: StateDict = {"due": self.due, "age": self.age}
        if live:
            part["live"] = [tensor.clone() for tensor in self.live]  # the common model is restored into them first
        tensors = {"own": self.own_change, "residual": self.residual}
        return part | {name: value for name, value in tensors.items() if value is not None}

    def load_own(self, part: Mapping[str, Any]) -> None:
        """Takes back what `own_state` gave."""
        self.due = part["due"]
        self.age = int(part["age"])
        if "live" in part:
            torch._foreach_copy_(self.live, part["live"])
        self.own_change = part["own"].clone() if "own" in part else None
        if self.residual is not None and "residual" in part:
            self.residual.copy_(part["residual"])


def split(live: Sequence[Tensor], fragments: int) -> list[list[Tensor]]:
    """Tensors in order, cut into `fragments` parts of about equal size. Raises UserError: fewer tensors than parts."""
    parts = iter(live)
    return [list(islice(parts, len(fragment))) for fragment in cut([tensor.numel() for tensor in live], fragments)]


def cut(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """The same of their sizes."""
    if fragments > len(sizes):
        raise UserError(
            f"sync.fragments = {fragments}, and the model has {len(sizes)} tensors.", do=f"sync.fragments={len(sizes)}"
        )
    whole = sum(sizes)
    parts: list[list[int]] = [[]]
    done = 0
    for index, size in enumerate(sizes):
        missing = fragments - len(parts)
        if parts[-1] and missing and (done >= len(parts) * whole / fragments or len(sizes) - index <= missing):
            parts.append([])
        parts[-1].append(size)
        done += size
    return parts


def fragment_of(live: list[Tensor], choices: OuterMethod, lossy: bool, total: Sum | None) -> Fragment:
    """A fragment at rest, its outer parameters the live ones. Raises UserError: tensors of several kinds."""
    kinds = {(tensor.dtype, tensor.device) for tensor in live}
    if len(kinds) > 1:
        raise UserError(
            f"Parameters of several kinds travel together: {sorted(map(str, kinds))}.",
            do="bring the model to one dtype and device",
        )
    x = torch.cat([tensor.reshape(-1) for tensor in where(live, choices.offload)])
    cuts = [0]
    for tensor in live:
        cuts.append(cuts[-1] + tensor.numel())
    residual = torch.zeros_like(x) if lossy else None
    return Fragment(
        [tensor.detach() for tensor in live], x, views_of(x, live), OuterUpdate(x, choices, cuts, total), residual
    )


def where(live: Sequence[Tensor], offload: bool) -> list[Tensor]:
    """`live` tensors where the outer ones are: in host memory, or as they are."""
    return [tensor.detach().cpu() if offload else tensor.detach() for tensor in live]


def views_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Parts of `flat` in the shapes of `like`."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
