"""Graph transformers on one graph: seconds of a training step and memory beside dense attention and PyG's networks.

    python bench/torchgt.py [--quick] [--pairs N] [--json FILE] [--only WORD] [--sizes N,N] [--degrees N,N]
        [--peers NAME,NAME] [--limit GIB] [--data FOLDER] [--seeds N] [--steps N]

`step`: forward, loss and backward of four layers, width 64, 8 heads, over a whole planted graph with clusters of 128
nodes (at most 512 clusters; 90 % of the edges inside, --degrees of each node), in the order `graph.order = "clusters"`.
All have the same linear maps around attention: `dense` is scaled_dot_product_attention over all pairs,
`TransformerConv` PyG's attention along the edges; `GPSConv` (multihead, performer), `SGFormer` and `Polynormer` are
PyG's own layers (Polynormer without its global attention, as it begins; GPSConv without a local layer beside its
attention, its performer with heads as wide as ours). Each contestant is a process of its own; two are up at a time and
take turns, over 131,072 tokens one after the other. Memory is the most that a process held beyond what it held before
its first step, peak RSS all that it held in that step. A contestant that holds over --limit (22 GiB, or what the
machine has free) is ended, and its row says so. Rows of ours name the plan that `auto` took. `real`: the same on the
packages that apt knows here and on WordNet (examples/text_graphs.py). `patterns`: ours beside
itself under each plan, with expander edges, and with a tenth of the edges left out. `million`: 2^20 tokens of degree 10
and a virtual token that attends to all, with the optimizer's step; its memory is the whole process's at its most,
preparing included. `planning`: making order, pattern and its measured plan, in steps. `accuracy`: beside GCN, Cora and
CiteSeer (--data, folder `planetoid`; --seeds) with `model.local`, and the real graphs without, one seed; `--only cora`,
`--only debian:wordnet` and so on: one of them. `equals`, which runs where it is named: test accuracy of ours, of PyG's
networks and of an MLP, two layers of width 64 (of those that have more parameters then also as wide as gives them as
many), on the real graphs after --steps of the same Adam, one seed; `--only "equals debian:wordnet"`: on one of them.
Needs PyG for its rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import graph as bench_graph
import real_graphs
from espalier import recipe as config
from espalier.graph.data import synthetic
from espalier.graph.data.graph import Graph
from espalier.graph.networks import graph_plan
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.machine import malloc_trim
from espalier.mechanisms.pattern_attention.attention import BLOCK, EDGE, HYBRID, by_counts
from espalier.mechanisms.pattern_attention.model import tokens_of
from espalier.mechanisms.pattern_attention.pattern import Pattern
from espalier.parallel.workload import Shard
from espalier.recipe import defaults, process_environment, recipe_file
from table import Row, arguments, compare, markdown, publish
from torchgt_peers import DEPTH, HEADS, WIDTH, peer

PEERS = ("TransformerConv", "GPSConv performer", "SGFormer", "Polynormer")
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, edge plan": {},
    "ours, block plan": {},
    "ours, hybrid plan": {},
    "ours, 3 permutations of expander edges": {"expander": 3},
    "ours, recall 0.9": {"recall": 0.9},
}
"""With other plans and patterns."""
FIXED = {"ours, edge plan": EDGE, "ours, block plan": BLOCK, "ours, hybrid plan": HYBRID}
MILLION = "ours, with a virtual token and the optimizer's step"
REAL = ("debian:packages", "debian:wordnet")
HOPS = 16
"""`model.local` on Cora and CiteSeer: S²GC's (ICLR 2021)."""
QUADRATIC = ("dense", "GPSConv multihead")
DENSE = 16384
"""Tokens up to which peers that look at all pairs take part."""
TOGETHER = 131072
"""Tokens up to which ours and a peer are in memory at the same time."""


PAGE = os.sysconf("SC_PAGESIZE")
WATCHED = 0.02
"""Seconds between two looks at what a contestant holds."""


