"""Weights gathered per block while activations stay cut (ISP): when gathers begin, and from which length on it pays.

    python bench/isp.py [--quick] [--pairs N] [--json FILE] [--only prefetch,crossover]

Four hosts in a network of slow links (bench/netlab.py; needs root) train decoders through the product's own trainer,
all contestants in turn in the same processes. `prefetch`: the choice that the planner makes of when a gather begins,
beside always as early as possible and never before it is needed. `crossover`: Megatron's tensor and sequence
parallelism (`megatron`, tp 4) beside heads over four ranks with all states sharded (`isp`), and the length from which
on ISP is faster, measured and predicted. The planner's coefficients are fitted to a step that exchanges nothing and to
one all-gather.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from espalier.language.workload import open_language
from espalier.machine import cluster as clusters
from espalier.plan import base as plans
from espalier.plan import collective_time, step_time
from espalier.plan.calibration_factors import PLAIN, CostFactors
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.layout_estimate import estimate
from espalier.plan.layouts import Layouts
from espalier.train import request_from_recipe
from isp_rank import Contestant, Outcome, Task, recipe_of
from netlab import Lab, Shape, first_said
from table import Row, arguments, compare, publish

RANKS = 4
GATHER = 4 * 2**20
"""Bytes of the all-gather that the links are measured by."""
LINKS = ((1024, 100e6), (4096, 400e6))
"""Tokens, and bits/s of each host's link, of `prefetch`: gathers take longer than all computation, or a part of it."""
CROSSOVER_RATE = 200e6
PREFETCH_LIMIT, CROSSOVER_LIMIT = 90.0, 180.0
"""Seconds of a lab after which no further round begins."""
ALONE = "alone"


# --- the contestants -----------------------------------------------------------------------------------------------


