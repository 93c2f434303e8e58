"""Placeholder `.grad` of a sharded gradient: norms and elementwise in-place operations work, anything else raises.

An ordinary loop looks at `parameter.grad`. Where only a piece of a gradient is on this rank, that is one of these: it
has the parameter's shape and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from espalier.recipe.errors import UserError

aten = torch.ops.aten


class Holder(Protocol):
    """Who knows the pieces of a gradient."""

    def norm_of(self, name: str, order: float) -> Tensor:
        """The norm of the whole gradient of a parameter: one number, on the parameter's device."""

    def change(self, name: str, operation: Callable[[Tensor], Any]) -> None:
        """Does `operation`, in place and number by number, to the piece that is here."""


EACH = {
    getattr(aten, name)
    for name in ("mul_", "div_", "neg_", "zero_", "clamp_", "clamp_min_", "clamp_max_", "nan_to_num_", "copysign_")
}
"""What changes each number of a gradient by itself."""
TOGETHER = {
    getattr(aten, f"_foreach_{name}"): getattr(aten, name)
    for name in ("mul_", "div_", "neg_", "zero_", "clamp_min_", "clamp_max_")
}
"""The same for lists of gradients."""


class ShardedGradient(torch.Tensor):
    """Stands in `parameter.grad` for a gradient in shards.

    Attributes:
        path: the parameter's name.
        fresh: what a later backward pass added, until it is taken into the shards.
    """

    path: str
    holder: Holder
    fresh: Tensor | None

    @staticmethod
    def __new__(cls, like: Tensor, name: str, holder: Holder) -> ShardedGradient:
        """Of the shape, dtype and device of `like`."""
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        made.path = name
        made.holder = holder
        made.fresh = None
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGradient({self.path!r}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Norms, scaling, and what autograd itself does."""
        first = args[0]
        if function in (aten.linalg_vector_norm.default, aten.norm.Scalar):
            return first.holder.norm_of(first.path, float(args[1] if len(args) > 1 else 2.0))
        if function.overloadpacket in EACH and isinstance(first, cls) and not _matrices(args[1:], kwargs):
            first.holder.change(first.path, lambda piece: function(piece, *args[1:], **(kwargs or {})))
            return first
        if function.overloadpacket in TOGETHER:
            return _one_by_one(function, *args)
        adds = function in (aten.add_.Tensor, aten.add.Tensor) and isinstance(first, cls)
        if adds and torch._C._current_graph_task_id() != -1:  # a backward pass adds to what is there
            first.fresh = args[1]
            return first
        if function in (aten.detach.default, aten.alias.default):
            return first
        name = next(leaf.path for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise UserError(
            f"The gradient of '{name}' is sharded, and {function} needs the whole gradient.",
            why="the plan shards gradients or optimizer states; norms, clipping, scaling and zeroing work",
            do="plan with shard={'params': 1, 'grads': 1, 'optimizer': 1} where the loop needs whole gradients",
        )


def _matrices(*given: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in tree_leaves(given))


def _one_by_one(function: Any, gradients: Sequence[Tensor], *rest: Any) -> None:
    """A foreach operation on gradients of which some are in shards; `rest` may have one value for each."""
    for index, gradient in enumerate(gradients):
        mine = [argument[index] if isinstance(argument, (list, tuple)) else argument for argument in rest]
        TOGETHER[function.overloadpacket](gradient, *mine)
