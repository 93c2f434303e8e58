"""Full-graph training over four hosts: Sylvie beside fp32 exchanges, PipeGCN, 8 bits, BNS-GCN and sampled batches.

    python bench/sylvie.py [--quick] [--pairs N] [--json FILE] [--only CASES]
    python bench/sylvie.py --only "20 Mbit/s, 200,000 nodes" --json FILE
    python bench/sylvie.py --only "accuracy, 200,000 nodes" --json FILE
    python bench/sylvie.py --only "kernels;covers" --json FILE
    python bench/sylvie.py --only convergence [--graph NAME] [--pairs SEEDS] --json FILE

Four hosts of bench/netlab.py (needs root), each with a link of 1 Gbit/s, 100 or 20 Mbit/s, train GraphSAGE of 3 layers
of 256 columns on a planted graph of degree 30, which is cut into four parts; the cut is large, as 4 in 10 edges lead
anywhere. All sum the gradients of a layer while backward goes on, ours also in 8 bits. Of the forms of ours the one
with the shortest epochs on a link stands in its rows, which say which one it is; the others stand beside as
contestants. The epochs to an accuracy are counted over 1 Gbit/s, as no link changes what is computed; seconds to it are
those of whichever of ours is there first. Peers are written here after their papers: PipeGCN (arXiv 2203.10428) without
its smoothing, 8 bits for all rows (AdaQP, arXiv 2306.01381, without its solver), BNS-GCN (arXiv 2203.10983) at 0.1, and
DDP over sampled batches, of which an epoch passes over all training nodes (ours too, with gradients in 8 bits: what
`graph.fanout` and `comm.codec` make of a recipe). All hosts share the machine's cores, so
computing is slower than on hosts of their own: the row of computing alone, without any message, is what no exchange can
be faster than. `kernels`: rows of 256 values to bits and back, one thread, beside plain torch operations. `covers`:
what crosses between four parts of the packages that apt knows, rows alone and with partial sums. `accuracy, 200,000
nodes` counts epochs to an accuracy (of sampled batches in tenths), then times an epoch of those which have it over each
link, once. `convergence`: accuracy of GraphSAGE over four parts of real graphs, until no contestant gains any more, of
late rows, `adapt` and PipeGCN with its smoothing beside fresh rows in fp32 (sylvie_accuracy.py, without ranks).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import real_graphs
import sylvie_accuracy
from espalier.graph.data import array_file, synthetic
from espalier.graph.parts import halo, partial_sums
from espalier.graph.sampling.neighbor_sampler import Style, whole
from espalier.kernels import quantize_rows
from espalier.recipe.cache_dir import cache_folder
from espalier.sparse.partition import clusters
from netlab import Lab, Shape, first_said
from sylvie_rank import ALONE, DRAWN_INT8, FRESH_INT8, INT8, PERIOD, TRANSPORTS, Outcome, Task
from table import Row, arguments, compare, publish

WORLD = 4
FP32 = "fp32 synchronous"
BATCHES = "DDP over sampled batches"
SMALL = (FP32, "8-bit synchronous (AdaQP-like)", FRESH_INT8, INT8, ALONE)
REACHERS = (
    *(name for name in TRANSPORTS if name not in (ALONE, "sylvie 1 bit", "sylvie 1 bit, late")),
    BATCHES,
    DRAWN_INT8,
)
"""To an accuracy."""
ROWS = 20_000
"""Of the kernels' rows: 20 MB in fp32, more than the caches hold."""
NEAR = 0.01
"""Accuracy below the best that counts as reached."""


class Case(NamedTuple):
    """Links of `rate` bits a second (0: without a limit): nodes of the graph, blocks of so many epochs, and who takes
    part. `evaluates`: after each block. `late`: epochs of PipeGCN's blocks at least, since its last messages are waited
    for. `portion`: of an epoch, a block of sampled batches."""

    rate: float
    nodes: int
    rounds: int
    epochs: int
    contestants: tuple[str, ...] = (*TRANSPORTS, BATCHES, DRAWN_INT8)
    evaluates: bool = False
    late: int = PERIOD
    portion: float = 1.0


