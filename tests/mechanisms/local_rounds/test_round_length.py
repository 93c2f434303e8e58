"""All ranks of all replicas hold one length of a round, whatever each of them has waited, and nobody stands still."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from crews import RATE, SIZES, Replica, together
from torch import Tensor

from espalier.mechanisms.local_rounds.membership import CommitVote, Members
from espalier.mechanisms.local_rounds.outer_loop import OuterSync
from espalier.mechanisms.local_rounds.round_length import NAME, Length, Rounds
from espalier.optim.diloco_slowmo import METHODS, OuterMethod
from espalier.track.decision_log import Recorded

Make = Callable[..., OuterSync]

# --- a model of the agreement ----------------------------------------------------------------------------------------

WAITS = {"hidden": (1.0, 0.0, 0.1), "just hidden": (1.0, 0.0, 0.6), "waited": (1.0, 0.5, 0.5)}
"""(seconds of a round, of them waited, of its flights): rounds become shorter, stay, become longer."""


class Rank(NamedTuple):
    """Where a rank is: what it does next, its round and step in it, what it knows, how many flights it has sent, and
    its wishes in the last two."""

    does: str
    round: int
    clock: int
    length: Length
    sent: int = 0
    wishes: tuple[float, float] = (0.0, 0.0)

    def wish_of(self, flight: int) -> float:
        """In one of the last two flights: nobody is further ahead of another."""
        return self.wishes[flight - self.sent + 2]


State = tuple[tuple[Rank, ...], ...]
"""By replica and shard."""
Agree = Callable[[list[float]], list[float]]
Hear = Callable[[Length, list[float]], Length]


def largest(wishes: list[float]) -> list[float]:
    """As `OuterSync._largest` does."""
    return [max(wishes)] * len(wishes)


def moves(state: State, agree: Agree, hear: Hear) -> Iterator[list[State]]:
    """What can happen next, of each actor what it may come to: all ranks of a replica take a step, take in what was
    set, or agree, together, as these are collectives among them; or one rank uses the flight before, once every rank
    has sent its part, and sends the next."""
    for replica, ranks in enumerate(state):
        does = {rank.does for rank in ranks}
        if does == {"step"}:
            yield [_with(state, replica, [_stepped(rank) for rank in ranks])]
        if does == {"adopt"}:
            yield [_with(state, replica, [rank._replace(does="agree") for rank in ranks])]
        if does == {"agree"}:
            found = set()
            for waits in itertools.product(WAITS.values(), repeat=len(ranks)):
                own = [rank.length.wished(*waited) for rank, waited in zip(ranks, waits, strict=True)]
                wishes = zip(ranks, agree(own), strict=True)
                found.add(_with(state, replica, [_turned(rank, wish) for rank, wish in wishes]))
            yield list(found)
        for shard, rank in enumerate(ranks):
            if rank.does == "fly" and all(one.sent >= rank.round for them in state for one in them):
                heard = rank.length
                if rank.round:
                    heard = hear(heard, [them[shard].wish_of(rank.round - 1) for them in state])
                flown = rank._replace(
                    does="adopt", length=heard, sent=rank.sent + 1, wishes=(rank.wishes[1], rank.length.wish)
                )
                yield [_with(state, replica, [*ranks[:shard], flown, *ranks[shard + 1 :]])]


def _with(state: State, replica: int, ranks: list[Rank]) -> State:
    return (*state[:replica], tuple(ranks), *state[replica + 1 :])


def _stepped(rank: Rank) -> Rank:
    clock = rank.clock + 1
    return rank._replace(does="fly" if clock >= rank.length.steps else "step", clock=clock)


def _turned(rank: Rank, wish: float) -> Rank:
    return rank._replace(does="step", round=rank.round + 1, clock=0, length=rank.length._replace(wish=wish).turned({}))


def trouble(
    shape: tuple[int, int], rounds: int, agree: Agree = largest, hear: Hear = Length.heard, orders: bool = False
) -> str:
    """What is wrong in some state that can be reached with any waits. Empty: nothing.

    What an actor does is not changed or prevented by what another does first, so one order of them stands for all;
    with `orders` all are tried.
    """
    replicas, shards = shape
    begin: State = ((Rank("step", 0, 0, Length(1, adapt=True)),) * shards,) * replicas
    seen, waiting = {begin}, [begin]
    while waiting:
        state = waiting.pop()
        ranks = [rank for them in state for rank in them]
        if len({(rank.round, rank.length.steps) for rank in ranks}) > len({rank.round for rank in ranks}):
            return "two lengths of one round"
        if max(rank.round for rank in ranks) >= rounds:
            continue
        actors = list(itertools.islice(moves(state, agree, hear), None if orders else 1))
        if not actors:
            return "all stand still"
        fresh = {one for actor in actors for one in actor} - seen
        seen |= fresh
        waiting += fresh
    return ""


@pytest.mark.parametrize(
    ("shape", "rounds"), [((2, 1), 8), ((2, 2), 8), ((3, 2), 5), pytest.param((3, 2), 7, marks=pytest.mark.slow)]
)
def test_no_waits_part_the_ranks(shape: tuple[int, int], rounds: int) -> None:
    assert not trouble(shape, rounds)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "rounds"), [((2, 2), 5), ((3, 2), 3)])
def test_no_order_of_events_and_no_waits_part_the_ranks(shape: tuple[int, int], rounds: int) -> None:
    assert not trouble(shape, rounds, orders=True)


def test_ranks_of_a_replica_that_each_send_their_own_wish_are_found_out() -> None:
    for shape in ((2, 2), (3, 2)):
        assert trouble(shape, 4, agree=lambda wishes: wishes)


def test_a_length_that_holds_as_soon_as_it_is_heard_is_found_out() -> None:
    def at_once(length: Length, wishes: list[float]) -> Length:
        return length.heard(wishes).turned({})

    assert trouble((2, 2), 5, hear=at_once)


def test_lengths_settle_where_a_flight_fits_into_two_steps_and_not_into_one() -> None:
    """Every change doubles the rounds before the next but one: in 1,000 rounds a score of changes at most."""
    length, changes = Length(1, adapt=True), 0
    for _ in range(1000):
        late = length.steps == 1
        wish = length.wished(seconds=length.steps + 0.1 * late, waited=0.1 * late, flown=0.4)
        after = length.heard([wish]).turned({})
        changes += after.steps != length.steps
        length = after
    assert 2 <= changes <= 20


def test_rounds_become_shorter_in_the_end_when_a_link_becomes_faster() -> None:
    length = Length(1, adapt=True)
    for number in range(60):
        flown = 8.0 if number < 20 else 0.1
        waited = max(0.0, flown - length.steps)
        length = length.heard([length.wished(length.steps + waited, waited, flown)]).turned({})
        assert number != 19 or length.steps == 9
    assert length.steps == 1


# --- the engine ------------------------------------------------------------------------------------------------------


def test_a_replica_sends_the_largest_wish_of_its_ranks() -> None:
    """Two replicas of two ranks, of which one alone finds that it waits."""

    def run(member: int, make: Make) -> list[int]:
        replica = Replica(member)
        engine = make(replica, METHODS["eager"], Rounds(2, adapt=True), total=_beside(9.0))
        assert engine.members is not None
        engine.members.crew = engine.members.crew._replace(shard=0, shards=2)
        engine.members._together = _alone(engine.members)  # type: ignore[method-assign]
        lengths = []
        for _ in range(30):
            replica.step()
            if engine.after_step(RATE):
                lengths.append(engine.steps)
        return lengths

    found = together(2, run)
    assert found[0] == found[1]
    assert 9 in found[0]


def _beside(wish: float) -> Callable[[Tensor], Tensor]:
    """The other rank of a replica has this wish."""

    def total(wishes: Tensor) -> Tensor:
        wishes[1] = wish
        return wishes

    return total


def _alone(members: Members) -> Any:
    """Flights count when this shard's ranks have them: there are no others here."""
    plain = type(members)._together

    def together(*arguments: Any) -> CommitVote:
        crew = members.crew
        members.crew = crew._replace(shards=1)
        try:
            return plain(members, *arguments)
        finally:
            members.crew = crew

    return together


