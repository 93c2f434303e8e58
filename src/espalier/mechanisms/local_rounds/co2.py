"""CO2: replicas far apart train on while the average of their last round travels. After arXiv 2401.16265.

Also around anybody's model and optimizer, in their own loop. It deviates from the authors' code where that is wrong:
what travels is a copy, the clip clips, nothing in the outer step blocks, and no round depends on timing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from espalier.checkpoint.base import StateDict
from espalier.comm.base import check_feedback
from espalier.comm.codecs import codec
from espalier.mechanisms.local_rounds.membership import MemberGroup, Members
from espalier.mechanisms.local_rounds.outer_loop import OuterSync
from espalier.mechanisms.local_rounds.round_length import Rounds
from espalier.optim.diloco_slowmo import METHODS, OuterMethod, defaults_of
from espalier.plan.compose import Claim
from espalier.recipe.errors import UserError

CLAIM = Claim(
    "outer_rounds",
    question="sync",
    needs={"gradients are summed"},
    changes={"owns the optimizer step", "replicas differ between rounds"},
    forbids={"owns the optimizer step", "matrices are cut"},
    after={"optimizer", "stages"},
    instead=("every_step",),
)
"""Ranks that share matrices hold the same norms, which each of them would exchange."""


class CO2:
    """An outer agreement around a model and the optimizer that moves it, on every rank of a group.

    Train in an ordinary loop on each rank's own data; every `optimizer.step()` counts as a local step, and at the
    end of a round the parameters are set to the common ones. Call `finish()` after the last step: then all ranks hold
    one model. Models with running statistics (BatchNorm) are refused: these would differ between ranks.

    Args:
        model: on every rank; rank 0's parameters go to all.
        optimizer: of its parameters, any kind; keeps its own state through rounds.
        steps: local steps of a round; None: begins at 8 and follows the measured waits, for all ranks alike.
        method: a key of `optim.diloco_slowmo.METHODS`.
        group: the ranks; None: torch's default group. A `MemberGroup` for ranks that met in a store of their own.
        choices: settings of `optim.diloco_slowmo.OuterMethod` other than the method's.

    Raises:
        UserError: an unknown method or setting, a model that cannot be averaged, no process group.
        PeerLost: (from `optimizer.step`, `finish`) this rank was given up by the others.

    >>> outer = CO2(model, optimizer, steps=24, codec="int4")  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        steps: int | None = None,
        method: str = "co2",
        group: dist.ProcessGroup | MemberGroup | None = None,
        **choices: Any,
    ) -> None:
        refuse_statistics(model)
        chosen = chosen_of(method, choices)
        self.optimizer = optimizer
        live = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        moving = {id(tensor) for tensor in live}
        still = [tensor.detach() for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in moving]
        crew = group if isinstance(group, MemberGroup) else _crew(group)
        members = None if crew is None else Members(crew, codec(chosen.codec))
        if members is not None:
            members.spread([*live, *still])
        self.engine = OuterSync(live, chosen, members, Rounds(steps or 8, adapt=steps is None))
        self._hook = optimizer.register_step_post_hook(self._stepped)

    @property
    def rate(self) -> float:
        """The inner learning rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    def _stepped(self, *_: Any) -> None:
        self.engine.after_step(self.rate)

    def shown(self) -> AbstractContextManager[None]:
        """The common parameters in place of this rank's own, to validate or save them."""
        return self.engine.shown()

    def finish(self) -> None:
        """Makes all ranks one model. All call it after their last step."""
        self.engine.finish(self.rate)

    def state_dict(self) -> StateDict:
        """What a checkpoint of this rank needs beside its model and its optimizer; also in flight."""
        return self.engine.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Takes back what `state_dict` gave, after model and optimizer took back theirs."""
        self.engine.load_state_dict(state)

    def detach(self) -> None:
        """Leaves model and optimizer as they are."""
        self._hook.remove()
        self.engine.close()


def chosen_of(method: str, settings: dict[str, Any]) -> OuterMethod:
    """The choices of a method with some set otherwise. Raises UserError for a name that is none, and for a codec
    with which error feedback diverges."""
    if method not in METHODS:
        raise UserError(f"sync.kind = {method!r} is unknown.", do=f"one of {', '.join(METHODS)}")
    known = {field.name for field in fields(OuterMethod)}
    wrong = sorted(set(settings) - known)
    if wrong:
        raise UserError(f"{wrong[0]!r} is not an option of sync.", why=f"there are {', '.join(sorted(known))}")
    chosen = replace(defaults_of(method, settings.get("penalty")), **settings)
    check_feedback(codec(chosen.codec))
    return chosen


def refuse_pieces(choices: OuterMethod, shards: int) -> None:
    """Raises UserError for a penalty by tensors where a replica's ranks hold pieces of them."""
    if choices.penalty == "per_tensor" and shards > 1:
        raise UserError(
            f"sync.penalty = 'per_tensor' with replicas of {shards} ranks.",
            why="each rank holds pieces of other tensors, and no rank the norm of one",
            do="sync.penalty='norm', or replicas of one rank",
        )


def refuse_statistics(model: nn.Module) -> None:
    """Raises UserError for a model with buffers that would differ between replicas."""
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None:
            raise UserError(
                f"{name or type(model).__name__} keeps running statistics, which would differ between replicas.",
                do="GroupNorm or LayerNorm, or track_running_stats=False",
            )


def _crew(group: dist.ProcessGroup | None) -> MemberGroup | None:
    """The ranks of a process group, each a member; None where there is but one."""
    if group is None and not dist.is_initialized():
        return None
    everyone = group if group is not None else dist.group.WORLD
    assert everyone is not None
    return (
        MemberGroup(_store(everyone), everyone.rank(), tuple(range(everyone.size()))) if everyone.size() > 1 else None
    )


def _store(group: Any) -> Any:
    """The store that a group's ranks met in."""
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.distributed_c10d import _get_default_store, _world

    getter = getattr(group, "get_group_store", None)
    store = getter() if getter is not None else _get_default_store()
    return PrefixStore(f"outer of {_world.pg_names.get(group, 'all')}", store)
