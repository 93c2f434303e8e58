"""Printing of plans and results."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster, Disk, Link
from espalier.plan import plan_summary
from espalier.plan.base import Plan, Predicted
from espalier.recipe import cache_dir, model_kinds, terminal
from espalier.recipe.base import Derivation
from espalier.recipe.terminal import line, rows, say, visible, wrapped
from espalier.recipe.units import plural, show_count, show_flops, show_rate, show_seconds, show_size

if TYPE_CHECKING:
    from espalier.track.goodput import Account
    from espalier.track.run_tables import RunTables

TERMS = (
    "forward", "backward", "recompute", "tensor", "sequence", "weights", "pipeline", "send", "optimizer", "all_reduce",
    "refresh", "launch",
)  # fmt: skip
"""The order in which the parts of a step are told; others follow."""

DAY = 86_400

NARROW = 40
"""Columns below which reasons stand under their keys instead of beside them."""


# --- plans -------------------------------------------------------------------------------------------------------


def plan(plan: Plan, derivations: Sequence[Derivation] = (), steps: int | None = None, unit: str = "tokens") -> None:
    """The plan as people read it: what runs where, what it should cost, and why, and what was derived for it.

    With `steps`, also how long the whole run should take. `unit`: what speed is counted in.
    """
    name = f"Plan ({plan.planner})" if plan.executable else f"No plan fits. The closest lacks {plan.missing}"
    line(f"{name}: {where(plan)}, {plan.layout}, accumulate {plan.layout.accumulate}, {plan.precision}")
    if plan.predicted is not None:
        _predicted(plan.predicted, steps if plan.executable else None, unit)
    for sentence in plan.why:
        line(f"  - {sentence}")
    for other in plan.runners_up:
        line(f"  - not taken: {ranks_of(plan, other.ranks, other.threads)}, {other.layout}: {other.loses}")
    if derivations:
        _derived(derivations)
    say(flush=True)


def what_if(plan: Plan, other: Plan) -> list[str]:
    """What a changed cluster or recipe would change."""
    if not other.executable:
        return [f"What if: nothing fits; {other.missing} are missing in the closest plan."]
    assert plan.predicted is not None
    assert other.predicted is not None
    compared = [other.predicted, plan.predicted][: 1 + plan.executable]
    seconds = [prediction.step_seconds for prediction in compared]
    speeds = [show_count(prediction.tokens_per_second) for prediction in compared]
    peaks = [show_size(prediction.memory_bytes["peak"]) for prediction in compared]
    times = f" ({seconds[0] / seconds[1]:.2f}x)" if plan.executable else ", where nothing fits now"
    return [
        f"What if: {other.layout} on {where(other)}",
        f"  predicted step {' instead of '.join(map(show_seconds, seconds))}{times}, "
        f"memory per rank {' instead of '.join(peaks)}, {' instead of '.join(speeds)} a second",
        *(f"  {sentence}" for sentence in other.why if sentence.startswith(plan_summary.FEATURES)),
    ]


def where(plan: Plan) -> str:
    """What it runs on: `16 GPUs on 2 machines`."""
    ranks = plan.ranks
    nodes = len({rank.node for rank in ranks})
    on = "cpu" if ranks[0].device == "cpu" else plural(nodes, "machine")
    return f"{ranks_of(plan, len(ranks), ranks[0].threads)} on {on}"


def ranks_of(plan: Plan, count: int, threads: int) -> str:
    """So many ranks on the devices of `plan`."""
    on_gpus = plan.ranks[0].device != "cpu"
    return plural(count, "GPU") if on_gpus else f"{plural(count, 'rank')} x {plural(threads, 'thread')}"


def _derived(derivations: Sequence[Derivation]) -> None:
    """Keys and values, those of one reason together and the reason once."""
    say("\nDerived:")
    width = terminal.columns()
    key = max(len(derivation.key) for derivation in derivations)
    value = max(len(str(derivation.value)) for derivation in derivations)
    indent = 2 + key + 2 + value + 2
    groups: dict[str, list[Derivation]] = {}
    for each in derivations:
        groups.setdefault(each.reason, []).append(each)
    for reason, together in groups.items():
        left = [f"  {derivation.key:<{key}}  {derivation.value!s:<{value}}" for derivation in together]
        if width is not None and width - indent < NARROW:
            right = []
            left += wrapped(" " * 6 + reason, width, 6)
        else:
            right = wrapped(" " * indent + reason, width, indent)
        for keys, words in itertools.zip_longest(left, right, fillvalue=""):
            say((f"{keys:<{indent}}" + words[indent:]).rstrip())


def _predicted(predicted: Predicted, steps: int | None, unit: str) -> None:
    order = {name: at for at, name in enumerate(TERMS)}
    terms = sorted(predicted.terms.items(), key=lambda item: order.get(item[0], len(TERMS)))
    band = f", give or take {predicted.spread:.0%}" if predicted.spread else ""
    say(f"  predicted step {show_seconds(predicted.step_seconds)}{band}")
    _parts(f"{name} {show_seconds(value)}" for name, value in terms if value)
    if steps is not None:
        line(f"  predicted run {plural(steps, 'step')}, {', '.join(run_cost(predicted, steps))}")
    mfu = f", MFU {predicted.mfu:.0%}" if predicted.mfu else ""
    say(f"  predicted speed {show_count(predicted.tokens_per_second)} {unit}/s{mfu}")
    memory = predicted.memory_bytes
    say(
        f"  predicted memory per rank {show_size(memory.get('peak', 0))} of "
        f"{show_size(predicted.memory_limit)}"
        + (" (does not fit)" if memory.get("peak", 0) > predicted.memory_limit else "")
    )
    _parts(f"{name} {show_size(value)}" for name, value in memory.items() if value and name != "peak")
    sent = ", ".join(f"{name} {show_size(value)}" for name, value in predicted.sent_bytes.items() if value)
    line(f"  predicted traffic per rank and step: {sent or 'none'}")


def run_cost(predicted: Predicted, steps: int) -> list[str]:
    """How long `steps` take, the energy of their devices and the price of their machines, where these are known."""
    seconds = steps * predicted.step_seconds
    words = [f"about {show_seconds(seconds) if seconds < 2 * DAY else f'{seconds / DAY:,.0f} days'}"]
    if predicted.watts:
        words.append(f"at most {_amount(predicted.watts * seconds / 3.6e6)} kWh in its devices")
    if predicted.price_per_hour:
        words.append(f"price {_amount(predicted.price_per_hour * seconds / 3600)}")
    return words


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _parts(parts: Iterable[str]) -> None:
    """The parts of a figure, under it, few to a line."""
    every = list(parts)
    for first in range(0, len(every), 3):
        say("      " + ", ".join(every[first : first + 3]) + "," * (first + 3 < len(every)))


def write_cluster(machines: Cluster, out: str, as_json: bool, remark: str) -> None:
    """Writes the cluster file `out`, and shows what is in it."""
    cache_dir.replace(Path(out), clusters.dumps(machines))
    if as_json:
        print(json.dumps(msgspec.to_builtins(machines)))
    else:
        say(cluster(machines))
        say(f"\nWritten to {out}{remark}")


def cluster(machines: Cluster) -> str:
    """A cluster in a few lines."""
    lines = []
    for node in machines.nodes:
        device = node.device
        rates = ", ".join(f"{name} {show_flops(rate)}" for name, rate in device.flops.items())
        count = f"{node.count} x " if node.count > 1 else ""
        lines.append(f"{count}{node.devices} x {device.name}: {rates}")
        lines.append(f"  memory {show_size(device.memory)} at {show_rate(device.memory_bandwidth)}")
        lines.append(f"  {node.cores} cores, host memory {show_size(node.memory)}")
        lines += [f"  disk {disk}" for disk in map(_disk, node.disks)]
        lines.append(f"  between its ranks: {_link(node.inside)}")
    if machines.between is not None:
        lines.append(f"between nodes: {_link(machines.between)}")
    return "\n".join([*lines, *(f"note: {note}" for note in machines.notes)])


def _disk(disk: Disk) -> str:
    rates = f"reads {show_rate(disk.read)}, writes {show_rate(disk.write)}"
    return f"{disk.path}: {rates}, {disk.iops:,.0f} random 4 KiB reads/s"


def _link(link: Link) -> str:
    return f"{show_rate(link.bandwidth)}, {show_seconds(link.latency)}"


def results(run: RunTables) -> dict[str, Any]:
    """The figures of a finished run, from its log."""
    numbers: dict[str, Any] = {"steps": run.latest["step"]} if run.latest else {}
    rows = [("", run.latest), *(("validation_", row) for row in run.newest("validation"))]
    losses = {
        prefix + name: float(row[name])
        for prefix, row in rows
        for name in ("loss", "bits_per_byte")
        if row.get(name) is not None
    }
    return numbers | losses


def finished(run: RunTables, page: Path, seconds: float) -> None:
    """What a person wants to read when a run has ended, and what to do next."""
    console = Console(highlight=False)
    samples = run.newest("sample")
    latest = [str(sample.get("text")) for sample in samples if sample["step"] == samples[-1]["step"]]
    for text in latest:
        console.rule("sample", align="left")
        console.print(visible(text), markup=False, soft_wrap=True)
    if latest:
        console.rule()
    numbers = results(run)
    figures = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in numbers.items())
    say()
    line(f"Done in {show_seconds(seconds)}: {figures or 'no steps were left'}.")
    # Paths and commands stay whole on one line, so that they can be copied.
    say(f"  report    {page}")
    from espalier.train import workload_registry  # loads torch, which diagnosing a log goes without
    from espalier.train.workload_row import Exports, Predicts

    kind = model_kinds.tagged((run.recipe.get("model") or {}).get("kind"))
    row: object = None if kind is None else workload_registry.row_of(kind)
    if isinstance(row, Predicts):
        word, question = row.usage(run.recipe)
        say(f"  {word:<8}  espalier predict {run.folder}{question}")
    say(f"  evaluate  espalier eval {run.folder}")
    if isinstance(row, Exports) and "hf" in row.exports:
        say(f"  export    espalier export {run.folder} --to hf")


def account(times: Account) -> None:
    """Where the time went, and what failures cost where there were any."""
    seconds = show_seconds
    if times.useful:
        spent = ((name, took) for name, took in times.parts.items() if took >= 0.005 * times.wall)
        line(f"Of {seconds(times.wall)}: {', '.join(f'{took / times.wall:.1%} {name}' for name, took in spent)}.")
    if not times.failures:
        return
    line(f"Goodput {times.goodput:.1%} of {seconds(times.wall)}; a failure every {seconds(times.between_failures)}.")
    head = (
        "cause",
        "reason (category)",
        "failures",
        "recovered",
        "time to recover",
        "steps repeated",
        "time to repeat",
    )
    body = [
        (
            cause.kind,
            f"{cause.reason} ({cause.category})" if cause.reason else "-",
            str(cause.count),
            str(cause.recovered),
            seconds(cause.down),
            str(cause.steps),
            seconds(cause.again),
        )
        for cause in times.causes
    ]
    rows(head, body)


def sources(plan: Plan) -> None:
    """Where each number of the prediction comes from."""
    if plan.predicted is None or not plan.predicted.sources:
        return
    rows(("number", "formula or source"), list(plan.predicted.sources.items()))
