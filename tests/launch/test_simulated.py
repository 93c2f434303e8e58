"""The policy of restarts and the protocol between hosts, in simulated time (`simulated`): thousands of schedules of
faults, and a supervisor that is killed at every line."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from simulated import Actor, Fault, Killed, SimulatedAgent, SimulatedLink, World, specs

from espalier.launch.hosts import host_check, leader
from espalier.launch.hosts.follower import Follower
from espalier.launch.hosts.host_map import HostMap
from espalier.launch.hosts.supervisor_protocol import MeetingPoint
from espalier.launch.ranks.resize import RunShape
from espalier.launch.ranks.supervisor import RestartOptions, Supervisor
from espalier.recipe.errors import HostLost, RunFailed, UserError

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # who is killed says so

STEPS = 24
KINDS = {
    "kill": "killed", "raise": "exception", "hang": "hang", "stop": "stopped", "exit": "exit", "terminate": "signal",
}  # fmt: skip
"""What happens to a rank, and what that is called."""


def supervised(
    world: World, stays: str = "", heartbeat: float = 1.0
) -> tuple[Any, list[tuple[float, str, dict[str, Any]]]]:
    """How the run ended, and what was told, with the time."""
    told: list[tuple[float, str, dict[str, Any]]] = []
    care = RestartOptions(
        heartbeat=heartbeat, memory=0, stays=stays, tell=lambda event, **fields: told.append((world.now, event, fields))
    )

    def life(actor: Any) -> Any:
        agent = SimulatedAgent(world, actor)
        return Supervisor(specs(world.world), care, agent, agent).run()

    actor = world.act("supervisor", life)
    world.run()
    assert all(rank.status is not None for rank in world.ranks), "a rank was left behind"
    return actor.outcome, told


def faults(ranks: int, whats: str) -> st.SearchStrategy[list[Fault]]:
    one = st.builds(Fault, st.integers(0, STEPS - 1), st.integers(0, ranks - 1), st.sampled_from(whats.split()))
    return st.lists(one, max_size=6).map(lambda all_: sorted(all_, key=lambda fault: fault.step))


def schedules(whats: str) -> st.SearchStrategy[tuple[int, list[Fault]]]:
    return st.integers(1, 4).flatmap(lambda ranks: st.tuples(st.just(ranks), faults(ranks, whats)))


def outlives(ranks: int, schedule: list[Fault], stays: str) -> None:
    """A run whose faults each came after progress, or less than four times at one step, ends well; each was told of,
    and the run was said to have recovered."""
    world = World(ranks, STEPS, schedule, stays=bool(stays) and ranks > 1)
    outcome, told = supervised(world, stays if ranks > 1 else "")
    assert outcome == [STEPS] * ranks, outcome
    incidents = [fields for _, event, fields in told if event == "incident"]
    assert len(incidents) == len(schedule)
    assert sum(event == "recovered" for _, event, _ in told) >= (1 if schedule else 0)
    assert {fields["action"].partition(" ")[0] for fields in incidents} <= {"start", "replace"}
    if stays and ranks > 1:
        only_who_failed_was_replaced(incidents, schedule)


def only_who_failed_was_replaced(incidents: list[dict[str, Any]], schedule: list[Fault]) -> None:
    """Where ranks stay and the run got further since the last failure, one rank's own failure costs no other's
    process."""
    furthest = 0
    for fields, fault in zip(incidents, schedule, strict=True):
        if fault.what not in ("hang", "terminate") and fault.step > furthest:
            assert fields["action"].startswith(f"replace rank {fault.rank}, the others stay")
        furthest = max(furthest, fault.step)


def endurable(schedule: list[Fault]) -> bool:
    """Whether no cause comes back more often than it is tried again without a step gained: machines' three times, a
    crash of code once. Until the run is back where a fault met it, it has gained nothing."""
    counts: dict[tuple[int, str], int] = {}
    for fault in schedule:
        counts[fault.step, fault.what] = counts.get((fault.step, fault.what), 0) + 1
    return all(count <= (1 if what == "raise" else 3) for (_, what), count in counts.items())


NORMAL = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
MANY = settings(NORMAL, max_examples=3000)


CASES = given(case=schedules(" ".join(KINDS)), stays=st.sampled_from(["", "alike"]))


def outlived(case: tuple[int, list[Fault]], stays: str) -> None:
    ranks, schedule = case
    assume(endurable(schedule))
    outlives(ranks, schedule, stays)


@pytest.mark.slow
@NORMAL
@CASES
def test_a_run_outlives_whatever_is_no_ones_fault(case: tuple[int, list[Fault]], stays: str) -> None:
    outlived(case, stays)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@MANY
@CASES
def test_a_run_outlives_thousands_of_schedules(case: tuple[int, list[Fault]], stays: str) -> None:
    outlived(case, stays)


@pytest.mark.parametrize("what", list(KINDS))
@pytest.mark.parametrize("stays", ["", "alike"])
@pytest.mark.parametrize("heartbeat", [0.5, 1.0, 4.0])
def test_each_fault_is_found_within_three_heartbeats(what: str, stays: str, heartbeat: float) -> None:
    world = World(3, STEPS, [Fault(10, 1, what)], stays=bool(stays))
    at: list[tuple[float, int]] = []
    strike = world._strike
    world._strike = lambda *struck: (at.append((world.now, len(world.starts))), strike(*struck))[1]  # type: ignore[method-assign,assignment]
    outcome, told = supervised(world, stays, heartbeat)
    assert outcome == [STEPS] * 3
    ((found, _, fields),) = [one for one in told if one[1] == "incident"]
    assert found - at[0][0] <= (3.0 * heartbeat + 0.5 if what in ("hang", "stop") else 1.5)
    assert (fields["kind"], fields["step"]) == (KINDS[what], 10)
    assert fields["rank"] == (-1 if what == "hang" else 1)
    starts = [rank for _, rank in world.starts[at[0][1] :]]
    in_place = stays and what not in ("hang", "terminate")  # nobody knows who hangs where no stack tells
    assert starts == ([1] if in_place else [0, 1, 2])


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_comes_back_without_a_step_gained_ends_the_run_and_what_the_user_mends_at_once(ranks: int) -> None:
    world = World(ranks, STEPS, [Fault(6, 0, "kill")] * 9)
    outcome, told = supervised(world)
    assert isinstance(outcome, RunFailed)
    assert sum(event == "incident" for _, event, _ in told) == len(world.met) == 4
    waits = [
        later - sooner
        for (sooner, _), (later, _) in zip(world.starts[::ranks], world.starts[ranks::ranks], strict=False)
    ]
    assert waits[1:] == sorted(set(waits[1:])), "each wait is longer than the one before"
    outcome, told = supervised(World(ranks, STEPS, [Fault(6, 0, "user")] * 9))
    assert isinstance(outcome, UserError)
    assert len(told) == 1


def test_an_error_of_the_supervisor_itself_leaves_no_rank_behind() -> None:
    world = World(3, STEPS, [Fault(6, 0, "kill")], stays=True)

    def tell(event: str, **fields: Any) -> None:
        raise OSError("No space left on device")

    def life(actor: Actor) -> Any:
        agent = SimulatedAgent(world, actor)
        care = RestartOptions(memory=0, stays="alike", tell=tell)
        return Supervisor(specs(3), care, agent, agent).run()

    actor = world.act("supervisor", life)
    world.run()
    assert isinstance(actor.outcome, OSError)


def test_progress_pays_back_what_restarts_cost() -> None:
    world = World(2, 400, [Fault(step, step % 2, "kill") for step in range(3, 399, 5)])
    outcome, told = supervised(world)
    assert outcome == [400] * 2
    assert sum(event == "incident" for _, event, _ in told) == 80


# --- two and three hosts ---------------------------------------------------------------------------------------------


class _Test:
    def close(self) -> None:
        """Nothing was started."""


@pytest.fixture(autouse=True)
def _no_test_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_check, "hosts", lambda team, number, signals: None)
    monkeypatch.setattr(host_check, "takes_part", lambda team, number: _Test())


class Hosts:
    """A run over hosts. A supervisor that ended is started again after `returns` seconds, but the first."""

    def __init__(self, world: World, hosts: int, stays: str = "", returns: float = 1.5, absence: float = 20.0) -> None:
        self.world, self.hosts, self.returns, self.absence = world, hosts, returns, absence
        self.told: list[tuple[str, dict[str, Any]]] = []
        tell = lambda event, **fields: self.told.append((event, fields))  # noqa: E731
        self.care = RestartOptions(heartbeat=1.0, memory=0, stays=stays, tell=tell)  # type: ignore[arg-type]
        self.places = tuple(rank % hosts for rank in range(world.world))
        self.lives = [0] * hosts
        self.returned = 0

    def start(self, host: int, kill_at: int = -1) -> Any:
        return self.world.act(f"host {host}", partial(self._live, host, self.lives[host]), kill_at)

    def _live(self, host: int, life: int, actor: Any) -> Any:
        line = MeetingPoint(host, self.hosts, "127.0.0.1", 1, "run", 1.0, life)
        team = HostMap(line, tuple("abc"[: self.hosts]), self.places, self.absence)
        try:
            agent, link = SimulatedAgent(self.world, actor), partial(SimulatedLink, self.world, actor)
            if host == 0:
                everybody = [team.place(rank) for rank in range(len(self.places))]
                return leader.lead(everybody, team, self.care, agent, link)  # type: ignore[arg-type]
            return Follower([team.place(rank) for rank in team.own], team, self.care, agent, link).run()  # type: ignore[arg-type]
        except Killed:
            if host:
                self.lives[host] += 1
                self.world.later.append((self.world.now + self.returns, partial(self._again, host)))
            raise

    def _again(self, host: int) -> None:
        if self.world.actors[0].dead is None:
            self.returned += 1
            self.start(host)

    def run(self, killed: int = -1, at: int = -1) -> Any:
        """All to their end; the supervisor that was traced."""
        found = [self.start(host, at if host == killed else -1) for host in range(self.hosts)]
        self.world.run()
        assert all(rank.status is not None for rank in self.world.ranks), "a rank was left behind"
        return found[killed]


def world_of(ranks: int, stays: bool, *schedule: Fault) -> World:
    return World(ranks, 12, schedule, stays=stays)


@pytest.mark.extremes
@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("stays", ["", "alike"])
@pytest.mark.parametrize("what", ["", *KINDS])
def test_hosts_end_a_run_well_whatever_happens_to_a_rank(hosts: int, stays: str, what: str) -> None:
    run = Hosts(world_of(hosts + 1, bool(stays), *([Fault(5, 1, what)] if what else [])), hosts, stays)
    run.run()
    for actor in run.world.actors:
        assert ended_well(actor), actor.outcome
    assert [event for event, _ in run.told] == (["incident", "recovered"] if what else [])


def ended_well(actor: Actor) -> bool:
    return isinstance(actor.outcome, list) and set(actor.outcome) == {12}


def lines_of(hosts: int, killed: int, stays: str) -> list[int]:
    """The numbers at which each line of that supervisor's life is met for the first and for the last time."""
    traced = Hosts(world_of(hosts, bool(stays), Fault(5, 1, "kill")), hosts, stays).run(killed, at=10**9)
    first = {line: number for number, line in reversed(list(enumerate(traced.lines)))}
    last = {line: number for number, line in enumerate(traced.lines)}
    assert traced.lines
    return sorted({*first.values(), *last.values()})


