"""Sharded models in a user's own loop: backward, clipping, step and zero_grad as usual, the exchanges by themselves.

The optimizer keeps its class, its groups and its schedulers; only its parameters become the pieces that this rank
moves. Each backward pass exchanges, as under DistributedDataParallel, unless it runs in `model.no_sync()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from espalier.comm.base import Traffic, traffic
from espalier.mechanisms.sharding.amsp import Amsp
from espalier.mechanisms.sharding.flat_parameter import FlatParameter
from espalier.mechanisms.sharding.model_signature import ModelSignature, changed
from espalier.mechanisms.sharding.sharded_gradient import ShardedGradient
from espalier.mechanisms.sharding.sharded_state_dict import load_whole_state_dict, whole_state_dict
from espalier.recipe.errors import UserError

ELEMENTWISE = frozenset(
    ["Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Lion", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"],
)
"""Optimizers that move each number by itself, so that a piece moves as it would in the whole."""

REDUCTIONS = {float("inf"): dist.ReduceOp.MAX, float("-inf"): dist.ReduceOp.MIN}
"""How norms of pieces become the whole's, where their powers are not added up."""


class UserLoop:
    """Drives an `Amsp` from the events of an ordinary loop. Has state: whether a backward pass is under way.

    Args:
        sharding: the model, spread.
        optimizer: built on the model's parameters; changed in place.
        weight: what each gradient of this rank counts in the sum: its share of the batch, when losses are means.
        channel: the ranks.
    """

    def __init__(
        self, sharding: Amsp, optimizer: torch.optim.Optimizer, weight: float, channel: dist.ProcessGroup
    ) -> None:
        self.sharding = sharding
        self._open = self._pending = False
        self._exchanges = True
        self._carried: dict[FlatParameter, Tensor] = {}
        self._norms: dict[float, dict[str, Tensor]] = {}
        self._among = channel if sharding.cut is None else sharding.cut.replica
        for flat in sharding.flats:
            flat.weight = weight
        sharding.on_backward = self._begin
        optimizer.register_step_pre_hook(lambda *_: self._before_step())
        optimizer.register_step_post_hook(lambda *_: self._moved())
        model = sharding.model
        self._seen = ModelSignature(model)
        model.register_forward_pre_hook(lambda *_: self._forward(), prepend=True)
        model.register_state_dict_post_hook(partial(whole_state_dict, sharding))
        model.register_load_state_dict_pre_hook(partial(load_whole_state_dict, sharding))
        model.register_load_state_dict_post_hook(lambda *_: sharding.let_go())
        model.no_sync = self.no_sync  # type: ignore[assignment]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add to this rank's gradients; the next one outside exchanges them all."""
        before = self._exchanges
        self._exchanges = False
        try:
            yield
        finally:
            self._exchanges = before

    # --- backward ----------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        """A backward pass that is still open was ended by an error: what it began is dropped."""
        if self._open and torch._C._current_graph_task_id() == -1:
            self.clear()

    def _begin(self) -> None:
        """The first gradient of a backward pass has come. Raises UserError when the model is not what was spread."""
        self._seen.check(self.sharding.model, may_freeze=True)
        moved = next((flat for flat in self.sharding.flats if not flat.attached()), None)
        if moved is not None:
            raise changed(moved.slots[0].name, self.sharding.model)
        self._open = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._norms.clear()
        for flat in self.sharding.flats:
            accumulated = any(isinstance(slot.parameter.grad, ShardedGradient) for slot in flat.slots)
            if not accumulated:
                self._carried.pop(flat, None)
                flat.rounds = 0
                for slot in flat.slots:
                    slot.used = slot.parameter.grad is not None and slot.parameter.grad is slot.view
            elif not self._pending:  # exchanged already, and not cleared since
                self._carried[flat] = flat.result().clone()
                flat.rounds = 0
        self.sharding.begin_round(self._exchanges)

    def _end(self) -> None:
        self.sharding.end_round()
        self._open = False
        self._pending = True
        if self._exchanges:
            self._finish()
        self._stand_in()

    def _finish(self) -> None:
        used = self.sharding.finish(self._carried)
        self._carried.clear()
        self._pending = False
        for flat in self.sharding.flats:
            for slot in flat.slots:
                slot.used = used[slot.number]

    def _stand_in(self) -> None:
        """Puts stand-ins where the gradient is in shards now."""
        for flat in self.sharding.flats:
            for slot in flat.slots:
                if (flat.scattered or not self._pending) and slot.used and not flat.direct:
                    slot.parameter.grad = ShardedGradient(slot.parameter, slot.name, self)

    # --- the optimizer -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Exchanges what backward passes in `no_sync` have left."""
        if self._pending:
            self.sharding.begin_round(True)
            self.sharding.end_round()
            self._finish()
            self._stand_in()

    def _before_step(self) -> None:
        self.flush()
        for flat in self.sharding.flats:
            for slot, owned, _ in flat.moved:
                if slot.parameter.grad is None:  # cleared by the loop itself, which skips this update
                    owned.tensor.grad = None

    def _moved(self) -> None:
        """Waits for what was moved: an ordinary loop may read parameters wherever it likes."""
        self.sharding.refresh()
        self.sharding.settle()

    def clear(self) -> None:
        """What `zero_grad` does; also after a backward pass that an error ended."""
        if self._open:
            self.sharding.abandon()
        self._open = self._pending = False
        self._carried.clear()
        self._norms.clear()
        self.sharding.clear()

    # --- norms of gradients in shards --------------------------------------------------------------------------------

    def norm_of(self, name: str, order: float) -> Tensor:
        """See `sharded_gradient.Holder`. The first question after a backward pass asks all ranks for all norms at
        once."""
        self.flush()
        if order not in self._norms:
            self._norms[order] = self._all_norms(order)
        return self._norms[order][name]

    def _all_norms(self, order: float) -> dict[str, Tensor]:
        flats = [flat for flat in self.sharding.flats if not flat.direct]
        slots = [slot for flat in flats for slot in flat.slots]
        place = {slot.name: index for index, slot in enumerate(slots)}
        norms_by_slot = torch.zeros(len(slots), dtype=torch.float64, device=flats[0].full.device)
        if order == float("-inf"):
            norms_by_slot.fill_(float("inf"))
        power = order if order and not math.isinf(order) else 1.0  # order 0 counts, infinite orders compare
        for flat in flats:
            copies = 1.0 if math.isinf(order) else flat.copies
            for slot, owned, _ in flat.moved:
                if owned.tensor.grad is not None and owned.tensor.numel():
                    norm = torch.linalg.vector_norm(owned.tensor.grad.double(), order)
                    norms_by_slot[place[slot.name]] = norm**power / copies
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(REDUCTIONS.get(order, dist.ReduceOp.SUM))
        with traffic(Traffic.CONTROL):
            self._among.allreduce([norms_by_slot], options).wait()
        norms = norms_by_slot ** (1.0 / power)
        kinds = {slot.name: torch.promote_types(slot.parameter.dtype, torch.float32) for slot in slots}
        return {name: norms[place[name]].to(kind) for name, kind in kinds.items()}

    def change(self, name: str, operation: Callable[[Tensor], Any]) -> None:
        self._norms.clear()
        for owned in self.sharding.owned:
            if owned.name == name and owned.tensor.grad is not None:
                operation(owned.tensor.grad)


def refuse_split(optimizer: torch.optim.Optimizer, sharding: Amsp) -> None:
    """Raises UserError when the plan cuts matrices that this optimizer moves as a whole."""
    kind = type(optimizer)
    elementwise = any(base.__name__ in ELEMENTWISE for base in kind.__mro__) or getattr(optimizer, "elementwise", False)
    cut = next((owned for owned in sharding.owned if not owned.whole), None)
    if cut is not None and not elementwise:
        raise UserError(
            f"{kind.__name__} may need whole matrices, and the plan shards '{cut.name}'.",
            why="only elementwise optimizers (Adam, SGD, …) give the same result on shards",
            do="make_plan(…, shard={'optimizer': 1}); or set `elementwise = True` on an optimizer that is one of those",
        )
