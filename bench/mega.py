"""MEGA: packages beside simple forms of the same features, decoding, and accelerators simulated on trained networks.

    python bench/mega.py [--quick] [--pairs N] [--data FOLDER] [--only NAMES] [--parts NAMES] [--json FILE]

A GCN of two layers and 128 columns, `quant.kind = "mega"`, 60 steps (20 on the last two), on Cora, CiteSeer and PubMed
(raw files in FOLDER/NAME; what is not there is left out), the packages that apt knows and WordNet. Sizes: the
package of hidden features, all parts counted, beside the same features in fp32, int4 (16 levels, a float32 scale a
row), CSR with int8 values, zstd (level 3) of int8; and beside zstd of the very codes that the package holds, an
entropy coder that nothing reads rows from. Condensed edges: requests and bytes that inference of all nodes in little
memory makes of the disk for the results of the first layer, beside rows by node. With --pairs also decoding: the
package to codes, in fp32-equivalent GB/s, beside zstd's of the int8 features, one thread, and the seconds that all
simulations take beside the goal of 60. Bags of words at the input: their package beside fp32. blosc2 is a peer where it
is installed. Accuracy of held-out nodes: one training beside one in fp32, not over seeds.
Simulation: cycles, DRAM bytes and energy of an inference of all nodes beside MEGA's; "published" are the paper's means
over five graphs and three networks, which nothing here is fitted to.
Ablation, with the buffers of the paper's configuration (96 KiB of products, 128 KiB of sums): rows as a bitmap with
codes of the widest row's bits, as packages with bitmaps, as packages with the shortest lists; then edges condensed.
Each stands beside the one before it.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import zstandard

sys.path.insert(0, str(Path(__file__).parent))
import real_graphs
from espalier.graph.data.condensed_file import Foretold, outside_sources
from espalier.graph.networks.gnn import Gnn
from espalier.graph.sampling.subgraphs import infer
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.mechanisms.disk_batches import inference
from espalier.mechanisms.disk_batches.inference import InferenceFolder
from espalier.mechanisms.few_bits import energy, packed_run, quantization
from espalier.mechanisms.few_bits.mega.package import encode
from espalier.parallel.workload import Shard
from espalier.recipe import defaults, recipe_file
from espalier.store.io_queue import IoQueue
from espalier.store.memory import MemoryRows
from espalier_accelerators import simulator
from table import Row, arguments, compare, publish

WIDTH = 128
LARGE = {"debian": "debian:packages", "wordnet": "debian:wordnet"}
PUBLISHED = {"hygcn": (38.3, 108.1, 47.6), "gcnax": (7.1, 10.5, 7.2), "grow": (4.0, 8.4, 5.4), "sgcn": (3.6, 7.3, 4.5)}


def trained(path: str, steps: int, kind: str = "mega") -> tuple[GraphWorkload, torch.nn.Module]:
    table = {"model": {"kind": "gcn", "width": WIDTH}, "data": {"path": real_graphs.path_of(path)}}
    table |= {"quant": {"kind": kind}} if kind else {}
    workload = open_graph(defaults.resolve(recipe_file.from_table({**table, "train": {"steps": steps}}))[0])
    model = workload.build(torch.device("cpu"), torch.float32).train()
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=0.01)
    for step in range(steps):
        torch.manual_seed(step)
        (batch,) = workload.batches(step, Shard(0, workload.global_batch, workload.global_batch))
        optimizer.zero_grad()
        loss, weight = workload.loss(model, batch)
        (loss / weight).backward()
        optimizer.step()
    return workload, model.eval()


def accuracy(workload: GraphWorkload, model: torch.nn.Module) -> float:
    """Of held-out nodes, in per cent."""
    count = workload.validation_samples()
    totals = workload.evaluate(model, Shard(0, count, count))
    return 100 * workload.summary({name: total / weight for name, (total, weight) in totals.items()})["accuracy"]


def squeezed_by_blosc(int8: np.ndarray) -> dict[str, int]:
    """Bytes that blosc2's default makes of them; nothing where it is not installed."""
    try:
        import blosc2
    except ImportError:
        return {}
    return {"blosc2 of int8": len(blosc2.compress2(int8.tobytes(), typesize=1)) + 4 * len(int8)}


def input_size(name: str, workload: GraphWorkload, model: torch.nn.Module) -> list[Row]:
    """Of features whose rows have one value but 0, with that value of each row; others are not packed so."""
    found = quantization.quantization_of(model)
    if found is None or "layers.0.rows" in found.stored:
        return []
    features = np.asarray(workload.graph.features)
    packed, values = packed_run.packed_input(features)
    pair = (packed.nbytes + 4 * len(values)) / 1024, 4 * features.size / 1024
    return [compare(f"{name}: input ({packed.occupied})", "fp32", "KiB", [pair], higher_is_better=False)]


