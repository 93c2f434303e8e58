"""CBM and our CSR kernels beside SciPy and torch (MKL): products, building, memory, what `auto` costs where it loses.

    python bench/cbm.py [--quick] [--pairs N] [--json FILE] [--data FOLDER] [--graph NAME]

Graphs are drawn here from fixed seeds: cliques of 60 to 200 nodes, 5 % of their edges dropped, with 2 more random edges
for each node; overlapping cliques, as papers with their authors make them; small cliques; a random graph without any
structure; with --data (or ESPALIER_DATA), the co-authorship network ca-HepPh. Every graph but the first is drawn with
its nodes in random order; the first in both. All products include the allocation of their result.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

sys.path.insert(0, str(Path(__file__).parent))
from espalier.sparse import CBM, CSR
from espalier.sparse.cbm.build import compress
from table import Row, arguments, compare, publish, settle

Graph = Any


def from_pairs(nodes: int, left: Any, right: Any) -> Graph:
    """The symmetric 0/1 matrix of undirected edges."""
    keep = left != right
    left, right = left[keep], right[keep]
    ones = np.ones(2 * len(left), np.float32)
    graph = sp.coo_matrix((ones, (np.r_[left, right], np.r_[right, left])), (nodes, nodes)).tocsr()
    graph.data[:] = 1
    return graph


def shuffled(graph: Graph, seed: int = 1) -> Graph:
    order = np.random.default_rng(seed).permutation(graph.shape[0])
    return graph[order][:, order].tocsr()


def cliques(nodes: int, smallest: int, largest: int, dropped: float, noise: int) -> Graph:
    draw, parts, at = np.random.default_rng(0), [], 0
    while at < nodes:
        size = min(int(draw.integers(smallest, largest + 1)), nodes - at)
        pair = np.array(np.triu_indices(size, 1))
        parts.append(at + pair[:, draw.random(pair.shape[1]) >= dropped])
        at += size
    parts.append(draw.integers(0, nodes, (2, nodes * noise // 2)))
    left, right = np.concatenate(parts, axis=1)
    return from_pairs(nodes, left, right)


def collaborations(people: int, groups: int) -> Graph:
    """Overlapping cliques: groups of 10 to 80 people drawn from a neighbourhood, some people in several of them."""
    draw, parts = np.random.default_rng(0), []
    for _ in range(groups):
        size, centre = int(10 + 70 * draw.random() ** 2), int(draw.integers(people))
        members = np.unique((centre + draw.integers(0, 2 * size, size)) % people)
        parts.append(members[np.array(np.triu_indices(len(members), 1))])
    left, right = np.concatenate(parts, axis=1)
    return shuffled(from_pairs(people, left, right))


def random_graph(nodes: int, degree: int) -> Graph:
    return from_pairs(nodes, *np.random.default_rng(0).integers(0, nodes, (2, nodes * degree // 2)))


def hepph(folder: str | None) -> dict[str, Graph]:
    """The co-authorship network ca-HepPh (SNAP), if there."""
    base = folder or os.environ.get("ESPALIER_DATA")
    path = Path(base) / "matrices" / "ca-HepPh.txt" if base else None
    if path is None or not path.exists():
        print("ca-HepPh is left out: neither --data nor ESPALIER_DATA names a folder that has matrices/ca-HepPh.txt.\n")
        return {}
    ends = np.loadtxt(path, usecols=(0, 1), dtype=np.int64)
    names, ids = np.unique(ends, return_inverse=True)
    return {"ca-HepPh": from_pairs(len(names), *ids.reshape(-1, 2).T)}


def graphs(quick: bool, folder: str | None) -> dict[str, Graph]:
    scale = 2 if quick else 1
    five = cliques(20_000 // scale, 60, 200, 0.05, 2)
    return {
        "cliques-5%": five,
        "cliques-5%, shuffled": shuffled(five),
        "collaborations": collaborations(30_000 // scale, 2_500 // scale),
        "small cliques": shuffled(cliques(100_000 // scale, 5, 15, 0.0, 1)),
        "random": random_graph(50_000 // scale, 16),
        **hepph(folder),
    }


def timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def together(ours: Callable[[], Any], theirs: Callable[[], Any], pairs: int) -> list[tuple[float, float]]:
    """Milliseconds of both in turn, after one of each that is not counted. At its turn each is run twice in a row; the
    second counts, with its own data in the caches as in repeated use."""

    def alone(run: Callable[[], Any]) -> float:
        settle()
        run()
        return 1e3 * timed(run)

    ours(), theirs()
    return [(alone(ours), alone(theirs)) for _ in range(pairs)]


def torch_csr(matrix: CSR) -> torch.Tensor:
    """A binary matrix as torch has it."""
    ones = torch.ones(matrix.entries)
    return torch.sparse_csr_tensor(matrix.indptr.int(), matrix.indices, ones, matrix.shape, check_invariants=False)


def products(name: str, graph: Graph, pairs: int) -> list[Row]:
    """CBM in auto mode and our CSR beside torch, and CBM beside SciPy, our CSR and what auto would fall back to."""
    plain = CSR.of(graph.indptr, graph.indices, graph.shape)
    auto, mkl = CBM.of(plain), torch_csr(plain)
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for width in (16, 128, 500):
            x = torch.randn(graph.shape[0], width, generator=torch.Generator().manual_seed(0))
            array, case = x.numpy(), f"{name} F={width} threads={threads}"
            runs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
                "torch-csr": (lambda x=x: auto.matmul(x), lambda x=x: mkl @ x),
                "our csr": (lambda x=x: auto.matmul(x), lambda x=x: plain.matmul(x)),
            }
            if threads == 1:
                runs["scipy-csr"] = (lambda x=x: auto.matmul(x), lambda a=array: graph @ a)
            rows += [compare(f"{case}: cbm", peer, "ms", together(*run, pairs), False) for peer, run in runs.items()]
            ours = (lambda x=x: plain.matmul(x), lambda x=x: mkl @ x)
            rows.append(compare(f"{case}: csr", "torch-csr", "ms", together(*ours, pairs), False))
    return rows


def building(name: str, graph: Graph, pairs: int) -> list[Row]:
    """Build time in products of torch's CSR at F=128, 2 threads; additions and index bytes beside CSR; fast search."""
    plain = CSR.of(graph.indptr, graph.indices, graph.shape)
    mkl, x = torch_csr(plain), torch.randn(graph.shape[0], 128)
    fresh = lambda: compress(CSR.of(graph.indptr, graph.indices, graph.shape), 0)  # noqa: E731
    taken = together(fresh, lambda: mkl @ x, max(3, pairs // 3))
    counted = [(ours / theirs, 25.0) for ours, theirs in taken]
    exact, fast = CBM.of(plain, 0, "exact").stats(), compress(plain, 0, "fast")
    quick = together(lambda: compress(plain, 0, "fast"), lambda: compress(plain, 0, "exact"), 3)
    print(f"{name}: {exact}; fast search {plain.entries / max(1, fast.additions):.2f}")
    return [
        compare(f"{name}: build, products at F=128", "goal", "products", counted, False),
        compare(f"{name}: additions", "csr", "rows", [(exact.differences + exact.tree_edges, exact.entries)], False),
        compare(f"{name}: index", "csr", "bytes", [(exact.bytes, exact.csr_bytes)], False),
        compare(
            f"{name}: fast search's additions", "exact", "rows", [(fast.additions, exact.entries / exact.ratio)], False
        ),
        compare(f"{name}: fast search's time", "exact", "ms", quick, False),
    ]


def main() -> None:
    own = {"data": {"metavar": "FOLDER"}, "graph": {"metavar": "NAME", "help": "one graph only"}}
    options = arguments(__doc__ or "", **own)
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
    pairs = options.pairs or (5 if options.quick else 15)
    rows = []
    drawn = graphs(options.quick, options.data)
    for name, graph in ((name, drawn[name]) for name in ([options.graph] if options.graph else drawn)):
        case = f"{name} ({graph.shape[0]} nodes, {graph.nnz} edges)" if options.quick else name
        rows += products(case, graph, pairs)
        rows += building(case, graph, pairs)
    publish(rows, options.json)


if __name__ == "__main__":
    main()