@pytest.mark.parametrize("method", ["streaming_diloco", "co2", "eager", "local_sgd"])
def test_recorded_lengths_are_followed_and_no_flight_is_lost(method: str) -> None:
    """Also where a round is shorter than what is left of a flight's way."""
    lengths = {0: 8, 8: 8, 16: 2, 18: 5, 23: 1, 24: 8}
    choices = METHODS[method] if method != "streaming_diloco" else OuterMethod(delay=0.9, fragments=4, mixing=0.5)

    def run(member: int, make: Make) -> Any:
        replica = Replica(member)
        engine = make(replica, choices, Rounds(8, adapt=True))
        engine.decisions.replay({NAME: [Recorded(tuple(lengths.items()), until=32)]})
        told: list[tuple[int, int]] = []
        engine.decisions.tell = lambda name, begun, steps: told.append((begun, steps))
        launched, landed = _counted(engine)
        for _ in range(31):
            replica.step()
            time.sleep(0.001 * member)
            engine.after_step(RATE)
        engine.finish(RATE)
        return told, launched == sorted(landed), len(launched), replica.flat()

    one, other = together(2, run)
    assert one[0] == other[0] == [(16, 2), (18, 5), (23, 1), (24, 8)]
    assert one[1]
    assert other[1]
    assert one[2] == other[2] >= len(lengths)
    assert torch.equal(one[3], other[3])