class Corpus:
    """Text in a folder of its own, and recipes that read it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "text").mkdir()
        for number in range(8):
            lines = (f"def f{i * number}(x):\n    return x * {i} + {number}\n" for i in range(4000))
            (folder / "text" / f"{number}.py").write_text("".join(lines))

    def recipe(self, sequence: int, width: int, depth: int) -> dict[str, Any]:
        """One sequence a step."""
        feed_forward = 64 * math.ceil(8 * width / 3 / 64)
        heads = {"heads": 8, "kv_heads": 8, "feed_forward": feed_forward}
        return {
            "name": "bench",
            "model": {"depth": depth, "width": width, **heads},
            "data": {"path": str(self.folder / "text"), "cache": str(self.folder / "cache"), "validation": 0.2},
            "train": {
                "steps": 1000, "sequence": sequence, "batch_tokens": sequence, "precision": "fp32",
                "optimizer": {"kind": "adamw"},
            },
        }  # fmt: skip


ISP = Layouts("isp", dp=1, hp=RANKS, params=RANKS, grads=RANKS, optimizer=RANKS)
MSP = Layouts("megatron", dp=1, tp=RANKS)


def plan_of(layout: Layouts, depth: int, prefetch: Any = "block") -> plans.Plan:
    """One sequence over four ranks."""
    group = tuple(range(RANKS)) if layout.params > 1 else ()
    stage = plans.Stage(ranks=tuple(range(RANKS)), layers=(0, depth), tensor=layout.tp, heads=layout.hp)
    return plans.Plan(
        ranks=tuple(plans.Rank(share=(0, 1), node=number) for number in range(RANKS)),
        units=(plans.Unit(params=group, grads=group, optimizer=group),),
        stages=(stage,),
        algorithm=layout.algorithm,
        prefetch=prefetch,
    )


def contestant(name: str, recipe: dict[str, Any], plan: plans.Plan) -> Contestant:
    """`plan` as it is sent to the ranks."""
    return Contestant(name, recipe, plans.dumps(plan))


def alone(recipe: dict[str, Any]) -> Contestant:
    """Each rank trains by itself."""
    return contestant(ALONE, recipe, plans.Plan(ranks=(plans.Rank(share=(0, 1)),)))


def in_lab(rate: float, who: Sequence[Contestant], rounds: int, limit: float) -> Outcome:
    """What was measured, shown as it comes."""
    for one in who:
        open_language(recipe_of(one.recipe))  # fills the cache that the ranks read
    task = msgspec.json.encode(Task(tuple(who), rounds, limit, (GATHER,))).decode()
    with Lab(Shape(nodes=RANKS, hosts=1, rate=rate)) as lab:
        said = first_said(lab.start([sys.executable, str(Path(__file__).parent / "isp_rank.py"), task]))
    found = msgspec.json.decode(said, type=Outcome)
    for name, seconds in found.seconds.items():
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}, {len(seconds)} turns"
        print(f"  {name:24} {statistics.median(seconds):8.3f} s a step ({spread})")
    return found


# --- what the planner expects --------------------------------------------------------------------------------------


def lab_cluster(rate: float) -> clusters.Cluster:
    """The lab as a user would declare it."""
    nodes = f'[[nodes]]\ndevice = "cpu"\ncores = 1\nmemory = "8GiB"\ncount = {RANKS}\n'
    return clusters.loads(f'{nodes}[links]\nbetween = "{rate / 1e6:g}Mbit/s"')


def one_core() -> clusters.Cluster:
    """A host by itself."""
    return clusters.loads('[[nodes]]\ndevice = "cpu"\ncores = 1\nmemory = "8GiB"\n')


def calibrated(found: Outcome, recipe: dict[str, Any], rate: float) -> CostFactors:
    """The factors with which the step alone and the all-gather take as long as they were measured to."""
    request = request_from_recipe.of_recipe(recipe_of(recipe))
    terms = estimate(request, one_core(), Layouts()).terms
    slow = statistics.median(found.seconds[ALONE]) / sum(terms.values())
    on = collective_time.fleet(lab_cluster(rate), RANKS, 1)
    link = found.gathers[GATHER] / float(collective_time.seconds("all_gather", GATHER, RANKS, 1, on))
    print(f"  fitted: compute x {slow:.2f} of the assumed rate, bytes between hosts x {link:.2f}")
    return msgspec.structs.replace(PLAIN, product=slow, attention=slow, memory=slow, issue=slow, between=link)


def predicted(recipe: dict[str, Any], layout: Layouts, rate: float, factors: CostFactors) -> float:
    """Seconds of a step."""
    request = request_from_recipe.of_recipe(recipe_of(recipe))
    return estimate(request, lab_cluster(rate), layout, factors).step_seconds


# --- the cases -----------------------------------------------------------------------------------------------------


def prefetch(corpus: Corpus, rounds: int, quick: bool, note: str) -> list[Row]:
    """The planner's choice beside always and never, on two kinds of links."""
    width, depth = (256, 2) if quick else (384, 4)
    rows: list[Row] = []
    names = {"block": "always", "attention": "attention", "none": "never"}
    for length, rate in LINKS:
        recipe, part = corpus.recipe(length, width, depth), corpus.recipe(length // RANKS, width, depth)
        case = f"ISP, {length} tokens, width {width}, {RANKS} hosts, {rate / 1e6:g} Mbit/s{note}"
        print(f"{case}:")
        who = [contestant(name, recipe, plan_of(ISP, depth, start)) for start, name in names.items()]
        found = in_lab(rate, [*who, alone(part)], rounds, PREFETCH_LIMIT)
        assert len({found.losses[name] for name in names.values()}) == 1, f"losses differ: {found.losses}"
        factors = calibrated(found, part, rate)
        request = request_from_recipe.of_recipe(recipe_of(recipe))
        on = replace(collective_time.fleet(lab_cluster(rate), RANKS, 1), factors=factors)
        expected = step_time.prefetch(CostInputs(request, on, on.kinds[0], ISP), 1)
        print("  predicted: " + ", ".join(f"{names[one]} {depth * taken:.3f} s" for one, taken in expected.items()))
        chosen = names[next(iter(expected))]
        for other in ("always", "never"):
            pairs = list(zip(found.seconds[chosen], found.seconds[other], strict=True))
            rows.append(compare(f"{case}: gathers begin as planned ({chosen})", other, "s", pairs, False))
    return rows


def crossover(corpus: Corpus, rounds: int, quick: bool, note: str) -> list[Row]:
    """The length from which on gathering weights is faster than gathering activations."""
    width, depth, rate = 384, 2, CROSSOVER_RATE
    lengths = (1024, 2048, 4096) if quick else (1024, 2048, 4096, 8192)
    recipes = {length: corpus.recipe(length, width, depth) for length in lengths}
    part = corpus.recipe(lengths[1] // RANKS, width, depth)
    case = f"MSP and ISP, width {width}, {RANKS} hosts, {rate / 1e6:g} Mbit/s{note}"
    print(f"{case}:")
    who = [
        contestant(f"{layout.algorithm} {length}", recipe, plan_of(layout, depth))
        for length, recipe in recipes.items()
        for layout in (MSP, ISP)
    ]
    found = in_lab(rate, [*who, alone(part)], rounds, CROSSOVER_LIMIT)
    factors = calibrated(found, part, rate)
    expected = {}
    for length, recipe in recipes.items():
        both = [predicted(recipe, layout, rate, factors) for layout in (MSP, ISP)]
        print(f"  {length}: predicted megatron {both[0]:.3f} s, isp {both[1]:.3f} s")
        expected[length] = both[0] / both[1]
    paired = {n: zip(found.seconds[f"megatron {n}"], found.seconds[f"isp {n}"], strict=True) for n in lengths}
    each = [[msp / isp for msp, isp in pairs] for pairs in paired.values()]
    ratios = [dict(zip(lengths, turn, strict=True)) for turn in zip(*each, strict=True)]
    wanted = crossing(expected)
    turns = [(wanted, crossing(one)) for one in ratios]
    row = compare(f"{case}: length from which on ISP is faster, predicted", "measured", "tokens", turns)
    medians = {name: statistics.median(seconds) for name, seconds in found.seconds.items()}
    measured = crossing({n: medians[f"megatron {n}"] / medians[f"isp {n}"] for n in lengths})
    return [msgspec.structs.replace(row, peer_value=measured, ratio=wanted / measured)]


def crossing(ratios: Mapping[int, float]) -> float:
    """The length at which a ratio is 1, between lengths by their logarithms; beyond them by the nearest two."""
    points = [(math.log(length), math.log(ratio)) for length, ratio in ratios.items()]
    lines = list(pairwise(points))
    line = next((one for one in lines if one[0][1] <= 0 < one[1][1]), lines[0] if points[0][1] > 0 else lines[-1])
    (x, y), (far, high) = line
    return math.exp(x - y * (far - x) / (high - y))


CASES = {"prefetch": prefetch, "crossover": crossover}


def main() -> None:
    """Runs the cases and prints their rows."""
    asked = arguments(__doc__ or "", only={"default": ",".join(CASES), "help": "cases, with commas"})
    rounds, note = asked.pairs or (3 if asked.quick else 7), ", quick" if asked.quick else ""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(Path(folder))
        rows = [row for name in asked.only.split(",") for row in CASES[name](corpus, rounds, asked.quick, note)]
    publish(rows, asked.json)


if __name__ == "__main__":
    main()
