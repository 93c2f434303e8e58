"""A2Q and MEGA's widths by degree beside learned-step uniform widths, Degree-Quant and fp32: accuracy and the bytes
really stored.

    python bench/a2q.py [--quick] [--pairs SEEDS] [--data FOLDER] [--only NAMES] [--keep FOLDER] [--json FILE]
                        [--picture FILE] [--kinds NAMES]

GCN of two layers on Cora, CiteSeer and PubMed (raw files in FOLDER/NAME; what is not there is left out), standard
split, 200 steps of Adam, and with `--only debian` on the packages that apt knows, 64 columns, 60 steps; test accuracy
at the step of the best validation accuracy, every ten steps. Nothing of that is timed: it may run in pieces (`--keep`
takes up what was trained before) and beside other work. Weights and
messages have 4 bits in all quantized networks, learned by the same rule. `uniform`: one learned step for the layer, 2
or 4 bits. `Degree-Quant` (arXiv 2008.05000): 4 or 2 bits, ranges from percentiles, nodes of high degree protected at
random while training (its mask and ranges are written here; the rest is ours). A2Q and MEGA have a target in bits a
value (SHARE). Bytes: the package of the hidden features (payload, headers, padding, lists, index, steps). `-64`: 64
columns. `cora-curve`, `citeseer-curve`: 64 columns at 1 to 4 bits a value, three seeds, and a2q with the gradient of
the task in place of the local one, with the share of nodes whose step it does not reach; `--picture` draws accuracy
against bytes of what FOLDER has. Timed, two threads: `products` and `cached`, products that read packed rows beyond
the last-level cache and within it, 128 columns, beside `torch.sparse` in fp32, same edges; `cost`, a step of training
beside fp32, GCN's by the clock, GCN's and GraphSAGE's also by CPU time on one thread.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import a2q_picture
from espalier.config import defaults, recipe_file
from espalier.graph import quantization
from espalier.graph.quantization import QuantizedGraph
from espalier.graph.subgraphs import infer
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.quant.a2q import Coded, FeatureQuantizer
from espalier.quant.base import RowIndex
from espalier.quant.packed_spmm import PackedMatrix, packed_matmul
from espalier.workload import Shard
from table import Row, arguments, compare, publish

EVERY = 10
DEBIAN = "debian:packages"
KINDS: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "uniform 4-bit": {"kind": "uniform", "bits": 4},
    "uniform 2-bit": {"kind": "uniform", "bits": 2},
    "Degree-Quant 4-bit": {"kind": "uniform", "bits": 4},
    "Degree-Quant 2-bit": {"kind": "uniform", "bits": 2},
    "a2q": {"kind": "a2q", "bits": 2},
    "mega": {"kind": "mega", "bits": 2},
}
SHARE = {"a2q": 1.7, "mega": 1.85}
"""Bits a value that the target asks for, so that packages are about as large as those of 2 bits for all."""
TASK = "a2q by the task alone"
CURVE = {"uniform": ("uniform 1-bit", "uniform 2-bit", "uniform 3-bit", "uniform 4-bit")}
KINDS |= {f"uniform {bits}-bit": {"kind": "uniform", "bits": bits} for bits in (1, 3)} | {TASK: KINDS["a2q"]}
SHARE[TASK] = SHARE["a2q"]
for _kind in ("a2q", "mega"):
    CURVE[_kind] = (f"{_kind} 1-bit", _kind, f"{_kind} 3-bit", f"{_kind} 4-bit")
    for _name, _bits, _share in zip(CURVE[_kind], (2, 2, 3, 4), (0.9, SHARE[_kind], 2.6, 3.5), strict=True):
        KINDS[_name], SHARE[_name] = {"kind": _kind, "bits": _bits}, _share
PLAIN = ("fp32", "uniform 2-bit", "a2q", "mega", "uniform 4-bit", "Degree-Quant 4-bit", "Degree-Quant 2-bit")
WIDE = ("fp32", "uniform 2-bit", "a2q", "mega")


class DegreeQuant(FeatureQuantizer):
    """Rows as Degree-Quant rounds them: codes from 0 to the 99.9th percentile, which a moving mean follows, and while
    training rows left as they are with a probability that rises with the degree, to MOST_PROTECTED."""

    MOST_PROTECTED = 0.1

    def __init__(self, like: FeatureQuantizer, bits: int, degrees: torch.Tensor) -> None:
        super().__init__(like.allocator, like.columns, like.rule)
        self.gain, self.width, self.top = like.gain, bits, torch.zeros(())
        self.protected = self.MOST_PROTECTED * degrees.argsort().argsort() / len(degrees)

    def _rounded(self, x: torch.Tensor, gain: float) -> tuple[torch.Tensor, torch.Tensor]:
        step = gain * self.top.clamp(min=1e-6) / (2**self.width - 1)
        return (x / step).round().clamp(0, 2**self.width - 1), step

    @staticmethod
    def _percentile(values: torch.Tensor) -> torch.Tensor:
        if len(values) <= 1 << 24:  # what quantile takes
            return values.quantile(0.999)
        return values.kthvalue(round(0.999 * len(values))).values

    def rounded(self, x: torch.Tensor, index: RowIndex | None = None) -> tuple[torch.Tensor, None]:
        gain = self.gain if self.training else 1.0
        if self.training:
            now = self._percentile(x.detach().flatten()) / gain
            self.top = now if self.top == 0 else 0.9 * self.top + 0.1 * now
        codes, step = self._rounded(x, gain)
        found = x + (codes * step - x).detach()
        found = torch.where(x.detach() > (2**self.width - 1) * step, (codes * step).detach(), found)
        if not self.training:
            return found, None
        return torch.where((torch.rand(len(x)) < self.protected)[:, None], x, found), None

    def codes(self, x: torch.Tensor, index: RowIndex | None = None) -> Coded:
        codes, _ = self._rounded(x, 1.0)
        width = torch.full((len(x),), self.width, dtype=torch.uint8)
        return Coded(codes.to(torch.uint8), width, torch.full_like(width, 128))


def steps_of(path: Path) -> int:
    return 60 if str(path) == DEBIAN else 200


@cache
def size_of(path: Path) -> tuple[int, int]:
    """Nodes, and columns of the input that are quantized."""
    table: dict[str, Any] = {"model": {"kind": "gcn"}, "data": {"path": str(path)}, "train": {"steps": 1}}
    graph = open_graph(defaults.resolve(recipe_file.from_table(table))[0]).graph
    return graph.nodes, graph.features.shape[1] if QuantizedGraph(graph).input_signed() is not None else 0


def opened(path: Path, kind: str, seed: int, width: int) -> GraphWorkload:
    table: dict[str, Any] = {"model": {"kind": "gcn", "width": width}, "data": {"path": str(path)}}
    table["train"] = {"steps": steps_of(path), "seed": seed}
    quant = KINDS[kind]
    if quant is not None:
        table["quant"] = dict(quant)
        if kind in SHARE:
            nodes, inputs = size_of(path)
            table["quant"]["target"] = int(nodes * (inputs + width) * SHARE[kind] / 8)
    return open_graph(defaults.resolve(recipe_file.from_table(table))[0])


def accuracy(workload: GraphWorkload, model: torch.nn.Module) -> tuple[float, float]:
    """Validation and test, per cent."""
    logits, parts, labels = infer(model.eval(), workload.task.held), workload.task.parts, workload.task.labels
    found = ((logits[ids].argmax(1) == labels[ids]).float().mean() for ids in (parts.validation, parts.test))
    return tuple(100 * float(one) for one in found)  # type: ignore[return-value]


def own_gradient(found: quantization.Quantization) -> None:
    """Widths and steps learn from the loss of the task alone."""
    for feature in found.features:
        feature.rule = feature.rule._replace(local=0.0)
    for column in found.columns:
        column.local = False


def trained(path: Path, kind: str, seed: int, width: int = 16) -> tuple[float, int, float]:
    """(test accuracy, bytes of all quantized features, share of nodes whose step the first gradient does not reach)."""
    workload = opened(path, kind, seed, width)
    model = workload.build(torch.device("cpu"), torch.float32)
    found = quantization.quantization_of(model)
    if kind.startswith("Degree-Quant"):
        assert found is not None
        degrees, bits = torch.from_numpy(workload.graph.degrees()), int(kind.split()[1][0])
        for at, like in enumerate(found.features):
            found.features[at] = own = DegreeQuant(like, bits, degrees)
            model.layers[at + found.first].quantizer = own  # type: ignore[union-attr, operator, index]
    if kind == TASK:
        assert found is not None
        own_gradient(found)
    parameters, silent = [one for one in model.parameters() if one.requires_grad], 0.0
    matrices = [one for one in parameters if one.ndim > 1]
    others = [one for one in parameters if one.ndim < 2]
    optimizer = torch.optim.Adam(
        [{"params": matrices, "weight_decay": 5e-4}, {"params": others, "weight_decay": 0.0}], lr=0.01
    )
    best, count = (-1.0, 0.0), workload.global_batch
    for step in range(steps_of(path)):
        torch.manual_seed(1000 * seed + step)
        model.train()
        (batch,) = workload.batches(step, Shard(0, count, count))
        optimizer.zero_grad()
        loss, weight = workload.loss(model, batch)
        (loss / weight).backward()
        reached = found.features[-1].allocator.raw_step.grad if step == 0 and found is not None else None
        if reached is not None and len(reached) > 1:
            silent = float((reached == 0).float().mean())
        optimizer.step()
        if step % EVERY == EVERY - 1 and (now := accuracy(workload, model))[0] > best[0]:
            best = now
    if found is None:
        nodes, inputs = size_of(path)
        return best[1], 4 * nodes * (inputs + width), silent
    found.packed = True
    infer(model.eval(), workload.task.held)
    return best[1], sum(one.nbytes for one in found.stored.values()), silent


def kept(keep: str, path: Path, kind: str, seed: int, width: int) -> Path:
    return Path(keep) / f"{path.name}-{width}-{kind.replace(' ', '-')}-{seed}.json"


def once(keep: str, path: Path, kind: str, seed: int, width: int) -> tuple[float, ...]:
    """`trained`, or what a file in `keep` says of it."""
    file = kept(keep, path, kind, seed, width)
    if keep and file.exists():
        return tuple(json.loads(file.read_text()))
    found = trained(path, kind, seed, width)
    print(f"  {path.name}, {width} columns, {kind}, seed {seed}: {found}", flush=True)
    if keep:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    return found


def accuracies(path: Path, seeds: int, width: int, keep: str, only: str = "") -> list[Row]:
    kinds: Sequence[str] = WIDE if width == 64 and str(path) != DEBIAN else PLAIN
    kinds = [one for one in kinds if not only or one in only.split(",")]
    runs: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in kinds}
    for seed in range(1, seeds + 1):
        for kind in kinds:
            runs[kind].append(once(keep, path, kind, seed, width))
    name, rows = path.name + (f", {width} columns" if width != 16 else ""), []
    for kind, found in runs.items():
        print(f"{name}, {kind}: {found}", flush=True)
    what = "input and hidden" if size_of(path)[1] else "hidden"
    for ours in [one for one in ("a2q", "mega") if one in kinds]:
        for peer in kinds:
            if peer not in ("a2q", "mega"):
                pairs = [(one[0], other[0]) for one, other in zip(runs[ours], runs[peer], strict=True)]
                rows.append(means(f"{name}, {ours}: accuracy", peer, pairs))
                sizes = [(one[1] / 1024, other[1] / 1024) for one, other in zip(runs[ours], runs[peer], strict=True)]
                rows.append(compare(f"{name}, {ours}: {what} features", peer, "KiB", sizes, higher_is_better=False))
    return rows


def curve(path: Path, seeds: int, keep: str) -> list[Row]:
    """Accuracy against bytes, 1 to 4 bits a value, 64 columns; and what the local gradient is worth."""
    kinds = ("fp32", TASK, *(one for names in CURVE.values() for one in names))
    runs: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in kinds}
    for seed in range(1, seeds + 1):  # all kinds of a seed, so that what is kept is whole early
        for kind in kinds:
            runs[kind].append(once(keep, path, kind, seed, 64))
    name, rows = f"{path.name}, 64 columns", []
    for kind in (one for one in kinds if one != "fp32"):
        pairs = [(one[0], other[0]) for one, other in zip(runs[kind], runs["fp32"], strict=True)]
        size = statistics.mean(one[1] for one in runs[kind]) / 1024
        rows.append(means(f"{name}, {kind}, {size:.1f} KiB: accuracy", "fp32", pairs))
    pairs = [(one[0], other[0]) for one, other in zip(runs["a2q"], runs[TASK], strict=True)]
    rows.append(means(f"{name}, a2q: accuracy", TASK, pairs))
    ours, theirs = (100 * statistics.mean(one[2] for one in runs[kind]) for kind in ("a2q", TASK))
    case = f"{name}, a2q: nodes whose step the first gradient does not reach"
    rows.append(Row(case, TASK, theirs, ours, theirs / max(ours, 1e-9), "%", f"n={seeds}"))
    return rows


def curves_kept(keep: str, data: Path) -> dict[str, a2q_picture.Lines]:
    """By data set and policy, (KiB, accuracy) of each number of bits, means over the seeds that `keep` has."""
    found: dict[str, a2q_picture.Lines] = {}
    for name in ("cora", "citeseer"):
        for policy, kinds in {**CURVE, "fp32": ("fp32",)}.items():
            for kind in kinds:
                paths = [kept(keep, data / name, kind, seed, 64) for seed in range(1, 11)]
                runs = [json.loads(one.read_text()) for one in paths if one.exists()]
                if runs:
                    accuracy, size = (statistics.mean(run[at] for run in runs) for at in (0, 1))
                    found.setdefault(name, {}).setdefault(policy, []).append((size / 1024, accuracy))
    return found


def costs(pairs: int) -> list[Row]:
    """A step of training, beside the same network in fp32, taken in turn: GCN's by the clock, and GCN's and GraphSAGE's
    by the CPU time of the process on one thread."""
    rows = []
    for model, name in (("gcn", "GCN"), ("sage", "GraphSAGE")):
        for nodes in (3_000, 30_000):
            data = f"planted:nodes={nodes},degree=8,features=128,classes=7"
            steps = {kind: step_of(data, kind, 64, model) for kind in ("fp32", "a2q", "mega", "uniform 2-bit")}
            case = f"step of {nodes:,} nodes, {name} of 128 to 64 columns"
            if model == "gcn":
                torch.set_num_threads(2)
                rows += in_turn(f"a {case}", steps, pairs, time.perf_counter)
            torch.set_num_threads(1)
            rows += in_turn(f"CPU time of a {case}", steps, pairs, time.process_time)
    return rows


def in_turn(case: str, steps: dict[str, Any], pairs: int, clock: Callable[[], float]) -> list[Row]:
    """Milliseconds of each step by `clock` beside fp32's."""
    took: dict[str, list[float]] = {kind: [] for kind in steps}
    for turn in range(pairs + 2):
        for kind, step in steps.items():
            begun = clock()
            for _ in range(3):
                step()
            if turn > 1:
                took[kind].append(1e3 * (clock() - begun) / 3)
    rows, threads = [], torch.get_num_threads()
    for kind in [one for one in steps if one != "fp32"]:
        found = list(zip(took[kind], took["fp32"], strict=True))
        label = f"{case}, {kind}, {threads} thread{'s' * (threads > 1)}"
        rows.append(compare(label, "fp32", "ms", found, higher_is_better=False))
    return rows


