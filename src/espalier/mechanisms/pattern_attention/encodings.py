"""Encodings of a node's place in its graph, as columns beside its features, and hops between nodes.

Eigenvectors of the normalised Laplacian after Dwivedi and Bresson (arXiv 2012.09699), returns of a random walk after
Dwivedi et al. (arXiv 2110.07875), degrees and hops after Graphormer (arXiv 2106.05234, sections 3.1.1 and 3.1.2).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import ArpackNoConvergence, eigsh

from espalier.graph.data.graph import Array, Graph
from espalier.recipe import cache_dir, data_hash
from espalier.recipe.errors import UserError
from espalier.track.progress import Stages, Waiting

DENSE = 512
"""Nodes up to which all eigenvectors are made, by LAPACK; of larger graphs the wanted ones, by Lanczos iteration."""
OWN = 0.05
"""Share of a node's own features in averages over hops, as their authors have it."""
WALKED = 2e12
"""Additions that the returns of random walks may take: about 20 minutes of one core."""
PAIRS = 1 << 26
"""Pairs of nodes within a number of hops that are kept, 9 bytes each."""


def encoded(graph: Graph, names: Sequence[str], size: int) -> Graph:
    """`graph` with the columns of each encoding behind its features; kept in the cache folder, as it takes a while.

    Raises UserError: a random walk over too large a graph, eigenvectors that are not found.
    """
    if not names:
        return graph
    columns = [_kept(graph, name, size) for name in names]
    return replace(graph, features=np.concatenate([graph.features, *columns], axis=1), columns=())


def averaged(graph: Graph, hops: int) -> Graph:
    """`graph` with features (1 - a) / hops (S + S² + ... + S^hops) X + a X, where S = D^-1/2 (A + I) D^-1/2: those of
    simple spectral graph convolution (Zhu and Koniusz, ICLR 2021, equation 8), whose far hops do not drown near ones.
    a is OWN."""
    if not hops:
        return graph
    matrix = sparse.csr_array(_adjacency(graph) + sparse.eye_array(graph.nodes))
    scale = sparse.diags_array(1 / np.sqrt(matrix.sum(1)))
    step = sparse.csr_array((scale @ matrix @ scale).astype(np.float32))
    original = features = np.asarray(graph.features, np.float32)
    total = np.zeros_like(features)
    with Waiting("Averaging features over hops", hops, out=sys.stderr) as bar:
        for _ in range(hops):
            features = step @ features
            total += features
            bar.advance()
    return replace(graph, features=(1 - OWN) / hops * total + OWN * original)


def _kept(graph: Graph, name: str, size: int) -> Array:
    if name == "degree":
        return np.log1p(graph.degrees())[:, None].astype(np.float32)
    starts = () if graph.starts is None else (graph.starts,)
    content = [data_hash.of_arrays(graph.indptr, graph.indices, *starts), name, size, graph.nodes]
    place = cache_dir.cache_folder() / "encodings" / f"{cache_dir.hashed(content)}.npy"
    try:
        return np.load(place)
    except (OSError, ValueError):
        with Stages(f"Encoding nodes ({name})"):
            made = _MAKERS[name](graph, size)
    cache_dir.keep_made(place, lambda file: np.save(file, made))
    return made


def _adjacency(graph: Graph) -> sparse.csr_array:
    """A + Aᵀ without its diagonal, ones; float64."""
    ones = np.ones(graph.edges)
    matrix = sparse.csr_array((ones, graph.indices, graph.indptr), shape=(graph.nodes, graph.nodes))
    matrix = sparse.csr_array(matrix + matrix.T)
    matrix.setdiag(0)
    matrix.eliminate_zeros()
    matrix.data[:] = 1
    return matrix


def _each(graph: Graph, make: Callable[[sparse.csr_array], Array]) -> Array:
    """`make` of the adjacency matrix of the graph, or of each of many small graphs."""
    matrix = _adjacency(graph)
    if graph.starts is None:
        return make(matrix)
    ends = list(zip(graph.starts[:-1].tolist(), graph.starts[1:].tolist(), strict=True))
    return np.concatenate([make(sparse.csr_array(matrix[start:stop, start:stop])) for start, stop in ends])


def laplacian(graph: Graph, size: int) -> Array:
    """float32 [nodes, size]: eigenvectors of I - D^-1/2 A D^-1/2 for the least eigenvalues but the first, times √nodes.

    The largest entry of each is positive, so that every run finds the same; zeros where the graph has fewer.
    """
    return _each(graph, lambda matrix: _eigenvectors(matrix, size))


