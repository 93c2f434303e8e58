"""One engine for replicas that take several steps of their own between agreements: Local SGD, SlowMo, DiLoCo, Streaming
DiLoCo and CO2 (arXiv 2401.16265) are settings of it.

A round is some local steps. Each fragment of the model departs at a step of its own in the round, as a copy, and is
used when its flight has arrived: at once, later in the next round, or a whole round later. It deviates from CO2's own
code where that is wrong: what travels is a copy, the clip clips, and whether a round happens never depends on timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espalier.errors import UserError
from espalier.sync.choices import Choices
from espalier.sync.members import Arrived, Flight, Members, Note
from espalier.sync.update import Sum, Update

EXPOSED = 0.02
"""Share of a round that may be spent waiting before rounds become longer."""
SLACK = 0.5
"""Rounds become shorter when a flight takes less than this share of one."""
MARGIN = 1.1
"""Rounds are planned this much longer than a flight."""


@dataclass(frozen=True)
class Rounds:
    """How long a replica's rounds are.

    Attributes:
        steps: local steps of the fastest replica.
        pace: this replica's steps for each of the fastest, above 0, at most 1.
        weight: of one of its steps in a mean, such as its samples.
        adapt: whether `steps` follows the measured waits.
    """

    steps: int
    pace: float = 1.0
    weight: float = 1.0
    adapt: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"sync.steps = {self.steps}.", why="a round has at least one step", do="sync.steps=1")
        if not 0 < self.pace <= 1:
            raise UserError(f"pace = {self.pace}.", why="the fastest replica has 1, others less")


@dataclass
class Fragment:
    """A part of the model that travels at once. Has state.

    Attributes:
        live: the tensors that the inner optimizer moves.
        views: the same places in `x`.
        base: with `parameters`: x as it was where the fragment under way began.
        flight: under way; arrived: a flight that is here already (taken up from a checkpoint).
        due: local steps until the flight is used; None: at the fragment's next departure.
        rate: the inner learning rate when it departed; age: local steps since then.
    """

    live: list[Tensor]
    x: Tensor
    views: list[Tensor]
    update: Update
    residual: Tensor | None
    base: Tensor | None = None
    flight: Flight | None = None
    arrived: Arrived | None = None
    due: int | None = None
    rate: float = 1.0
    age: int = 0


class OuterSync:
    """Counts local steps and makes replicas agree round by round. Has state: the outer parameters and what travels.

    Args:
        live: what the inner optimizer moves on this rank; moved by this engine too.
        choices: see there.
        members: the other replicas; None: there are none, and means are of one.
        rounds: how long they are.
        total: adds small tensors over the ranks of one replica (norms of what is sharded in it).

    Attributes:
        steps: of a round of the fastest replica, as agreed.
        rounds: that are over; clock: local steps in this one.
        waited: seconds spent standing still for flights, of the last round; flown: of its flights.
        stopping: some replica asked to stop, and all know.
    """

    def __init__(
        self,
        live: Sequence[Tensor],
        choices: Choices,
        members: Members | None,
        rounds: Rounds,
        total: Sum | None = None,
    ) -> None:
        self.choices, self.members = choices, members
        self.steps, self.pace, self.weight, self.adapt = rounds.steps, rounds.pace, rounds.weight, rounds.adapt
        self.rounds = self.clock = 0
        self.waited = self.flown = 0.0
        self.stopping = False
        self.wish = 0.0
        self._asked = False
        self._begun = time.perf_counter()
        self._still = 0.0
        self.on_moved: Callable[[], None] = lambda: None
        lossy = members is not None and not members.codec.lossless
        self.fragments = [_fragment(part, choices, lossy, total) for part in split(live, choices.fragments)]

    # --- local steps -----------------------------------------------------------------------------------------------

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
        for index, fragment in enumerate(self.fragments):
            fragment.age += 1
            if fragment.due is not None:
                fragment.due -= 1
                if fragment.due <= 0:
                    self._use(fragment)
                    self._put(fragment, self.choices.mixing)
                    moved = True
            if self.clock == self._departure(index):
                moved |= self._depart(fragment, rate)
        if moved:
            self.on_moved()
        if self.clock < self.own_steps:
            return False
        self._next_round()
        return True

    def _departure(self, index: int) -> int:
        return -(-(index + 1) * self.own_steps // len(self.fragments))

    def _next_round(self) -> None:
        now = time.perf_counter()
        self.waited, self._still = self._still, 0.0
        self._measure(now - self._begun)
        self._begun = now
        self.rounds += 1
        self.clock = 0

    def _measure(self, seconds: float) -> None:
        """What length of a round would hide its flights."""
        if self.members is None or not self.adapt:
            return
        step = max(1e-9, (seconds - self.waited) / self.steps)
        fits = -(-MARGIN * self.flown // step)
        if self.waited > EXPOSED * seconds:
            self.wish = max(self.steps + 1, fits)
        elif self.flown < SLACK * self.steps * step and self.flown:
            self.wish = max(1.0, fits)
        else:
            self.wish = float(self.steps)

    # --- departures and arrivals -----------------------------------------------------------------------------------

    def _depart(self, fragment: Fragment, rate: float) -> bool:
        """A copy leaves; with a delay of a round, what left before is used. Returns whether live tensors were set."""
        choices = self.choices
        sent = self._copy(fragment)
        base = fragment.x.clone() if choices.average == "parameters" else None
        if choices.delay == 1:
            self._use(fragment)
        self._launch(fragment, sent, base, rate)
        if choices.delay == 1:
            self._put(fragment)
            return True
        if choices.delay == 0:
            self._use(fragment)
            self._put(fragment, choices.mixing)
            return True
        fragment.due = min(max(1, -(-int(choices.delay * 1000) * self.own_steps // 1000)), max(1, self.own_steps - 1))
        return False

    def _copy(self, fragment: Fragment) -> Tensor:
        """[n] what this replica gives: its parameters, or how far it went from the outer ones; times its weight."""
        sent = torch.empty_like(fragment.x)
        views = _views(sent, fragment.live)
        torch._foreach_copy_(views, fragment.live)
        if self.choices.average == "differences":
            torch.sub(fragment.x, sent, out=sent)
        weight = self._weight()
        return sent if weight == 1.0 else sent.mul_(weight)

    def _weight(self) -> float:
        return self.weight * self.own_steps / self.steps

    def _launch(self, fragment: Fragment, sent: Tensor, base: Tensor | None, rate: float) -> None:
        step = (time.perf_counter() - self._begun - self._still) / max(1, self.clock)
        note = Note(self._weight(), self.wish, float(self._asked), step)
        fragment.base, fragment.rate, fragment.age = base, rate, 0
        if self.members is None:
            fragment.arrived = Arrived(sent, {0: note}, 0.0)
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
        fragment.update.apply(mean, fragment.rate)
        if fragment is self.fragments[-1]:
            self._listen(arrived.notes)

    def _arrive(self, fragment: Fragment) -> Arrived | None:
        if fragment.flight is not None and self.members is not None:
            begun = time.perf_counter()
            fragment.arrived = self.members.arrive(fragment.flight)
            self._still += time.perf_counter() - begun
            self.flown = fragment.arrived.seconds * len(self.fragments)
            fragment.flight = None
        return fragment.arrived

    def _listen(self, notes: Mapping[int, Note]) -> None:
        """What all members take from the same flight in the same round."""
        self.stopping = self.stopping or any(note.stop for note in notes.values())
        wish = max(note.steps for note in notes.values())
        if self.adapt and wish:
            self.steps = int(wish)

    def _put(self, fragment: Fragment, mixing: float = 0.0) -> None:
        if mixing == 0.0:
            torch._foreach_copy_(fragment.live, fragment.views)
        else:
            torch._foreach_lerp_(fragment.live, fragment.views, 1.0 - mixing)

    # --- the outer model ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the live parameters with the outer ones, to look at these; call it again to go on."""
        for fragment in self.fragments:
            kept = [tensor.clone() for tensor in fragment.live]
            torch._foreach_copy_(fragment.live, fragment.views)
            torch._foreach_copy_(fragment.views, kept)
        self.on_moved()

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
                base = fragment.x.clone() if self.choices.average == "parameters" else None
                self._use(fragment)
                self._launch(fragment, sent, base, rate)
            self._use(fragment)
            self._put(fragment)
        self.clock = 0
        self.on_moved()

    def close(self) -> None:
        """Ends the thread of flights."""
        if self.members is not None:
            self.members.close()

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything but the live tensors; waits for what travels, and does not use it yet."""
        found: dict[str, Any] = {
            "counts": {"steps": self.steps, "rounds": self.rounds, "clock": self.clock, "wish": self.wish}
        }
        for index, one in enumerate(self.fragments):
            part: dict[str, Any] = {
                "x": one.x,
                "update": one.update.state_dict(),
                "rate": one.rate,
                "due": one.due,
                "age": one.age,
            }
            if one.residual is not None:
                part["residual"] = one.residual
            arrived = self._arrive(one)
            if arrived is not None:
                part["total"] = arrived.total
                part["notes"] = {str(member): list(note) for member, note in arrived.notes.items()}
                if one.base is not None:
                    part["base"] = one.base
            found[str(index)] = part
        return found

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave, on the same shards."""
        counts = state["counts"]
        self.steps, self.rounds = int(counts["steps"]), int(counts["rounds"])
        self.clock, self.wish = int(counts["clock"]), float(counts["wish"])
        for index, one in enumerate(self.fragments):
            part = state[str(index)]
            one.x.copy_(part["x"])
            one.update.load_state_dict(part["update"])
            one.rate, one.due, one.age = float(part["rate"]), part["due"], int(part["age"])
            one.base = one.flight = one.arrived = None
            if one.residual is not None and "residual" in part:
                one.residual.copy_(part["residual"])
            if "total" in part:
                notes = {int(member): Note(*note) for member, note in part["notes"].items()}
                one.arrived = Arrived(part["total"].clone(), notes, 0.0)
                one.base = part["base"].clone() if "base" in part else None


