"""A loss that goes wrong puts the run back, and leaves the batches out exactly once."""

import json
import math

import pytest
from struck import Struck, recipe_of, same, write_corpus

from espalier.errors import RunFailed
from espalier.resilience.acme import skipping

STEPS, NOISE = 44, range(24, 32)


class Noisy(Struck):
    """Some batches (numbered from 0) have labels that nobody could learn: their loss is far too high."""

    noise: tuple[int, ...] = tuple(NOISE)
    factor = 50.0

    def _arm(self, workload, place):
        plain = workload.loss

        def loss(model, batch):
            value, weight = plain(model, batch)
            if model.training:
                number = self.trainer.healing.skips.batch(self.trainer.step)
                if place.rank == 0:
                    with (self.folder / "taken").open("a") as file:
                        file.write(f"{self.trainer.step} {number}\n")
                value = value * self.factor if number in self.noise else value
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
    skipping.write(never.folder, skipping.Skips(tuple(range(24, 31))))
    assert same(run, never.run()), "as if it had never seen them"


@pytest.mark.slow
def test_what_heals_in_time_is_left_alone(corpus, tmp_path):
    run = Noisy(recipe(corpus, rollback=50), 1, tmp_path / "run")
    run.run()
    assert run.all("incident") == []
    assert not (run.folder / "skips.json").exists()


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
