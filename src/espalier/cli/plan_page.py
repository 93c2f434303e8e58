"""Plan page (`espalier plan --html`): the plan among what else was possible, time against memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from espalier.cli import printing
from espalier.mechanisms.pipeline.schedules import action_lists
from espalier.parallel.action_list import Action, ActionKind, Pipeline, Timed, timetable
from espalier.plan.axes.pipeline import hand_overs
from espalier.plan.base import Layout, Plan, Predicted
from espalier.recipe import cache_dir
from espalier.recipe.units import plural, show_count, show_seconds, show_size
from espalier.track import charts, page
from espalier.track.charts import Point, TimetableBar
from espalier.track.page import Figure

NAMES = {"data": "data parallel", "megatron": "Megatron", "fsp": "FSP", "isp": "ISP"}
"""Algorithms as people call them."""


class Rung(NamedTuple):
    """One part of a whole: where it starts and how long it is, in percent of the track, and where it comes from."""

    name: str
    start: float
    width: float
    text: str
    source: str


class PlanQuestion(NamedTuple):
    """What was asked besides: what so many `steps` take, and what a change would do, in lines (`printing.what_if`)."""

    steps: int | None = None
    what_if: Sequence[str] = ()


NOTHING = PlanQuestion()


def write(path: str | Path, plan: Plan, points: Sequence[Point], title: str, asked: PlanQuestion = NOTHING) -> None:
    """Writes the page of `plan` among the `points` that were priced; `title` says whose plan it is.

    Raises:
        UserError: the file cannot be written.
    """
    cache_dir.replace(
        Path(path),
        render(plan, points, title, asked),
        "--html with a file in a folder that exists and may be written to",
    )


def render(plan: Plan, points: Sequence[Point], title: str, asked: PlanQuestion = NOTHING) -> str:
    """The page as text."""
    predicted = plan.predicted
    assert predicted is not None, "planners price what they plan"
    limit = predicted.memory_limit
    counts = Counter(point.algorithm for point in points)
    return page.render(
        "cli/plan_page.html.j2",
        title=title,
        kind="plan",
        state="fits" if plan.executable else "does not fit",
        mood="good" if plan.executable else "not",
        subtitle=[printing.where(plan), *words(plan.layout)],
        plan=plan,
        what_if=asked.what_if,
        figures=[*_figures(predicted), *_run_figure(predicted, asked.steps if plan.executable else None)],
        chart=charts.scatter(points, limit, NAMES),
        keys=[(name, NAMES.get(name, name), counts[name]) for name in _order(counts)],
        timetable=_spans(plan, predicted),
        fitting=sum(point.fits for point in points),
        priced=len(points),
        time=_ladder(predicted.terms, predicted.step_seconds, show_seconds, predicted.sources),
        memory=_memory(predicted),
        step_text=show_seconds(predicted.step_seconds),
        runners=[
            (words(runner_up.layout), printing.ranks_of(plan, runner_up.ranks, runner_up.threads), runner_up)
            for runner_up in plan.runners_up
        ],
        sources=predicted.sources,
    )


# --- words -------------------------------------------------------------------------------------------------------


def words(layout: Layout) -> list[str]:
    """A layout in a few phrases, the outermost division first."""
    shard = layout.shard
    split = [(name, shard.get(key, 1)) for name, key in _STATES if shard.get(key, 1) > 1]
    words_of_layout = [plural(layout.dp, "replica")]
    if layout.waves:
        words_of_layout = [plural(layout.waves, "wave")]
    if layout.pp > 1:
        words_of_layout.append(f"{layout.pp} stages")
    if layout.tp > 1:
        words_of_layout.append(f"{layout.tp} tensor ranks ({NAMES.get(layout.algorithm, layout.algorithm)})")
    if layout.sp > 1:
        parts = [f"{layout.heads} of heads"] * (layout.heads > 1) + [f"{layout.cp} of context"] * (layout.cp > 1)
        words_of_layout.append(f"{layout.sp} sequence ranks ({' x '.join(parts)})")
    if split:
        words_of_layout.append(", ".join(f"{name} over {over:,}" for name, over in split))
    size = f"micro-batch {layout.micro_batch}"
    words_of_layout.append(f"{size}, {layout.accumulate:,} to a step" if layout.accumulate > 1 else size)
    words_of_layout += [f"recompute {layout.recompute}"] * (layout.recompute != "none")
    words_of_layout.append(layout.precision)
    return words_of_layout


_STATES = (("parameters", "params"), ("gradients", "grads"), ("optimizer states", "optimizer"))


def _order(counts: Mapping[str, int]) -> list[str]:
    return [name for name in dict.fromkeys([*NAMES, *counts]) if counts.get(name)]


# --- figures -----------------------------------------------------------------------------------------------------


def _figures(predicted: Predicted) -> list[Figure]:
    wide = 1 + predicted.spread
    low = show_seconds(predicted.step_seconds / wide)
    high = show_seconds(predicted.step_seconds * wide)
    band = f"four of five in {low} to {high}" if predicted.spread else ""
    peak = predicted.memory_bytes["peak"]
    limit = predicted.memory_limit
    room = f"of {show_size(limit)} per rank" if math.isfinite(limit) else "per rank"
    return [
        Figure("seconds per step", show_seconds(predicted.step_seconds), band),
        Figure("tokens/s per device", show_count(predicted.tokens_per_second_per_device)),
        Figure("MFU", f"{predicted.mfu:.1%}"),
        Figure("memory", show_size(peak), room),
    ]


def _run_figure(predicted: Predicted, steps: int | None) -> list[Figure]:
    if steps is None:
        return []
    took, *bill = printing.run_cost(predicted, steps)
    return [Figure(plural(steps, "step"), took.removeprefix("about "), ", ".join(bill))]


PASSES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward of inputs",
    ActionKind.BACKWARD_WEIGHT: "backward of weights",
}
"""Passes of a timetable, as its key calls them."""
DRAWN = 2000
"""Bars of a timetable; of more micro-batches the first ones are drawn."""


def _spans(plan: Plan, predicted: Predicted) -> list[TimetableBar]:
    """The passes of the first pipeline, on the first rank of each stage, or what a system draws; none of one stage."""
    if spans := [span for state in plan.choices.values() for span in state.spans()]:
        return spans
    stages = plan.pipelines.get(0, [])
    if len(stages) < 2:
        return []
    count = min(stages[0].micro_batches, max(1, DRAWN // (3 * len(stages))))
    pipeline = Pipeline(tuple(stage.ranks[:1] for stage in stages), count)
    layers = [stage.layers[1] - stage.layers[0] for stage in stages]
    terms = {name: seconds / stages[0].micro_batches for name, seconds in predicted.terms.items()}
    fullest = max(sum(layers[stage] for stage in pipeline.stages_of(rank)) for rank in pipeline.ranks)
    forward = terms.get("forward", 0.0)
    backward = terms.get("backward", 0.0) + terms.get("recompute", 0.0)
    takes = {ActionKind.FORWARD: forward, ActionKind.BACKWARD: backward}
    takes |= dict.fromkeys((ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT), backward / 2)
    link = predicted.terms.get("send", 0.0) / float(
        hand_overs(len(pipeline.ranks), stages[0].micro_batches, plan.interleave == 1)
    )

    def seconds(action: Action) -> float:
        return takes[action.kind] * layers[action.stage] / fullest if action.computes else float(link)

    actions = timetable(pipeline, action_lists([pipeline], plan.schedule), seconds)
    return [
        TimetableBar(f"rank {action.rank}", action.start, action.end, PASSES[action.action.kind], _told(action))
        for action in sorted(actions, key=lambda action: (pipeline.ranks.index(action.rank), action.start))
        if action.action.computes
    ]


def _told(action: Timed) -> str:
    stage, kind, number, _ = action.action
    return f"stage {stage}, micro-batch {number}: {PASSES[kind]}, {show_seconds(action.end - action.start)}"


def _memory(predicted: Predicted) -> dict[str, Any]:
    """Memory by kind, the peak, and where on the same track the limit stands."""
    kinds = {name: value for name, value in predicted.memory_bytes.items() if name != "peak"}
    peak = predicted.memory_bytes["peak"]
    limit = predicted.memory_limit
    limited = math.isfinite(limit) and limit > 0
    whole = 1.04 * max(peak, sum(kinds.values()), limit if limited else 0.0)  # the line stands inside the track
    over = peak - limit
    room = f"{show_size(over)} too much" if over > 0 else f"{show_size(-over)} to spare"
    return {
        "rungs": _ladder(kinds, whole, show_size, predicted.sources),
        "peak": show_size(peak),
        "peak_width": 100 * peak / whole,
        "limit": show_size(limit) if limited else "",
        "limit_at": 100 * limit / whole if limited else 0.0,
        "said": room if limited else "",
    }


def _ladder(
    parts: Mapping[str, float], whole: float, show: Callable[[float], str], sources: Mapping[str, str]
) -> list[Rung]:
    """Each part starts where the larger one before it ends."""
    ticks = []
    at = 0.0
    named = {name.replace("_", " "): source for name, source in sources.items()}
    for share in charts.shares(parts, show):
        width = 100 * share.value / whole if whole else 0.0
        ticks.append(Rung(share.name, at, width, share.text, named.get(share.name, "")))
        at += width
    return ticks
