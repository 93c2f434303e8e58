"""When do replicas agree? An Agreement owns the optimizer step and everything exchanged round it."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from espalier.parallel.workload import Outcome


class AgreedStep(NamedTuple):
    """What all ranks know after a step."""

    loss: float
    """Loss over the global batch: total sum / total weight."""
    weight: float
    gradient_norm: float
    rate: float
    """The factor of the learning rates in this step."""
    stop: bool
    """Some rank asked to stop; all stop after this same step."""
    exposed: float
    """Seconds this rank stood still for the exchange, after its own backward pass was done."""
    faulty: tuple[int, ...]
    """Ranks whose own loss or gradient was not finite; the parameters were then left untouched."""
    tasks: tuple[float, ...] = ()
    """Each task's own loss, where there are several."""
    skipped: bool = False
    """The scaled gradient was not finite: the step was left out, and the loss scale made smaller."""


class Agreement(Protocol):
    """Makes the ranks' gradients one, moves the parameters, and says what all ranks then know."""

    def step(self, outcome: Outcome, learning_rate: float, stop: bool) -> AgreedStep:
        """Ends the step begun by the schedule. `learning_rate` is the schedule's factor of each group's own rate."""

    @property
    def level(self) -> bool:
        """Whether all replicas are at the same step now, so that they may validate and save together."""

    @property
    def whole(self) -> bool:
        """Whether all replicas take part; one that was lost may be back later."""

    @property
    def outlives(self) -> bool:
        """Whether replicas can go on from here without one that was lost just now."""

    @property
    def common(self) -> bool:
        """Whether all ranks learn the same from a step; else the replicas' losses differ."""

    @property
    def leaving(self) -> bool:
        """Whether all replicas are to begin anew now, with one that takes the place of another, as all of them know."""

    def following(self, step: int) -> int:
        """The number of the step that comes after `step` on this rank."""

    def at(self, step: int) -> None:
        """What was restored is the state before `step`."""

    def shown(self) -> AbstractContextManager[None]:
        """Surrounds what looks at the model that all replicas agreed on last."""

    def finish(self, learning_rate: float) -> None:
        """After the last step: makes all replicas one."""

    def follow(self, launcher: LauncherNews) -> None:
        """Learns from the launcher which ranks were lost, and when a replacement waits to be met."""

    def close(self) -> None:
        """Ends the threads that exchange something, whatever is under way."""


class LauncherNews(Protocol):
    """What an agreement hears from whoever started the ranks (see `train.rejoin_signal.Recall`)."""

    gone: frozenset[int]
    """Ranks that were lost."""
    called: threading.Event
    """Set while a replacement waits for all ranks to meet anew."""