def _eigenvectors(matrix: sparse.csr_array, size: int) -> Array:
    nodes = matrix.shape[0]
    scale = 1 / np.sqrt(np.maximum(matrix.sum(1), 1))
    walk = sparse.diags_array(scale) @ matrix @ sparse.diags_array(scale)
    if nodes <= max(DENSE, 2 * size + 2):
        values, vectors = np.linalg.eigh(np.eye(nodes) - walk.toarray())
    else:
        start = np.random.default_rng(0).normal(size=nodes)
        try:  # the largest of I + walk are the least of the Laplacian
            values, vectors = eigsh(walk + sparse.eye_array(nodes), k=size + 1, which="LA", v0=start, tol=1e-4)
        except ArpackNoConvergence as error:
            raise UserError(
                f"The eigenvectors of a Laplacian of {nodes:,} nodes were not found.",
                why=str(error),
                do='model.encodings = ["degree"], or a smaller model.encoding_size',
            ) from None
        values = 2 - values
    encoding = vectors[:, np.argsort(values, kind="stable")[1 : size + 1]] * np.sqrt(nodes)
    signs = np.sign(encoding[np.abs(encoding).argmax(0), np.arange(encoding.shape[1])]) if nodes > 1 else 1.0
    padded = np.zeros((nodes, size), np.float32)
    padded[:, : encoding.shape[1]] = encoding * signs
    return padded


def random_walk(graph: Graph, size: int) -> Array:
    """float32 [nodes, size]: the probability that a walk is back at its node after 1 to `size` steps."""
    work = 2.0 * graph.edges * size * float(graph.nodes if graph.starts is None else np.diff(graph.starts).max())
    if work > WALKED:
        raise UserError(
            f'model.encodings = ["random-walk"] takes {work:.1e} additions for {graph.nodes:,} nodes.',
            why=f"up to {WALKED:.0e} are made",
            do='model.encodings = ["laplacian"], or "degree"',
        )
    return _each(graph, lambda matrix: _returns(matrix, size))


def _returns(matrix: sparse.csr_array, size: int) -> Array:
    nodes = matrix.shape[0]
    walk = sparse.csr_array(sparse.diags_array(1 / np.maximum(matrix.sum(1), 1)) @ matrix)
    returns = np.zeros((nodes, size), np.float32)
    piece = max(1, (1 << 24) // max(1, nodes))
    for start in range(0, nodes, piece):
        mine = np.arange(start, min(nodes, start + piece))
        reached = np.zeros((nodes, len(mine)))
        reached[mine, np.arange(len(mine))] = 1
        for step in range(size):
            reached = walk @ reached
            returns[mine, step] = reached[mine, np.arange(len(mine))]
    return returns


_MAKERS: dict[str, Callable[[Graph, int], Array]] = {"laplacian": laplacian, "random-walk": random_walk}


def hops(matrix: Any, most: int) -> tuple[Array, Array]:
    """Pairs of nodes at most `most` hops apart, each with itself: keys int64, ascending, row · nodes + column, and
    their hops uint8. `matrix`: a square SciPy matrix; an entry is a hop from column to row.

    Raises UserError where there are too many pairs.
    """
    nodes = matrix.shape[0]
    step = sparse.csr_array((np.ones(matrix.nnz, np.int32), matrix.indices, matrix.indptr), shape=matrix.shape)
    reached = sparse.eye_array(nodes, format="csr", dtype=np.int32)
    keys = np.arange(nodes, dtype=np.int64) * (nodes + 1)
    far = np.zeros(nodes, np.uint8)
    for count in range(1, most + 1):
        reached = sparse.csr_array(step @ reached)
        reached.data[:] = 1
        if reached.nnz + len(keys) > PAIRS:
            raise UserError(
                f"model.distance = {most} has over {PAIRS:,} pairs of nodes.",
                do=f"model.distance = {count - 1}" if count > 1 else "model.distance = 0",
            )
        rows = np.repeat(np.arange(nodes, dtype=np.int64), np.diff(reached.indptr))
        new_keys = np.setdiff1d(rows * nodes + reached.indices, keys)
        keys = np.concatenate([keys, new_keys])
        far = np.concatenate([far, np.full(len(new_keys), count, np.uint8)])
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        far = far[order]
    return keys, far
