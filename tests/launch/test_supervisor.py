"""Real kills on one machine: the weights and losses are those of the unbroken run.

Each kind of kill is here once; what follows each, on any rank of any number, is proven in simulated time
(`test_simulated`).
"""

import os
import random
import signal
import socket
import time

import pytest
from struck import PHASES, Struck, recipe_of, same

from accounts import account
from espalier.launch.ranks import supervisor as supervise
from espalier.recipe.errors import Interrupted, RunFailed, UserError
from espalier.train import rank_spec as base
from many_ranks.faults import Fault

HAPPENINGS = ("kill", "terminate", "raise", "stop", "hang", "exit")


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def survives(corpus, unbroken, folder, world, rank, what):
    run = Struck(recipe_of(corpus), world, folder / "run", (Fault(rank, 6, what),)).run()
    assert same(run, unbroken(world))
    (incident,) = run.all("incident")
    kinds = {"kill": "killed", "terminate": "signal", "raise": "exception", "stop": "stopped"}
    assert incident["kind"] == kinds.get(what, what)
    assert incident["rank"] == rank
    assert incident["reason"] == {"raise": "Runtime Error", "hang": "Hang"}.get(what, "Unknown")
    (recovered,) = run.all("recovered")
    assert recovered["step"] + recovered["lost_steps"] in (5, 6)
    return recovered


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("what", "rank"),
    [
        ("kill", 0),
        pytest.param("raise", 1, marks=pytest.mark.slow),
        ("hang", 0),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("stop", 1), ("exit", 0), ("terminate", 1))),
    ],
)
def test_whatever_happens_to_one_of_two_ranks_changes_no_bit(corpus, unbroken, tmp_path, what, rank):
    survives(corpus, unbroken, tmp_path, 2, rank, what)


@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        ("publish", 0),
        *(pytest.param(phase, 0, marks=pytest.mark.slow) for phase in PHASES if phase != "publish"),
        pytest.param("publish", 1, marks=pytest.mark.slow),
    ],
)
def test_a_rank_killed_while_it_saves_changes_no_bit(corpus, unbroken, tmp_path, phase, rank):
    run = Struck(recipe_of(corpus), 2, tmp_path / "run", phase=(rank, phase)).run()
    assert same(run, unbroken(2))
    assert len(run.all("incident")) == 1


def orphaned(corpus, unbroken, folder, world, rank):
    """Rank `rank` kills the supervisor, which is a process of its own here; then the same run is begun again."""
    run = Struck(recipe_of(corpus), world, folder / "run", (Fault(rank, 6, "kill"),), orphans=True)
    supervisor = os.fork()
    if supervisor == 0:
        try:
            run.run()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1]) == -signal.SIGKILL
    pids = [int((folder / "run" / f"pid-{one}").read_text()) for one in range(world)]
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, pids))
    again = Struck(recipe_of(corpus), world, folder / "run").run()
    assert same(again, unbroken(world))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "rank"), [(2, 1), pytest.param(3, 0, marks=pytest.mark.slow)])
def test_a_killed_supervisor_leaves_no_rank_and_the_same_run_goes_on(corpus, unbroken, tmp_path, world, rank):
    orphaned(corpus, unbroken, tmp_path, world, rank)


@pytest.mark.slow
def test_several_failures_in_one_run_change_no_bit(corpus, unbroken, tmp_path):
    faults = (Fault(1, 2, "exit"), Fault(0, 5, "kill"), Fault(1, 7, "raise"))
    run = Struck(recipe_of(corpus), 2, tmp_path / "run", faults).run()
    assert same(run, unbroken(2))
    assert [event["kind"] for event in run.all("incident")] == ["exit", "killed", "exception"]
    assert [event["attempt"] for event in run.all("recovered")] == [1, 2, 3]
    spent = account(run.events).parts
    assert spent["recovering"] > 0
    assert min(spent.values()) > -0.05, "seconds of the clock, and of perf_counter"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_a_run_under_constant_fire_ends_with_the_weights_of_peace(corpus, tmp_path, seed):
    """Acme's mix in small: a fault of any kind on any rank every ten steps or so."""
    draw = random.Random(seed)
    recipe = recipe_of(corpus, train={"steps": 120, "validate_every": 50}, checkpoint={"every": 10})
    whole = Struck(recipe, 3, tmp_path / "whole").run()
    struck = draw.sample(range(2, 121), 12)
    faults = tuple(Fault(draw.randrange(3), step, draw.choice(HAPPENINGS)) for step in struck)
    run = Struck(recipe, 3, tmp_path / "run", faults, memory=1 << 26).run()
    assert same(run, whole)
    found = account(run.events)
    assert found.failures == len(faults)
    # A fault may strike before the run has got over the one before: then both are over with one recovery.
    assert len(faults) // 2 < sum(cause.recovered for cause in found.causes) <= len(faults)
    assert set(run.losses) == set(range(1, 121))