def sizes_and_decoding(name: str, workload: GraphWorkload, model: torch.nn.Module, pairs: int) -> list[Row]:
    found = quantization.quantization_of(model)
    assert found is not None
    found.packed = True
    read: list[torch.Tensor] = []
    hook = model.layers[1].register_forward_pre_hook(  # type: ignore[union-attr, operator, index]
        lambda module, inputs: read.append(quantization.dense_rows(inputs[1])), prepend=True
    )
    infer(model, workload.task.view)
    hook.remove()
    packed, dense = found.stored["layers.1.rows"], torch.cat(read).numpy()
    level = np.abs(dense).max(1, keepdims=True) / 127
    int8 = np.round(dense / np.where(level > 0, level, 1)).astype(np.int8)
    compress = zstandard.ZstdCompressor(level=3).compress
    squeezed, values = compress(int8.tobytes()), int((int8 != 0).sum())
    peers = {
        "fp32": 4 * int8.size,
        "int4": int8.size // 2 + 4 * len(int8),
        "CSR, int8": values * 5 + 4 * len(int8) + 4 * len(int8),
        "zstd of int8": len(squeezed) + 4 * len(int8),
        **squeezed_by_blosc(int8),
        "zstd of these codes": len(compress(packed.decoded().codes.numpy().tobytes())) + 2 * len(int8),
    }
    rows = [
        compare(f"{name}: hidden features", peer, "KiB", [(packed.nbytes / 1024, size / 1024)], higher_is_better=False)
        for peer, size in peers.items()
    ]
    rows += input_size(name, workload, model)
    speeds = []
    for _ in range(pairs):
        begun = time.perf_counter()
        packed.decoded()
        middle = time.perf_counter()
        np.frombuffer(zstandard.ZstdDecompressor().decompress(squeezed), np.uint8)
        speeds.append(tuple(4e-9 * int8.size / took for took in (middle - begun, time.perf_counter() - middle)))
    form = f"{name}: decoding ({packed.occupied})"
    return [*rows, compare(form, "zstd of int8", "GB/s of fp32", speeds)] if speeds else rows


def simulated(name: str, workload: GraphWorkload, model: torch.nn.Module, timed: bool) -> list[Row]:
    begun = time.perf_counter()
    results = {one.name: one for one in energy.accelerators(workload, model)}
    took = time.perf_counter() - begun
    ours, rows = results["mega"], []
    if timed:
        case = f"{name}: simulation of five accelerators"
        rows.append(compare(case, "the goal", "s", [(took, 60.0)], higher_is_better=False))
    for kind in ("dram", "arithmetic", "buffer"):
        pair = 1e6 * getattr(ours, f"{kind}_joules"), 1e6 * getattr(results["hygcn"], f"{kind}_joules")
        rows.append(compare(f"{name}, simulated: of joules, {kind}", "hygcn", "µJ", [pair], higher_is_better=False))
    for peer, published in PUBLISHED.items():
        other = results[peer]
        figures = (("cycles", 1e-3, "thousands"), ("bytes", 2**-20, "MiB of DRAM"), ("joules", 1e6, "µJ"))
        for (field, scale, unit), known in zip(figures, published, strict=True):
            pair = scale * getattr(ours, field), scale * getattr(other, field)
            case = f"{name}, simulated: {field} (published {known})"
            rows.append(compare(case, peer, unit, [pair], higher_is_better=False))
    return rows


