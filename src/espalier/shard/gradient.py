"""The gradient of a parameter whose gradients lie in shards: torch's clipping works on it, all else is refused by name.

An ordinary loop looks at `parameter.grad`. Where only a piece of a gradient is on this rank, that is one of these: it
has the parameter's shape and no memory.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from espalier.errors import UserError

aten = torch.ops.aten


class Holder(Protocol):
    """Who knows the pieces of a gradient."""

    def norm_of(self, name: str, order: float) -> Tensor:
        """The norm of the whole gradient of a parameter: one number, on the parameter's device."""

    def scale(self, name: str, factor: Any) -> None:
        """Multiplies the piece that is here."""


class Elsewhere(torch.Tensor):
    """Stands in `parameter.grad` for a gradient in shards.

    Attributes:
        path: the parameter's name.
        fresh: what a later backward pass added, until it is taken into the shards.
    """

    path: str
    holder: Holder
    fresh: Tensor | None

    @staticmethod
    def __new__(cls, like: Tensor, name: str, holder: Holder) -> Elsewhere:
        """Of the shape, dtype and device of `like`."""
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        made.path, made.holder, made.fresh = name, holder, None
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.path!r}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Norms, scaling, and what autograd itself does."""
        first = args[0]
        if function in (aten.linalg_vector_norm.default, aten.norm.Scalar):
            return first.holder.norm_of(first.path, float(args[1] if len(args) > 1 else 2.0))
        if function in (aten.mul_.Tensor, aten.mul_.Scalar) and isinstance(first, cls):
            first.holder.scale(first.path, args[1])
            return first
        adds = function in (aten.add_.Tensor, aten.add.Tensor) and isinstance(first, cls)
        if adds and torch._C._current_graph_task_id() != -1:  # a backward pass adds to what is there
            first.fresh = args[1]
            return first
        if function in (aten.detach.default, aten.alias.default):
            return first
        name = next(one.path for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, cls))
        raise UserError(
            f"The gradient of '{name}' is not on this rank: it lies in shards, and {function} needs all of it.",
            why="the plan shards gradients or optimizer states; norms, clipping and scaling work",
            do="plan with shard={'params': 1, 'grads': 1, 'optimizer': 1} where the loop needs whole gradients",
        )