def strike(hosts: int, killed: int, at: int, stays: str) -> None:
    run = Hosts(world_of(hosts, bool(stays), Fault(5, 1, "kill")), hosts, stays)
    struck = run.run(killed, at)
    assert isinstance(struck.outcome, Killed)
    leads, *others = [actor for actor in run.world.actors if actor is not struck]
    if killed:
        assert ended_well(leads), (struck.lines[-1], leads.outcome)
    else:
        for actor in (leads, *others):
            gave_up = actor.outcome is None or isinstance(actor.outcome, HostLost)
            assert gave_up or ended_well(actor), (struck.lines[-1], actor.outcome)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("killed", "stays"),
    [(0, "alike"), (1, ""), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((0, ""), (1, "alike")))],
)
def test_a_supervisor_killed_at_some_lines_leaves_no_rank_and_the_run_goes_on_if_it_did_not_lead(killed, stays) -> None:
    for at in lines_of(2, killed, stays)[::12]:
        strike(2, killed, at, stays)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("stays", ["", "alike"])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_supervisor_killed_at_every_line_leaves_no_rank_and_the_run_goes_on_if_it_did_not_lead(
    hosts: int, killed: int, stays: str
) -> None:
    for at in lines_of(hosts, killed, stays):
        strike(hosts, killed, at, stays)


