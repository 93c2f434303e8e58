"""The plan foretells how often a run saves, and why; a number that was given is obeyed."""

import math
import re
import shutil

import msgspec
import pytest

from espalier import recipe as config
from espalier.checkpoint import save_interval, young_daly
from espalier.machine import cluster as clusters
from espalier.plan import base, checkpoint_cost
from espalier.plan.axes.offload import PCIE
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
    assert checkpoint_cost.first(made)[0] == round(young_daly.optimal(stall, 24 * 3600) / 0.5)
    assert [rule.name for rule in made.rules] == ["checkpoint.every", "mtbf"]
    assert f"every {checkpoint_cost.first(made)[0]} steps" in made.why[-1]


H100, A100, HOME = 16_384 * 54 * 24 / 419, 8 * 24 * 1000 / 6.5, 24
FAILING = {
    'device = "H100"': H100,
    'device = "H100"\ndevices = 8': H100 / 8,
    'device = "H100"\ndevices = 8\ncount = 1250': H100 / 10_000,
    'device = "A100-80GB"\ndevices = 8': A100 / 8,
    'device = "H100"\n[[nodes]]\ndevice = "A100-80GB"': 1 / (1 / H100 + 1 / A100),
    'device = "RTX 3060"\ndevices = 2': HOME,
    'device = "RTX 3060"\ncount = 8': HOME / 8,
    'device = "RTX 3060"\nname = "desk"\n[[nodes]]\ndevice = "RTX 4090"\nname = "desk"': HOME,
    'device = "H100"\ndevices = 8\ncount = 2\nmtbf = 1000': 500,
    'device = "H100"\ndevices = 8\nmtbf = 1000\n[[nodes]]\ndevice = "RTX 3060"': 1 / (1 / 1000 + 1 / HOME),
}


@pytest.mark.parametrize(("table", "hours"), FAILING.items())
def test_failures_are_expected_as_often_as_published_of_the_devices_or_as_the_file_says(table, hours):
    cluster = clusters.loads(f'[[nodes]]\n{table}\n[links]\nbetween = "1Gbit/s"\n')
    assert clusters.loads(clusters.dumps(cluster)) == cluster
    ranks = tuple(base.Rank(device=place.device_name, node=place.node) for place in cluster.devices())
    made = checkpoint_cost.paced(plan(params=4e9).changed(ranks=ranks), Checkpoint(), cluster)
    steps, seconds = checkpoint_cost.first(made)
    assert seconds / 3600 == pytest.approx(hours, rel=1e-4)
    assert steps == pytest.approx(math.sqrt(2 * 4e9 / PCIE * seconds) / 0.5, abs=1)
    assert re.search(r"every [\d,.]+ hours \(", made.why[-1])
    said = {"mtbf": "nodes.mtbf", "RTX": "assumed of", "A100": "2410.21680", '"H100"': "2407.21783"}
    named = {name for name in said if name in table} - ({'"H100"'} if "mtbf" in table else set())
    assert {name for name, source in said.items() if source in made.why[-1]} == named


def test_ranks_on_a_part_of_a_machine_fail_as_their_devices_do():
    cluster = clusters.loads('[[nodes]]\ndevice = "H100"\ndevices = 8\n')
    half = plan().changed(ranks=tuple(base.Rank(device=f"cuda:{number}") for number in range(4)))
    assert checkpoint_cost.between_failures(half, cluster)[0] == pytest.approx(3600 * H100 / 4, rel=1e-4)


def test_a_number_that_was_given_is_obeyed(here):
    before = plan(params=4e9)
    assert checkpoint_cost.paced(before, Checkpoint(every=7), here) == before


def test_a_plan_without_a_prediction_begins_with_ten_steps(here):
    bare = msgspec.structs.replace(plan(), predicted=None)
    assert checkpoint_cost.first(checkpoint_cost.paced(bare, Checkpoint(), here))[0] == save_interval.FIRST


def test_a_slow_disk_makes_checkpoints_rarer(here):
    disk = '[[nodes.disks]]\npath = "/"\nwrite = 10e6\nread = 10e6\niops = 100.0\n'
    slow = clusters.loads(clusters.dumps(here) + disk)
    made = plan(params=4e9, grads=4e9, optimizer=8e9, peak=2e10)
    assert checkpoint_cost.first(checkpoint_cost.paced(made, Checkpoint(), slow))[0] == round(12e9 / 10e6 / 0.5)
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
