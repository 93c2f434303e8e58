"""Graph networks beside PyTorch Geometric's on the same graphs: epochs, accuracy, MaxK, inference; and the sampler.

    python bench/graph.py [--quick] [--pairs N] [--json FILE] [--only WORD] [--data FOLDER]

Epochs: forward, loss and backward of two layers over a whole planted graph of 50,000 nodes of degree 16 (and of degree
50 for MaxK); each peer is the faster of PyG's `edge_index` and its `torch.sparse` CSR form, normalised once.
Accuracy: Cora and CiteSeer with the standard split (--data, folder `planetoid`), ten seeds, the same optimizer, steps
and sizes on both sides, at the last step. Inference: latency of all nodes, and the most memory a process needs beyond
what it held before. Beside DGL's own layers, by the Python of bench/peers/dgl.sh or of --dgl PYTHON: epochs
with Adam on three graphs, wall seconds of two threads and CPU seconds of one, and the sampler, edges drawn for batches
of 1,024 nodes, fan-out 10 and 10.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from beside_dgl import of_dgl, sampler
from espalier import recipe as config
from espalier.graph.data import pyg, sources, synthetic
from espalier.graph.data.graph import DataSplit, Graph
from espalier.graph.sampling.subgraphs import infer
from espalier.graph.workload import GraphWorkload
from espalier.machine.peak_memory import peak_memory
from espalier.parallel.workload import Shard
from espalier.recipe import defaults, recipe_file
from espalier.train.rank_setup import RankSetup
from table import Row, arguments, compare, publish

KINDS = ("gcn", "sage", "gat")
WIDTH = 64
SEEDS = (1, 2, 3)
"""Of networks whose accuracy is compared, MaxK beside ReLU."""
ACCURATE = (("cora", "gcn"), ("cora", "gat"), ("citeseer", "gcn"))


# --- ours --------------------------------------------------------------------------------------------------------


def recipe(kind: str, **changes: Any) -> config.Recipe:
    table = {"model": {"kind": kind, **changes.pop("model", {})}, "data": {"path": "bench"}, "train": {**changes}}
    return defaults.resolve(recipe_file.from_table(table))[0]


def opened(graph: Graph, kind: str, **changes: Any) -> GraphWorkload:
    return GraphWorkload(recipe(kind, **changes), graph)


def epoch_of_ours(workload: GraphWorkload) -> Callable[[], None]:
    model = workload.build(torch.device("cpu"), torch.float32).train()
    count = workload.global_batch

    def run() -> None:
        model.zero_grad()
        (batch,) = workload.batches(0, Shard(0, count, count))
        loss, weight = workload.loss(model, batch)
        (loss / weight).backward()

    return run


# --- PyG ---------------------------------------------------------------------------------------------------------


class Theirs(nn.Module):
    """Two layers of PyG with the sizes, the nonlinearity and the dropout of ours."""

    def __init__(self, kind: str, inputs: int, width: int, outputs: int, dropout: float) -> None:
        from torch_geometric.nn import GATConv, GCNConv, SAGEConv

        super().__init__()
        self.kind, self.dropout = kind, dropout
        if kind == "gat":
            self.first = GATConv(inputs, width // 8, heads=8, dropout=dropout)
            self.second = GATConv(width, outputs, heads=1, concat=False, dropout=dropout)
        elif kind == "gcn":
            self.first, self.second = GCNConv(inputs, width, cached=True), GCNConv(width, outputs, cached=True)
        else:
            self.first, self.second = SAGEConv(inputs, width), SAGEConv(width, outputs)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        if self.kind != "sage":
            x = F.dropout(x, self.dropout, self.training)
        x = self.first(x, edges)
        x = F.elu(x) if self.kind == "gat" else F.relu(x)
        return self.second(F.dropout(x, self.dropout, self.training), edges)


def forms_of(graph: Graph) -> dict[str, Tensor]:
    """What PyG takes: the pairs, and the transposed adjacency as torch's CSR."""
    data = pyg.to_pyg(graph)
    ones = torch.ones(graph.edges)
    shape = (graph.nodes, graph.nodes)
    indptr, indices = torch.from_numpy(graph.indptr), torch.from_numpy(graph.indices.astype(np.int64))
    return {"edge_index": data.edge_index, "csr": torch.sparse_csr_tensor(indptr, indices, ones, shape)}


def epoch_of_theirs(model: nn.Module, graph: Graph, edges: Tensor) -> Callable[[], None]:
    x, labels = torch.from_numpy(np.array(graph.features)), torch.from_numpy(np.array(graph.labels))
    train = torch.from_numpy(graph.parts.train)

    def run() -> None:
        model.zero_grad()
        F.cross_entropy(model(x, edges)[train], labels[train]).backward()

    return run


