"""Outer loop: one engine for replicas that take several local steps between agreements: Local SGD, SlowMo, DiLoCo,
Streaming DiLoCo and CO2 (arXiv 2401.16265) are settings of it.

A round is some local steps. Each fragment of the model departs at a step of its own in the round, as a copy, and is
used when its flight has arrived: at once, later in the next round, or a whole round later. It deviates from CO2's own
code where that is wrong: what travels is a copy, the clip clips, and whether a round happens never depends on timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from espalier.checkpoint.base import StateDict
from espalier.mechanisms.local_rounds.fragment import Fragment, fragment_of, split, views_of, where
from espalier.mechanisms.local_rounds.membership import MemberReport, Members, OuterSum
from espalier.mechanisms.local_rounds.round_length import Length, Rounds
from espalier.optim.diloco_slowmo import OuterMethod
from espalier.optim.outer_optimizer import Sum
from espalier.track.decision_log import Decisions


class OuterSync:
    """Counts local steps and makes replicas agree round by round. Has state: the outer parameters and what travels.

    Args:
        live: what the inner optimizer moves on this rank; moved by this engine too.
        choices: see there.
        members: the other replicas; None: there are none, and means are of one.
        rounds: how long they are.
        total: adds small tensors over the ranks of one replica (norms of what is sharded in it).

    Attributes:
        decisions: how long rounds of the fastest replica are, as agreed.
        rounds: that are over; clock: local steps in this one; begun: steps of the fastest replica before it.
        waited, stood: seconds spent standing still for flights, of the last round and in all; flown: of its flights.
        on_moving, on_moved: called before and after live tensors are set.
        stopping: some replica asked to stop, and all know.
        summoned: asked whether this replica was called to begin anew with the others; leaving: one was, and all know.
    """

    def __init__(
        self,
        live: Sequence[Tensor],
        choices: OuterMethod,
        members: Members | None,
        rounds: Rounds,
        total: Sum | None = None,
    ) -> None:
        self.choices = choices
        self.members = members
        self.decisions = Decisions(Length(rounds.steps, rounds.adapt), "measured waits")
        self.decisions.replayed = self._follow
        self.pace = rounds.pace
        self.weight = rounds.weight
        self.rounds = self.clock = self.begun = 0
        self.waited = self.flown = 0.0
        self.stopping = self.leaving = False
        self.summoned: Callable[[], bool] = bool
        self._asked = False
        self._total = total
        self._begun = time.perf_counter()
        self._still = 0.0
        self.stood = 0.0
        self.on_moving: Callable[[], object] = bool
        self.on_moved: Callable[[], object] = bool
        lossy = members is not None and not members.codec.lossless
        self.fragments = [fragment_of(part, choices, lossy, total) for part in split(live, choices.fragments)]

    @property
    def whole(self) -> bool:
        """Whether no replica is away, as far as this one knows."""
        members = self.members
        return members is None or (len(members.members) == len(members.crew.members) and not self.summoned())

    @property
    def warm(self) -> bool:
        """Whether this round's flights are used at once, whatever the delay."""
        return self.rounds < self.choices.warm

    # --- local steps -----------------------------------------------------------------------------------------------

    @property
    def length(self) -> Length:
        """Of rounds."""
        length = self.decisions.now
        assert isinstance(length, Length)
        return length

    @length.setter
    def length(self, value: Length) -> None:
        self.decisions.now = value

    @property
    def steps(self) -> int:
        """Of this round, of the fastest replica."""
        return self.length.steps

    @property
    def own_steps(self) -> int:
        """Local steps of this replica in a round."""
        return max(1, round(self.pace * self.steps))

    @torch.no_grad()
    def after_step(self, rate: float = 1.0, stop: bool = False) -> bool:
        """Call after every local optimizer step with its learning rate. Returns whether a round is over.

        Raises PeerLost: see `Members.arrive`.
        """
        self.clock += 1
        self._asked |= stop
        moved = False
        length = self.own_steps
        for index, fragment in enumerate(self.fragments):
            fragment.age += 1
            if fragment.due is not None:
                fragment.due -= 1
                if fragment.due <= 0:
                    moved = self._land(fragment)
            if self.clock == -(-(index + 1) * length // len(self.fragments)):
                moved |= self._depart(fragment, rate)
        if moved:
            self.on_moved()
        if self.clock < length:
            return False
        self._next_round()
        return True

    def _next_round(self) -> None:
        now = time.perf_counter()
        self.waited = self._still
        self._still = 0.0
        if self.members is not None and self.length.adapt and not self.warm:
            wish = self.length.wished(now - self._begun, self.waited, self.flown)
            self.length = self.length._replace(wish=self._largest(wish))
        self._begun = now
        self.rounds += 1
        self.begun += self.steps
        self._turn()

    def _turn(self) -> None:
        """A round begins."""
        self.clock = 0
        self.decisions.turn(self.begun)

    def _largest(self, wish: float) -> float:
        """Of the ranks of this replica, whose flights are different ones: all ask for one length."""
        assert self.members is not None
        crew = self.members.crew
        if crew.shards == 1:
            return wish
        assert self._total is not None, "shards of a replica can be added up"
        wishes = torch.zeros(crew.shards, dtype=torch.float64)
        wishes[crew.shard] = wish
        return float(self._total(wishes).max())

    def _follow(self) -> None:
        """A log is to be followed, from the round on that begins now."""
        if self.clock == 0:
            self._turn()

    # --- departures and arrivals -----------------------------------------------------------------------------------

    def _depart(self, fragment: Fragment, rate: float) -> bool:
        """A copy leaves; with a delay of a round, what left before is used. Returns whether live tensors were set."""
        choices = self.choices
        delay = 0 if self.warm else choices.delay
        weight = self._weight()
        if fragment.due is not None:  # this round is shorter than the one in which it left
            self._land(fragment)
        sent = self._copy(fragment)
        base = fragment.x.clone() if choices.average == "parameters" else None
        own_values = sent.clone() if choices.eager else None
        if weight != 1.0:
            sent.mul_(weight)
        if delay == 1:
            self._use(fragment)
        self._launch(fragment, (sent, weight), base, rate)
        if delay == 1:
            fragment.own_change = own_values
            self._put(fragment)
            return True
        if delay == 0:
            return self._land(fragment)
        fragment.due = self._due()
        return False

    def _land(self, fragment: Fragment) -> bool:
        """What is under way is used, and live tensors are set."""
        self._use(fragment)
        self._put(fragment, self.choices.mixing)
        return True

    def _due(self) -> int:
        """Local steps until what departs now is used, with a delay of less than a round."""
        steps = self.own_steps
        return min(max(1, -(-int(self.choices.delay * 1000) * steps // 1000)), max(1, steps - 1))

    def _copy(self, fragment: Fragment) -> Tensor:
        """[n] what this replica gives: its parameters, or how far it went from where its round began."""
        if self.choices.average == "parameters":
            sent = torch.empty_like(fragment.x)
            torch._foreach_copy_(views_of(sent, fragment.live), fragment.live)
        else:
            sent = fragment.x.clone() if fragment.own_change is None else fragment.x - fragment.own_change
            live = where(fragment.live, self.choices.offload)
            torch._foreach_sub_(views_of(sent, live), live)
        return sent

    def _weight(self) -> float:
        return self.weight * self.own_steps / self.steps

    def _launch(self, fragment: Fragment, weighted: tuple[Tensor, float], base: Tensor | None, rate: float) -> None:
        sent, weight = weighted
        step = (time.perf_counter() - self._begun - self._still) / max(1, self.clock)
        note = MemberReport(weight, self.length.wish, float(self._asked), step, rate, float(self.summoned()))
        fragment.base = base
        fragment.age = 0
        if self.members is None:
            fragment.arrived = OuterSum(sent, {0: note}, 0.0)
        else:
            fragment.flight = self.members.launch(sent, fragment.residual, note)

    def _use(self, fragment: Fragment) -> None:
        """Waits for what is under way, if anything is, and updates the outer parameters."""
        arrived = self._arrive(fragment)
        if arrived is None:
            return
        fragment.flight = fragment.arrived = fragment.due = None
        mean = arrived.total.div_(arrived.weight) if arrived.weight != 1.0 else arrived.total
        if fragment.base is not None:
            mean = torch.sub(fragment.base, mean, out=mean)
            fragment.base = None
        first = min(member for member, note in arrived.notes.items() if note.weight)
        fragment.update.apply(mean, arrived.notes[first].rate, late=not self.warm)
        if fragment is self.fragments[-1]:
            self._listen(arrived.notes)

    def _arrive(self, fragment: Fragment) -> OuterSum | None:
        if fragment.flight is not None and self.members is not None:
            begun = time.perf_counter()
            fragment.arrived = self.members.arrive(fragment.flight)
            stood = time.perf_counter() - begun
            self._still += stood
            self.stood += stood
            self.flown = fragment.arrived.seconds * len(self.fragments)
            fragment.flight = None
        return fragment.arrived

    def _listen(self, notes: Mapping[int, MemberReport]) -> None:
        """What all members take from the same flight in the same round."""
        self.stopping = self.stopping or any(note.stop for note in notes.values())
        self.leaving = self.leaving or any(note.called for note in notes.values())
        self.decisions.heard(note.steps for note in notes.values())

    def _put(self, fragment: Fragment, mixing: float = 0.0) -> None:
        self.on_moving()
        device = fragment.live[0].device
        if mixing == 0.0:
            torch._foreach_copy_(fragment.live, fragment.views)
            if fragment.own_change is not None:
                change = views_of(fragment.own_change.to(device), fragment.live)
                torch._foreach_sub_(fragment.live, change)
        else:
            outer = views_of(fragment.x.to(device), fragment.live)
            torch._foreach_lerp_(fragment.live, outer, 1.0 - mixing)

    # --- the outer model ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the live parameters with the outer ones, to look at these; call it again to go on."""
        self.on_moving()
        for fragment in self.fragments:
            live_values = [tensor.clone() for tensor in fragment.live]
            torch._foreach_copy_(fragment.live, fragment.views)
            torch._foreach_copy_(fragment.views, live_values)
        self.on_moved()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The outer parameters in place of the live ones, to validate or save them."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def finish(self, rate: float = 1.0) -> None:
        """Makes all replicas one, with all that they did: whatever travels is waited for, the rest sent after it."""
        for fragment in self.fragments:
            late = self.choices.delay == 1  # what is under way is not in the live tensors: these were set back
            if not late and self._arrive(fragment) is not None:
                self._use(fragment)
                self._put(fragment, self.choices.mixing)
            if fragment.age:
                sent = self._copy(fragment)
                weight = self._weight()
                base = fragment.x.clone() if self.choices.average == "parameters" else None
                self._use(fragment)
                self._launch(fragment, (sent.mul_(weight) if weight != 1.0 else sent, weight), base, rate)
            fragment.own_change = None
            self._use(fragment)
            self._put(fragment)
        self.clock = 0
        self.on_moved()

    def close(self) -> None:
        """Ends the thread of flights."""
        if self.members is not None:
            self.members.close()

    # --- state -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self) -> None:
        """The live tensors are the outer parameters from now on, and nothing is under way."""
        for fragment in self.fragments:
            torch._foreach_copy_(fragment.views, fragment.live)
            fragment.base = fragment.flight = fragment.arrived = fragment.due = fragment.own_change = None
            fragment.age = 0
        self.clock = 0

    def state_dict(self) -> StateDict:
        """Everything but the live tensors; waits for what travels, and does not use it yet."""
        return {"common": self.common_state(), "own": self.own_state(live=False)}

    def load_state_dict(self, state: StateDict) -> None:
        """Takes back what `state_dict` gave, on the same shards."""
        self.load_common(state["common"])
        self.load_own(state["own"])

    def common_state(self) -> StateDict:
        """What is the same on all replicas: counts, outer parameters, and what was under way, arrived."""
        state: StateDict = {"steps": self.steps, "coming": self.length.coming, "rounds": self.rounds}
        for index, fragment in enumerate(self.fragments):
            self._arrive(fragment)
            state[str(index)] = fragment.common_state()
        return state

    @torch.no_grad()
    def load_common(self, state: Mapping[str, Any]) -> None:
        """Takes back what `common_state` gave."""
        self.rounds = int(state["rounds"])
        self.length = self.length._replace(steps=int(state["steps"]), coming=int(state.get("coming", 0)))
        for index, fragment in enumerate(self.fragments):
            fragment.load_common(state[str(index)])

    def own_state(self, live: bool = True) -> StateDict:
        """What is this replica's: where it is in its round, its live tensors, and what codecs have kept back."""
        state: StateDict = {"clock": self.clock, "begun": self.begun, "wish": self.length.wish}
        return state | {str(index): fragment.own_state(live) for index, fragment in enumerate(self.fragments)}

    @torch.no_grad()
    def load_own(self, state: Mapping[str, Any]) -> None:
        """Takes back what `own_state` gave."""
        self.clock = int(state["clock"])
        self.begun = int(state["begun"])
        self.length = self.length._replace(wish=float(state["wish"]))
        self.on_moving()
        for index, fragment in enumerate(self.fragments):
            fragment.load_own(state[str(index)])
        self.on_moved()
