"""How plans and results are printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from espalier import units
from espalier.cluster import Cluster, Disk, Link
from espalier.config.derive import Derivation
from espalier.plan.base import Plan
from espalier.track import tables


def plan(plan: Plan, derivations: Sequence[Derivation] = ()) -> None:
    """The plan as people read it: what was derived, what runs where, what it should cost, and why."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if derivations:
        console.print("Derived:")
        width = max(len(one.key) for one in derivations)
        for one in derivations:
            console.print(f"  {one.key:<{width}}  {one.value!s:<8}  {one.reason}")
        console.print()
    devices = sorted({rank.device.split(":")[0] for rank in plan.ranks})
    count = len(plan.ranks)
    console.print(
        f"Plan ({plan.planner}): {count} rank{'s' * (count != 1)} x {plan.ranks[0].threads} "
        f"thread{'s' * (plan.ranks[0].threads != 1)} on {', '.join(devices)}, micro-batch {plan.micro_batch}, "
        f"accumulate {plan.layout.accumulate}, recompute {plan.recompute}, {plan.precision}"
    )
    if plan.predicted is not None:
        _predicted(console, plan)
    for sentence in plan.why:
        console.print(f"  - {sentence}")
    for other in plan.runners_up:
        console.print(f"  - not taken: {other.ranks} x {other.threads} threads: {other.loses}")
    if not plan.executable:
        console.print(f"  - `train` cannot run this plan yet: {plan.missing}")
    console.print()
    sys.stdout.flush()


def notes(lines: Sequence[str]) -> None:
    """What the user should know of the data."""
    for line in lines:
        print(f"note: {line}")


def _predicted(console: Console, plan: Plan) -> None:
    predicted = plan.predicted
    assert predicted is not None
    terms = ", ".join(f"{name} {units.show_seconds(value)}" for name, value in predicted.terms.items() if value)
    memory = ", ".join(
        f"{name} {units.show_size(value)}" for name, value in predicted.memory_bytes.items() if value and name != "peak"
    )
    sent = ", ".join(f"{name} {units.show_size(value)}" for name, value in predicted.sent_bytes.items() if value)
    console.print(
        f"  predicted step {units.show_seconds(predicted.step_seconds)} ({terms})\n"
        f"  predicted speed {units.show_count(predicted.tokens_per_second)} tokens/s, MFU {predicted.mfu:.0%}\n"
        f"  predicted memory per rank {units.show_size(predicted.memory_bytes.get('peak', 0))} of "
        f"{units.show_size(predicted.memory_limit)} ({memory})\n"
        f"  predicted traffic per rank and step: {sent or 'none'}"
    )


def cluster(found: Cluster) -> str:
    """A cluster in a few lines."""
    lines = []
    for node in found.nodes:
        device = node.device
        rates = ", ".join(f"{name} {units.show_flops(rate)}" for name, rate in device.flops.items())
        count = f"{node.count} x " if node.count > 1 else ""
        lines.append(f"{count}{node.devices} x {device.name}: {rates}")
        lines.append(f"  memory {units.show_size(device.memory)} at {units.show_rate(device.memory_bandwidth)}")
        lines.append(f"  {node.cores} cores, host memory {units.show_size(node.memory)}")
        lines += [f"  disk {disk}" for disk in map(_disk, node.disks)]
        lines.append(f"  between its ranks: {_link(node.inside)}")
    if found.between is not None:
        lines.append(f"between nodes: {_link(found.between)}")
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _disk(disk: Disk) -> str:
    rates = f"reads {units.show_rate(disk.read)}, writes {units.show_rate(disk.write)}"
    return f"{disk.path}: {rates}, {disk.iops:,.0f} random 4 KiB reads/s"


def _link(link: Link) -> str:
    return f"{units.show_rate(link.bandwidth)}, {units.show_seconds(link.latency)}"


def results(folder: Path) -> dict[str, Any]:
    """The figures of a finished run, from its log."""
    run = tables.open_run(folder)
    found: dict[str, Any] = {}
    if len(run.steps["step"]):
        found |= {"steps": int(run.steps["step"][-1]), "loss": float(run.steps["loss"][-1])}
    for name in ("loss", "bits_per_byte"):
        if name in run.validations and len(run.validations[name]):
            found["validation_" + name] = float(run.validations[name][-1])
    return found


def finished(folder: Path, page: Path, seconds: float) -> None:
    """What a person wants to read when a run has ended, and what to do next."""
    console = Console(highlight=False)
    run = tables.open_run(folder)
    if run.samples and len(run.samples["text"]):
        console.rule("sample", align="left")
        console.print(str(run.samples["text"][-1]), markup=False)
        console.rule()
    found = results(folder)
    figures = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in found.items())
    console.print(f"\nDone in {units.show_seconds(seconds)}: {figures}.")
    console.print(f"  report    {page}")
    console.print(f"  go on     espalier predict {folder} 'def '")
    console.print(f"  evaluate  espalier eval {folder}")
    console.print(f"  export    espalier export {folder} --to hf")


def sources(plan: Plan) -> None:
    """Where each number of the prediction comes from."""
    if plan.predicted is None or not plan.predicted.sources:
        return
    table = Table("number", "formula or source", box=None, pad_edge=False)
    for name, source in plan.predicted.sources.items():
        table.add_row(name, source)
    Console(highlight=False).print(table)