# --- timing ------------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def beside(case: str, ours: Callable[[], object], peers: dict[str, Callable[[], object]], pairs: int) -> Row:
    """Ours beside the fastest peer, in turns; each is run once before, and peers that cannot are left out."""
    ours()
    first: dict[str, float] = {}
    for name, run in list(peers.items()):
        try:
            run()
            first[name] = min(seconds(run) for _ in range(2))
        except (RuntimeError, ValueError) as error:
            print(f"{case}: {name} left out ({str(error).splitlines()[0][:80]})", file=sys.stderr)
    best = min(first, key=lambda name: first[name])
    taken = [(seconds(ours) * 1e3, seconds(peers[best]) * 1e3) for _ in range(pairs)]
    return compare(case, f"pyg-{best}", "ms", taken, higher_is_better=False)


def epochs(kind: str, graph: Graph, name: str, pairs: int) -> Row:
    workload = opened(graph, kind)
    outputs, inputs, dropout = graph.outputs, graph.features.shape[1], recipe(kind).model.dropout
    peers = {}
    for form, edges in forms_of(graph).items():
        peers[form] = epoch_of_theirs(Theirs(kind, inputs, WIDTH, outputs, dropout).train(), graph, edges)
    return beside(f"{kind} epoch, {name}", epoch_of_ours(workload), peers, pairs)


# --- MaxK --------------------------------------------------------------------------------------------------------


def maxk(graph: Graph, k: int, pairs: int, steps: int) -> list[Row]:
    """MaxK-SAGE beside ReLU-SAGE, both ours; accuracy in per cent after the same steps."""
    sizes = {"width": 256, "depth": 3, "norm": True}
    plain = {"model": {**sizes}, "steps": steps}
    kept = {"model": {**sizes, "k": k}, "steps": steps}
    ours, theirs = (opened(graph, "sage", **one) for one in (kept, plain))
    runs = [epoch_of_ours(one) for one in (ours, theirs)]
    for run in runs:
        run()
    taken = [(seconds(runs[0]) * 1e3, seconds(runs[1]) * 1e3) for _ in range(pairs)]
    rows = [compare(f"maxk-sage epoch, k {k} of 256, {graph.origin}", "relu-sage", "ms", taken, higher_is_better=False)]
    points = []
    for seed in SEEDS:
        pair = (opened(graph, "sage", seed=seed, **one) for one in (kept, plain))
        points.append(tuple(100 * trained(one) for one in pair))
    case = f"maxk-sage accuracy, k {k} of 256, {steps} steps, {len(SEEDS)} seeds"
    return [*rows, compare(case, "relu-sage", "%", points)]


# --- accuracy ----------------------------------------------------------------------------------------------------


def trained(workload: GraphWorkload) -> float:
    """Test accuracy at the last step, by the product's own optimizer and schedule on one rank."""
    from espalier.plan import base as plans
    from espalier.train import rank_spec as launch
    from espalier.train import trainer

    count = workload.global_batch
    plan = plans.Plan(ranks=(plans.Rank(share=(0, count)),), micro_batch=count, precision="fp32")
    one = trainer.Trainer(RankSetup(workload.recipe, plan, workload, launch.places(plan)[0]), None)
    for step in range(workload.recipe.train.steps or 0):
        one.train_step(workload.batches(step, Shard(0, count, count)))
    model = one.built.model.eval()
    logits = infer(model, workload.task.view)
    return right(logits, workload.task.graph)


def right(logits: Tensor, graph: Graph) -> float:
    test = torch.from_numpy(graph.parts.test)
    labels = torch.from_numpy(np.array(graph.labels))[test]
    return float((logits[test].argmax(1) == labels)[labels >= 0].float().mean())


def accuracy(data: Path, name: str, kind: str, seeds: int) -> Row:
    """Both sides: Adam, L2 5e-4, the authors' rate, constant, no clipping."""
    graph = sources.load(config.Data(path=str(data / "planetoid" / name)), config.GraphOptions())
    rate, steps = (0.005, 400) if kind == "gat" else (0.01, 200)
    edges = forms_of(graph)["edge_index"]
    pairs = []
    for seed in range(1, seeds + 1):
        optimizer = {
            "kind": "adamw",
            "coupled": True,
            "weight_decay": 5e-4,
            "betas": [0.9, 0.999],
            "learning_rate": rate,
        }
        made = {"steps": steps, "seed": seed, "clip": 0.0, "optimizer": optimizer, "schedule": {"kind": "constant"}}
        ours = trained(opened(graph, kind, model={"width": WIDTH if kind == "gat" else 16}, **made))
        pairs.append((100 * ours, 100 * trained_by_pyg(graph, kind, edges, seed, (rate, steps))))
        print(f"{name} {kind} seed {seed}: {pairs[-1][0]:.1f} {pairs[-1][1]:.1f}", file=sys.stderr)
    ours, theirs = (statistics.mean(side) for side in zip(*pairs, strict=True))
    row = compare(f"{name} {kind} test accuracy, mean of {seeds} seeds", "pyg", "%", pairs)
    return msgspec.structs.replace(row, peer_value=theirs, ours=ours, ratio=ours / theirs)


