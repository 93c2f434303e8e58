"""Membership of the outer rounds: who takes part, and what travels between members. A flight is one sum on its way, in
its own thread.

Sums are a direct exchange in rank order, so all members get the same bits (`comm.compressed_collectives`). A flight
counts when every member has it: the last to get it says so in the store, the first to fail says the opposite, and one
word is never replaced by the other. After a failure those that report within a grace period are the members from then
on, and the flight is flown again among them from what each had sent; its weights say what the sum is of.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo

from espalier.comm import store_client
from espalier.comm.abort import apart
from espalier.comm.base import Codec, Ledger, Spent, Traffic
from espalier.comm.comm_thread import QueuedWork
from espalier.comm.compressed_collectives import CodedCollectives
from espalier.recipe.errors import RESUME, PeerLost

GRACE = 3.0
"""Seconds after the first sign of a failure in which survivors report."""
LOOK = 0.02
"""Seconds between looks into the store while something is under way."""


class MemberReport(NamedTuple):
    """What a member says of its round.

    Attributes:
        weight: of what it sends: samples behind it, in any unit that all share.
        steps: local steps of a round that would hide its flights (0: no wish).
        stop: it was asked to stop.
        seconds: of one local step.
        rate: its inner learning rate; all use that of the first member.
        called: it was called to begin anew with all members, at the end of a round.
    """

    weight: float = 1.0
    steps: float = 0.0
    stop: float = 0.0
    seconds: float = 0.0
    rate: float = 1.0
    called: float = 0.0


class OuterSum(NamedTuple):
    """A flight that every member has: the sum, who is in it with what to say, and how long it took."""

    total: Tensor
    notes: dict[int, MemberReport]
    seconds: float

    @property
    def weight(self) -> float:
        """Of the whole sum."""
        return sum(note.weight for note in self.notes.values())


class MemberGroup(NamedTuple):
    """What members need to find each other.

    Attributes:
        store: of all ranks; its server must outlive every member.
        member, members: this replica's number, and those that begin.
        shard, shards: this rank's number among the ranks of its replica, and how many these are.
        timeout: seconds of any wait for a message.
        grace: seconds; see `GRACE`.
        ledger: books what is sent; may be None.
        lost: asked who is known to be gone, by rank among all of all members; None: nobody knows more than they do.
    """

    store: Any
    member: int
    members: tuple[int, ...]
    shard: int = 0
    shards: int = 1
    timeout: float = 60.0
    grace: float = GRACE
    ledger: Ledger | None = None
    lost: Callable[[], Collection[int]] | None = None


@dataclass
class SumAttempt:
    """A flight among the members of one epoch. Has state: what it brought here.

    Attributes:
        total: becomes the sum; residual: becomes what the flight's residual is once every member has the sum.
    """

    total: Tensor
    residual: Tensor | None
    notes: dict[int, MemberReport] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class PendingSum:
    """One sum under way. Has state: what it needs to be flown again."""

    sent: Tensor
    """[n] this member's contribution, unchanged until the flight has ended."""
    residual: Tensor | None
    note: MemberReport
    number: int
    attempt: SumAttempt = field(init=False)
    outcome: CommitVote = field(init=False)
    epoch: int = field(init=False, default=0)
    """Of the members among whom it flies."""


@dataclass
class CommitVote:
    """Whether all ranks of all members have done something, as one word in the store that is never replaced. The last
    to have done it says so, the first to fail says the opposite. Has state: the answer, once there is one."""

    space: Any
    number: int
    ranks: int
    limit: float
    known: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    done_at: float = math.inf
    begun: float = field(default_factory=time.monotonic)

    def arrive(self) -> None:
        """This rank has done it."""
        if self.space.add(f"arrived/{self.number}", 1) == self.ranks:
            self.space.compare_set(f"verdict/{self.number}", "", "all")
        self.done_at = time.monotonic()

    def failed(self, error: BaseException) -> None:
        """This rank has not, and nobody has."""
        self.error = self.error or error
        self.space.compare_set(f"verdict/{self.number}", "", "failed")

    def look(self, rank: int) -> bool:
        """Whether there is an answer; of a failure the others learn at once that this rank is alive."""
        if time.monotonic() > self.done_at + self.limit:
            self.failed(RuntimeError(f"the others did not finish exchange {self.number} in {self.limit:g} s"))
        word = f"verdict/{self.number}"
        if not self.space.check([word]):
            return False
        if self.space.get(word) != b"all":
            self.space.set(f"left/{rank}", "")
            self.error = self.error or RuntimeError(f"exchange {self.number} did not reach every member")
        self.known.set()
        return True

    def wait(self, heard: Callable[[], float]) -> None:
        """Returns when all have done it. Raises what went wrong; TimeoutError when the store, last `heard` from then
        (monotonic seconds), does not answer any more: a question to a server that was cut off never returns."""
        while not self.known.wait(1.0):
            silent = time.monotonic() - max(heard(), self.begun)
            if silent > self.limit + 1.0:
                raise TimeoutError(f"the store has not answered for {silent:.0f} s")
        if self.error is not None:
            raise self.error