def step_of(data: str, kind: str, width: int, model_kind: str) -> Any:
    table: dict[str, Any] = {"model": {"kind": model_kind, "width": width}, "data": {"path": data}}
    table["train"] = {"steps": 10}
    table |= {"quant": dict(quant)} if (quant := KINDS[kind]) is not None else {}
    workload = open_graph(defaults.resolve(recipe_file.from_table(table))[0])
    model = workload.build(torch.device("cpu"), torch.float32).train()
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=0.01)
    (batch,) = workload.batches(0, Shard(0, workload.global_batch, workload.global_batch))

    def step() -> None:
        optimizer.zero_grad()
        loss, weight = workload.loss(model, batch)
        (loss / weight).backward()
        optimizer.step()

    return step


def means(case: str, peer: str, pairs: Sequence[tuple[float, float]]) -> Row:
    """Mean accuracies over seeds, as the literature gives them, and the mean difference with its standard error."""
    ours, theirs = (statistics.mean(one) for one in zip(*pairs, strict=True))
    apart = [one - other for one, other in pairs]
    error = f", standard error {statistics.stdev(apart) / math.sqrt(len(apart)):.2f}" if len(apart) > 1 else ""
    spread = f"{statistics.mean(apart):+.2f} points{error} (n={len(apart)})"
    return Row(case, peer, theirs, ours, ours / theirs, "%, mean", spread)