def trained_by_pyg(graph: Graph, kind: str, edges: Tensor, seed: int, how: tuple[float, int]) -> float:
    torch.manual_seed(seed)
    width, dropout = (64, 0.6) if kind == "gat" else (16, 0.5)
    model = Theirs(kind, graph.features.shape[1], width, graph.outputs, dropout).train()
    decayed = [one for one in model.parameters() if one.ndim >= 2]
    rest = [one for one in model.parameters() if one.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 5e-4}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.Adam(groups, lr=how[0])
    run = epoch_of_theirs(model, graph, edges)
    for _ in range(how[1]):
        run()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return right(model(torch.from_numpy(np.array(graph.features)), edges), graph)


# --- inference ---------------------------------------------------------------------------------------------------


def inference(kind: str, graph: Graph, name: str, pairs: int) -> Row:
    workload = opened(graph, kind)
    model = workload.build(torch.device("cpu"), torch.float32).eval()
    features = torch.from_numpy(np.array(graph.features))
    peers = {}
    for form, edges in forms_of(graph).items():
        other = Theirs(kind, graph.features.shape[1], WIDTH, graph.outputs, 0.0).eval()
        peers[form] = torch.no_grad()(lambda other=other, edges=edges: other(features, edges))
    return beside(f"{kind} inference, {name}", lambda: infer(model, workload.task.view), peers, pairs)


def cliquish(nodes: int) -> Graph:
    """Cliques of 60 to 200 nodes, 5 % of their edges dropped, two random edges per node (as in bench/cbm.py)."""
    from cbm import cliques

    matrix = cliques(nodes, 60, 200, 0.05, 2).tocoo()
    draw = np.random.default_rng(0)
    parts = DataSplit(*np.array_split(np.arange(nodes), 3))
    known: dict[str, Any] = {"labels": draw.integers(0, 10, nodes), "parts": parts}
    return Graph.from_edges(matrix.col, matrix.row, features=draw.normal(size=(nodes, 64)), **known)


def memory(kind: str, graph_text: str, folder: str, form: str) -> float:
    """MiB that inference in a fresh process needs beyond what it held before; form `ours` or one of PyG's."""
    command = [sys.executable, __file__, "--memory", kind, graph_text, folder, form]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure_memory(kind: str, text: str, folder: str, form: str) -> None:
    graph = synthetic.load(text, Path(folder))
    if form == "ours":
        workload = opened(graph, kind)
        model = workload.build(torch.device("cpu"), torch.float32).eval()
        small = opened(synthetic.load("planted:nodes=100", Path(folder)), kind)
        infer(small.build(torch.device("cpu"), torch.float32).eval(), small.task.view)  # compiles
        run: Callable[[], object] = lambda: infer(model, workload.task.view)  # noqa: E731
    else:
        features, edges = torch.from_numpy(np.array(graph.features)), forms_of(graph)[form]
        other = Theirs(kind, graph.features.shape[1], WIDTH, graph.outputs, 0.0).eval()
        run = torch.no_grad()(lambda: other(features, edges))
    before = peak_memory(torch.device("cpu"))
    run()
    print((peak_memory(torch.device("cpu")) - before) / 2**20)


# --- DGL's own layers --------------------------------------------------------------------------------------------