LARGE = {
    f"{link}, 200,000 nodes": rate for link, rate in (("1 Gbit/s", 1e9), ("100 Mbit/s", 100e6), ("20 Mbit/s", 20e6))
}
"""Take 12, 17 and 17 minutes, and 11 GB (the last without warming up): not among those that run unasked."""
REACHING = "accuracy, 200,000 nodes"
"""Takes most of an hour."""
LIMITS = {"1 Gbit/s": 420.0, "20 Mbit/s": 420.0, **dict.fromkeys((*LARGE, REACHING), 2400.0)}
"""Seconds of a case at most; of others 200."""
CASES = {
    "1 Gbit/s": Case(1e9, 10_000, 12, 5, evaluates=True),
    "100 Mbit/s": Case(100e6, 10_000, 5, 1),
    "100 Mbit/s, large": Case(100e6, 40_000, 3, 1, SMALL),
    "20 Mbit/s": Case(20e6, 10_000, 3, 1),
    **{
        name: Case(rate, 200_000, 2 if rate > 20e6 else 0, 1, late=PERIOD if rate > 100e6 else 2)
        for name, rate in LARGE.items()
    },
    REACHING: Case(0.0, 200_000, 12, 5, REACHERS, evaluates=True, portion=0.1),
}


def over_links(case: Case, limit: float) -> Outcome:
    """Four hosts with a link each; so many seconds at most."""
    script, folder = str(Path(__file__).parent / "sylvie_rank.py"), graph_folder(case.nodes)
    graph = folder, parts_of(folder), case.nodes
    task = Task(
        case.contestants,
        case.rounds,
        case.epochs,
        *graph,
        limit=limit,
        evaluates=case.evaluates,
        late=case.late,
        portion=case.portion,
    )
    with Lab(Shape(nodes=WORLD, hosts=1, rate=case.rate)) as lab:
        ranks = lab.start([sys.executable, script, msgspec.json.encode(task).decode()])
        found = msgspec.json.decode(first_said(ranks), type=Outcome)
    for name, seconds in found.seconds.items():
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}, {len(seconds)} blocks"
        print(f"  {name:34} {statistics.median(seconds):8.3f} s ({spread}); {sum(found.sent[name]) / 2**20:8.2f} MiB")
    return found


def ours(found: Outcome) -> str:
    """The form of ours with the shortest epochs."""
    return min((statistics.median(each), name) for name, each in found.seconds.items() if name.startswith("sylvie"))[1]


def rows_of(case: str, found: Outcome) -> list[Row]:
    """Seconds of an epoch beside every peer."""
    best, rows = ours(found), []
    for name, theirs in found.seconds.items():
        if name != best:
            pairs = list(zip(found.seconds[best], theirs, strict=False))
            rows.append(compare(f"{case}: epoch, {best}", name, "s", pairs, higher_is_better=False))
    return rows


def bytes_of(case: str, found: Outcome) -> list[Row]:
    """Bytes that all hosts sent in an epoch: of halos, and of halos and gradients."""
    rows = []
    for what, of in (("halo bytes", lambda one: one[0]), ("bytes of halos and gradients", sum)):
        mine = of(found.sent[INT8])
        for name, one in found.sent.items():
            if name != ALONE and of(one) not in (0.0, mine):
                sizes = of(one) / 2**20, mine / 2**20
                rows.append(Row(f"{case}: {what} of an epoch", name, *sizes, of(one) / mine, "MiB", "exact"))
    return rows


