"""Models cut over machines learn as they do exactly, with each class of what they send in its own codec."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from tests.mechanisms.pipeline.runs import recipe_of, train

import espalier
from espalier.machine import cluster as clusters
from espalier.plan.base import Plan
from espalier.recipe import defaults, recipe_file

CUTS = {
    "stages": {"pp": 2, "micro_batch": 4},
    "matrices": {"tp": 2, "micro_batch": 8},
    "heads": {"sp": 2, "hp": 2, "micro_batch": 16},
    "context": {"sp": 2, "cp": 2, "micro_batch": 16},
}
MACHINES = clusters.loads(
    '[[nodes]]\ndevice = "cpu"\ncores = 1\nmemory = "8GiB"\ncount = 2\n[links]\nbetween = "1Gbit/s"'
)
LATE = 20
"""Steps whose mean loss is compared."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """English: sums of digits are learnt in jumps, whose moment any rounding moves."""
    folder = tmp_path_factory.mktemp("texts")
    for page in (Path(__file__).parents[3] / "docs").glob("*.md"):
        (folder / f"{page.stem}.txt").write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def late(texts: Path, codec: str, cut: str, steps: int) -> tuple[float, list[float], Plan]:
    """The mean loss of the last steps, all losses, and the plan."""
    model = {"depth": 2, "width": 64, "heads": 2, "tied": False}
    lengths = {"steps": steps, "sequence": 64, "batch_tokens": 1024, "validate_every": steps}
    table = recipe_file.to_table(recipe_of(texts, model, {**lengths, "precision": "fp32"}))
    table |= {"comm": {"codec": codec}, "sync": {"kind": "every_step"}}
    recipe = defaults.resolve(recipe_file.from_table(table))[0]
    plan = espalier.make_plan(recipe, MACHINES, ranks=2, **CUTS[cut])
    losses = train(recipe, plan)[0].losses
    return statistics.mean(losses[-LATE:]), losses, plan


@pytest.mark.parametrize("cut", CUTS)
def test_two_runs_through_codecs_have_the_same_bits_and_begin_as_exact_ones(texts: Path, cut: str) -> None:
    (_, exact, plain), (_, first, plan), (_, again, _) = (
        late(texts, codec, cut, LATE) for codec in ("exact", "zhybrid", "zhybrid")
    )
    assert first == again
    assert first != exact
    assert first[0] == pytest.approx(exact[0], rel=1e-3)
    assert statistics.mean(first) == pytest.approx(statistics.mean(exact), rel=0.05)
    kind = "keys_values" if cut == "context" else "activations"
    assert [each.codec for each in plan.exchanges if each.traffic == kind] == ["zfp:16"]
    assert {each.codec for each in plain.exchanges} <= {"exact"}
    assert any(f"{kind.replace('_', ' and ')} as zfp:16" in sentence for sentence in plan.why)
    assert any("as they are: " in sentence and "experts" in sentence for sentence in plan.why)


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_three_hundred_steps_end_at_the_exact_loss(texts: Path, cut: str) -> None:
    """The paper's claim: hybrid codecs keep the loss. Mean of the last twenty steps."""
    exact, hybrid = (late(texts, codec, cut, 300)[0] for codec in ("exact", "zhybrid"))
    assert hybrid < 1.02 * exact
