"""Gather hooks: all-gather the parameters of a block around its passes, and refresh them before their first use.

Hooks sit on the model and its blocks, so what is inside a block may be compiled or checkpointed. When the gather of the
next block begins is a choice (selective overlap: Buff, arXiv 2401.09149): with the block before it (`block`), at the
end of that block's attention, so that it takes no bandwidth from what attention waits for (`attention`), or when it is
needed (`none`). Results and bytes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from espalier.mechanisms.sharding.async_collectives import Exchanges
from espalier.mechanisms.sharding.flat_parameter import FlatParameter, FlatUnit, FrozenUnit
from espalier.plan.axes.placement_plan import Prefetch
from espalier.recipe.errors import UserError
from espalier.train.wrap_policy import Membership, attention_of


class GatherWindow:
    """One block (or, for `module` the model itself, all that lies outside the blocks) and its units. Has state.

    Attributes:
        attention: what must have ended before the next block's parameters are gathered; None: nothing.
        in_backward: between its backward's beginning and the end of the pass.
        recomputes: its backward begins with another pass through its attention.
    """

    def __init__(self, module: nn.Module, flats: Sequence[FlatUnit], attention: nn.Module | None = None) -> None:
        self.module = module
        self.flats = list(flats)
        self.attention = attention
        self.sharded = [flat for flat in flats if flat.sharded]
        self.in_backward = self.recomputes = False


class GatherHooks:
    """The hooks that bring parameters in time and let them go. Has state: the order in which blocks ran last."""

    def __init__(
        self,
        model: nn.Module,
        member: Membership,
        flats: Sequence[FlatUnit],
        exchanges: Exchanges,
        prefetch: Prefetch = "block",
    ) -> None:
        self._exchanges = exchanges
        self._ahead = prefetch != "none"
        self._flats = flats
        self._freezes = any(isinstance(flat, FrozenUnit) for flat in flats)
        used = [{member.of(slot.parameter) for slot in flat.slots} for flat in flats]

        def of(module: nn.Module, block: int | None) -> GatherWindow:
            attention = attention_of(module) if prefetch == "attention" and block is not None else None
            mine = [flat for flat, blocks in zip(flats, used, strict=True) if block in blocks]
            return GatherWindow(module, mine, attention)

        self._root = of(model, None)
        self._blocks = [of(block, index) for index, block in enumerate(member.blocks)]
        self._order = [block for block in self._blocks if block.sharded]  # as far as is known; corrected by every pass
        self._seen: list[GatherWindow] = []
        self._hooks = [
            model.register_forward_pre_hook(self._enter_model, prepend=True),
            model.register_forward_hook(self._leave_model),
        ]
        for window in self._blocks:
            if window.flats:
                self._hooks += self._watch(window)

    def _watch(self, window: GatherWindow) -> list[Any]:
        def enter(*_: Any) -> None:
            with _apart(window):
                self._enter(window)

        def attended(*_: Any) -> None:
            window.recomputes |= window.in_backward
            with _apart(window):
                self._exchanges.advance()
                self._prefetch(window)

        hooks: list[Any] = [window.module.register_forward_pre_hook(enter, prepend=True)]
        if window.sharded:
            hooks.append(window.module.register_forward_hook(lambda *given: self._leave(window, given[-1])))
            if window.attention is not None:
                hooks.append(window.attention.register_forward_hook(torch.compiler.disable(attended)))
        return hooks

    # --- after the optimizer -----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Begins to bring back what was moved, in the order in which forward needs it."""
        order = [self._root, *self._blocks]
        for flat in dict.fromkeys([*(flat for window in order for flat in window.flats), *reversed(self._flats)]):
            stages = flat.refresh()
            flat.refreshing = self._exchanges.begin(stages) if stages else None
            if flat.gathered and flat.sharded:
                flat.release()  # what is gathered is from before

    def settle(self) -> None:
        """Waits for all of it."""
        for flat in self._flats:
            self._refreshed(flat)

    def _refreshed(self, flat: FlatUnit) -> None:
        if flat.refreshing is not None:
            self._exchanges.finish(flat.refreshing)
            flat.refreshing = None

    # --- gathering ---------------------------------------------------------------------------------------------------

    def _launch(self, window: GatherWindow, ahead: bool = False) -> None:
        """Begins the gathers of a window; `ahead` of its turn only as far as that needs no waiting."""
        for flat in window.sharded:
            if not flat.gathered and flat.gathering is None:
                if ahead and flat.refreshing is not None and not flat.refreshing.complete:
                    return  # gathers begin in one order on all ranks, so none may overtake it
                self._refreshed(flat)
                flat.gathering = self._exchanges.begin(flat.gather())

    def _prefetch(self, window: GatherWindow) -> None:
        """Begins the gathers of the block that comes after `window` in this pass."""
        neighbour = self._beside(window, -1 if window.in_backward else 1) if self._ahead else None
        if neighbour is not None:
            self._launch(neighbour, ahead=not window.in_backward)

    def _need(self, window: GatherWindow) -> None:
        self._launch(window)
        for flat in window.flats:
            self._refreshed(flat)
        for flat in window.sharded:
            if not flat.gathered:
                self._exchanges.finish(flat.gathering)
                flat.attach()

    def _release(self, window: GatherWindow, kind: type[FlatUnit] = FlatUnit) -> None:
        for flat in window.sharded:
            if flat.gathered and isinstance(flat, kind):
                flat.release()

    def _beside(self, window: GatherWindow, offset: int) -> GatherWindow | None:
        """The block that runs `offset` after this one, as far as is known."""
        if window not in self._order:
            return None
        at = self._order.index(window) + offset
        return self._order[at] if 0 <= at < len(self._order) else None

    # --- forward -----------------------------------------------------------------------------------------------------

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        self._seen = []
        self._need(self._root)

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._seen:
            self._order = self._seen
        if not torch.is_grad_enabled():
            self.let_go()
        elif self._root.sharded:  # a pass without gradients may come before backward, and let go
            _on_backward(output, lambda: self._need(self._root))

    def _enter(self, window: GatherWindow) -> None:
        self._exchanges.advance()
        if window.sharded and not window.in_backward and window not in self._seen:
            self._seen.append(window)
        self._launch(window)
        if not window.in_backward and window.attention is None:
            self._prefetch(window)
        self._need(window)

    def _leave(self, window: GatherWindow, output: Any) -> None:
        if window.in_backward:  # recomputation
            return
        if self._freezes:
            _on_backward(output, lambda: self._passed(window), "all")
        trained = _on_backward(output, lambda: self._backward(window))
        if not (trained and window is self._order[-1]):
            self._release(window)

    # --- backward ----------------------------------------------------------------------------------------------------

    def _backward(self, window: GatherWindow) -> None:
        window.in_backward = True
        self._launch(window)
        if window.attention is None or not window.recomputes:  # else attention comes first, and is waited for
            self._prefetch(window)
        self._need(window)

    def _passed(self, window: GatherWindow) -> None:
        """All gradients of a block's output have come: nothing in backward needs the frozen parameters behind it."""
        if (behind := self._beside(window, 1)) is not None:
            self._release(behind, FrozenUnit)

    def gradients_are_there(self, flat: FlatParameter) -> None:
        """A unit has all its gradients: nothing in backward needs its parameters any more."""
        if flat.sharded and not flat.gathered:
            raise UserError(
                f"'{flat.slots[0].name}' got a gradient, but the module that holds it was never called.",
                why="sharded parameters are gathered when the module that holds them is called",
                do="call the block as a module, or keep its parameters whole: plan.pin.shard.params=1",
            )
        if flat.sharded and flat not in self._root.flats:
            flat.release()

    def let_go(self) -> None:
        """After backward, or a forward pass without one: also of what was gathered ahead and not needed."""
        for window in (self._root, *self._blocks):
            window.in_backward = False
            for flat in window.sharded:
                if flat.gathering is not None and not flat.gathered:
                    self._exchanges.finish(flat.gathering)
                    flat.attach()
            self._release(window)

    def summon(self) -> None:
        """Brings everything here."""
        for window in (self._root, *self._blocks):
            self._need(window)

    def idle(self) -> None:
        """The gathers of a forward pass without gradients."""
        with self.gathered(self._root.module):
            for window in self._order:
                self._need(window)
                self._release(window)

    @contextmanager
    def gathered(self, module: nn.Module) -> Iterator[None]:
        """Surrounds a pass through a block, or through what lies outside the blocks (of the model itself)."""
        window = next(window for window in (self._root, *self._blocks) if window.module is module)
        self._need(window)
        yield
        self._release(window)

    def detach(self) -> None:
        """Takes off the hooks."""
        for hook in self._hooks:
            hook.remove()


def _apart(window: GatherWindow) -> AbstractContextManager[Any]:
    """Where selective checkpointing computes a block again, it takes every operation for the model's own."""
    return torch._C._DisableTorchDispatch() if window.in_backward else nullcontext()


def _on_backward(output: Any, begin: Callable[[], None], mode: Literal["any", "all"] = "any") -> bool:
    """Calls `begin` with the first gradient of `output`, or with the last of all; whether it will have any."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if leaves:
        torch.autograd.graph.register_multi_grad_hook(leaves, lambda _: begin(), mode=mode)
    return bool(leaves)
