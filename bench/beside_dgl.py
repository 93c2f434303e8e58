"""DGL in a process of its own, for it needs an older torch: measured in turns with ours. The sampler beside its own."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espalier.graph.data.graph import Graph
from espalier.graph.sampling.neighbor_sampler import Sampler, Style
from table import Row, compare


def of_dgl(python: str, arrays: dict[str, Any], options: Sequence[str], ours: Callable[[], float], pairs: int) -> Any:
    """(Ours, DGL's) measurements in turns, DGL's by a process of its own; the first pair is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.npz"
        np.savez(file, **arrays)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        script = str(Path(__file__).parent / "peers" / "dgl_graph.py")
        command = [python, script, str(file), str(torch.get_num_threads()), *options]
        with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            taken = []
            for _ in range(pairs + 1):
                other.stdin.write("go\n")
                other.stdin.flush()
                theirs = float(other.stdout.readline())
                taken.append((ours(), theirs))
            other.stdin.close()
    return taken[1:]


def sampler(graph: Graph, python: str | None, pairs: int, batches: int) -> list[Row]:
    draw = np.random.default_rng(0)
    seeds = np.stack([draw.choice(graph.nodes, 1024, replace=False) for _ in range(batches)])
    ours = Sampler(graph, Style(False, "mean"))

    def rate() -> float:
        begun, edges = time.perf_counter(), 0
        for step, batch in enumerate(seeds):
            edges += sum(block.edges for block in ours.draw(batch, (10, 10), step=step).blocks)
        return edges / (time.perf_counter() - begun) / 1e6

    rate()
    if python is None:
        alone = statistics.median(rate() for _ in range(pairs))
        print(f"sampler: {alone:.1f} million edges/s (no DGL named by --dgl)", file=sys.stderr)
        return []
    arrays = {"indptr": graph.indptr, "indices": graph.indices.astype(np.int64), "seeds": seeds}
    taken = of_dgl(python, arrays, ("sample",), rate, pairs)
    values = [(ours, theirs / 1e6) for ours, theirs in taken]
    return [compare("sampler, fan-out 10 and 10, 1024 seeds", "dgl-2.1.0", "million edges/s", values)]
