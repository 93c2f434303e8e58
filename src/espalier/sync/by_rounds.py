"""Replicas agree round by round, and inside each replica at every step: the trainer's door to the outer engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from espalier.checkpoint.base import Stateful
from espalier.checkpoint.slices import Slice
from espalier.sync.base import Agreed, Agreement
from espalier.sync.outer import OuterSync
from espalier.workload import Outcome


class Moved(Protocol):
    """What is needed of a sharding (see `shard.base.Sharding`)."""

    def settle(self) -> None:
        """Returns when every parameter that lives here is up to date."""

    def adopt(self) -> None:
        """Takes what was written into what is owned for everybody's parameters."""


class ByRounds:
    """One step inside the replica, then the outer engine's. Has no state of its own.

    Args:
        inner: the agreement inside the replica.
        engine: of what this rank owns.
        sharding: of the replica.
        rate: the inner optimizer's own learning rate, which the schedule's factor multiplies.
    """

    def __init__(self, inner: Agreement, engine: OuterSync, sharding: Moved, rate: float) -> None:
        self.inner, self.engine, self.sharding, self.rate = inner, engine, sharding, rate
        engine.on_moving, engine.on_moved = sharding.settle, sharding.adopt

    def step(self, outcome: Outcome, learning_rate: float, stop: bool) -> Agreed:
        """See `Agreement.step`; the loss is this replica's. All stop at the end of the same round."""
        agreed = self.inner.step(outcome, learning_rate, stop)
        if agreed.faulty:
            return agreed
        before = self.engine.stood
        over = self.engine.after_step(learning_rate * self.rate, agreed.stop)
        exposed = agreed.exposed + self.engine.stood - before
        return agreed._replace(stop=over and self.engine.stopping, exposed=exposed)

    @property
    def level(self) -> bool:
        """See `Agreement.level`: between rounds, and at the end."""
        return self.engine.clock == 0

    @property
    def whole(self) -> bool:
        """See `Agreement.whole`."""
        return self.engine.whole

    @property
    def outlives(self) -> bool:
        """See `Agreement.outlives`."""
        return self.level and not self.engine.leaving and self.engine.members is not None

    @property
    def leaving(self) -> bool:
        """See `Agreement.leaving`: known to all at the end of the same round."""
        return self.level and self.engine.leaving

    def following(self, step: int) -> int:
        """See `Agreement.following`. A slower replica leaves steps out, so that all end their rounds at one number."""
        engine = self.engine
        return engine.begun + (engine.clock + 1) * engine.steps // engine.own_steps

    def at(self, step: int) -> None:
        """See `Agreement.at`."""
        if self.engine.clock == 0:
            self.engine.begun = step

    def shown(self) -> AbstractContextManager[None]:
        """The common parameters in place of this replica's own."""
        return self.engine.shown()

    def finish(self, learning_rate: float) -> None:
        """Makes all replicas one."""
        self.engine.finish(learning_rate * self.rate)


# --- what survives -------------------------------------------------------------------------------------------------


class Common:
    """The model as all replicas agreed on it last: what evaluation and export read, and others resume from. Stateful.

    `writes`: whether this replica writes it.
    """

    def __init__(self, model: Stateful, agreement: ByRounds, writes: bool) -> None:
        self.model, self.agreement, self.writes = model, agreement, writes

    def state_dict(self) -> dict[str, Any]:
        """Copies."""
        with self.agreement.shown():
            return {name: self._copy(value) for name, value in self.model.state_dict().items()}

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Slice):
            return replace(value, local=value.local.clone(), writes=value.writes and self.writes)
        return value.detach().clone() if isinstance(value, Tensor) else value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Every replica begins a round from it, unless parts loaded later say more."""
        self.model.load_state_dict(state)
        self.agreement.engine.begin()


class Part:
    """One half of an outer engine's state. Stateful."""

    def __init__(self, give: Callable[[], dict[str, Any]], take: Callable[[Mapping[str, Any]], None]) -> None:
        self.state_dict, self._take = give, take

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        with torch.no_grad():
            self._take(state)


def parts(inner: Mapping[str, Stateful], agreement: ByRounds, replica: int, shard: str) -> dict[str, Stateful]:
    """What a checkpoint holds of a rank: the common model, its replica's optimizer, and the engine's two halves.

    Args:
        inner: the parts of the replica's sharding, among them `model` and `optimizer`.
        agreement: of this rank.
        replica: its replica's number; shard: names its shard among the ranks of a replica.
    """
    engine = agreement.engine
    own = f"replica {replica}"
    found: dict[str, Stateful] = {"model": Common(inner["model"], agreement, replica == 0)}
    for name, part in inner.items():
        if name != "model":
            found[name if replica == 0 else f"{name} of {own}"] = part
    found[f"outer, shard {shard}"] = Part(engine.common_state, engine.load_common)
    found[f"{own}, shard {shard}"] = Part(engine.own_state, engine.load_own)
    return found