def test_a_host_that_stays_away_ends_the_run_and_is_named() -> None:
    run = Hosts(world_of(2, False), 2, returns=500.0)
    run.run(1, 400)
    error = run.world.actors[0].outcome
    assert isinstance(error, HostLost)
    assert error.what.startswith("Host b was not heard for")


# --- a host that is left out and comes back --------------------------------------------------------------------------


class Fewer:
    """Plans a run of a rank on each of the hosts that are there."""

    planned_wait = None
    planned_work = ()

    def __init__(self, world: World, ratio: float) -> None:
        self.world, self.ratio, self.steps = world, ratio, world.steps
        self.hosts = tuple(range(world.world))
        self.shapes: dict[str, RunShape] = {}

    @property
    def plan(self) -> str:
        return repr(self.hosts)

    def shape(self, hosts: tuple[int, ...], ratio: float) -> RunShape:
        kept = tuple(self.hosts.index(host) if host in self.hosts else -1 for host in hosts)
        places, told = specs(len(hosts)), repr(hosts)
        made = RunShape(lambda place: None, places, kept, False, ratio, told, f"{len(hosts)} ranks", hosts, told)
        return self.shapes.setdefault(told, made) if not kept else made

    def heard(self, told: str) -> RunShape:
        hosts = tuple(int(one) for one in told.strip("(),").split(","))
        return self.shape(hosts, 1.0)

    def without(self, ranks: Any) -> RunShape:
        return self.shape(tuple(host for rank, host in enumerate(self.hosts) if rank not in ranks), 2.0)

    def again(self, hosts: Any) -> RunShape:
        return self.shape(tuple(sorted({*self.hosts, *hosts})), self.ratio)

    def saving(self) -> float:
        return 0.1

    def adopt(self, shape: RunShape) -> None:
        self.hosts, self.world.world = shape.hosts, len(shape.hosts)