def epochs_to(found: Outcome) -> tuple[float, dict[str, float]]:
    """The accuracy that is asked for, and the epochs until each contestant has it after a block (none: it has not)."""
    target = max(found.accuracy[FP32]) - NEAR
    reached = {}
    for name, accuracies in found.accuracy.items():
        if name == ALONE:
            continue
        told = " ".join(f"{at:g}: {one:.3f}" for at, one in zip(found.epochs[name], accuracies, strict=True))
        print(f"  {name:34} held-out accuracy by epochs: {told}")
        blocks = [epochs for epochs, accuracy in zip(found.epochs[name], accuracies, strict=True) if accuracy >= target]
        if blocks:
            reached[name] = blocks[0]
        else:
            print(f"  {name} does not reach {target:.1%}")
    return target, reached


def accuracies(told: str, found: Outcome) -> list[Row]:
    """At the end, beside ours on the whole graph."""
    best = max((one[-1], name) for name, one in found.accuracy.items() if name.startswith("sylvie"))[1]
    mine, rows = found.accuracy[best][-1], []
    for name, one in found.accuracy.items():
        if name not in (best, ALONE):
            spread = f"after {found.epochs[name][-1]:.3g} and {found.epochs[best][-1]:.3g} epochs (n=1)"
            said = f"{told}: held-out accuracy, {best}"
            rows.append(Row(said, name, 100 * one[-1], 100 * mine, mine / one[-1], "%", spread))
    return rows


def time_to(told: str, target: float, reached: dict[str, float], found: Outcome) -> list[Row]:
    """Seconds to the accuracy, of that of ours which is there first, and of the first on the whole graph: epochs that
    it takes (which no link changes) times the seconds of an epoch here."""
    times = {
        name: epochs * statistics.median(found.seconds[name])
        for name, epochs in reached.items()
        if name in found.seconds and name != ALONE
    }
    own = (DRAWN_INT8, *(name for name in times if name.startswith("sylvie")))
    mine_first = sorted((seconds, name) for name, seconds in times.items() if name in own)
    whole_first = [one for one in mine_first if one[1] != DRAWN_INT8]
    rows = []
    for mine, best in dict.fromkeys((*mine_first[:1], *whole_first[:1])):
        said = f"{told}: seconds to {target:.1%} accuracy, {best}"
        for name, theirs in times.items():
            if name not in own:
                spread = f"{reached[name]:.3g} and {reached[best]:.3g} epochs"
                rows.append(Row(said, name, theirs, mine, theirs / mine, "s", spread))
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


def kernels(turns: int) -> list[Row]:
    """Gigabytes of fp32 rows a second, one thread: our kernels and plain torch operations in turn."""
    torch.set_num_threads(1)
    return [row for bits in (1, 8) for row in kernels_of(torch.randn(ROWS, 256), bits, turns)]


def kernels_of(rows: torch.Tensor, bits: int, turns: int) -> list[Row]:
    """Both ways, with so many bits."""
    every, widths = torch.arange(len(rows)), torch.full((len(rows),), bits, dtype=torch.uint8)
    sizes = quantize_rows.wire_bytes(rows.shape[1], widths.long())
    begins, wire = sizes.cumsum(0) - sizes, torch.empty(int(sizes.sum()), dtype=torch.uint8)
    back, coded = torch.empty_like(rows), by_torch(rows, bits)

    def beside(what: str, mine: Callable[[], Any], plain: Callable[[], Any]) -> Row:
        pairs = [(rows.nbytes / 1e9 / seconds(mine), rows.nbytes / 1e9 / seconds(plain)) for _ in range(turns + 1)]
        return compare(f"{what} rows of 256 values, {bits} bits", "torch operations", "GB/s", pairs[1:])

    return [
        beside(
            "encode",
            lambda: quantize_rows.quantize_rows(rows, every, widths, (begins, wire), 1),
            lambda: by_torch(rows, bits),
        ),
        beside(
            "decode",
            lambda: quantize_rows.restore_rows(wire, begins, widths, back),
            lambda: from_torch(*coded, bits),
        ),
    ]