def beside_dgl(kind: str, graph: Graph, name: str, python: str | None, pairs: int) -> list[Row]:
    """Epochs with Adam of ours and of DGL's own layers."""
    if python is None:
        print(f"{kind} epoch, {name}: no DGL (bench/peers/dgl.sh, or --dgl PYTHON)", file=sys.stderr)
        return []
    workload = opened(graph, kind)
    model = workload.build(torch.device("cpu"), torch.float32).train()
    optimizer, count = torch.optim.Adam(model.parameters(), 0.01), workload.global_batch

    def epoch(clock: Callable[[], float]) -> float:
        begun = clock()
        optimizer.zero_grad()
        (batch,) = workload.batches(0, Shard(0, count, count))
        loss, weight = workload.loss(model, batch)
        (loss / weight).backward()
        optimizer.step()
        return clock() - begun

    arrays = {"indptr": graph.indptr, "indices": graph.indices.astype(np.int64), "features": np.array(graph.features)}
    arrays |= {"labels": np.array(graph.labels), "train": graph.parts.train}
    options = (kind, str(WIDTH), str(recipe(kind).model.dropout))
    rows, threads = [], torch.get_num_threads()
    for used, clock in ((threads, time.perf_counter), (1, time.process_time)):
        torch.set_num_threads(used)
        values = [
            (1e3 * ours, 1e3 * theirs) for ours, theirs in of_dgl(python, arrays, options, partial(epoch, clock), pairs)
        ]
        case, unit = f"{kind} epoch with Adam, {name}, {used} threads", "ms" if used > 1 else "ms cpu"
        rows.append(compare(case, "dgl-2.1.0", unit, values, higher_is_better=False))
    torch.set_num_threads(threads)
    return rows


# --- all of it ---------------------------------------------------------------------------------------------------


def main() -> None:
    own = {"only": {"default": ""}, "dgl": {"metavar": "PYTHON"}, "data": {"metavar": "FOLDER"}, "memory": {"nargs": 4}}
    options = arguments(__doc__ or "", **own)
    if options.memory:
        measure_memory(*options.memory)
        return
    quick = options.quick
    pairs = options.pairs or (5 if quick else 15)
    named = options.data or os.environ.get("ESPALIER_DATA")
    own_dgl = Path(__file__).parent / ".dgl" / "bin" / "python"
    dgl = options.dgl or (str(own_dgl) if own_dgl.exists() else None)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        text = f"planted:nodes={10_000 if quick else 50_000},degree=16,features=64"
        denser = f"planted:nodes={5_000 if quick else 20_000},degree=50,features=64,signal=1,homophily=0.15,classes=16"
        sparser = f"planted:nodes={10_000 if quick else 100_000},degree=6,features=64"
        cases: dict[str, Callable[[], list[Row]]] = {
            **{f"epoch-{kind}": _later(epochs, kind, text, folder, pairs) for kind in KINDS},
            **{
                f"dgl-{kind}-{at}": _later(beside_dgl, kind, one, folder, dgl, pairs)
                for at, one in enumerate((text, sparser, denser))
                for kind in KINDS
            },
            **{f"inference-{kind}": _later(inference, kind, text, folder, pairs) for kind in KINDS},
            **{f"memory-{kind}": _memory_rows(kind, text, folder) for kind in KINDS},
            "inference-cliques": lambda: [inference("gcn", cliquish(5_000 if quick else 20_000), "cliques", pairs)],
            **{f"maxk-{k}": _maxk(denser, folder, k, pairs, 20 if quick else 60) for k in (32, 16, 8)},
            "sampler": lambda: sampler(synthetic.load(text, Path(folder)), dgl, pairs, 10 if quick else 40),
        }
        for name, kind in ACCURATE if named else ():
            cases[f"accuracy-{name}-{kind}"] = _accuracy(Path(named or ""), name, kind, 2 if quick else 10)
        for name, run in cases.items():
            if options.only in name:
                rows += run()
                print(msgspec.json.encode(rows[-1:]).decode(), file=sys.stderr)
    publish(rows, options.json)


def _maxk(text: str, folder: str, k: int, pairs: int, steps: int) -> Callable[[], list[Row]]:
    return lambda: maxk(synthetic.load(text, Path(folder)), k, pairs, steps)


def _later(what: Callable[..., Any], kind: str, text: str, folder: str, *more: Any) -> Callable[[], list[Row]]:
    def run() -> list[Row]:
        found = what(kind, synthetic.load(text, Path(folder)), text, *more)
        return found if isinstance(found, list) else [found]

    return run


def _memory_rows(kind: str, text: str, folder: str) -> Callable[[], list[Row]]:
    def run() -> list[Row]:
        peers = {form: memory(kind, text, folder, form) for form in ("edge_index", "csr")}
        best = min(peers, key=lambda form: peers[form])
        pair = [(memory(kind, text, folder, "ours"), peers[best])]
        return [compare(f"{kind} inference memory, {text}", f"pyg-{best}", "MiB", pair, higher_is_better=False)]

    return run


def _accuracy(data: Path, name: str, kind: str, seeds: int) -> Callable[[], list[Row]]:
    return lambda: [accuracy(data, name, kind, seeds)]


if __name__ == "__main__":
    main()
