"""A loss that goes wrong puts the run back, and leaves the batches out exactly once."""

import json
import math
from types import SimpleNamespace

import msgspec
import pytest
from struck import Struck, plan_of, recipe_of, same, write_corpus

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.parallel.agreement import AgreedStep
from espalier.plan import base as plans
from espalier.recipe.errors import RunFailed, UserError
from espalier.train import skip_list
from espalier.train.anomaly import Verdict
from espalier.train.rollback import Healing

STEPS, NOISE = 44, range(24, 32)


class Noisy(Struck):
    """Some batches (numbered from 0) have labels that nobody could learn: their loss is far too high."""

    noise: tuple[int, ...] = tuple(NOISE)
    factor = 50.0
    noisy: tuple[int, ...] = (0, 1)
    """Ranks that see the noise."""
    gradient_only = False

    def _arm(self, workload, place):
        plain = workload.loss

        def loss(model, batch):
            value, weight = plain(model, batch)
            if model.training:
                number = self.trainer.healing.skips.batch(self.trainer.step)
                if place.rank == 0:
                    with (self.folder / "taken").open("a") as file:
                        file.write(f"{self.trainer.step} {number}\n")
                if number in self.noise and place.rank in self.noisy:
                    risen = value * self.factor
                    value = value.detach() + risen - risen.detach() if self.gradient_only else risen
            return value, weight

        workload.loss = loss


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("healing") / "corpus")


def recipe(corpus, **faults):
    train = {"steps": STEPS, "validate_every": 1000, "schedule": {"kind": "constant"}, "optimizer": {"kind": "adamw"}}
    return recipe_of(corpus, train=train, checkpoint={"every": 10}, faults=faults)


def taken(run):
    """The batch of each step, in the attempt that counts."""
    return dict(map(int, line.split()) for line in (run.folder / "taken").read_text().splitlines())


@pytest.mark.slow
def test_a_loss_that_stays_high_is_put_back_and_its_batches_are_left_out_exactly_once(corpus, tmp_path):
    run = Noisy(recipe(corpus, rollback=4), 2, tmp_path / "run")
    run.run()
    (incident,) = run.all("incident")
    assert incident["kind"] == "anomaly"
    assert "rose at step 25" in incident["what"]
    skips = json.loads((run.folder / "skips.json").read_text())
    assert skips["batches"] == [*range(24, 31)]
    assert skips["back_to"] is None
    assert [event["step"] for event in run.all("run")] == [0, 20]
    numbers = taken(run)
    # One noisy batch is left, which is a blip; nothing else is missing and nothing comes twice.
    assert [numbers[step] for step in range(STEPS)] == [*range(24), *range(31, STEPS + 7)]
    never = Noisy(recipe(corpus, rollback=4), 2, tmp_path / "never")
    never.folder.mkdir()
    skip_list.write(never.folder, skip_list.Skips(tuple(range(24, 31))))
    assert same(run, never.run()), "as if it had never seen them"


def test_a_gradient_norm_that_rises_alone_is_put_back_as_a_loss_is(corpus, tmp_path):
    made = recipe(corpus, rollback=4)
    still = msgspec.structs.replace(made.train.optimizer, learning_rate=1e-9)  # a loss that falls would be a reason
    made = msgspec.structs.replace(made, train=msgspec.structs.replace(made.train, optimizer=still))
    run = Noisy(made, 1, tmp_path / "run")
    run.factor, run.gradient_only = 1000.0, True
    run.run()
    (incident,) = run.all("incident")
    assert "gradient norm rose at step 25" in incident["what"]
    assert incident["reason"] == "Loss Anomaly"
    assert json.loads((run.folder / "skips.json").read_text())["batches"] == [*range(24, 31)]
    assert [event["step"] for event in run.all("run")] == [0, 20]


def by_rounds(corpus, folder):
    """Two replicas of one rank, in rounds of four steps."""
    made = recipe(corpus, rollback=4)
    outer = LocalRoundsState(replicas=((0,), (1,)), steps=4, adapt=False)
    run = Noisy(made, 2, folder, plan=msgspec.structs.replace(plan_of(made, 2), choices={"local_rounds": outer}))
    run.noisy = (1,)
    return run


