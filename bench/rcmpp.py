"""RCM++ and its MIND finder beside SciPy's reverse Cuthill-McKee: speed, bandwidth, profile; products before and after.

    python bench/rcmpp.py [--quick] [--pairs N] [--json FILE] [--data FOLDER]

Speed: structures of 10⁵ and more nodes, as generated and with their nodes shuffled, then small ones and those from
files; SciPy is spared the addition of the transpose (symmetric_mode=True), ours finds out by itself that the pattern is
symmetric. Bandwidth and profile: the geometric mean over shuffled structures, and over every matrix (`*.mtx`, or
scipy's `*.npz`) in --data, else in the folder `matrices` of the one that ESPALIER_DATA names. Products: torch's CSR
with 64 float32 features, one thread.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.io import mmread
from scipy.sparse.csgraph import minimum_spanning_tree, reverse_cuthill_mckee
from scipy.spatial import Delaunay, cKDTree

sys.path.insert(0, str(Path(__file__).parent))
from espalier.sparse.order_choice import order as advice
from espalier.sparse.rcmpp import bandwidth, profile, rcmpp
from table import Row, arguments, compare, publish

PEER = "scipy reverse_cuthill_mckee"
Matrix = sparse.csr_array

# --- structures --------------------------------------------------------------------------------------------------


def symmetric(rows: Any, columns: Any, nodes: int) -> Matrix:
    """Ones at (rows, columns) and their mirror images."""
    found = Matrix((np.ones(len(rows), np.int32), (rows, columns)), shape=(nodes, nodes))
    found = Matrix(found + found.T)
    found.data[:] = 1
    found.sort_indices()
    return found


def grid(*sides: int) -> Matrix:
    found = Matrix((1, 1))
    for side in sides:
        line = sparse.diags_array([np.ones(side - 1), np.ones(side - 1)], offsets=[-1, 1])
        found = sparse.kron(found, sparse.eye_array(side)) + sparse.kron(sparse.eye_array(found.shape[0]), line)
    return symmetric(*found.nonzero(), found.shape[0])


def points(count: int, axes: int) -> np.ndarray:
    return np.random.default_rng(count).random((count, axes))


def simplices(count: int, axes: int) -> Matrix:
    """Delaunay triangles or tetrahedra of random points."""
    corners = Delaunay(points(count, axes)).simplices
    pairs = [(corners[:, a], corners[:, b]) for a in range(axes + 1) for b in range(a)]
    return symmetric(*(np.concatenate(side) for side in zip(*pairs, strict=True)), count)


def geometric(count: int, degree: float) -> Matrix:
    """Points nearer than a radius that gives the mean degree."""
    near = cKDTree(points(count, 2)).query_pairs((degree / np.pi / count) ** 0.5, output_type="ndarray")
    return symmetric(*near.T, count)


def elements(side: int, unknowns: int) -> Matrix:
    """Trilinear bricks: 27 neighbours of a node with itself, and several unknowns at each."""
    line = Matrix(grid(side) + sparse.eye_array(side))
    nodes = sparse.kron(sparse.kron(line, line), line)
    found = Matrix(sparse.kron(nodes, np.ones((unknowns, unknowns))))
    found.sort_indices()
    return found


def roads(count: int) -> Matrix:
    """A spanning tree of the plane and a twelfth of Delaunay's other edges: mean degree 2.4."""
    place, mesh = points(count, 2), simplices(count, 2).tocoo()
    lengths = np.linalg.norm(place[mesh.row] - place[mesh.col], axis=1)
    tree = minimum_spanning_tree(Matrix((lengths, (mesh.row, mesh.col)), shape=(count, count))).tocoo()
    kept = np.random.default_rng(0).random(mesh.nnz) < 0.04
    return symmetric(np.r_[tree.row, mesh.row[kept]], np.r_[tree.col, mesh.col[kept]], count)


def circuit(side: int) -> Matrix:
    """A grid with a few nets that reach 600 nodes anywhere."""
    mesh, draw = grid(side, side).tocoo(), np.random.default_rng(0)
    rails = np.repeat(draw.integers(0, side * side, 40), 600)
    far = draw.integers(0, side * side, len(rails))
    return symmetric(np.r_[mesh.row, rails], np.r_[mesh.col, far], side * side)


