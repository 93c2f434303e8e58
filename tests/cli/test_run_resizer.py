"""`train` itself goes on with fewer ranks, and by another plan; the batch and the losses stay what they were."""

import argparse
import json
import os
import signal
import time

import pytest
import torch
from struck import recipe_of, write_corpus

from espalier.cli import run_resizer, start_run, train
from espalier.launch.resilience.slowdown import Evidence
from espalier.plan import base as plans
from espalier.recipe import recipe_file
from espalier.recipe.errors import UserError
from espalier.train import worker

UNLIKE = "".join(
    f"""[[nodes]]
name = "here"
cores = 1
memory = "2GiB"
inside = {{ bandwidth = "1Gbit/s", latency = "100us", launch = "100us" }}
[nodes.device]
name = "core {number}"
kind = "cpu"
memory = {2**31}
memory_bandwidth = 1e10
flops = {{ fp32 = {flops} }}
peak = false
"""
    for number, flops in enumerate((8e9, 4e9, 4e9))
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("reshaped") / "corpus")


@pytest.fixture
def job(corpus, tmp_path):
    """A run about to begin, with as many ranks and options as asked for."""
    torch.set_num_threads(1)
    jobs = []

    def make(ranks, **tables):
        (tmp_path / "cluster.toml").write_text('[[nodes]]\ndevice = "cpu"\ncores = 4\nmemory = "8GiB"')
        pin = {"ranks": ranks, "threads": 1}
        if tables.pop("unequal", False):
            (tmp_path / "cluster.toml").write_text(UNLIKE)
            pin["pipelines"] = "unequal"
        tables["plan"] = {"cluster": str(tmp_path / "cluster.toml"), "trial": False, "pin": pin}
        recipe = recipe_of(corpus, **tables)
        path = tmp_path / "recipe.toml"
        path.write_text(recipe_file.dump(recipe))
        arguments = argparse.Namespace(
            recipe=path, overrides=[], run=str(tmp_path / f"run-{len(jobs)}"), json=True, trust=False
        )
        jobs.append(start_run.of_command(arguments))
        return jobs[-1]

    yield make
    for one in jobs:
        one.folder.release()


def struck(monkeypatch, job, happens):
    """Calls `happens(seat, step, samples)` in each forward pass of the job's ranks; the run's events."""
    plain = worker.train

    def armed(setting, identity):
        loss, begun = setting.workload.loss, worker.Trainer.train_step
        now = [0]

        def train_step(trainer, batches):
            now[0] = trainer.step + 1
            return begun(trainer, batches)

        def struck(model, batch):
            if model.training:
                happens(setting.place.seat, now[0], len(batch.tokens))
            return loss(model, batch)

        worker.Trainer.train_step, setting.workload.loss = train_step, struck
        return plain(setting, identity)

    monkeypatch.setattr(train.worker, "train", armed)
    train.carry_out(train.Ranks(lambda: (job, ()), train.fork), as_json=True)
    return [json.loads(line) for line in job.folder.events.read_text().splitlines()]


def losses(events):
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def all_of(events, name):
    return [event for event in events if event["event"] == name]


@pytest.mark.slow
def test_a_place_that_always_dies_is_left_out_by_the_planner_and_the_losses_meet_rounding(monkeypatch, job):
    def dies(seat, step, samples):
        if seat == 0 and step >= 5:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

    begun = job(3, faults={"restarts": 1})
    events = struck(monkeypatch, begun, dies)
    action = all_of(events, "incident")[-1]["action"]
    assert "place 0" in action
    assert "2 of 3 ranks with 4, 4 samples each step; by estimate a step takes" in action
    assert len(plans.read(begun.folder.plan).ranks) == 2, "the same command goes on with it"
    assert all_of(events, "run")[-1]["ranks"] == 2
    whole = struck(monkeypatch, job(3), lambda *_: None)
    assert losses(events) == pytest.approx(losses(whole), rel=1e-4)
    assert set(losses(events)) == set(range(1, 9))