@pytest.mark.parametrize(("optimizer", "world"), [pytest.param("muon", 2, marks=pytest.mark.slow), ("adamw", 1)])
def test_with_copies_in_memory_the_run_goes_on_from_the_newest_and_no_bit_changes(corpus, tmp_path, optimizer, world):
    options = {"optimizer": {"kind": optimizer}}
    recipe = recipe_of(corpus, train=options, checkpoint={"every": 100})
    whole = Struck(recipe, world, tmp_path / "whole").run()
    run = Struck(recipe, world, tmp_path / "run", (Fault(world - 1, 6, "kill"),), memory=1 << 26).run()
    assert same(run, whole)
    (recovered,) = run.all("recovered")
    assert recovered["source"] == "memory"
    assert 2 <= recovered["step"] <= 5, "steps take milliseconds here, so not each has a copy"
    assert run.all("run")[1]["source"] == "memory (the newest on disk is of step 0)"


def test_a_hang_names_the_rank_that_the_others_wait_for_and_where_it_is(corpus, tmp_path):
    run = Struck(recipe_of(corpus), 2, tmp_path / "run", (Fault(1, 6, "hang"),)).run()
    (incident,) = run.all("incident")
    assert incident["what"] == "Rank 1 hangs."
    assert "faults.py" in incident["why"]
    (recovered,) = run.all("recovered")
    assert recovered["seconds"] < 3 * run.heartbeat + 5


@pytest.mark.extremes
@pytest.mark.parametrize("method", ["evaluate", pytest.param("sample", marks=pytest.mark.slow)])
def test_a_rank_that_falls_asleep_without_a_step_is_found_as_soon_as_in_one(corpus, unbroken, tmp_path, method):
    run = Struck(recipe_of(corpus), 2, tmp_path / "run", asleep=(0, method)).run()
    assert same(run, unbroken(2))
    (incident,) = run.all("incident")
    assert (incident["kind"], incident["rank"]) == ("hang", 0)
    assert "usually takes 0.0" not in incident["why"]
    (recovered,) = run.all("recovered")
    assert recovered["seconds"] < 3 * run.heartbeat + 5


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(1, 2), pytest.param((20,), marks=pytest.mark.soak)])
def test_a_step_that_computes_for_long_is_waited_for_past_every_deadline(corpus, tmp_path, steps):
    recipe = recipe_of(corpus, train={"steps": steps[-1] + 2, "validate_every": 1000})
    faults = tuple(Fault(0, step, "burn", 5.0) for step in steps)
    run = Struck(recipe, 2, tmp_path / "run", faults, timeout=2.0).run()
    assert not run.all("incident")
    assert [event["step"] for event in run.all("step")] == list(range(1, steps[-1] + 3))
    assert all(event["seconds"] > 4.5 for event in run.all("step") if event["step"] in steps)


def test_a_rank_that_holds_the_others_up_is_named_and_left_alone(tmp_path):
    def task(place):
        place.pulse.begins(0)
        for step in range(1, 61):
            time.sleep(0.05)
            place.pulse.stepped(step, waited=0.0 if place.rank == 1 else 0.04)
        return place.rank

    events = []
    care = supervise.RestartOptions(None, 0.1, 0, lambda event, **fields: events.append(fields))
    assert supervise.run(task, places(3, tmp_path), care) == [0, 1, 2]
    assert [(event["kind"], event["rank"]) for event in events] == [("slow", 1)]


# --- what is not started again ---------------------------------------------------------------------------------------