def ablation(name: str, workload: GraphWorkload, model: torch.nn.Module) -> list[Row]:
    """MEGA's parts, one after the other: bytes of the rows that both layers read, DRAM bytes and cycles."""
    assert isinstance(model, Gnn)
    chip, full = simulator.Chip(buffer=96 << 10), energy.network(workload, model)
    found = quantization.quantization_of(model)
    assert found is not None
    with quantization.packing(found) as stored_rows:
        infer(model, workload.task.view)
    packed = [stored_rows.get(f"layers.{at}.rows") for at in range(len(full.layers))]
    values = [0 if one is not None else 4 * workload.graph.nodes for one in packed]  # of bags of words, one a row
    every = [packed_run.packed_input(np.asarray(workload.graph.features))[0] if one is None else one for one in packed]
    bitmaps = [
        (-(-one.columns // 8) * one.rows + math.ceil(float(layer.nonzeros.sum()) * int(layer.bits.max()) / 8))
        for one, layer in zip(every, full.layers, strict=True)
    ]
    forms = {
        "a bitmap, codes of the widest row": bitmaps,
        "packages, bitmaps": [encode(one.decoded(), occupied="bitmap").nbytes for one in every],
        "packages, the shortest lists": [one.nbytes for one in every],
    }
    steps = []
    for form, sizes in forms.items():
        stored = [size + more for size, more in zip(sizes, values, strict=True)]
        layers = [one._replace(packed_bytes=size) for one, size in zip(full.layers, stored, strict=True)]
        given = full._replace(layers=layers)
        steps.append((form, sum(stored), simulator.simulate("mega", given, chip, simulator.uncondensed)))
    steps.append(("condensed edges", sum(stored), simulator.simulate("mega", given, chip)))
    rows = []
    for (before, peer_size, peer), (form, size, ours) in itertools.pairwise(steps):
        case, low = f"{name}, ablation: {form}", {"higher_is_better": False}
        rows.append(compare(f"{case}, rows stored", before, "KiB", [(size / 1024, peer_size / 1024)], **low))
        rows.append(compare(f"{case}, DRAM", before, "MiB", [(ours.bytes / 2**20, peer.bytes / 2**20)], **low))
        rows.append(compare(f"{case}, cycles", before, "thousands", [(ours.cycles / 1e3, peer.cycles / 1e3)], **low))
        pair = 1e6 * ours.joules, 1e6 * peer.joules
        rows.append(compare(f"{case}, joules", before, "µJ", [pair], **low))
    return rows


def condensed(name: str, workload: GraphWorkload, model: torch.nn.Module) -> list[Row]:
    """Results of inner layers read from disk where all nodes are inferred in as little memory as the node of the most
    neighbours allows: by ranges with the rows of their outside sources, beside rows by node."""
    assert isinstance(model, Gnn)
    held, counted, real = workload.task.view, [0, 0], IoQueue.read_runs
    memory = inference.least_memory(model, int(held.graph.degrees().max()))
    starts = inference._starts(model, 1, held.sampler, memory)
    ranges = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    outside = sum(len(outside_sources(held.sampler, *one)) for one in ranges)

    def count(queue: IoQueue, file: Any, runs: Any, *more: Any) -> Any:
        counted[0], counted[1] = counted[0] + len(runs), counted[1] + int(runs[:, 1].sum())
        return real(queue, file, runs, *more)

    found = []
    for pays in (True, False):
        counted[:] = 0, 0
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(Foretold, "pays", pays):
            with mock.patch.object(IoQueue, "read_runs", count):
                inference.infer(model, held.sampler, MemoryRows(held.features), InferenceFolder(Path(folder), memory))
            found.append(tuple(counted))
    (ours, moved), (by_node, pages) = found
    needed, more = 4 * WIDTH * (workload.graph.nodes + outside), 4 * WIDTH * outside
    case, low = f"{name}: results of layer 1 from disk, {len(starts) - 1} ranges", {"higher_is_better": False}
    return [
        compare(case, "one by one, outside sources", "requests", [(ours, outside)], **low),
        compare(case, "pages by node, neighbours together", "requests", [(ours, by_node)], **low),
        compare(case, "pages by node, neighbours together", "MiB read", [(moved / 2**20, pages / 2**20)], **low),
        compare(case, "read; ours written too", "MiB", [((moved + more) / 2**20, pages / 2**20)], **low),
        compare(case, "the rows themselves", "MiB read", [(moved / 2**20, needed / 2**20)], **low),
    ]


def main() -> None:
    options = arguments(
        __doc__ or "",
        data={"default": ".", "help": "folder of cora/, citeseer/ and pubmed/"},
        only={"default": "cora,citeseer,pubmed,debian,wordnet", "help": "of these, with commas"},
        parts={"default": "sizes,simulation,disk,accuracy", "help": "of these and ablation, with commas"},
    )
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in options.only.split(","):
        path = Path(options.data) / name
        if name not in LARGE and not (path / f"ind.{name}.allx").exists():
            print(f"without {name}: {path} has no features")
            continue
        steps = (5 if options.quick else 20) if name in LARGE else (20 if options.quick else 60)
        workload, model = trained(LARGE.get(name, str(path)), steps)
        parts: dict[str, Callable[[], list[Row]]] = {
            "sizes": lambda: sizes_and_decoding(name, workload, model, options.pairs or 0),  # noqa: B023
            "simulation": lambda: simulated(name, workload, model, bool(options.pairs)),  # noqa: B023
            "ablation": lambda: ablation(name, workload, model),  # noqa: B023
            "disk": lambda: condensed(name, workload, workload.bare().eval()),  # noqa: B023
        }
        for part in options.parts.split(","):
            if part in parts:
                rows += parts[part]()
                publish(rows, options.json)  # what is there already, should the rest not end
        if name not in LARGE and "accuracy" in options.parts:
            plain = trained(str(path), steps, kind="")
            pair = accuracy(workload, model), accuracy(*plain)
            rows.append(compare(f"{name}: accuracy, {WIDTH} columns", "fp32", "%", [pair]))
    publish(rows, options.json)


if __name__ == "__main__":
    main()