@pytest.mark.slow
def test_a_rank_that_stays_slow_is_planned_round_and_the_losses_meet_rounding(monkeypatch, job):
    begun = job(2, train={"steps": 120}, faults={"heartbeat": "0.1s"})
    events = struck(monkeypatch, begun, lambda seat, step, samples: time.sleep(0.03 * samples * seat))
    (switch,) = [event for event in all_of(events, "incident") if event["kind"] == "replanned"]
    assert switch["gain"] > 0
    assert switch["predicted"] < 0.9 * switch["before"]
    (recovered,) = all_of(events, "recovered")
    assert (recovered["kind"], recovered["lost_steps"]) == ("replanned", 0)
    after = [event["seconds"] for event in all_of(events, "step") if event["step"] > switch["step"] + 5]
    assert sorted(after)[len(after) // 2] < 0.9 * switch["before"]
    whole = struck(monkeypatch, job(2, train={"steps": 120}), lambda *_: None)
    assert losses(events) == pytest.approx(losses(whole), rel=1e-3)


@pytest.mark.parametrize("slower", [8.0, 40.0])
def test_a_rank_that_is_slower_than_its_share_can_be_small_keeps_one_sample(job, slower):
    offers = run_resizer.RunResizer(job(2), lambda job: len)
    found, _ = offers.faster(Evidence((0.0045, 0.0045 * slower), 0.0045 * slower, 0.0, (1,), False))
    assert found[0].says.startswith("all 2 ranks with 7, 1 samples")
    assert found[0].ratio < 0.9


def test_what_is_offered_names_shares_and_can_be_adopted(job):
    begun = job(2)
    begun.folder.events.write_text('{"event": "checkpoint", "time": 0, "step": 1, "seconds": 1.5}\n')
    offers = run_resizer.RunResizer(begun, lambda job: len)
    before = offers.plan
    found, speeds = offers.faster(Evidence((0.1, 0.4), 0.4, 0.0, (1,), False))
    assert speeds == pytest.approx({0: 1.0, 1: 4.0})
    assert found == sorted(found, key=lambda one: one.ratio)
    assert found[0].ratio < 1
    offers.adopt(found[0])
    assert offers.plan == found[0].plan != before
    assert offers.saving() == 1.5
    assert all(len(one.previous_ranks) == 2 for one in found), "ranks that were asked for are kept"
    assert [one.rank for one in found[0].places] == list(range(len(found[0].previous_ranks)))


def unequal(job, **tables):
    return job(3, unequal=True, model={"depth": 4}, **tables)


def test_unequal_pipelines_are_offered_without_a_rank_and_at_measured_speeds(job):
    begun = unequal(job)
    assert begun.plan.planner == "flashflex"
    offers = run_resizer.RunResizer(begun, lambda job: len)
    before, costs = offers.plan, offers.planned_wait
    assert costs is None, "ranks of a pipeline wait for one another besides"
    fewer = offers.without({1})
    assert fewer.previous_ranks == (0, 2)
    assert not fewer.copies, "layers lie elsewhere"
    assert "2 of 3 ranks with" in fewer.says
    assert "samples each step" in fewer.says
    found, speeds = offers.faster(Evidence((0.1, 0.1, 0.8), 0.8, 0.0, (2,), False))
    assert speeds[2] > 4
    assert found
    assert all(len(one.previous_ranks) == 3 for one in found), "ranks that were asked for are kept"
    offers.adopt(found[0])
    assert offers.plan == found[0].plan != before
    assert plans.read(begun.folder.plan).planner == "flashflex"


def test_over_hosts_the_first_one_keeps_the_run(job):
    begun = unequal(job)
    left = []
    offers = run_resizer.HostResizer(begun, lambda job: len, (0, 1, 2), lambda *told: left.append(told))
    with pytest.raises(UserError, match="The first host keeps the run"):
        offers.without({0})
    alone = offers.without({1, 2})
    assert (alone.previous_ranks, alone.hosts) == ((0,), (0,))
    found, _ = offers.faster(Evidence((0.8, 0.1, 0.1), 0.8, 0.0, (0,), False))
    assert all(0 in one.previous_ranks for one in found)
    fewer = offers.without({1})
    offers.adopt(fewer)
    assert (offers.hosts, left) == ((0, 2), [(1, True)])


def test_a_host_that_is_back_is_offered_with_the_plan_of_all_and_some_of_several_with_a_new_one(job):
    begun = unequal(job)
    told = []
    offers = run_resizer.HostResizer(begun, lambda job: len, (0, 1, 2), lambda *one: told.append(one))
    whole = offers.plan
    offers.adopt(offers.without({1, 2}))
    assert offers.hosts == (0,)
    some = offers.again([2])
    assert (some.previous_ranks, some.hosts, some.copies) == ((0, -1), (0, 2), False)
    assert some.ratio < 1
    assert some.says.startswith("all 2 ranks with")
    offers.adopt(some)
    back = offers.again([1])
    assert (back.previous_ranks, back.hosts, back.plan) == ((0, -1, 1), (0, 1, 2), whole)
    heard = run_resizer.heard(begun, lambda job: len, back.encoded)
    assert (heard.hosts, heard.copies, len(heard.places)) == ((0, 1, 2), False, 3)
    offers.adopt(back)
    assert plans.dumps(offers.job.plan) == plans.dumps(begun.plan), "the plan that the run was begun with"
    assert told == [(1, True), (2, True), (2, False), (1, False)]
    offers.adopt(offers.without({1}))
    assert offers.again([1]).previous_ranks == (0, -1, 1)


def test_on_one_machine_nothing_comes_back(job):
    with pytest.raises(UserError, match="no other hosts"):
        run_resizer.RunResizer(unequal(job), lambda job: len).again([1])


@pytest.mark.slow
def test_a_rank_of_a_ragged_step_is_lost_and_the_others_do_its_micro_batches(monkeypatch, job):
    def dies(seat, step, samples):
        if seat == 1 and step >= 5:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

    begun = unequal(job, faults={"restarts": 1})
    events = struck(monkeypatch, begun, dies)
    action = all_of(events, "incident")[-1]["action"]
    assert "place 1" in action
    assert "2 of 3 ranks with" in action
    after = plans.read(begun.folder.plan)
    assert len(after.ranks) == 2, "the same command goes on with it"
    assert all_of(events, "run")[-1]["ranks"] == 2
    whole = struck(monkeypatch, unequal(job), lambda *_: None)
    assert losses(events) == pytest.approx(losses(whole), rel=1e-4)
    assert set(losses(events)) == set(range(1, 9))


@pytest.mark.slow
def test_a_straggler_in_a_pipeline_is_named_and_planned_round(monkeypatch, job):
    begun = unequal(job, train={"steps": 120}, faults={"heartbeat": "0.1s"})
    events = struck(monkeypatch, begun, lambda seat, step, samples: time.sleep(0.03 * samples * (seat == 0)))
    told = [event for event in all_of(events, "incident") if event["kind"] == "slow"]
    assert told[0]["rank"] == 0
    (switch,) = [event for event in all_of(events, "incident") if event["kind"] == "replanned"]
    assert switch["gain"] > 0
    (recovered,) = all_of(events, "recovered")
    assert (recovered["kind"], recovered["lost_steps"]) == ("replanned", 0)
    after = [event["seconds"] for event in all_of(events, "step") if event["step"] > switch["step"] + 5]
    assert sorted(after)[len(after) // 2] < 0.9 * switch["before"]
    whole = losses(struck(monkeypatch, unequal(job, train={"steps": 120}), lambda *_: None))
    found, near = losses(events), range(1, switch["step"] + 11)  # rounding grows from step to step
    assert [found[step] for step in near] == pytest.approx([whole[step] for step in near], rel=1e-3)
