"""A2Q and MEGA's widths by degree beside learned-step uniform widths, Degree-Quant and fp32: accuracy and the bytes
really stored.

    python bench/a2q.py [--quick] [--pairs SEEDS] [--data FOLDER] [--only NAMES] [--keep FOLDER] [--json FILE]
                        [--picture FILE] [--kinds NAMES]

GCN of two layers on Cora, CiteSeer and PubMed (raw files in FOLDER/NAME; what is not there is left out), standard
split, 200 steps of Adam, and with `--only debian` on the packages that apt knows, 64 columns, 60 steps; test accuracy
at the step of the best validation accuracy, every ten steps. Nothing of that is timed: it may run in pieces (`--keep`
takes up what was trained before) and beside other work. Weights and messages have 4 bits in all quantized networks,
learned by the same rule. `uniform`: one learned step for the layer, 2 or 4 bits. `LSQ`: the same, steps of rows and of
messages learned from the gradient of the task, as its authors have it (arXiv 1902.08153), not from their own errors.
`Degree-Quant` (arXiv 2008.05000): 4 or 2 bits, ranges from percentiles, nodes of high degree protected at random while
training (its mask and ranges are written here; the rest is ours). A2Q and MEGA have a target in bits a value (SHARE).
Bytes: the package of the hidden features (payload, headers, padding, lists, index, steps). `-64`: 64 columns.
`cora-inductive`: nodes of the test are hidden while training. `cora-curve`, `citeseer-curve`: 64 columns at 1 to 4 bits
a value, three seeds, and a2q with the gradient of the task in place of the local one, with the share of nodes whose
step it does not reach; `--picture` draws accuracy against bytes of what FOLDER has. Timed, two threads: `products` and
`cached`, products that read packed rows beyond the last-level cache and within it, 128 columns, beside `torch.sparse`
in fp32, same edges; `cost`, a step of training beside fp32, GCN's by the clock, GCN's and GraphSAGE's also by CPU time
on one thread.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))
import a2q_picture
import a2q_speed
import real_graphs
from espalier.graph.sampling.subgraphs import infer
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.mechanisms.few_bits import quantization
from espalier.mechanisms.few_bits.a2q import Coded, FeatureQuantizer
from espalier.mechanisms.few_bits.bit_allocator import RowIndex
from espalier.mechanisms.few_bits.quantization import QuantizedGraph
from espalier.parallel.workload import Shard
from espalier.recipe import defaults, recipe_file
from table import Row, arguments, compare, publish

EVERY = 10
DEBIAN = "debian:packages"
KINDS: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "uniform 4-bit": {"kind": "uniform", "bits": 4},
    "uniform 2-bit": {"kind": "uniform", "bits": 2},
    "Degree-Quant 4-bit": {"kind": "uniform", "bits": 4},
    "Degree-Quant 2-bit": {"kind": "uniform", "bits": 2},
    "a2q": {"kind": "a2q", "bits": 4},
    "mega": {"kind": "mega", "bits": 4},
}
SHARE = {"a2q": 1.7, "mega": 1.85}
"""Bits a value that the target asks for, so that packages are about as large as those of 2 bits for all."""
TASK = "a2q by the task alone"
CURVE = {"uniform": ("uniform 1-bit", "uniform 2-bit", "uniform 3-bit", "uniform 4-bit")}
KINDS |= {f"uniform {bits}-bit": {"kind": "uniform", "bits": bits} for bits in (1, 3)} | {TASK: KINDS["a2q"]}
KINDS |= {f"LSQ {bits}-bit": KINDS[f"uniform {bits}-bit"] for bits in (2, 3, 4)}
SHARE[TASK] = SHARE["a2q"]
for _kind in ("a2q", "mega"):
    CURVE[_kind] = (f"{_kind} 1-bit", _kind, f"{_kind} 3-bit", f"{_kind} 4-bit")
    for _name, _share in zip(CURVE[_kind], (0.9, SHARE[_kind], 2.6, 3.5), strict=True):
        KINDS[_name], SHARE[_name] = {"kind": _kind, "bits": 4}, _share
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


class Case(NamedTuple):
    """A data set, hidden columns, and whether nodes of the test are hidden while training."""

    path: Path
    width: int = 16
    inductive: bool = False

    @property
    def debian(self) -> bool:
        return str(self.path) == DEBIAN

    @property
    def steps(self) -> int:
        return 60 if self.debian else 200

    @property
    def name(self) -> str:
        columns = f", {self.width} columns" if self.width != 16 else ""
        return self.path.name + columns + (", inductive" if self.inductive else "")


@cache
def size_of(path: Path) -> tuple[int, int]:
    """Nodes, and columns of the input that are quantized."""
    table: dict[str, Any] = {
        "model": {"kind": "gcn"},
        "data": {"path": real_graphs.path_of(str(path))},
        "train": {"steps": 1},
    }
    graph = open_graph(defaults.resolve(recipe_file.from_table(table))[0]).graph
    return graph.nodes, graph.features.shape[1] if QuantizedGraph(graph).input_signed is not None else 0


def opened(case: Case, kind: str, seed: int) -> GraphWorkload:
    table: dict[str, Any] = {
        "model": {"kind": "gcn", "width": case.width},
        "data": {"path": real_graphs.path_of(str(case.path))},
    }
    table["train"] = {"steps": case.steps, "seed": seed}
    if case.inductive:
        table["graph"] = {"inductive": True}
    quant, share = KINDS[kind], SHARE.get(kind)
    if quant is not None:
        table["quant"] = dict(quant)
        if share is not None:
            nodes, inputs = size_of(case.path)
            table["quant"]["target"] = int(nodes * (inputs + case.width) * share / 8)
    return open_graph(defaults.resolve(recipe_file.from_table(table))[0])


def accuracy(workload: GraphWorkload, model: torch.nn.Module) -> tuple[float, float]:
    """Validation and test, per cent."""
    logits, parts, labels = infer(model.eval(), workload.task.view), workload.task.parts, workload.task.labels
    found = ((logits[ids].argmax(1) == labels[ids]).float().mean() for ids in (parts.validation, parts.test))
    return tuple(100 * float(one) for one in found)  # type: ignore[return-value]


def own_gradient(found: quantization.Quantization) -> None:
    """Widths and steps learn from the loss of the task alone."""
    for feature in found.features:
        feature.rule = feature.rule._replace(local=0.0)
    for column in found.columns:
        column.local = False


def trained(case: Case, kind: str, seed: int) -> tuple[float, int, float]:
    """(test accuracy, bytes of all quantized features, share of nodes whose step the first gradient does not reach)."""
    workload = opened(case, kind, seed)
    model = workload.build(torch.device("cpu"), torch.float32)
    found = quantization.quantization_of(model)
    if kind.startswith("Degree-Quant"):
        assert found is not None
        degrees, bits = torch.from_numpy(workload.graph.degrees()), int(kind.split()[1][0])
        for at, like in enumerate(found.features):
            found.features[at] = own = DegreeQuant(like, bits, degrees)
            model.layers[at + found.first].quantizer = own  # type: ignore[union-attr, operator, index]
    if kind == TASK or kind.startswith("LSQ"):
        assert found is not None
        own_gradient(found)
    parameters, silent = [one for one in model.parameters() if one.requires_grad], 0.0
    matrices = [one for one in parameters if one.ndim > 1]
    others = [one for one in parameters if one.ndim < 2]
    optimizer = torch.optim.Adam(
        [{"params": matrices, "weight_decay": 5e-4}, {"params": others, "weight_decay": 0.0}], lr=0.01
    )
    best, count = (-1.0, 0.0), workload.global_batch
    for step in range(case.steps):
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
        nodes, inputs = size_of(case.path)
        return best[1], 4 * nodes * (inputs + case.width), silent
    found.packed = True
    infer(model.eval(), workload.task.view)
    return best[1], sum(one.nbytes for one in found.stored.values()), silent


def kept(keep: str, case: Case, kind: str, seed: int) -> Path:
    name = f"{case.path.name}-{case.width}{'-inductive' * case.inductive}"
    return Path(keep) / f"{name}-{kind.replace(' ', '-')}-{seed}.json"


def once(keep: str, case: Case, kind: str, seed: int) -> tuple[float, ...]:
    """`trained`, or what a file in `keep` says of it."""
    file = kept(keep, case, kind, seed)
    if keep and file.exists():
        return tuple(json.loads(file.read_text()))
    found = trained(case, kind, seed)
    print(f"  {case.name}, {kind}, seed {seed}: {found}", flush=True)
    if keep:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    return found


def runs_of(keep: str, case: Case, kinds: Sequence[str], seeds: int) -> dict[str, list[tuple[float, ...]]]:
    """By kind; all kinds of a seed first, so that what is kept is whole early."""
    runs: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in kinds}
    for seed in range(1, seeds + 1):
        for kind in kinds:
            runs[kind].append(once(keep, case, kind, seed))
    return runs


def accuracies(case: Case, seeds: int, keep: str, only: str = "") -> list[Row]:
    kinds: Sequence[str] = ("fp32", "a2q", "mega") if case.inductive else WIDE if case.width == 64 else PLAIN
    kinds = PLAIN if case.debian else kinds
    runs = runs_of(keep, case, only.split(",") if only else kinds, seeds)
    rows = []
    for kind, found in runs.items():
        print(f"{case.name}, {kind}: {found}", flush=True)
    what = "input and hidden" if size_of(case.path)[1] else "hidden"
    for ours in [one for one in ("a2q", "mega") if one in runs]:
        for peer in [one for one in runs if one not in ("a2q", "mega")]:
            both = list(zip(runs[ours], runs[peer], strict=True))
            rows.append(means(f"{case.name}, {ours}: accuracy", peer, [(one[0], other[0]) for one, other in both]))
            sizes = [(one[1] / 1024, other[1] / 1024) for one, other in both]
            label = f"{case.name}, {ours}: {what} features"
            rows.append(compare(label, peer, "KiB", sizes, higher_is_better=False))
    return rows


def curve(case: Case, seeds: int, keep: str) -> list[Row]:
    """Accuracy against bytes, 1 to 4 bits a value, 64 columns; and what the local gradient is worth."""
    kinds = ("fp32", TASK, *(one for names in CURVE.values() for one in names))
    runs, rows = runs_of(keep, case, kinds, seeds), []
    for kind in (one for one in kinds if one != "fp32"):
        pairs = [(one[0], other[0]) for one, other in zip(runs[kind], runs["fp32"], strict=True)]
        size = statistics.mean(one[1] for one in runs[kind]) / 1024
        rows.append(means(f"{case.name}, {kind}, {size:.1f} KiB: accuracy", "fp32", pairs))
    pairs = [(one[0], other[0]) for one, other in zip(runs["a2q"], runs[TASK], strict=True)]
    rows.append(means(f"{case.name}, a2q: accuracy", TASK, pairs))
    ours, theirs = (100 * statistics.mean(one[2] for one in runs[kind]) for kind in ("a2q", TASK))
    label = f"{case.name}, a2q: nodes whose step the first gradient does not reach"
    rows.append(Row(label, TASK, theirs, ours, theirs / max(ours, 1e-9), "%", f"n={seeds}"))
    return rows


def curves_kept(keep: str, data: Path) -> dict[str, a2q_picture.Lines]:
    """By data set and policy, (KiB, accuracy) of each number of bits, means over the seeds that `keep` has."""
    found: dict[str, a2q_picture.Lines] = {}
    for name in ("cora", "citeseer"):
        for policy, kinds in {**CURVE, "fp32": ("fp32",)}.items():
            for kind in kinds:
                paths = [kept(keep, Case(data / name, 64), kind, seed) for seed in range(1, 11)]
                runs = [json.loads(one.read_text()) for one in paths if one.exists()]
                if runs:
                    accuracy, size = (statistics.mean(run[at] for run in runs) for at in (0, 1))
                    found.setdefault(name, {}).setdefault(policy, []).append((size / 1024, accuracy))
    return found


def means(case: str, peer: str, pairs: Sequence[tuple[float, float]]) -> Row:
    """Mean accuracies over seeds, as the literature gives them, and the mean difference with its standard error."""
    ours, theirs = (statistics.mean(one) for one in zip(*pairs, strict=True))
    apart = [one - other for one, other in pairs]
    error = f", standard error {statistics.stdev(apart) / math.sqrt(len(apart)):.2f}" if len(apart) > 1 else ""
    spread = f"{statistics.mean(apart):+.2f} points{error} (n={len(apart)})"
    return Row(case, peer, theirs, ours, ours / theirs, "%, mean", spread)


def of_citations(name: str, path: Path, options: Any) -> list[Row]:
    seeds = options.pairs or (3 if options.quick else 10)
    if name.endswith("-curve"):
        return curve(Case(path, 64), options.pairs or 3, options.keep)
    if name.endswith("-inductive"):
        return accuracies(Case(path, inductive=True), options.pairs or 3, options.keep, options.kinds)
    return accuracies(Case(path, 64 if name.endswith("-64") else 16), seeds, options.keep, options.kinds)


def main() -> None:
    options = arguments(
        __doc__ or "",
        data={"default": ".", "help": "folder of cora/, citeseer/ and pubmed/"},
        only={
            "default": "cora,citeseer,pubmed,cora-64,citeseer-64,cora-curve,citeseer-curve,products,cached,cost",
            "help": "of these, debian and cora-inductive, with commas; none: nothing",
        },
        keep={"default": "", "help": "folder of what was trained"},
        kinds={"default": "", "help": "of networks, with commas; none: all"},
        picture={"default": "", "help": "file: accuracy against bytes of what --keep has, as a PNG"},
    )
    rows: list[Row] = []
    for name in options.only.replace("none", "").split(","):
        path = Path(options.data) / name.split("-")[0]
        torch.set_num_threads(2 if name in ("products", "cached") else 1)
        if name in ("products", "cached"):
            nodes = 4_000 if name == "cached" else 100_000 if options.quick else 2_000_000
            rows += a2q_speed.products(nodes, options.pairs or 7)
        elif name == "cost":
            rows += a2q_speed.costs(options.pairs or (3 if options.quick else 15))
        elif name == "debian":
            rows += accuracies(Case(Path(DEBIAN), 64), options.pairs or 1, options.keep, options.kinds)
        elif (path / f"ind.{path.name}.allx").exists():
            rows += of_citations(name, path, options)
        elif name:
            print(f"without {name}: {path} has no features")
    if options.picture:
        a2q_picture.draw(Path(options.picture), curves_kept(options.keep, Path(options.data)))
    if rows:
        publish(rows, options.json)


if __name__ == "__main__":
    main()