def split(live: Sequence[Tensor], fragments: int) -> list[list[Tensor]]:
    """Tensors in order, cut into `fragments` parts of about equal size. Raises UserError: fewer tensors than parts."""
    if fragments > len(live):
        raise UserError(
            f"sync.fragments = {fragments}, and the model has {len(live)} tensors.", do=f"sync.fragments={len(live)}"
        )
    whole = sum(tensor.numel() for tensor in live)
    parts: list[list[Tensor]] = [[]]
    done = 0
    for index, tensor in enumerate(live):
        missing = fragments - len(parts)
        if parts[-1] and missing and (done >= len(parts) * whole / fragments or len(live) - index <= missing):
            parts.append([])
        parts[-1].append(tensor)
        done += tensor.numel()
    return parts


def _fragment(live: list[Tensor], choices: Choices, lossy: bool, total: Sum | None) -> Fragment:
    kinds = {(tensor.dtype, tensor.device) for tensor in live}
    if len(kinds) > 1:
        raise UserError(
            f"Parameters of several kinds travel together: {sorted(map(str, kinds))}.",
            do="bring the model to one dtype and device",
        )
    x = torch.cat([tensor.detach().reshape(-1) for tensor in live])
    cuts = [0]
    for tensor in live:
        cuts.append(cuts[-1] + tensor.numel())
    residual = torch.zeros_like(x) if lossy else None
    return Fragment([tensor.detach() for tensor in live], x, _views(x, live), Update(x, choices, cuts, total), residual)


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