def by_torch(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes, smallest values and steps of rows that are rounded at random."""
    low = rows.amin(1, keepdim=True)
    step = (rows.amax(1, keepdim=True) - low) / (2**bits - 1)
    codes = ((rows - low) / step + torch.rand_like(rows)).floor_().clamp_(max=2**bits - 1).to(torch.uint8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (codes.view(len(rows), -1, 8 // bits) << shifts).sum(2, dtype=torch.uint8), low, step


def from_torch(packed: torch.Tensor, low: torch.Tensor, step: torch.Tensor, bits: int) -> torch.Tensor:
    """What `by_torch` encoded."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return low + (packed[:, :, None] >> shifts & (2**bits - 1)).view(len(packed), -1) * step


def seconds(run: Callable[[], Any]) -> float:
    """Of a call."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def covered() -> list[Row]:
    """Rows that cross before a layer of GraphSAGE, with and without partial sums."""
    graph = array_file.load(Path(real_graphs.path_of("debian:packages")), undirected=True)
    block = whole(graph, Style(loops=False, scale="mean"))
    cut = halo.boundary(block.indptr, block.indices, clusters(graph.indptr, graph.indices, WORLD), WORLD)
    plain = int(cut.rows.sum())
    mine = int(partial_sums.crossing_rows(partial_sums.covers(block, cut), WORLD).sum())
    return [Row(f"debian:packages, {WORLD} parts: a layer", "rows alone", plain, mine, plain / mine, "rows", "exact")]


def over_each_link(case: Case, target: float, reached: dict[str, float]) -> list[Row]:
    """Seconds to the accuracy over each link, where an epoch of each contestant is timed once."""
    rows = []
    for name, rate in LARGE.items():
        warms = rate > 20e6
        timed = case._replace(rate=rate, rounds=int(warms), epochs=1, contestants=tuple(reached), evaluates=False)
        told = f"planted graph, {case.nodes:,} nodes, 4 x {name.partition(',')[0]}"
        print(f"{told}:")
        rows += time_to(told, target, reached, over_links(timed, LIMITS[name]))
    return rows


def converged(asked: Any) -> list[Row]:
    """Of each graph, or of the one that is asked for."""
    graphs = [asked.graph] if asked.graph else list(real_graphs.NAMES)
    most = 20 if asked.quick else sylvie_accuracy.MOST
    return [row for graph in graphs for row in sylvie_accuracy.rows(graph, asked.pairs or 3, most)]


WITHOUT_HOSTS: dict[str, Callable[[Any], list[Row]]] = {
    "kernels": lambda asked: kernels(asked.pairs or 7),
    "covers": lambda asked: covered(),
    "convergence": converged,
}


def main() -> None:
    """Runs the cases and prints their rows."""
    unasked = ";".join(name for name in CASES if name not in (*LARGE, REACHING))
    own = {"graph": {"metavar": "NAME", "help": "of `convergence`; both without it"}}
    asked = arguments(__doc__ or "", only={"default": unasked, "help": "cases, with semicolons"}, **own)
    rows: list[Row] = []
    target, reached = 1.0, dict[str, float]()
    for name in asked.only.split(";"):
        if name in WITHOUT_HOSTS:
            rows += WITHOUT_HOSTS[name](asked)
            continue
        case = CASES[name]
        if asked.quick:
            case = case._replace(nodes=case.nodes // 5, rounds=2)
        if asked.pairs is not None:
            case = case._replace(rounds=asked.pairs)
        told = f"planted graph, {case.nodes:,} nodes, 4 x {name.partition(',')[0]}{', quick' * asked.quick}"
        print(f"{told}:")
        found = over_links(case, LIMITS.get(name, 200.0))
        if case.evaluates:
            target, reached = epochs_to(found)
        if name == REACHING:
            rows += accuracies(told.partition(", 4 x")[0], found) + over_each_link(case, target, reached)
            continue
        rows += rows_of(told, found)
        if case.evaluates or name in LARGE:
            rows += bytes_of(told, found)
        if name in ("1 Gbit/s", "100 Mbit/s", "20 Mbit/s"):
            rows += time_to(told, target, reached, found)
    publish(rows, asked.json)


if __name__ == "__main__":
    main()