def places(count, folder):
    return [base.RankSpec(rank=i, world=count, local_rank=i, log=folder / f"rank-{i}.log") for i in range(count)]


def attempts(folder, task, restarts=None, count=2):
    """The error that ended `task` on `count` ranks, the attempts there were, and the events."""
    events = []

    def life(place):
        (folder / f"attempt-{place.attempt}").touch()
        return task(place)

    care = supervise.RestartOptions(restarts, 0.2, 0, lambda event, **fields: events.append({"event": event, **fields}))
    with pytest.raises((RunFailed, UserError, Interrupted)) as caught:
        supervise.run(life, places(count, folder), care)
    return caught.value, len([*folder.glob("attempt-*")]), events


def test_what_the_user_has_to_mend_is_not_tried_again(tmp_path):
    def task(place):
        raise UserError("no such file")

    error, tried, events = attempts(tmp_path, task)
    assert (error.what, tried) == ("no such file", 1)
    assert [event["kind"] for event in events] == ["user"]
    assert "stop" in events[0]["action"]


def test_code_that_raises_again_at_the_same_step_is_tried_twice(tmp_path):
    def task(place):
        place.pulse.begins(0)
        place.pulse.stepped(4)
        raise RuntimeError("odd shape")

    error, tried, events = attempts(tmp_path, task)
    assert tried == 2
    assert "RuntimeError: odd shape" in error.what
    assert "no step gained" in error.why
    assert [event["action"].split()[0] for event in events if event["event"] == "incident"] == ["start", "stop"]


def test_an_error_that_an_unchanged_program_repeats_is_not_tried_again_and_is_named(tmp_path):
    def task(place):
        place.pulse.begins(0)
        if place.rank == 1:
            raise RuntimeError("Error(s) in loading state_dict for Gpt: size mismatch for head.weight")
        time.sleep(30)

    error, tried, (event,) = attempts(tmp_path, task)
    assert tried == 1
    assert "size mismatch" in error.what
    assert (event["category"], event["reason"]) == ("Framework", "Model Loading Error")
    assert (event["rank"], event["calls_for"]) == (1, "stop")
    assert event["action"] == "stop (an unchanged run would fail again (Model Loading Error))"


@pytest.mark.slow
def test_a_fault_of_the_machine_is_tried_as_often_as_a_death_and_names_the_host(tmp_path):
    def task(place):
        place.pulse.begins(0)
        if place.rank == 1 and place.attempt < 3:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return place.attempt

    events = []
    care = supervise.RestartOptions(None, 0.2, 0, lambda event, **fields: events.append({"event": event, **fields}))
    assert supervise.run(task, places(2, tmp_path), care) == [3, 3]
    found = [event for event in events if event["event"] == "incident"]
    assert [event["reason"] for event in found] == ["ECC Error"] * 3
    assert {event["suspect"] for event in found} == {socket.gethostname()}


@pytest.mark.slow
def test_a_rank_that_is_killed_again_and_again_is_tried_four_times(tmp_path):
    def task(place):
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)

    error, tried, _ = attempts(tmp_path, task)
    assert (error.what, tried) == ("Rank 1 was killed (SIGKILL).", 4)


def test_no_restart_where_none_is_wanted(tmp_path):
    def task(place):
        os._exit(0)

    error, tried, _ = attempts(tmp_path, task, restarts=0, count=1)
    assert (error.what, tried) == ("Rank 0 ended with exit code 0.", 1)
    assert "before its work was done" in error.why


def test_the_first_interrupt_lets_the_ranks_save_and_is_no_incident(tmp_path):
    def task(place):
        try:
            (tmp_path / str(place.rank)).touch()
            if place.rank == 0:
                while not (tmp_path / "1").exists():
                    time.sleep(0.01)
                os.kill(os.getppid(), signal.SIGINT)
            time.sleep(30)
        except KeyboardInterrupt:
            raise Interrupted("saved") from None

    error, tried, events = attempts(tmp_path, task)
    assert (error.what, tried, events) == ("saved", 1, [])
    assert isinstance(error, Interrupted)


def test_ranks_return_in_order(tmp_path):
    assert supervise.run(lambda place: place.rank * 10, places(3, tmp_path), supervise.RestartOptions()) == [0, 10, 20]