def path_of(tokens: int, degree: int) -> str:
    classes = min(512, max(2, tokens // 128))  # of more the logits would take most of the memory
    return f"planted:nodes={tokens},degree={degree},features=64,classes={classes},homophily=0.9,skew=1"


# --- contestants -------------------------------------------------------------------------------------------------


def step_of(name: str, path: str, cache: str) -> tuple[Callable[[], float], str]:
    """A training step of a contestant over the graph, which returns its loss, and the plan of ours."""
    torch.manual_seed(0)
    if name == MILLION or name in OURS:
        return step_of_ours(name, opened(path, cache, **({"virtual": 1} if name == MILLION else OURS[name])))
    graph = opened(path, cache).task.graph
    edges, features, labels, train = tensors_of(graph)
    other = peer(name, features.shape[1], graph.outputs).train()

    def theirs() -> float:
        other.zero_grad()
        loss = F.cross_entropy(other(features, edges)[train], labels[train])
        loss.backward()
        return float(loss.detach())

    return theirs, ""


def step_of_ours(name: str, workload: GraphWorkload) -> tuple[Callable[[], float], str]:
    recall = OURS.get(name, {}).get("recall", 1.0)
    model = workload.build(torch.device("cpu"), torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters()) if name == MILLION else None
    count = workload.global_batch
    shard = Shard(0, count, count)
    known = pattern_of(workload)
    if name in FIXED:
        known.chosen["auto"] = FIXED[name]

    def run() -> float:
        model.zero_grad()
        (batch,) = workload.batches(0, shard)
        batch = batch._replace(blocks=(batch.blocks[0]._replace(recall=recall), *batch.blocks[1:]))
        loss, weight = workload.loss(model, batch)
        (loss / weight).backward()
        if optimizer is not None:
            optimizer.step()
        return float((loss / weight).detach())

    return run, (known.chosen.get("auto") or by_counts(known)).name


def pattern_of(workload: GraphWorkload) -> Pattern:
    """That a step attends along, with the plan that was measured for it."""
    workload.decisions()
    (batch,) = workload.batches(0, Shard(0, workload.global_batch, workload.global_batch))
    model = workload.recipe.model
    assert isinstance(model, config.GraphTransformer)
    return tokens_of(batch.blocks[0], model, path=False, full=False).pattern


def tensors_of(graph: Graph) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Edges, features, labels, and the nodes that are trained on."""
    assert graph.parts is not None
    edges = torch.stack([torch.from_numpy(graph.indices).long(), torch.from_numpy(graph.targets()).long()])
    labels = torch.from_numpy(graph.labels).long()
    return edges, torch.from_numpy(graph.features), labels, torch.from_numpy(graph.parts.train)


def opened(path: str, cache: str, **model: Any) -> GraphWorkload:
    return open_graph(resolved(table_of(path, cache, **model)))


def table_of(path: str, cache: str, **model: Any) -> dict[str, Any]:
    sizes = {"depth": DEPTH, "width": WIDTH, "heads": HEADS, "dropout": 0.0, "virtual": 0, "attention": "sparse"}
    return {
        "model": {"kind": "graph-transformer", **sizes, **model},
        "data": {"path": real_graphs.path_of(path), "cache": cache},
        "graph": {"order": "clusters"},
        "train": {"steps": 10, "precision": "fp32"},
    }


def held() -> tuple[int, int]:
    """Bytes this process holds, and the most it did since the last `clear_refs`."""
    lines = dict(
        line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Vm")
    )
    return tuple(int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def contestant(name: str, path: str, cache: str) -> None:
    """`turns`; says the bytes that it has and wants where the system refuses them, and is the first that it ends."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        turns(name, path, cache)
    except (RuntimeError, MemoryError) as error:
        if "allocate memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        asked = [int(one) for one in re.findall(r"allocate (\d+) bytes", str(error))]
        print(json.dumps({"refused": held()[0] + sum(asked)}), flush=True)


def turns(name: str, path: str, cache: str) -> None:
    """One process: a step for each line that is read; says its seconds, and the bytes that the first one needed, once a
    step over a small graph has loaded all code."""
    step_of(name, path_of(256, 10), cache)[0]()
    run, plan = step_of(name, path, cache)
    malloc_trim.give_back()
    before, most = held()
    Path("/proc/self/clear_refs").write_text("5")
    run()
    peak = held()[1]
    print(json.dumps({"bytes": peak - before, "held": peak, "peak": max(most, peak), "plan": plan}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        run()
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


# --- rows --------------------------------------------------------------------------------------------------------


class Told(NamedTuple):
    """MiB that a step needs beyond what was there, that the process held in it, and that it held at its most; the plan
    of ours."""

    step: float
    held: float
    peak: float
    plan: str


class OutOfMemory(Exception):
    """A contestant needs more bytes than `least`."""

    def __init__(self, least: int) -> None:
        super().__init__(f"over {least / 2**30:.1f} GiB")
        self.least = least


@contextmanager
def up(name: str, path: str, cache: str, limit: float = math.inf) -> Iterator[tuple[Callable[[], float], Told]]:
    """A contestant in its process: what takes a step and returns its seconds, and what it said.

    Raises OutOfMemory, here or in a step, where it holds more than `limit` bytes or the system has no more to give.
    """
    command = [sys.executable, __file__, "--contestant", name, path, cache]
    own = dict([process_environment.SPINS]) if name.startswith("ours") else {}  # as a run has it
    environment = {**os.environ, **own}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdin is not None
    assert process.stdout is not None
    most = 0

    def watch() -> None:
        nonlocal most
        while process.poll() is None:
            with suppress(OSError, IndexError):  # it may end meanwhile
                most = max(most, int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * PAGE)
            if most > limit:
                process.kill()
            time.sleep(WATCHED)

    def answer() -> dict[str, Any]:
        line = process.stdout.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            if "refused" not in found:
                return found
            process.wait()
            raise OutOfMemory(max(most, found["refused"]))
        code = process.wait()
        if code == -signal.SIGKILL:
            raise OutOfMemory(most)
        raise RuntimeError(f"{name} ended with {code} on {path}")

    def ask() -> float:
        with suppress(BrokenPipeError):  # it was ended between two steps
            process.stdin.write("\n")
            process.stdin.flush()
        return float(answer()["seconds"])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        told = answer()
        yield ask, Told(*(told[one] / 2**20 for one in ("bytes", "held", "peak")), told["plan"])
    finally:
        with suppress(OSError):
            process.stdin.close()
        process.wait()
        process.stdout.close()
        watcher.join()


class Case(NamedTuple):
    """A graph, what rows call it, how often contestants take turns on it, and the bytes that each may hold."""

    path: str
    said: str
    pairs: int
    limit: float


def steps(case: Case, names: Sequence[str], together: bool, cache: str) -> Iterator[Row]:
    """Ours beside each peer. Where they are not in memory `together`, ours took its steps before."""
    with ExitStack() as stack:
        ours, our = stack.enter_context(up("ours", case.path, cache, case.limit))
        before = [] if together else [ours() for _ in range(case.pairs)]
        if not together:
            stack.close()
        said = f"{case.said}, {our.plan} plan"
        for name in names:
            try:
                with up(name, case.path, cache, case.limit) as (theirs, their):
                    taken = [(before[at] if before else ours(), theirs()) for at in range(case.pairs)]
            except OutOfMemory as error:
                yield beyond(f"peak RSS in a step, {said}", name, our.held, error.least)
                continue
            yield compare(f"training step, {said}", name, "s", taken, higher_is_better=False)
            yield compare(f"memory of a step, {said}", name, "MiB", [(our.step, their.step)], higher_is_better=False)
            yield compare(f"peak RSS in a step, {said}", name, "MiB", [(our.held, their.held)], higher_is_better=False)


def beyond(case: str, name: str, ours: float, least: int) -> Row:
    """Of a peer that was ended; its value and the ratio are the least that they can be."""
    theirs = least / 2**20
    return Row(case, name, theirs, ours, theirs / ours, "MiB", f"out of memory: needs over {least / 2**30:.1f} GiB")


def shown(rows: Iterator[Row]) -> Iterator[Row]:
    """Each row as it is made: a script that is ended half way has shown what it measured."""
    for row in rows:
        print(markdown([row])[-1], file=sys.stderr, flush=True)
        yield row


def free() -> int:
    """Bytes that the machine can still give."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def patterns(tokens: int, degree: int, pairs: int, cache: str) -> Iterator[Row]:
    path, (plain, *others) = path_of(tokens, degree), OURS
    with up(plain, path, cache) as (ours, our):
        said = f"{tokens:,} tokens, degree {degree}, {our.plan} plan"
        for name in others:
            with up(name, path, cache) as (theirs, their):
                taken = [(ours(), theirs()) for _ in range(pairs)]
            yield compare(f"training step, {said}", name, "s", taken, higher_is_better=False)
            if name in FIXED:
                both = [(our.step, their.step)]
                yield compare(f"memory of a step, {said}", name, "MiB", both, higher_is_better=False)


def million(quick: bool, pairs: int, cache: str) -> list[Row]:
    tokens = 1 << (16 if quick else 20)
    with up(MILLION, path_of(tokens, 10), cache) as (ours, our):
        taken = [ours() for _ in range(max(1, pairs // 2))]
    said = f"{tokens:,} tokens and a virtual one, degree 10, 4 layers of 64, {our.plan} plan"
    limit = [(our.peak, 24 * 1024.0)]
    return [
        compare(f"training step with AdamW's, {said}", "(alone)", "s", [(one, one) for one in taken]),
        compare(f"memory of the process at its most, {said}", "a limit of 24 GiB", "MiB", limit, False),
    ]


def planning(tokens: int, pairs: int, cache: str) -> list[Row]:
    """Order, pattern and its measured plan beside a step: made anew, and with what the cache keeps of them."""
    path = path_of(tokens, 20)
    graph = synthetic.load(path, Path(cache))
    run, _ = step_of("ours", path, cache)
    run()
    taken: dict[str, list[tuple[float, float]]] = {"planning": [], "planning, again": []}
    home = os.environ.get("XDG_CACHE_HOME")
    for number in range(pairs):
        os.environ["XDG_CACHE_HOME"] = str(Path(cache) / f"planned-{number}")
        for pairs_of in taken.values():
            start = time.perf_counter()
            ordered, _ = graph_plan.ordered(graph, "clusters")
            workload = GraphWorkload(resolved(table_of(path, cache)), ordered)
            known = pattern_of(workload)
            known.divided((known.chosen.get("auto") or by_counts(known)).least)
            made = time.perf_counter() - start
            start = time.perf_counter()
            run()
            pairs_of.append((made, time.perf_counter() - start))
    os.environ.pop("XDG_CACHE_HOME") if home is None else os.environ.update(XDG_CACHE_HOME=home)
    said = f"{tokens:,} tokens, degree 20"
    return [
        compare(f"{name}, {said}", "a training step", "s", one, higher_is_better=False) for name, one in taken.items()
    ]


def trained(kind: str, path: str, seed: int, count: int) -> float:
    """Test accuracy in % at the last of `count` steps of Adam with L2, as GCN's authors have it (bench/graph.py)."""
    few = path not in REAL  # labels
    model: dict[str, Any] = {"width": 16} if few else {}  # GCN's authors'; else as wide as ours
    if kind == "graph-transformer":
        model = {
            "local": HOPS * few,
            "depth": 1 if few else 2,
            "virtual": 0,
            "dropout": 0.5 if few else 0.1,
            "attention": "sparse",
        }
    how = {"kind": "adamw", "coupled": True, "weight_decay": 5e-4, "betas": [0.9, 0.999], "learning_rate": 0.01}
    schedule = {} if kind == "graph-transformer" else {"schedule": {"kind": "constant"}}  # GCN's, and our default
    train = {"steps": count, "seed": seed, "clip": 0.0, "optimizer": how, **schedule}
    workload = open_graph(
        resolved({"model": {"kind": kind, **model}, "data": {"path": real_graphs.path_of(path)}, "train": train})
    )
    return 100 * bench_graph.trained(workload)


def accuracy(path: str, seeds: int, count: int) -> list[Row]:
    """Ours beside our GCN, whose accuracy is PyG's (bench/graph.py): means over seeds, and the spread of the ratios."""
    pairs = []
    for seed in range(seeds):
        pairs.append((trained("graph-transformer", path, seed, count), trained("gcn", path, seed, count)))
        print(f"{path} seed {seed}: {pairs[-1][0]:.1f} {pairs[-1][1]:.1f}", file=sys.stderr, flush=True)
    ours, theirs = (statistics.mean(side) for side in zip(*pairs, strict=True))
    said = f"test accuracy, {Path(path).name}, {count} steps, mean of {seeds} seeds"
    row = compare(said, "gcn", "%", pairs)
    return [msgspec.structs.replace(row, peer_value=theirs, ours=ours, ratio=ours / theirs)]


EQUALS = ("MLP", "TransformerConv", "GPSConv performer", "SGFormer", "Polynormer")


def equals(path: str, names: Sequence[str], count: int, cache: str) -> Iterator[Row]:
    """Accuracy after `count` steps of the same Adam, whose rate rises for a tenth of them and falls as a cosine."""
    workload = opened(path, cache, depth=2, dropout=0.1)
    graph, model = workload.task.graph, workload.build(torch.device("cpu"), torch.float32)
    (batch,) = workload.batches(0, Shard(0, workload.global_batch, workload.global_batch))
    inputs, edges = tensors_of(graph)[1], tensors_of(graph)[0]
    ours = fitted(model, lambda: model(batch.features, batch.blocks[0]), graph, count)
    for name, width in widths(names, inputs.shape[1], graph.outputs, ours[1]):
        torch.manual_seed(0)
        other = peer(name, inputs.shape[1], graph.outputs, depth=2, width=width)
        found = fitted(other, lambda other=other: other(inputs, edges), graph, count)  # type: ignore[misc]
        said = f"test accuracy, {path}, {count} steps, {ours[1]:,} parameters, one seed"
        called = f"{name}, {width} columns, {found[1]:,} parameters"
        yield compare(said, called, "%", [(ours[0], found[0])])
        print("\n".join(markdown([compare(said, called, "%", [(ours[0], found[0])])])), file=sys.stderr, flush=True)


def widths(names: Sequence[str], inputs: int, outputs: int, most: int) -> Iterator[tuple[str, int]]:
    """Each network with our columns, and one that has more parameters then with the columns that give it as many."""
    for name in names:
        yield name, WIDTH
        sizes = {width: parameters(peer(name, inputs, outputs, 2, width)) for width in range(8, WIDTH + 1, 8)}
        if sizes[8] <= most < sizes[WIDTH]:
            yield name, max(width for width, size in sizes.items() if size <= most)


def parameters(model: nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())


def fitted(model: nn.Module, logits: Callable[[], Tensor], graph: Graph, count: int) -> tuple[float, int]:
    """Test accuracy in %, and the number of parameters. Polynormer attends globally in the second half, as its authors
    train it."""
    _, _, labels, train = tensors_of(graph)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for step in range(count):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1, 10 * (step + 1) / count) * (1 + math.cos(math.pi * step / count)) / 2
        for one in model.modules():
            if hasattr(one, "_global"):
                one._global = step >= count // 2
        model.train().zero_grad()
        F.cross_entropy(logits()[train], labels[train], ignore_index=-1).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return 100 * bench_graph.right(logits(), graph), parameters(model)


def resolved(table: dict[str, Any]) -> config.Recipe:
    return defaults.resolve(recipe_file.from_table(table))[0]


def main() -> None:
    if "--contestant" in sys.argv:
        contestant(*sys.argv[2:5])
        return
    data = {"metavar": "FOLDER", "help": "with a folder planetoid", "default": ""}
    more: dict[str, Any] = {"only": {"metavar": "WORD", "default": ""}, "data": data}
    more["sizes"] = {"metavar": "N,N", "default": "256,4096,16384,65536", "help": "tokens"}
    more["limit"] = {"metavar": "GIB", "type": float, "default": 22, "help": "memory of a contestant"}
    more["degrees"] = {"metavar": "N,N", "default": "20"}
    more["steps"] = {"metavar": "N", "type": int, "default": 80, "help": "of `equals`"}
    more["peers"] = {"metavar": "NAME,NAME", "default": ",".join((*PEERS, *QUADRATIC))}
    more["seeds"] = {"metavar": "N", "type": int, "default": 10, "help": "of the accuracy on Cora and CiteSeer"}
    args = arguments(str(__doc__), **more)
    pairs = args.pairs or (3 if args.quick else 5)
    limit = min(args.limit * 2**30, free() - 2**29)
    sizes = [1024, 4096] if args.quick else [int(one) for one in args.sizes.split(",")]
    names = [name for name in args.peers.split(",") if importlib.util.find_spec("torch_geometric") or name == "dense"]
    with tempfile.TemporaryDirectory() as cache:
        rows: list[Row] = []
        degrees = [int(one) for one in args.degrees.split(",")]
        for tokens, degree in itertools.product(sizes, degrees) if args.only in "step" else ():
            able = [name for name in names if name not in QUADRATIC or tokens <= DENSE]
            case = Case(path_of(tokens, degree), f"{tokens:,} tokens, degree {degree}", pairs, limit)
            rows += shown(steps(case, able, tokens <= TOGETHER, cache))
        for path in REAL if args.only in "real" else ():
            able = [name for name in names if name not in QUADRATIC]
            rows += shown(steps(Case(path, path, pairs, limit), able, together=True, cache=cache))
        rows += alone(args.only, sizes[-1], pairs, cache)
        if args.only in "million":
            rows += million(args.quick, pairs, cache)
        rows += accuracies(args, names, cache)
        publish(rows, args.json)


def accuracies(args: argparse.Namespace, names: Sequence[str], cache: str) -> Iterator[Row]:
    """Rows of held-out accuracy."""
    for path in (path_of(4096, 20),) if args.quick else REAL:
        if args.only in ("equals", f"equals {path}"):
            yield from equals(path, [name for name in EQUALS if name in names or name == "MLP"], args.steps, cache)
    for name in ("cora", "citeseer"):
        if args.data and args.only in f"accuracy {name}":
            yield from accuracy(str(Path(args.data) / "planetoid" / name), args.seeds, 200)
    for path in REAL if shutil.which("apt-cache") else ():
        if args.only in f"accuracy {path}":
            yield from accuracy(path, 1, 20 if args.quick else 80)


def alone(only: str, tokens: int, pairs: int, cache: str) -> list[Row]:
    """Ours beside itself."""
    rows = list(patterns(tokens, 20, pairs, cache)) if only in "patterns" else []
    return [*rows, *(planning(tokens, min(3, pairs), cache) if only in "planning" else [])]


if __name__ == "__main__":
    main()
