"""A2Q and MEGA's widths by degree beside learned-step uniform widths and fp32: accuracy and the bytes really stored.

    python bench/a2q.py [--quick] [--pairs SEEDS] [--data FOLDER] [--only NAME] [--json FILE]

GCN of two layers and 16 columns on Cora and CiteSeer (raw files in FOLDER/NAME), standard split, 200 steps of Adam,
test accuracy at the step of the best validation accuracy, every ten steps. Weights and messages have 4 bits in all
quantized networks, learned by the same rule. `uniform`: one learned step for the layer, 2 or 4 bits. A2Q and MEGA have
a target in bits a value (SHARE). Bytes: the package of the hidden features (payload, headers, padding, lists, index,
steps). Products that read packed rows: 4-bit rows of 128 columns beside `torch.sparse` in fp32, same edges.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from espalier.config import defaults, recipe_file
from espalier.graph import quantization
from espalier.graph.subgraphs import infer
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.quant.packed_spmm import PackedMatrix, packed_matmul
from espalier.workload import Shard
from table import Row, arguments, compare, publish

WIDTH, EVERY = 16, 10
KINDS: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "uniform 4-bit": {"kind": "uniform", "bits": 4},
    "uniform 2-bit": {"kind": "uniform", "bits": 2},
    "a2q": {"kind": "a2q", "bits": 2},
    "mega": {"kind": "mega", "bits": 2},
}
SHARE = {"a2q": 1.0, "mega": 1.6}
"""Bits a value that the target asks for."""


def opened(path: Path, kind: str, seed: int) -> GraphWorkload:
    table: dict[str, Any] = {"model": {"kind": "gcn", "width": WIDTH}, "data": {"path": str(path)}}
    table["train"] = {"steps": 200, "seed": seed}
    quant = KINDS[kind]
    if quant is not None:
        table["quant"] = dict(quant)
        if kind in SHARE:
            nodes = open_graph(defaults.resolve(recipe_file.from_table({**table, "quant": None}))[0]).graph.nodes
            table["quant"]["target"] = int(nodes * WIDTH * SHARE[kind] / 8)
    return open_graph(defaults.resolve(recipe_file.from_table({k: v for k, v in table.items() if v is not None}))[0])


def accuracy(workload: GraphWorkload, model: torch.nn.Module) -> tuple[float, float]:
    """Validation and test, per cent."""
    logits, parts, labels = infer(model.eval(), workload.task.held), workload.task.parts, workload.task.labels
    found = ((logits[ids].argmax(1) == labels[ids]).float().mean() for ids in (parts.validation, parts.test))
    return tuple(100 * float(one) for one in found)  # type: ignore[return-value]


def trained(path: Path, kind: str, seed: int) -> tuple[float, int]:
    """(test accuracy, bytes of the hidden features)."""
    workload = opened(path, kind, seed)
    model = workload.build(torch.device("cpu"), torch.float32)
    parameters = [one for one in model.parameters() if one.requires_grad]
    matrices = [one for one in parameters if one.ndim > 1]
    others = [one for one in parameters if one.ndim < 2]
    optimizer = torch.optim.Adam(
        [{"params": matrices, "weight_decay": 5e-4}, {"params": others, "weight_decay": 0.0}], lr=0.01
    )
    best, count = (-1.0, 0.0), workload.global_batch
    for step in range(200):
        torch.manual_seed(1000 * seed + step)
        model.train()
        (batch,) = workload.batches(step, Shard(0, count, count))
        optimizer.zero_grad()
        loss, weight = workload.loss(model, batch)
        (loss / weight).backward()
        optimizer.step()
        if step % EVERY == EVERY - 1 and (now := accuracy(workload, model))[0] > best[0]:
            best = now
    found = quantization.quantization_of(model)
    if found is None:
        return best[1], 4 * workload.graph.nodes * WIDTH
    found.packed = True
    infer(model.eval(), workload.task.held)
    return best[1], sum(one.nbytes for one in found.stored.values())


def accuracies(path: Path, seeds: int) -> list[Row]:
    runs = {kind: [trained(path, kind, seed) for seed in range(1, seeds + 1)] for kind in KINDS}
    name, rows = path.name, []
    for ours in ("a2q", "mega"):
        for peer in KINDS:
            if peer not in ("a2q", "mega"):
                pairs = [(one[0], other[0]) for one, other in zip(runs[ours], runs[peer], strict=True)]
                rows.append(compare(f"{name}, {ours}: accuracy", peer, "%", pairs))
                sizes = [(one[1] / 1024, other[1] / 1024) for one, other in zip(runs[ours], runs[peer], strict=True)]
                rows.append(compare(f"{name}, {ours}: hidden features", peer, "KiB", sizes, higher_is_better=False))
    return rows


def products(nodes: int, pairs: int) -> Row:
    random = np.random.default_rng(0)
    degree, columns = 8, 128
    indptr = torch.arange(nodes + 1) * degree
    indices = torch.from_numpy(np.sort(random.integers(0, nodes, (nodes, degree)), 1).reshape(-1))
    codes = torch.from_numpy(random.integers(-7, 8, (nodes, columns), dtype=np.int8))
    packed = PackedMatrix.of(codes, torch.full((nodes,), 4, dtype=torch.uint8), torch.ones(nodes))
    dense = codes.float()
    matrix = torch.sparse_csr_tensor(indptr, indices, torch.ones(len(indices)), (nodes, nodes))
    assert torch.equal(packed_matmul(packed, indptr, indices), matrix @ dense)
    found = []
    for _ in range(pairs):
        took = []
        for run in (lambda: packed_matmul(packed, indptr, indices), lambda: matrix @ dense):
            begun = time.perf_counter()
            run()
            took.append(1e3 * (time.perf_counter() - begun))
        found.append((took[0], took[1]))
    size = f"{nodes:,} nodes x {columns}, degree {degree}, 4 bits, {torch.get_num_threads()} threads"
    return compare(f"A X from packed rows: {size}", "torch.sparse fp32", "ms", found, higher_is_better=False)


def main() -> None:
    options = arguments(
        __doc__ or "",
        data={"default": ".", "help": "folder of cora/ and citeseer/"},
        only={"default": "", "help": "cora, citeseer or products"},
    )
    torch.set_num_threads(1)
    seeds = options.pairs or (3 if options.quick else 10)
    rows: list[Row] = []
    for name in ("cora", "citeseer"):
        if options.only in ("", name):
            rows += accuracies(Path(options.data) / name, seeds)
    if options.only in ("", "products"):
        torch.set_num_threads(2)
        rows.append(products(100_000 if options.quick else 2_000_000, 5))
    publish(rows, options.json)


if __name__ == "__main__":
    main()