def _counted(engine: OuterSync) -> tuple[list[int], list[int]]:
    """Numbers of the flights launched, and of those that came to be used."""
    members = engine.members
    assert members is not None
    launched: list[int] = []
    landed: list[int] = []
    launch, arrive = members.launch, members.arrive

    def launching(*arguments: Any) -> Any:
        flight = launch(*arguments)
        launched.append(flight.number)
        return flight

    def arriving(flight: Any) -> Any:
        landed.append(flight.number)
        return arrive(flight)

    members.launch, members.arrive = launching, arriving  # type: ignore[method-assign]
    return launched, landed


def test_a_run_that_is_given_what_another_decided_is_that_run() -> None:
    def run(member: int, make: Make, recorded: list[Recorded]) -> Any:
        replica = Replica(member)
        engine = make(replica, METHODS["eager"], Rounds(1, adapt=True))
        told = [(0, 1)]
        engine.decisions.tell = lambda name, begun, steps: told.append((begun, steps))
        engine.decisions.replay({NAME: recorded})
        for _ in range(60):
            replica.step()
            time.sleep(0.001 * (1 + member) * (len(recorded) + 1))
            engine.after_step(RATE)
        return told, replica.flat()

    first = together(2, lambda member, make: run(member, make, []))
    told, end = first[0]
    assert len(told) > 1, "rounds grew"
    again = together(2, lambda member, make: run(member, make, [Recorded(tuple(told), until=60)]))
    assert again[0][0] == told
    assert torch.equal(again[0][1], end)


def test_what_a_codec_kept_back_counts_once_where_a_flight_is_flown_again() -> None:
    """A member has the whole sum, another fails right then: both fly it anew."""
    wide = tuple(700 * size for size in SIZES)

    def run(member: int, make: Make, fails: bool) -> Tensor:
        replica = Replica(member)
        draw = torch.Generator().manual_seed(member)
        replica.live = [torch.zeros(size) for size in wide]
        replica.target = [torch.randn(size, generator=draw) for size in wide]
        replica.heavy = [torch.zeros(size) for size in wide]
        engine = make(replica, OuterMethod(delay=0.0, codec="int4"), Rounds(2))
        for step in range(12):
            if fails and member == 1 and step == 5:
                _fail_once(engine)
            replica.step()
            engine.after_step(RATE)
        return replica.flat()

    plain = together(2, lambda member, make: run(member, make, False))
    again = together(2, lambda member, make: run(member, make, True))
    assert torch.equal(plain[0], again[0])
    assert torch.equal(plain[1], again[1])


def _fail_once(engine: OuterSync) -> None:
    members = engine.members
    assert members is not None
    plain = members._together

    def failing(coded: Any, number: int, act: Any, book: Any) -> CommitVote:
        def broken(job: Any) -> None:
            act(job)
            raise RuntimeError("cut off")

        members._together = plain  # type: ignore[method-assign]
        return plain(coded, number, broken, book)

    members._together = failing  # type: ignore[method-assign]
