"""What bench/a2q.py times: a step of training with quantizers beside fp32, and products that read packed rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from espalier.graph.workload import open_graph
from espalier.mechanisms.few_bits.packed_spmm import PackedMatrix, packed_matmul
from espalier.parallel.workload import Shard
from espalier.recipe import defaults, recipe_file
from table import Row, compare

KINDS: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "a2q": {"kind": "a2q", "bits": 2},
    "mega": {"kind": "mega", "bits": 2},
    "uniform 2-bit": {"kind": "uniform", "bits": 2},
}


def costs(pairs: int) -> list[Row]:
    """A step of training, beside the same network in fp32, taken in turn: GCN's by the clock, and GCN's and GraphSAGE's
    by the CPU time of the process on one thread."""
    rows = []
    for model, name in (("gcn", "GCN"), ("sage", "GraphSAGE")):
        for nodes in (3_000, 30_000):
            data = f"planted:nodes={nodes},degree=8,features=128,classes=7"
            steps = {kind: step_of(data, kind, 64, model) for kind in KINDS}
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