def products(nodes: int, pairs: int) -> list[Row]:
    """A X from packed rows: all of 4 bits, and of widths by chance, seven of eight rows of 2."""
    random = np.random.default_rng(0)
    degree, columns, times = 8, 128, max(1, 200_000 // nodes)
    indptr = torch.arange(nodes + 1) * degree
    indices = torch.from_numpy(np.sort(random.integers(0, nodes, (nodes, degree)), 1).reshape(-1))
    matrix = torch.sparse_csr_tensor(indptr, indices, torch.ones(len(indices)), (nodes, nodes))
    mixed = torch.from_numpy(np.where(random.random(nodes) < 7 / 8, 2, random.integers(3, 9, nodes)).astype(np.uint8))
    rows = []
    for name, widths in (("4 bits", torch.full((nodes,), 4, dtype=torch.uint8)), ("2 to 8 bits", mixed)):
        largest = (1 << (widths.numpy().astype(np.int64) - 1)) - 1
        codes = torch.from_numpy(random.integers(-largest[:, None], largest[:, None] + 1, (nodes, columns), np.int8))
        packed, dense = PackedMatrix.of(codes, widths, torch.ones(nodes)), codes.float()
        assert torch.equal(packed_matmul(packed, indptr, indices), matrix @ dense)
        found = []
        for _ in range(pairs):
            took = []
            for run in (lambda: packed_matmul(packed, indptr, indices), lambda: matrix @ dense):  # noqa: B023
                begun = time.perf_counter()
                for _ in range(times):
                    run()
                took.append(1e3 * (time.perf_counter() - begun) / times)
            found.append((took[0], took[1]))
        size = f"{nodes:,} nodes x {columns}, degree {degree}, {name}, {torch.get_num_threads()} threads"
        rows.append(compare(f"A X from packed rows: {size}", "torch.sparse fp32", "ms", found, higher_is_better=False))
    return rows


def main() -> None:
    options = arguments(
        __doc__ or "",
        data={"default": ".", "help": "folder of cora/, citeseer/ and pubmed/"},
        only={
            "default": "cora,citeseer,pubmed,cora-64,citeseer-64,cora-curve,citeseer-curve,products,cached,cost",
            "help": "of these and debian, with commas; none: nothing",
        },
        keep={"default": "", "help": "folder of what was trained"},
        kinds={"default": "", "help": "of debian's networks, with commas; none: all"},
        picture={"default": "", "help": "file: accuracy against bytes of what --keep has, as a PNG"},
    )
    torch.set_num_threads(1)
    seeds = options.pairs or (3 if options.quick else 10)
    rows: list[Row] = []
    for name in options.only.replace("none", "").split(","):
        path = Path(options.data) / name.split("-")[0]
        if name in ("products", "cached"):
            torch.set_num_threads(2)
            nodes = 4_000 if name == "cached" else 100_000 if options.quick else 2_000_000
            rows += products(nodes, options.pairs or 7)
        elif name == "cost":
            rows += costs(options.pairs or (3 if options.quick else 15))
        elif name == "debian":
            torch.set_num_threads(1)
            rows += accuracies(Path(DEBIAN), options.pairs or 1, 64, options.keep, options.kinds)
        elif name.endswith("-curve") and (path / f"ind.{path.name}.allx").exists():
            torch.set_num_threads(1)
            rows += curve(path, options.pairs or 3, options.keep)
        elif (path / f"ind.{path.name}.allx").exists():
            torch.set_num_threads(1)
            rows += accuracies(path, seeds, 64 if name.endswith("-64") else 16, options.keep)
        elif name:
            print(f"without {name}: {path} has no features")
    if options.picture:
        a2q_picture.draw(Path(options.picture), curves_kept(options.keep, Path(options.data)))
    if rows:
        publish(rows, options.json)


if __name__ == "__main__":
    main()
