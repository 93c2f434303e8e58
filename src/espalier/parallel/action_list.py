"""Action lists: what each rank of a pipeline does in a step, in order; and the check that no rank waits without end.

A schedule is data: one list of forward, backward, send and receive actions for each rank. Lists can be written by
hand, printed (`dumps`), read (`loads`), checked (`check`) and timed without a process (`timetable`). Sends do not wait
for the receiver. Messages from one rank to another for one stage arrive in order.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from espalier.recipe.errors import UserError


class ActionKind(StrEnum):
    """What an action does, as `torch.distributed.pipelining` abbreviates it."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    """The gradients of a stage's inputs only."""
    BACKWARD_WEIGHT = "W"
    """The gradients of its parameters, after those of its inputs."""
    SEND_F = "SEND_F"
    """Outputs to the next stage."""
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    """Gradients of inputs to the stage before."""
    RECV_B = "RECV_B"


_COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
_ANSWER = {ActionKind.SEND_F: ActionKind.RECV_F, ActionKind.SEND_B: ActionKind.RECV_B}


class Action(NamedTuple):
    """One action of one rank. `peer`: the rank a message goes to or comes from."""

    stage: int
    kind: ActionKind
    micro_batch: int
    peer: int = -1

    def __str__(self) -> str:
        """`1RECV_F0@0`: stage 1 receives the outputs for micro-batch 0 from rank 0."""
        return f"{self.stage}{self.kind.value}{self.micro_batch}" + (f"@{self.peer}" if self.peer >= 0 else "")

    @property
    def computes(self) -> bool:
        """Whether it is a forward or backward pass."""
        return self.kind in _COMPUTE


ActionLists = Mapping[int, Sequence[Action]]
"""The actions of each rank, in order."""