class Members:
    """The living members as this rank sees them, and their flights. Has state.

    Args:
        crew: see there.
        codec: of what travels.
    """

    def __init__(self, crew: MemberGroup, codec: Codec) -> None:
        self.crew = crew
        self.codec = codec
        self.store = store_client.clone(crew.store)
        self.epoch = 0
        self.members = crew.members
        self._number = 0
        self._closed = False
        self._heard = 0.0  # when the store last answered, by the monotonic clock
        self._past: list[Any] = []  # groups with messages under way, which must not be taken apart
        self._waiting: queue.SimpleQueue[tuple[CommitVote, QueuedWork] | None] = queue.SimpleQueue()
        self._coded = self._joined()
        if self._coded is not None:
            threading.Thread(target=self._look, name="espalier-members", daemon=True).start()

    @property
    def rank(self) -> int:
        """This rank's number among all ranks of all members."""
        return self.crew.member * self.crew.shards + self.crew.shard

    def _look(self) -> None:
        """Looks after the exchanges under way, in their order, in a thread of its own."""
        while (waiting := self._waiting.get()) is not None:
            outcome, task = waiting
            try:
                while not outcome.look(self.rank) and not self._closed:
                    self._heard = time.monotonic()
                    if (broken := task.exception()) is not None:  # of one that never ran, too: another failed before it
                        outcome.failed(broken)
                    elif silent := self._silent(self.members):
                        outcome.failed(RuntimeError(f"rank {silent[0]} is gone"))
                    time.sleep(LOOK)
            except RuntimeError as error:  # the store is gone
                outcome.error = outcome.error or error
                outcome.known.set()

    def _silent(self, members: Sequence[int]) -> list[int]:
        """The other ranks of `members` that are known to be gone."""
        shards = self.crew.shards
        ranks = [member * shards + shard for member in members for shard in range(shards)]
        others = [rank for rank in ranks if rank != self.rank]
        return [] if self.crew.lost is None else [rank for rank in others if rank in self.crew.lost()]

    # --- the group -----------------------------------------------------------------------------------------------

    def _space(self) -> Any:
        """The key space of this epoch."""
        return PrefixStore(f"outer/{self.epoch}", self.store)

    def _joined(self) -> CodedCollectives | None:
        """The members' group of this epoch, of the ranks with this rank's shard; None where a replica is alone."""
        if len(self.members) == 1:
            return None
        crew = self.crew
        place = (self.members.index(self.crew.member), len(self.members))
        limit = timedelta(seconds=crew.timeout)
        inner = ProcessGroupGloo(PrefixStore(f"shard{crew.shard}", apart(self._space())), *place, limit)
        ranks = [member * crew.shards + crew.shard for member in self.members]
        return CodedCollectives(self.codec, inner, place, Traffic.OUTER_STEP._value_, ranks, lambda: limit)

    # --- flights -------------------------------------------------------------------------------------------------

    def launch(self, values: Tensor, residual: Tensor | None, note: MemberReport) -> PendingSum:
        """Begins the sum of all members' `values` [n], which must not change any more. All launch in one order.

        `residual` [n]: error feedback of lossy codecs.
        """
        self._number += 1
        flight = PendingSum(values, residual, note, self._number)
        self._fly(flight)
        return flight

    def _fly(self, flight: PendingSum) -> None:
        coded = self._coded
        members = self.members
        residual = flight.residual
        if coded is None:
            return
        flight.attempt = attempt = SumAttempt(flight.sent.clone(), residual if residual is None else residual.clone())

        def act(job: Any) -> None:
            begun = time.perf_counter()
            job.all_reduce(attempt.total, attempt.residual, False)
            there = coded.everyone(torch.tensor(flight.note, dtype=torch.float64))
            attempt.notes = {member: MemberReport(*row.tolist()) for member, row in zip(members, there, strict=True)}
            attempt.seconds = time.perf_counter() - begun

        flight.epoch = self.epoch
        flight.outcome = self._together(coded, flight.number, act, self._book)

    def _together(
        self, coded: CodedCollectives, number: int, act: Callable[[Any], None], book: Callable[[Spent], None]
    ) -> CommitVote:
        """Launches `act`, which counts when all ranks of all members have done it."""
        outcome = CommitVote(self._space(), number, len(self.members) * self.crew.shards, self.crew.timeout)

        def run(job: Any) -> None:
            try:
                act(job)
                outcome.arrive()
            except BaseException as error:
                outcome.failed(error)
                raise

        self._past = [task for task in self._past if not isinstance(task, QueuedWork) or not task.is_success()]
        task = coded.launch(run, book)
        self._past.append(task)
        self._waiting.put((outcome, task))
        return outcome

    def _book(self, spent: Spent) -> None:
        if self.crew.ledger is not None:
            self.crew.ledger.add_encoded(Traffic.OUTER_STEP._value_, "all_reduce", spent)

    def arrive(self, flight: PendingSum) -> OuterSum:
        """Waits for a flight, if need be among fewer members.

        Raises PeerLost: this member was given up by the others, or reaches none of those that live, or not the store.
        """
        while self._coded is not None:
            try:
                flight.outcome.wait(lambda: self._heard)
                attempt = flight.attempt
                if flight.residual is not None and attempt.residual is not None:
                    flight.residual.copy_(attempt.residual)
                return OuterSum(attempt.total, attempt.notes, attempt.seconds)
            except TimeoutError as error:
                raise self._alone(error) from None
            except Exception as error:
                if flight.epoch == self.epoch:  # else those that are left have found one another since
                    self._regroup(error)
            self._fly(flight)
        return OuterSum(flight.sent.clone(), {self.crew.member: flight.note}, 0.0)

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Gives the first member's `tensors` to all, in place. Before any flight."""
        if self._coded is not None:
            for tensor in tensors:
                host = tensor.detach().cpu()
                self._coded.inner.broadcast([host], BroadcastOptions()).wait()
                tensor.detach().copy_(host)

    # --- fewer members -------------------------------------------------------------------------------------------

    def _regroup(self, error: Exception) -> None:
        """Agrees with the other survivors who they are, in a new group."""
        if self._coded is not None:
            self._past.append(self._coded)
            self._coded.lane.patience = self.crew.timeout  # it may still wait for messages that will not come
            self._coded.close()
        space = self._space()
        crew = self.crew
        try:
            space.set(f"left/{self.rank}", "")
            survivors = self._survivors(space)
            space.compare_set("members", "", json.dumps(survivors))
            space.set_timeout(timedelta(seconds=crew.timeout))
            self.members = tuple(json.loads(space.get("members")))
        except RuntimeError as lost:
            raise self._alone(f"{error}; {lost}") from None
        if crew.member not in self.members:
            raise PeerLost(
                f"Replica {crew.member} was excluded by the others; replicas {list(self.members)} continue.",
                why=str(error).splitlines()[0],
                do=f"a grace of more than {crew.grace:g} s, or a link that is not silent for so long",
            )
        self.epoch += 1
        self._coded = self._joined()

    def _alone(self, why: object) -> PeerLost:
        return PeerLost(
            f"Replica {self.crew.member} lost its connections to the other replicas and to the store.",
            why=str(why).splitlines()[0],
            do=RESUME,
        )

    def _survivors(self, space: Any) -> list[int]:
        """Members all of whose ranks have reported, once all have or the grace is over."""
        shards = self.crew.shards
        until = time.monotonic() + self.crew.grace
        while True:
            there = [
                member
                for member in self.members
                if all(space.check([f"left/{member * shards + shard}"]) for shard in range(shards))
            ]
            absent = [member for member in self.members if member not in there]
            dead = {rank // shards for rank in self._silent(absent)} if absent else set()
            if dead.issuperset(absent) or time.monotonic() > until:
                return there
            time.sleep(LOOK)

    def close(self) -> None:
        """Ends the threads."""
        self._closed = True
        self._waiting.put(None)
        if self._coded is not None:
            self._coded.close()