def constrained(side: int) -> Matrix:
    """[[H, Bᵀ], [B, 0]]: a grid, and a constraint for each three of its nodes."""
    nodes, count = side * side, side * side // 3
    rows = nodes + np.repeat(np.arange(count), 3)
    mesh = grid(side, side).tocoo()
    return symmetric(np.r_[mesh.row, rows], np.r_[mesh.col, np.arange(3 * count)], nodes + count)


def attached(count: int, edges: int) -> Matrix:
    """Preferential attachment (Barabási and Albert, Science 286, 1999), drawn in blocks."""
    draw, ends = np.random.default_rng(0), np.arange(2 * edges)
    pairs = []
    for begin in range(edges, count, max(1, count // 200)):
        new = np.repeat(np.arange(begin, min(count, begin + max(1, count // 200))), edges)
        old = ends[draw.integers(0, len(ends), len(new))] % begin
        pairs.append((new, old))
        ends = np.concatenate([ends, new, old])
    return symmetric(*(np.concatenate(side) for side in zip(*pairs, strict=True)), count)


def shuffled(matrix: Matrix) -> Matrix:
    order = np.random.default_rng(1).permutation(matrix.shape[0])
    found = Matrix(matrix[order][:, order])
    found.sort_indices()
    return found


def large(quick: bool) -> dict[str, Callable[[], Matrix]]:
    """Structures of 10⁵ nodes or more; `quick` takes the smallest that count."""
    size = 100_000 if quick else 250_000
    side = 320 if quick else 500
    return {
        "grid 2-D": lambda: grid(side, side),
        "grid 3-D": lambda: grid(47, 47, 47) if quick else grid(63, 63, 63),
        "triangles": lambda: simplices(size, 2),
        "tetrahedra": lambda: simplices(100_000, 3),
        "bricks, 3 unknowns": lambda: elements(33, 3),
        "geometric, degree 12": lambda: geometric(size, 12),
        "roads": lambda: roads(size),
        "circuit": lambda: circuit(side),
        "constrained grid": lambda: constrained(side),
        "preferential attachment": lambda: attached(size, 5),
    }


def small() -> dict[str, Callable[[], Matrix]]:
    """Structures of 10³ to 3·10⁴ nodes for bandwidth and profile."""
    return {
        "triangles": lambda: simplices(20_000, 2),
        "tetrahedra": lambda: simplices(8_000, 3),
        "bricks, 3 unknowns": lambda: elements(12, 3),
        "geometric, degree 8": lambda: geometric(10_000, 8),
        "roads": lambda: roads(15_000),
        "circuit": lambda: circuit(90),
        "constrained grid": lambda: constrained(80),
        "long grid": lambda: grid(30, 200),
    }


def files(folder: Path | None) -> Iterator[tuple[str, Matrix]]:
    """The square matrices of 100 nodes or more in `folder`, as A + Aᵀ."""
    for file in sorted([*folder.glob("*.mtx"), *folder.glob("*.npz")] if folder else []):
        matrix = Matrix(mmread(file) if file.suffix == ".mtx" else sparse.load_npz(file))
        if matrix.shape[0] == matrix.shape[1] >= 100:
            yield file.stem, symmetric(*matrix.nonzero(), matrix.shape[0])


# --- measurements ------------------------------------------------------------------------------------------------


def milliseconds(run: Callable[[], Any]) -> float:
    """Of one call, or of so many that they take a millisecond."""
    calls, taken = 1, 0.0
    while taken < 1e-3:
        began = time.perf_counter()
        for _ in range(calls):
            run()
        taken = time.perf_counter() - began
        calls, made = 4 * calls, calls
    return 1e3 * taken / made


def speed(name: str, matrix: Matrix, pairs: int) -> list[Row]:
    case = f"{name}: {matrix.shape[0]:,} nodes, {matrix.nnz:,} entries"
    indptr, indices = matrix.indptr, matrix.indices
    found: dict[str, list[tuple[float, float]]] = {"default": [], "finder='mind'": []}
    for _ in range(pairs):
        theirs = milliseconds(lambda: reverse_cuthill_mckee(matrix, symmetric_mode=True))
        found["default"].append((milliseconds(lambda: rcmpp(indptr, indices)), theirs))
        found["finder='mind'"].append((milliseconds(lambda: rcmpp(indptr, indices, finder="mind")), theirs))
    return [compare(f"{case}, {options}", PEER, "ms", values, False) for options, values in found.items()]


def quality(name: str, matrices: list[tuple[str, Matrix]], restarts: int) -> list[Row]:
    """Geometric means of bandwidth and profile relative to SciPy's, with the range over the matrices."""
    ratios = []
    for _, matrix in matrices:
        given = matrix.indptr, matrix.indices
        orders = rcmpp(*given, restarts=restarts), reverse_cuthill_mckee(matrix, symmetric_mode=True)
        ours, theirs = ([max(1, measure(*given, one)) for measure in (bandwidth, profile)] for one in orders)
        ratios.append(np.divide(ours, theirs))
    logs = np.log(ratios)
    case = f"{len(ratios)} {name}, restarts={restarts}"
    return [
        Row(
            f"{case}: {measure}",
            PEER,
            1.0,
            float(np.exp(logs[:, at].mean())),
            float(np.exp(-logs[:, at].mean())),
            "geometric mean, relative",
            f"single matrices {np.exp(-logs[:, at].max()):.2f}-{np.exp(-logs[:, at].min()):.2f}",
        )
        for at, measure in enumerate(("bandwidth", "profile"))
    ]


def product(name: str, matrix: Matrix, pairs: int) -> Row:
    """torch's CSR product with the nodes as they came, and in our order."""
    order = rcmpp(matrix.indptr, matrix.indices)
    ordered = Matrix(matrix[order][:, order])
    ordered.sort_indices()
    tensors = []
    for one in (ordered, matrix):
        parts = (torch.from_numpy(part) for part in (one.indptr, one.indices, np.ones(one.nnz, np.float32)))
        tensors.append(torch.sparse_csr_tensor(*parts, one.shape))
    features = torch.rand(matrix.shape[0], 64)
    found = [tuple(milliseconds(lambda one=one: one @ features) for one in tensors) for _ in range(pairs + 1)]
    gain = advice(matrix).gain
    case = (
        f"product, {name}: {matrix.shape[0]:,} nodes, {matrix.nnz:,} entries, 64 features; `order` predicts {gain:.2f}"
    )
    return compare(case, "the same in the shuffled order", "ms", found[1:], False)


def main() -> None:
    options = arguments(__doc__ or "", data={"metavar": "FOLDER"})
    torch.set_num_threads(1)
    pairs = options.pairs or (5 if options.quick else 15)
    given = options.data or os.environ.get("ESPALIER_DATA")
    folder = Path(given) / "matrices" if given else None
    rcmpp(*(getattr(grid(9, 9), name) for name in ("indptr", "indices")))  # compiled before it is timed
    rows, products = [], []
    for name, build in large(options.quick).items():
        matrix = build()
        mixed = shuffled(matrix)
        rows += speed(name, matrix, pairs) + speed(f"{name}, shuffled", mixed, pairs)
        if name in ("grid 2-D", "grid 3-D", "triangles", "geometric, degree 12", "preferential attachment"):
            products.append(product(f"{name}, shuffled", mixed, pairs))
    sets = {"shuffled structures": [(name, shuffled(build())) for name, build in small().items()]}
    tiny = {f"grid of {side}, shuffled": shuffled(grid(side, side)) for side in (4, 10, 32)}
    rows += [row for name, matrix in tiny.items() for row in speed(name, matrix, 3 * pairs)]
    sets["matrices from files"] = list(files(folder))
    sets["matrices from files, shuffled"] = [(name, shuffled(one)) for name, one in sets["matrices from files"]]
    for name, matrices in sets.items():
        if name != "matrices from files, shuffled":
            rows += [one for label, matrix in matrices for one in speed(label, matrix, 3 * pairs)]
        if matrices:
            rows += [row for restarts in (1, 4) for row in quality(name, matrices, restarts)]
        else:
            print(f"{name} are left out: neither --data nor ESPALIER_DATA names a folder that has some.\n")
    publish(rows + products, options.json)


if __name__ == "__main__":
    main()
