"""The plan foretells how often a run saves, and why; a number that was given is obeyed."""

import re
import shutil

import msgspec
import pytest

from espalier import recipe as config
from espalier.checkpoint import save_interval, young_daly
from espalier.machine import cluster as clusters
from espalier.plan import base, checkpoint_cost
from espalier.recipe import Checkpoint
from espalier.recipe.errors import UserError


def plan(ranks=1, **held):
    predicted = base.Predicted(
        step_seconds=0.5, tokens_per_second=1.0, tokens_per_second_per_device=1.0, mfu=0.0, terms={},
        memory_bytes=held, memory_limit=1e12, sent_bytes={},
    )  # fmt: skip
    return base.Plan(ranks=(base.Rank(),) * ranks, predicted=predicted)


@pytest.fixture
def here():
    return clusters.loads('[[nodes]]\ndevice = "cpu"\ncores = 4\nmemory = "16GiB"\n')


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_rule_is_youngs_over_the_copy_of_what_is_saved(here, ranks):
    made = checkpoint_cost.paced(plan(ranks, params=4e9, grads=4e9, optimizer=8e9, peak=2e10), Checkpoint(), here)
    stall = ranks * 2 * 12e9 / here.devices()[0].table.device.memory_bandwidth
    assert checkpoint_cost.first(made) == round(young_daly.optimal(stall, young_daly.ASSUMED) / 0.5)
    (rule,) = made.rules
    assert rule.name == "checkpoint.every"
    assert f"every {checkpoint_cost.first(made)} steps" in made.why[-1]


def test_a_number_that_was_given_is_obeyed(here):
    before = plan(params=4e9)
    assert checkpoint_cost.paced(before, Checkpoint(every=7), here) == before


def test_a_plan_without_a_prediction_begins_with_ten_steps(here):
    bare = msgspec.structs.replace(plan(), predicted=None)
    assert checkpoint_cost.first(checkpoint_cost.paced(bare, Checkpoint(), here)) == save_interval.FIRST


def test_a_slow_disk_makes_checkpoints_rarer(here):
    disk = '[[nodes.disks]]\npath = "/"\nwrite = 10e6\nread = 10e6\niops = 100.0\n'
    slow = clusters.loads(clusters.dumps(here) + disk)
    made = plan(params=4e9, grads=4e9, optimizer=8e9, peak=2e10)
    assert checkpoint_cost.first(checkpoint_cost.paced(made, Checkpoint(), slow)) == round(12e9 / 10e6 / 0.5)
    assert "the disk writes one in 20 min" in checkpoint_cost.paced(made, Checkpoint(), slow).why[-1]


@pytest.mark.parametrize(("keep", "best", "count"), [(2, True, 4), (2, False, 3), (1, False, 2)])
def test_a_full_disk_is_refused_with_the_bytes_that_are_missing(tmp_path, monkeypatch, keep, best, count):
    folder, made = tmp_path / "run" / "checkpoints", plan(params=4e9, grads=4e9, optimizer=8e9)
    options = config.Checkpoint(keep=keep, keep_best=best)

    def free(size):
        monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(size, 0, size))

    free(count * 12_000_000_000)
    checkpoint_cost.refuse_full(made, options, folder)
    free(count * 12_000_000_000 - 7)
    with pytest.raises(UserError, match=rf"{re.escape(str(folder))} need .*\(7 bytes\) more"):
        checkpoint_cost.refuse_full(made, options, folder)
    folder.mkdir(parents=True)
    (folder / "old").write_bytes(b"1234567")  # is replaced
    checkpoint_cost.refuse_full(made, options, folder)


def test_shards_are_counted_as_the_whole_state(monkeypatch):
    layout = base.Layout(tp=2, shard={"params": 1, "grads": 1, "optimizer": 4})
    monkeypatch.setattr(base.Plan, "layout", layout)
    assert checkpoint_cost.checkpoint_bytes(plan(params=3.0, optimizer=5.0)) == 2 * (3 + 4 * 5)
