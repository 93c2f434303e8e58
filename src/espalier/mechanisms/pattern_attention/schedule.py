"""Dual-interleaved attention: whether edges are enough, and in which steps every token attends to all.

TorchGT (arXiv 2407.14106, section 3.1) takes the conditions under which attention along few edges approximates what
full attention does from Yun et al. (arXiv 2006.04862): C1, each token attends to itself; C2, the pattern has a
Hamiltonian path; C3, within the layers each token reaches every other. Where they do not hold, one step in `interleave`
is full. C2 is decided by sufficient conditions: a path through the nodes in their order, or Dirac's (every node has
half of the others as neighbours).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.csgraph import shortest_path

from espalier import recipe as config
from espalier.mechanisms.pattern_attention.pattern import Pattern
from espalier.recipe.units import show_size

FULL = 16384
"""Tokens up to which `auto` interleaves full steps: such a step is 0.5 TFLOP for width 64 and 4 layers."""
BIASES = 4 << 30
"""Bytes of biases by hops (`bias_bytes`) up to which `auto` interleaves full steps: 4,096 tokens, 4 layers, 8 heads."""
EXACT = 4096
"""Tokens up to which the longest of all shortest paths is found; above, a bound of it."""


class Conditions(NamedTuple):
    """What of a pattern is known.

    Attributes:
        loops: C1. path: C2, where False means "not shown".
        reach: layers after which each token has reached every other, or a bound of it; None: it does not.
    """

    loops: bool
    path: bool
    reach: int | None

    def hold(self, layers: int) -> bool:
        """All three, for so many layers."""
        return self.loops and self.path and self.reach is not None and self.reach <= layers

    def lacking(self, layers: int) -> str:
        """Those that do not hold, for people."""
        reasons = [] if self.loops else ["tokens do not attend to themselves"]
        reasons += [] if self.path else ["no path through all tokens is known"]
        if self.reach is None or self.reach > layers:
            far = "never" if self.reach is None else f"only after {self.reach} layers"
            reasons.append(f"each token reaches every other {far}")
        return ", ".join(reasons)


def conditions(pattern: Pattern, nodes: int | None = None) -> Conditions:
    """C1 to C3 of a pattern whose first `nodes` tokens are nodes (None: all)."""
    if pattern.matrix is None:
        return Conditions(loops=True, path=True, reach=min(1, pattern.tokens - 1))
    matrix = pattern.matrix
    tokens = pattern.tokens
    rows = matrix.rows
    columns = matrix.indices.long()
    loops = int((rows == columns).sum())
    count = tokens if nodes is None else nodes
    forward = int(((columns == rows + 1) & (columns < count)).sum())
    back = int(((rows == columns + 1) & (rows < count)).sum())
    others = matrix.degrees - torch.bincount(rows[rows == columns], minlength=tokens)
    dirac = (
        tokens >= 3
        and 2 * int(others.min()) >= tokens
        and bool((torch.sort(columns * tokens + rows).values == rows * tokens + columns).all())
    )
    path = min(forward, back) == count - 1 and tokens - count <= count
    return Conditions(loops == tokens, path or dirac, _reach(pattern))


def _reach(pattern: Pattern) -> int | None:
    """The longest of all shortest paths; of many tokens the sum of the longest to one token and from it."""
    assert pattern.matrix is not None
    tokens = pattern.tokens
    matrix = pattern.matrix
    if tokens == 1:
        return 0
    arrays = (np.ones(matrix.entries, np.float32), matrix.indices.numpy(), matrix.indptr.numpy())
    graph = sparse.csr_array(arrays, shape=(tokens, tokens))
    if tokens <= EXACT:
        far = shortest_path(graph, unweighted=True).max()
        return int(far) if np.isfinite(far) else None
    middle = int(matrix.degrees.argmax())
    both = [
        shortest_path(adjacency, unweighted=True, indices=middle).max()
        for adjacency in (graph, sparse.csr_array(graph.T))
    ]
    return int(sum(both)) if np.isfinite(both).all() else None


class Schedule(NamedTuple):
    """In each `every`-th step attention is full (0: in none, 1: in all); `path`: nodes in their order are joined."""

    every: int
    path: bool

    def full(self, step: int) -> bool:
        """Whether every token attends to all in this step."""
        return self.every > 0 and (step + 1) % self.every == 0

    @property
    def share(self) -> float:
        """Of steps that are full."""
        return 1 / self.every if self.every else 0.0


class BiasBytes(NamedTuple):
    """What `model.distance` takes in a step: bytes saved for backward, and further ones while a layer is computed."""

    saved: Any
    transient: Any


def bias_bytes(options: config.GraphTransformer, pairs: Any) -> BiasBytes:
    """Of so many pairs of tokens (arrays allowed). A bias that is learned makes attention keep its shares, and its
    gradient the kinds of the pairs, int32; beside them a layer has its biases, scores, and the gradients of both."""
    layers = options.depth or 1
    heads = options.heads or 1
    if not options.distance:
        return BiasBytes(0.0 * pairs, 0.0 * pairs)
    return BiasBytes(pairs * (1.0 + 4 * layers * (heads + 1)), pairs * 4.0 * 3 * heads)


def _too_large(options: config.GraphTransformer, tokens: int) -> str:
    """Why full steps are out of the question; empty: they are not."""
    if tokens > FULL:
        return f"{tokens:,} tokens are too many for full steps"
    size = sum(bias_bytes(options, float(tokens) ** 2))
    if size <= BIASES:
        return ""
    most = show_size(BIASES)
    return f"biases of all pairs (model.distance) would take {show_size(size)} in full steps, over {most}"


def schedule(options: config.GraphTransformer, pattern: Pattern | None, nodes: int) -> tuple[Schedule, str]:
    """The schedule that `options` ask for, or `auto`'s choice for this pattern (None: each batch has its own), and a
    sentence that says why."""
    asked = options.attention
    layers = options.depth or 1
    sparse_steps = Schedule(0, options.path)
    interleaved = Schedule(options.interleave, options.path)
    often = f"one step in {options.interleave} is full"
    if asked == "full":
        return Schedule(1, options.path), "Attention: every token attends to all (model.attention = full)."
    if asked == "sparse":
        return sparse_steps, "Attention: along the edges (model.attention = sparse)."
    if asked == "interleaved":
        return interleaved, f"Attention: {often} (model.attention = interleaved)."
    if pattern is None:
        return interleaved, f"Attention: {often}; each batch has a pattern of its own."
    checks = conditions(pattern, nodes)
    if checks.hold(layers):
        return sparse_steps, f"Attention: along the edges, which reach all in {checks.reach} layers."
    large = _too_large(options, pattern.tokens)
    if not large:
        return interleaved, f"Attention: {often}, for {checks.lacking(layers)}."
    joined = checks._replace(path=True)
    if joined.hold(layers):
        how = f", and between each node and the next, for {checks.lacking(layers)}: {large}."
    else:
        how = f", though {joined.lacking(layers)}: {large}. Try model.virtual = 1."
    return Schedule(0, True), f"Attention: along the edges{how}"