def test_what_one_replica_alone_sees_puts_all_back_where_they_next_save(corpus, tmp_path):
    run = by_rounds(corpus, tmp_path / "run")
    run.run()
    (incident,) = run.all("incident")
    assert incident["kind"] == "anomaly"
    assert (incident["step"], "rose at step 25" in incident["what"]) == (32, True)
    assert json.loads((run.folder / "skips.json").read_text())["batches"] == [*range(24, 31)]
    assert [event["step"] for event in run.all("run")] == [0, 20]


@pytest.mark.slow
def test_a_batch_that_is_not_finite_in_one_replica_is_left_out_by_all(corpus, tmp_path):
    run = by_rounds(corpus, tmp_path / "run")
    run.noise, run.factor = (13,), math.nan
    run.run()
    assert {event["kind"] for event in run.all("incident")} == {"anomaly"}
    assert json.loads((run.folder / "skips.json").read_text())["batches"] == [13]
    assert taken(run)[13] == 14


def test_a_run_on_an_optimizer_node_is_not_put_back_and_says_why(corpus, tmp_path):
    made = recipe(corpus)
    ranks = (*plan_of(made, 1).ranks, plans.Rank(role="optimizer"))
    plan = msgspec.structs.replace(plan_of(made, 1), ranks=ranks)
    setting = SimpleNamespace(recipe=made, plan=plan, folder=tmp_path, new=False, emit=lambda event, **fields: None)
    healing = Healing(setting, Checkpoints(str(tmp_path / "checkpoints")), common=True)
    with pytest.raises(UserError, match="rose at step 5 and did not recover") as refused:
        healing._put_back(Verdict(5, 9, 2.0, 1.0))
    assert "newest step only" in refused.value.why
    assert skip_list.read(tmp_path) == skip_list.Skips()


def test_a_plateau_is_reported_and_nothing_is_done(corpus, tmp_path):
    made = recipe(corpus, plateau=200, rollback="never")
    events = []
    setting = SimpleNamespace(
        recipe=made,
        plan=plan_of(made, 1),
        folder=tmp_path,
        new=False,
        emit=lambda event, **fields: events.append(fields),
    )
    healing = Healing(setting, Checkpoints(str(tmp_path / "checkpoints")), common=True)
    for step in range(1, 1001):
        rate = 1.0 if step < 800 else 0.1
        healing.watch(step, AgreedStep(2.0 + 0.01 * (step % 3), 1.0, 1.0, rate, False, 0.0, ()))
    (event,) = events
    assert (event["kind"], "attempt" in event, event["action"][:4]) == ("plateau", False, "none")
    assert "has not fallen in 200 steps" in event["what"]


@pytest.mark.slow
def test_what_heals_in_time_is_left_alone(corpus, tmp_path):
    run = Noisy(recipe(corpus, rollback=50), 1, tmp_path / "run")
    run.run()
    assert run.all("incident") == []
    assert not (run.folder / "skips.json").exists()


@pytest.mark.slow
def test_a_batch_that_is_never_finite_is_left_out_after_it_came_back(corpus, tmp_path):
    run = Noisy(recipe(corpus), 2, tmp_path / "run")
    run.noise, run.factor = (12,), math.nan
    run.run()
    assert [event["kind"] for event in run.all("incident")] == ["anomaly", "anomaly"]
    assert json.loads((run.folder / "skips.json").read_text())["batches"] == [12]
    assert taken(run)[12] == 13


@pytest.mark.slow
def test_a_run_that_is_never_finite_again_stops(corpus, tmp_path):
    run = Noisy(recipe(corpus), 1, tmp_path / "run")
    run.noise, run.factor = tuple(range(3, 100)), math.inf
    run.restarts = 2
    with pytest.raises(RunFailed, match="not finite in step 4"):
        run.run()
