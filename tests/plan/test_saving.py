"""The plan foretells how often a run saves, and why; a number that was given is obeyed."""

import msgspec
import pytest

from espalier import cluster as clusters
from espalier.checkpoint import save_interval, young_daly
from espalier.plan import base, checkpoint_cost

pytestmark = pytest.mark.quick


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
    made = checkpoint_cost.paced(plan(ranks, params=4e9, grads=4e9, optimizer=8e9, peak=2e10), "auto", here)
    stall = ranks * 2 * 12e9 / here.devices()[0].table.device.memory_bandwidth
    assert checkpoint_cost.first(made) == round(young_daly.optimal(stall, young_daly.ASSUMED) / 0.5)
    (rule,) = made.rules
    assert rule.name == "checkpoint.every"
    assert f"every {checkpoint_cost.first(made)} steps" in made.why[-1]


def test_a_number_that_was_given_is_obeyed(here):
    before = plan(params=4e9)
    assert checkpoint_cost.paced(before, 7, here) == before


def test_a_plan_without_a_prediction_begins_with_ten_steps(here):
    bare = msgspec.structs.replace(plan(), predicted=None)
    assert checkpoint_cost.first(checkpoint_cost.paced(bare, "auto", here)) == save_interval.FIRST
