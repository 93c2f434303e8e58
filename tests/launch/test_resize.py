"""A run that changes its shape: without a place that always fails, and by another plan where that pays."""

import contextlib
import os
import signal
import time

import pytest
from struck import Struck, recipe_of

from espalier.launch.ranks import supervisor
from espalier.launch.ranks.resize import RunShape
from espalier.recipe.errors import Interrupted, RunFailed, UserError
from espalier.train.rank_spec import RankSpec


@pytest.mark.slow
@pytest.mark.parametrize(("dead", "memory"), [(0, 0), pytest.param(2, 1 << 26, marks=pytest.mark.slow)])
def test_a_place_that_always_dies_is_left_out_and_no_bit_differs_from_a_run_begun_there_on_fewer(
    corpus, tmp_path, dead, memory
):
    recipe = recipe_of(corpus)
    run = Struck(recipe, 3, tmp_path / "run", memory=memory, restarts=1, dead=(dead, 5)).run()
    lost = run.all("incident")
    assert [event["kind"] for event in lost] == ["killed"] * len(lost)
    assert f"place {dead}" in lost[-1]["action"]
    assert "2 ranks" in lost[-1]["action"]
    taken_up = run.all("recovered")[-1]["step"]
    assert run.all("run")[-1]["source"].startswith("memory" if memory else "disk")

    with pytest.raises(Interrupted):
        Struck(recipe, 3, tmp_path / "other", restarts=0, stop_after=taken_up).run()
    fewer = Struck(recipe, 2, tmp_path / "other").run()
    assert fewer.losses == run.losses
    assert all((fewer.parameters[name] == value).all() for name, value in run.parameters.items())


def places(count):
    return [RankSpec(rank=i, world=count, local_rank=i, seat=i) for i in range(count)]


class Toy:
    """A run that sleeps: each sample takes as long as its seat needs, and ranks wait for the slowest."""

    planned_wait = None
    planned_work = ()

    def __init__(self, folder, steps, seconds, shares=(4, 4)):
        self.folder, self.steps, self.seconds, self.shares = folder, steps, seconds, shares
        self.ratio = 0.5

    def life(self, shares):
        took = [share * each for share, each in zip(shares, self.seconds, strict=True)]

        def task(place):
            state = self.folder / f"step-{place.seat}"
            first = int(state.read_text()) if state.exists() else 0
            place.pulse.begins(first)
            for step in range(first + 1, self.steps + 1):
                time.sleep(max(took))
                begun = state.with_suffix(".begun")  # the interrupt may come at any moment
                begun.write_text(str(step))
                begun.replace(state)
                place.pulse.stepped(step, max(took) - took[place.rank])
            return shares

        return task

    @property
    def plan(self):
        return str(self.shares)

    def without(self, ranks):
        raise UserError("too few to hold it")

    def faster(self, evidence):
        assert evidence.slow == (1,)
        other = RunShape(self.life((6, 2)), places(2), (0, 1), True, self.ratio, "(6, 2)", "6 and 2 samples")
        return [other], {0: 1.0, 1: 4.0}

    def saving(self):
        return 0.0

    def adopt(self, shape):
        self.shares = (6, 2)


def slept(tmp_path, toy):
    events = []
    care = supervisor.RestartOptions(
        None, 0.1, 0, lambda event, **fields: events.append({"event": event, **fields}), toy
    )
    return supervisor.run(toy.life(toy.shares), places(2), care), events


@pytest.mark.slow
def test_a_rank_that_stays_slow_leads_to_another_plan_where_enough_is_left(tmp_path):
    returned, events = slept(tmp_path, Toy(tmp_path, 100, (0.005, 0.02)))
    assert returned == [(6, 2), (6, 2)]
    incidents = [event for event in events if event["event"] == "incident"]
    assert [event["kind"] for event in incidents] == ["slow", "replanned"], "and it is not taken back"
    switch = incidents[1]
    assert switch["before"] == pytest.approx(0.08, rel=0.5)
    assert switch["predicted"] == pytest.approx(0.5 * switch["before"])
    left = 100 - switch["step"]
    assert switch["gain"] == pytest.approx(left * (switch["before"] - switch["predicted"]) - switch["cost"], rel=0.2)
    (recovered,) = [event for event in events if event["event"] == "recovered"]
    assert (recovered["kind"], recovered["lost_steps"]) == ("replanned", 0)


@pytest.mark.slow
def test_no_switch_where_the_rest_of_the_run_is_too_short(tmp_path):
    toy = Toy(tmp_path, 50, (0.005, 0.02))
    toy.saving = lambda: 60.0
    returned, events = slept(tmp_path, toy)
    assert returned == [(4, 4), (4, 4)]
    assert [event["kind"] for event in events] == ["slow", "slow"]
    assert "does not pay" in events[1]["what"]


@pytest.mark.slow
def test_where_fewer_cannot_hold_the_run_it_says_so(tmp_path):
    def task(place):
        with contextlib.suppress(KeyboardInterrupt):
            if place.seat == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)

    care = supervisor.RestartOptions(1, 0.2, 0, shapes=Toy(tmp_path, 1, (0.1, 0.1)))
    with pytest.raises(RunFailed) as caught:
        supervisor.run(task, places(2), care)
    assert "without rank 1: too few to hold it" in caught.value.why