class Leaving(Hosts):
    """Hosts of which one that stays away is left out. What the first host has done at its saves is kept."""

    def __init__(self, hosts: int, steps: int, returns: float, ratio: float = 0.5) -> None:
        super().__init__(World(hosts, steps), hosts, returns=returns)
        self.shapes = Fewer(self.world, ratio)
        planned = {"shapes": self.shapes, "heard": self.shapes.heard, "leaves": True}
        self.care = replace(self.care, **planned)  # type: ignore[arg-type]

    def incidents(self) -> list[dict[str, Any]]:
        return [fields for event, fields in self.told if event == "incident"]


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 3])
def test_a_host_that_was_left_out_has_ranks_again_when_it_is_back_and_no_step_is_lost(hosts: int) -> None:
    run = Leaving(hosts, 2000, returns=60.0)
    run.run(1, 4000)
    actors = run.world.actors
    assert isinstance(actors[0].outcome, list), actors[0].outcome
    assert set(actors[0].outcome) == {2000}
    out, back = (one for one in run.incidents() if not one["action"].startswith("wait"))
    assert out["action"].startswith("the others go on without it")
    assert (back["kind"], back["why"]) == ("replanned", "host b, which was left out, is there again")
    assert run.shapes.hosts == tuple(range(hosts))
    recovered = [fields for event, fields in run.told if event == "recovered" and fields["source"] != "place"]
    assert [one["kind"] for one in recovered] == ["lost", "replanned"]
    assert recovered[1]["lost_steps"] == 0
    assert actors[-1].name == "host 1"
    assert actors[-1].outcome == [2000], "its new supervisor has run ranks"


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "ratio"), [(500, 0.5), (2000, 0.95)])
def test_a_host_that_is_back_has_no_ranks_where_that_does_not_pay(steps: int, ratio: float) -> None:
    run = Leaving(2, steps, returns=60.0, ratio=ratio)
    run.run(1, 4000)
    assert isinstance(run.world.actors[0].outcome, list), run.world.actors[0].outcome
    told = [one["what"] for one in run.incidents()][2:]
    assert len(told) <= 1, "it is said once"
    assert all(one.startswith("Host b is there again, which does not pay") for one in told)
    assert run.shapes.hosts == (0,)


@pytest.mark.slow
def test_a_host_that_comes_and_goes_is_taken_in_ever_less() -> None:
    run = Leaving(2, 6000, returns=60.0)
    run.start(0)
    run.start(1)

    def kill() -> None:
        others = [actor for actor in run.world.actors if actor.name == "host 1" and not actor.over]
        if others and run.shapes.hosts == (0, 1):
            run.world.kill(others[0])
        run.world.later.append((run.world.now + 40.0, kill))

    run.world.later.append((run.world.now + 20.0, kill))
    while run.world._next() and not run.world.actors[0].over:
        pass
    assert isinstance(run.world.actors[0].outcome, list), run.world.actors[0].outcome
    taken_in = sum(one["kind"] == "replanned" for one in run.incidents())
    assert 1 <= taken_in <= 6
