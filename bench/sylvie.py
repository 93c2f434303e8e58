"""Full-graph training over four hosts: Sylvie beside fp32 exchanges, PipeGCN, 8 bits, BNS-GCN and sampled batches.

    python bench/sylvie.py [--quick] [--pairs N] [--json FILE] [--only CASES]
    python bench/sylvie.py --only "100 Mbit/s, 200,000 nodes" --json FILE

Four hosts of bench/netlab.py (needs root), each with a link of 1 Gbit/s, 100 or 20 Mbit/s, train GraphSAGE of 3 layers
of 256 columns on a planted graph of degree 30, which is cut into four parts; the cut is large, as 4 in 10 edges lead
anywhere. Ours also sums gradients in 8 bits; without that it stands beside as a contestant. The epochs to an accuracy
are counted over 1 Gbit/s, as no link changes what is computed; seconds to it are those of whichever of ours is there
first. Peers are written here after their papers: PipeGCN
(arXiv 2203.10428) without its smoothing, 8 bits for all rows (AdaQP, arXiv 2306.01381, without its solver), BNS-GCN
(arXiv 2203.10983) at 0.1, and DDP over sampled batches, of which an epoch passes over all training nodes. All hosts
share the machine's cores, so computing is slower than on hosts of their own: the row of computing alone, without any
message, is what no exchange can be faster than.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from espalier.cache_dir import cache_folder
from espalier.graph import synthetic
from espalier.sparse.partition import clusters
from netlab import Lab, Shape, first_said
from sylvie_rank import ALONE, FRESH_INT8, INT8, TRANSPORTS, Outcome, Task
from table import Row, arguments, compare, publish

WORLD = 4
OURS, FP32 = INT8, "fp32 synchronous"
BATCHES = "DDP over sampled batches"
PIPELINED = "fp32 pipelined (PipeGCN)"
SMALL = (FP32, "8-bit synchronous (AdaQP-like)", FRESH_INT8, INT8, ALONE)
SLOW = tuple(name for name in TRANSPORTS if name != PIPELINED)
"""Five epochs of `PIPELINED` take a minute there, as five of fp32 do: nothing hides messages that take longer than
computing."""
NEAR = 0.01
"""Accuracy below the best that counts as reached."""


class Case(NamedTuple):
    """Links of `rate` bits a second: nodes of the graph, blocks of so many epochs, and who takes part. `evaluates`:
    after each block."""

    rate: float
    nodes: int
    rounds: int
    epochs: int
    contestants: tuple[str, ...] = (*TRANSPORTS, BATCHES)
    evaluates: bool = False


LARGEST = "100 Mbit/s, 200,000 nodes"
"""Takes five minutes and 16 GB: not among those that run unasked."""
CASES = {
    "1 Gbit/s": Case(1e9, 10_000, 12, 5, evaluates=True),
    "100 Mbit/s": Case(100e6, 10_000, 5, 1),
    "100 Mbit/s, large": Case(100e6, 40_000, 3, 1, SMALL),
    "20 Mbit/s": Case(20e6, 10_000, 3, 1, SLOW),
    LARGEST: Case(100e6, 200_000, 3, 1, (FP32, FRESH_INT8, INT8, ALONE)),
}


def over_links(task: Task, rate: float) -> Outcome:
    """Four hosts with a link each."""
    script = str(Path(__file__).parent / "sylvie_rank.py")
    with Lab(Shape(nodes=WORLD, hosts=1, rate=rate)) as lab:
        ranks = lab.start([sys.executable, script, msgspec.json.encode(task).decode()])
        found = msgspec.json.decode(first_said(ranks), type=Outcome)
    for name, seconds in found.seconds.items():
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}, {len(seconds)} blocks"
        print(f"  {name:34} {statistics.median(seconds):8.3f} s ({spread}); {found.sent[name] / 2**20:8.2f} MiB")
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
        if one not in (0.0, found.sent[OURS])
    ]


def epochs_to(found: Outcome, epochs: int) -> tuple[float, dict[str, int]]:
    """The accuracy that is asked for, and the epochs until each contestant has it after a block (none: it has not)."""
    target = max(found.accuracy[FP32]) - NEAR
    reached = {}
    for name, accuracies in found.accuracy.items():
        if name == ALONE:
            continue
        told = " ".join(f"{one:.3f}" for one in accuracies)
        print(f"  {name:34} held-out accuracy after 1 + {epochs}, 1 + {2 * epochs}, … epochs: {told}")
        blocks = [number for number, accuracy in enumerate(accuracies, 1) if accuracy >= target]
        if blocks:
            reached[name] = 1 + epochs * blocks[0]
        else:
            print(f"  {name} does not reach {target:.1%}")
    return target, reached


def time_to(told: str, target: float, reached: dict[str, int], found: Outcome) -> list[Row]:
    """Seconds to the accuracy, of that of ours which is there first: epochs that it takes (counted over 1 Gbit/s) times
    the seconds of an epoch here."""
    times = {
        name: epochs * statistics.median(found.seconds[name])
        for name, epochs in reached.items()
        if name in found.seconds and name != ALONE
    }
    ours = sorted((seconds, name) for name, seconds in times.items() if name.startswith("sylvie"))
    rows = []
    for name, theirs in times.items():
        if ours and not name.startswith("sylvie"):
            mine, best = ours[0]
            spread = f"{reached[name]} and {reached[best]} epochs"
            rows.append(
                Row(f"{told}: seconds to {target:.1%} accuracy, {best}", name, theirs, mine, theirs / mine, "s", spread)
            )
    return rows


def graph_folder(nodes: int) -> str:
    """A planted graph of so many nodes, made once."""
    made = synthetic.parse(f"planted:nodes={nodes},degree=30,classes=10,features=64,homophily=0.6,skew=1,signal=0.7")
    folder = cache_folder() / f"bench-sylvie-{synthetic.identity(made)}"
    if not synthetic.is_store(folder):
        synthetic.write(made, folder)
    return str(folder)


def parts_of(folder: str) -> str:
    """The file of its four parts, made once."""
    path = Path(folder) / f"parts-{WORLD}.npy"
    if not path.exists():
        graph = synthetic.opened(Path(folder))
        np.save(path, clusters(graph.indptr, graph.indices, WORLD))
    return str(path)


def main() -> None:
    """Runs the cases and prints their rows."""
    unasked = ";".join(name for name in CASES if name != LARGEST)
    asked = arguments(__doc__ or "", only={"default": unasked, "help": "cases, with semicolons"})
    rows: list[Row] = []
    target, reached = 1.0, dict[str, int]()
    for name in asked.only.split(";"):
        case = CASES[name]
        if asked.quick:
            case = case._replace(nodes=case.nodes // 5, rounds=2)
        told = f"planted graph, {case.nodes:,} nodes, 4 x {name.partition(',')[0]}{', quick' * asked.quick}"
        print(f"{told}:")
        rounds, folder = asked.pairs or case.rounds, graph_folder(case.nodes)
        limit = 400.0 if name == LARGEST else 200.0
        graph = (folder, parts_of(folder), case.nodes)
        task = Task(case.contestants, rounds, case.epochs, *graph, limit=limit, evaluates=case.evaluates)
        found = over_links(task, case.rate)
        rows += rows_of(told, found)
        if case.evaluates:
            target, reached = epochs_to(found, case.epochs)
            rows += bytes_of(told, found)
        if name in ("100 Mbit/s", "20 Mbit/s"):
            rows += time_to(told, target, reached, found)
    publish(rows, asked.json)


if __name__ == "__main__":
    main()
