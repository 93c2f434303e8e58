"""Full-graph training over four hosts: Sylvie beside fp32 exchanges, PipeGCN, 8 bits, BNS-GCN and sampled batches.

    python bench/sylvie.py [--quick] [--pairs N] [--json FILE] [--only CASES]

Four hosts of bench/netlab.py (needs root), each with a link of 1 Gbit/s, 100 or 20 Mbit/s, train GraphSAGE of 3 layers
of 256 columns on a planted graph of degree 30, which is cut into four parts; the cut is large, as 4 in 10 edges lead
anywhere. Peers are written here after their papers: PipeGCN (arXiv 2203.10428) without its smoothing, 8 bits for all
rows (AdaQP, arXiv 2306.01381, without its solver), BNS-GCN (arXiv 2203.10983) at 0.1, and DDP over sampled batches,
of which an epoch passes over all training nodes. All hosts share the machine's cores, so computing is slower than on
hosts of their own.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from espalier.cache_dir import cache_folder
from espalier.graph import synthetic
from netlab import Lab, Shape, first_said
from sylvie_rank import TRANSPORTS, Outcome, Task
from table import Row, arguments, compare, publish

WORLD = 4
OURS, SYNCHRONOUS, FP32 = "sylvie 1 bit, late", "sylvie 1 bit", "fp32 synchronous"
BATCHES = "DDP over sampled batches"
RATES = {"1 Gbit/s": 1e9, "100 Mbit/s": 100e6, "20 Mbit/s": 20e6}
NEAR = 0.005
"""Accuracy below the best that counts as reached."""


def over_links(task: Task, rate: float) -> Outcome:
    """Four hosts with a link each."""
    script = str(Path(__file__).parent / "sylvie_rank.py")
    with Lab(Shape(nodes=WORLD, hosts=1, rate=rate)) as lab:
        ranks = lab.start([sys.executable, script, msgspec.json.encode(task).decode()])
        found = msgspec.json.decode(first_said(ranks), type=Outcome)
    for name, seconds in found.seconds.items():
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}, {len(seconds)} blocks"
        told = " ".join(f"{one:.3f}" for one in found.accuracy[name])
        print(
            f"  {name:34} {statistics.median(seconds):8.3f} s ({spread}); {found.sent[name] / 2**20:8.2f} MiB; {told}"
        )
    return found


def rows_of(case: str, found: Outcome) -> list[Row]:
    """Seconds of an epoch beside every peer, and bytes beside fp32."""
    rows = []
    for name, theirs in found.seconds.items():
        if name != OURS:
            pairs = list(zip(found.seconds[OURS], theirs, strict=False))
            rows.append(compare(f"{case}: epoch", name, "s", pairs, higher_is_better=False))
    return rows


def bytes_of(case: str, found: Outcome) -> list[Row]:
    """Bytes of halos that all hosts sent in an epoch; those of gradients are the same for all that cut the graph, and
    are what sampled batches send."""
    mine = found.sent[OURS] / 2**20
    return [
        Row(f"{case}: halo bytes of an epoch", name, one / 2**20, mine, one / 2**20 / mine, "MiB", "exact")
        for name, one in found.sent.items()
        if name not in (OURS, SYNCHRONOUS)
    ]


def reached(found: Outcome, epochs: int) -> list[Row]:
    """Seconds until held-out accuracy is within NEAR of the best that fp32 reaches; of peers that do not, none."""
    target = max(found.accuracy[FP32]) - NEAR
    times = {}
    for name, accuracies in found.accuracy.items():
        total = 0.0
        for seconds, accuracy in zip(found.seconds[name], accuracies, strict=True):
            total += seconds * epochs
            if accuracy >= target:
                times[name] = total
                break
    told = f"100 Mbit/s: seconds to {target:.1%} accuracy"
    rows = []
    for name in found.accuracy:
        if name == OURS or OURS not in times:
            continue
        if name in times:
            rows.append(Row(told, name, times[name], times[OURS], times[name] / times[OURS], "s", "one run"))
    for name in set(found.accuracy) - set(times):
        print(f"  {name} does not reach {target:.1%} (best: {max(found.accuracy[name]):.1%})")
    return rows


def main() -> None:
    """Runs the cases and prints their rows."""
    asked = arguments(__doc__ or "", only={"default": ",".join(RATES), "help": "links, with commas"})
    nodes, rounds, note = (2_000, 2, ", quick") if asked.quick else (10_000, asked.pairs or 5, "")
    made = synthetic.parse(f"planted:nodes={nodes},degree=30,classes=10,features=64,homophily=0.6,skew=1,signal=0.7")
    folder = cache_folder() / f"bench-sylvie-{synthetic.identity(made)}"
    if not synthetic.is_store(folder):
        synthetic.write(made, folder)
    rows: list[Row] = []
    for name in asked.only.split(","):
        case = f"planted graph, {nodes:,} nodes, 4 x {name}{note}"
        print(f"{case}:")
        contestants = (*TRANSPORTS, *([BATCHES] if name == "100 Mbit/s" else []))
        epochs, timed = (2 if name == "20 Mbit/s" else 4), name == "100 Mbit/s"
        task = Task(contestants, rounds, epochs, str(folder), nodes, limit=150.0, evaluates=timed)
        found = over_links(task, RATES[name])
        rows += rows_of(case, found)
        if timed:
            rows += bytes_of(case, found) + reached(found, epochs)
    publish(rows, asked.json)


if __name__ == "__main__":
    main()