@dataclass(frozen=True)
class Pipeline:
    """One run of all layers over some of the samples: `stages` are the ranks of each stage. A rank may hold several
    stages; the ranks of one stage compute the same micro-batches together (tensor parallelism)."""

    stages: tuple[tuple[int, ...], ...]
    micro_batches: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """All of them, each once, by their first stage."""
        return tuple(dict.fromkeys(rank for stage in self.stages for rank in stage))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds."""
        return tuple(number for number, ranks in enumerate(self.stages) if rank in ranks)

    def source(self, stage: int, neighbour: int, rank: int) -> int:
        """From whom `rank` of `stage` receives what stage `neighbour` made: itself, where it is there too. Where these
        stages have unequal numbers of ranks, one may send to several."""
        own_ranks = self.stages[stage]
        other = self.stages[neighbour]
        return rank if rank in other else other[own_ranks.index(rank) * len(other) // len(own_ranks)]

    def targets(self, stage: int, neighbour: int, rank: int) -> list[int]:
        """To whom `rank` of `stage` sends what stage `neighbour` needs."""
        return [peer for peer in self.stages[neighbour] if peer != rank and self.source(neighbour, stage, peer) == rank]


def with_transfers(pipeline: Pipeline, orders: Mapping[int, Iterable[Action]]) -> dict[int, list[Action]]:
    """The compute actions of each rank with the messages between stages: received just before they are used, sent as
    soon as they are made."""
    with_messages = {}
    for rank, order in orders.items():
        peers = {
            (stage, step): _peers(pipeline, stage, step, rank) for stage in pipeline.stages_of(rank) for step in (1, -1)
        }
        actions: list[Action] = []
        for action in order:
            stage, kind, number, _ = action
            if kind is ActionKind.BACKWARD_WEIGHT:
                actions.append(action)
                continue
            step = 1 if kind is ActionKind.FORWARD else -1
            source, targets = peers.get((stage, step), (rank, []))
            if source != rank:
                actions.append(Action(stage, ActionKind.RECV_F if step > 0 else ActionKind.RECV_B, number, source))
            actions.append(action)
            for peer in targets:
                actions.append(Action(stage, ActionKind.SEND_F if step > 0 else ActionKind.SEND_B, number, peer))
        with_messages[rank] = actions
    return with_messages


def _peers(pipeline: Pipeline, stage: int, step: int, rank: int) -> tuple[int, list[int]]:
    """From whom `rank` receives what a pass of `stage` takes (itself: from nobody), and to whom it sends what that
    makes. `step`: 1 forward, -1 backward."""
    inside = range(len(pipeline.stages))
    source = pipeline.source(stage, stage - step, rank) if stage - step in inside else rank
    return source, pipeline.targets(stage, stage + step, rank) if stage + step in inside else []


# --- text ----------------------------------------------------------------------------------------------------------


def dumps(lists: ActionLists) -> str:
    """One line for each rank: `0: 0F0,0SEND_F0@1,...`."""
    return "".join(f"{rank}: {','.join(map(str, lists[rank]))}\n" for rank in sorted(lists))


def loads(text: str, origin: str = "the action list") -> dict[int, list[Action]]:
    """The lists that `dumps` wrote. Raises UserError naming what is not an action."""
    lists = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        rank, colon, actions = line.partition(":")
        if not colon or not rank.strip().isdecimal():
            raise UserError(f"{origin}: {line[:40]!r} names no rank.", do="begin each line with a rank: `0: 0F0,0B0`")
        lists[int(rank)] = [_parsed(action.strip(), origin) for action in actions.split(",") if action.strip()]
    return lists


def _parsed(text: str, origin: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None or match[2] not in list(ActionKind) or (match[4] is None) is not (match[2] in _COMPUTE):
        raise UserError(
            f"{origin}: {text!r} is not an action.", do="write 0F0 (stage, kind, micro-batch) or 0SEND_F0@1"
        )
    return Action(int(match[1]), ActionKind(match[2]), int(match[3]), int(match[4] or -1))


_ACTION = re.compile(r"(\d+)([A-Z_]+)(\d+)(?:@(\d+))?")


# --- the check and the timetable -----------------------------------------------------------------------------------


class Timed(NamedTuple):
    """When a rank does an action: seconds from the beginning of the step. A receive ends when its message is there."""

    rank: int
    action: Action
    start: float
    end: float


Seconds = Callable[[Action], float]
"""How long an action takes; of a send, how long its message is on its way."""


def check(pipelines: Iterable[Pipeline], lists: ActionLists, origin: str = "The schedule") -> None:
    """Raises UserError unless every rank of the pipelines does each of its passes once, with what it needs, and no rank
    waits without end; names the first rank and action at fault."""
    for pipeline in pipelines:
        _Simulation(pipeline, lists, origin).run()


def timetable(pipeline: Pipeline, lists: ActionLists, seconds: Seconds) -> list[Timed]:
    """Start and end of every action of a pipeline. Raises UserError as `check` does."""
    return _Simulation(pipeline, lists, "The schedule").run(seconds)


_NOT_COMPUTED = "what it sends is not computed yet"
_NEEDS: Mapping[ActionKind, tuple[tuple[str, str], ...]] = {
    ActionKind.FORWARD: (("x", "its inputs are not there"),),
    ActionKind.BACKWARD: (
        ("F", "its forward pass is not computed yet"),
        ("g", "the gradients of its outputs are not there"),
    ),
    ActionKind.BACKWARD_WEIGHT: (("I", "the gradients of its inputs are not computed yet"),),
    ActionKind.SEND_F: (("F", _NOT_COMPUTED),),
    ActionKind.SEND_B: (("I", _NOT_COMPUTED),),
}
"""What must be there before an action, and what is said where it is not: inputs `x`, outputs `F`, their gradients `g`,
gradients of inputs `I` and of parameters `W`."""
_MAKES: Mapping[ActionKind, tuple[str, ...]] = {
    ActionKind.FORWARD: ("F",),
    ActionKind.BACKWARD: ("I", "W"),
    ActionKind.BACKWARD_INPUT: ("I",),
    ActionKind.BACKWARD_WEIGHT: ("W",),
}
"""What is there after a pass."""


@dataclass
class _Progress:
    """How far a rank is. Has state: the next action, its clock, and what is `there`, of each stage and micro-batch."""

    actions: Sequence[Action]
    stages: frozenset[int]
    at: int = 0
    clock: float = 0.0
    there: set[tuple[str, int, int]] = field(default_factory=set)


_Way = tuple[int, int, int, ActionKind]
"""Sender, receiver, stage and kind of the receive."""


class _Simulation:
    """All ranks of a pipeline, each as far as it comes. Has state."""

    def __init__(self, pipeline: Pipeline, lists: ActionLists, origin: str) -> None:
        self.pipeline = pipeline
        self.origin = origin
        self.last = len(pipeline.stages) - 1
        self.ranks = {
            rank: _Progress(lists.get(rank, ()), frozenset(pipeline.stages_of(rank))) for rank in pipeline.ranks
        }
        self.messages: defaultdict[_Way, deque[tuple[int, float]]] = defaultdict(deque)
        self.waiting: dict[_Way, int] = {}
        self.timed: list[Timed] = []

    def run(self, seconds: Seconds | None = None) -> list[Timed]:
        """Every action with its times; without `seconds` only the check."""
        ready = deque(self.ranks)
        while ready:
            rank = ready.popleft()
            progress = self.ranks[rank]
            while progress.at < len(progress.actions):
                action = progress.actions[progress.at]
                if not self._possible(rank, progress, action):
                    break
                start = progress.clock
                taken = 0.0 if seconds is None else seconds(action)
                if action.computes:
                    progress.clock += taken
                elif action.kind in _ANSWER:
                    way = self._way(rank, action)
                    self.messages[way].append((action.micro_batch, progress.clock + taken))
                    if (woken := self.waiting.pop(way, None)) is not None:
                        ready.append(woken)
                else:
                    progress.clock = max(progress.clock, self.messages[self._way(rank, action)].popleft()[1])
                if seconds is not None:
                    self.timed.append(Timed(rank, action, start, progress.clock))
                progress.at += 1
        self._ended()
        return self.timed

    def _way(self, rank: int, action: Action) -> _Way:
        if action.kind in _ANSWER:
            stage = action.stage + (1 if action.kind is ActionKind.SEND_F else -1)
            return rank, action.peer, stage, _ANSWER[action.kind]
        return action.peer, rank, action.stage, action.kind

    def _possible(self, rank: int, progress: _Progress, action: Action) -> bool:
        """Whether `action` can begin now; False: it waits for a message. Raises UserError where it never can."""
        stage, kind, number, _ = action
        known = stage in progress.stages and number < self.pipeline.micro_batches
        self._need(rank, known, "it has no such stage or micro-batch")
        if kind in (ActionKind.RECV_F, ActionKind.RECV_B):
            return self._received(rank, progress, action)
        given = ("x", 0), ("g", self.last)  # to the first stage and to the last
        for what, why in _NEEDS[ActionKind.BACKWARD if kind is ActionKind.BACKWARD_INPUT else kind]:
            self._need(rank, (what, stage) in given or (what, stage, number) in progress.there, why)
        made = _MAKES.get(kind, ())
        self._need(rank, not any((what, stage, number) in progress.there for what in made), "it has done that")
        progress.there.update((what, stage, number) for what in made)
        if "F" in made and stage + 1 in progress.stages:
            progress.there.add(("x", stage + 1, number))
        if "I" in made and stage - 1 in progress.stages:
            progress.there.add(("g", stage - 1, number))
        return True

    def _received(self, rank: int, progress: _Progress, action: Action) -> bool:
        way = self._way(rank, action)
        queue = self.messages[way]
        if not queue:
            self.waiting[way] = rank
            return False
        if queue[0][0] != action.micro_batch:
            raise self._wrong(rank, f"rank {action.peer} sends micro-batch {queue[0][0]} before that one")
        progress.there.add(("x" if action.kind is ActionKind.RECV_F else "g", action.stage, action.micro_batch))
        return True

    def _need(self, rank: int, there: bool, why: str) -> None:
        if not there:
            raise self._wrong(rank, why)

    def _ended(self) -> None:
        """Raises UserError where a rank still waits, a message is left, or a pass was not done exactly once."""
        blocked = {
            rank: progress.actions[progress.at]
            for rank, progress in self.ranks.items()
            if progress.at < len(progress.actions)
        }
        for rank, action in sorted(blocked.items()):
            sender = self.ranks.get(action.peer)
            coming = () if sender is None else sender.actions[sender.at :]
            wanted = *self._way(rank, action), action.micro_batch
            sent = (
                (*self._way(action.peer, awaited), awaited.micro_batch) for awaited in coming if awaited.kind in _ANSWER
            )
            if wanted not in sent:
                raise self._wrong(rank, f"it waits without end, as rank {action.peer} never sends that")
        for rank, action in sorted(blocked.items()):
            other = blocked[action.peer]
            raise self._wrong(
                rank, f"it waits without end: rank {action.peer} is to send that after {other}, which waits too"
            )
        for (source, target, stage, kind), queue in self.messages.items():
            if queue:
                left = Action(stage, kind, queue[0][0], source)
                raise self._refusal(f"rank {target} never receives what rank {source} sends ({left})")
        for rank, progress in self.ranks.items():
            for stage, number in itertools.product(sorted(progress.stages), range(self.pipeline.micro_batches)):
                if ("W", stage, number) not in progress.there:
                    what = "backward pass" if ("F", stage, number) in progress.there else "forward pass"
                    raise self._refusal(f"rank {rank} does no {what} of stage {stage} for micro-batch {number}")

    def _wrong(self, rank: int, why: str) -> UserError:
        progress = self.ranks[rank]
        return self._refusal(
            f"rank {rank} cannot do its action {progress.at + 1}, {progress.actions[progress.at]}: {why}"
        )

    def _refusal(self, why: str) -> UserError:
        return UserError(f"{self.origin} cannot be run.", why=why, do="plan.schedule=1f1b, or correct the action list")
