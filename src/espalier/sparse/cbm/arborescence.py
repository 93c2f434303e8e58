"""Kernel: the cheapest tree of directed edges below a root, by Edmonds' algorithm.

In Tarjan's form ("Finding optimum branchings", Networks 7, 1977): one path grows backwards along cheapest incoming
edges; a cycle is contracted, with its heaps of incoming edges merged (leftist heaps, whose lengths are lowered lazily),
and taken apart again once all paths ended at the root.
"""

# ruff: noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917  (kernels take their arrays one by one)

from __future__ import annotations

import numpy as np

from espalier.kernels.numba_compile import jit, njit


@njit
def _lower(heap, key, owed, left, right):  # type: ignore[no-untyped-def]
    """Hands what is owed to the keys of `heap` on to its children."""
    if owed[heap]:
        for child in (left[heap], right[heap]):
            if child >= 0:
                key[child] += owed[heap]
                owed[child] += owed[heap]
        owed[heap] = 0


@njit
def _merge(first, two, key, owed, left, right, rank):  # type: ignore[no-untyped-def]
    """The heap of both; -1 is empty."""
    spine, depth = np.empty(128, np.int64), 0  # right spines are logarithmic
    while first >= 0 and two >= 0:
        if key[two] < key[first]:
            first, two = two, first
        _lower(first, key, owed, left, right)
        spine[depth] = first
        depth += 1
        first = right[first]
    merged = first if first >= 0 else two
    while depth:
        depth -= 1
        top = spine[depth]
        right[top] = merged
        rank_beside = rank[left[top]] if left[top] >= 0 else 0
        if rank[merged] > rank_beside:
            left[top], right[top] = right[top], left[top]
        rank[top] = 1 + (rank[right[top]] if right[top] >= 0 else 0)
        merged = top
    return merged


@njit
def _group(node, above):  # type: ignore[no-untyped-def]
    """The contracted node that `node` belongs to."""
    while above[node] >= 0:
        node = above[node]
    return node


@jit("int32[::1](int64[::1], int32[::1], int32[::1], int32[::1], int64)")
def arborescence(degrees, us, vs, hs, alpha):  # type: ignore[no-untyped-def]
    """The parent of each row, -1 for the root, in the cheapest tree of these edges.

    Root to v of length degrees[v]; of each pair u to v of length h where h < degrees[v] - alpha, and v to u likewise.
    Joined nodes form a forest by size without path compression, so that joining can be undone.
    """
    rows = len(degrees)
    nodes = rows + 1  # the last is the root
    pairs = len(us)
    most = rows + 2 * pairs
    start = np.empty(most, np.int32)
    end = np.empty(most, np.int32)
    key = np.empty(most, np.int64)
    edges = 0
    for v in range(rows):
        start[edges] = rows
        end[edges] = v
        key[edges] = degrees[v]
        edges += 1
    for p in range(pairs):
        for a, b in ((us[p], vs[p]), (vs[p], us[p])):
            if hs[p] < degrees[b] - alpha:
                start[edges] = a
                end[edges] = b
                key[edges] = hs[p]
                edges += 1
    owed = np.zeros(edges, np.int64)
    left = np.full(edges, -1, np.int64)
    right = np.full(edges, -1, np.int64)
    rank = np.ones(edges, np.int32)
    heap = np.full(nodes, -1, np.int64)
    for e in range(edges):
        heap[end[e]] = _merge(heap[end[e]], e, key, owed, left, right, rank)
    above = np.full(nodes, -1, np.int64)
    size = np.ones(nodes, np.int64)
    joined = np.empty(nodes, np.int64)
    joins = 0
    seen = np.full(nodes, -1, np.int64)
    seen[rows] = rows
    path = np.empty(nodes, np.int64)
    chosen = np.empty(nodes, np.int64)
    length = 0
    incoming = np.full(nodes, -1, np.int64)
    # Cycles in the order of contraction: the contracted node, joins before it, and its edges in one long list.
    cycle_node = np.empty(nodes, np.int64)
    cycle_joins = np.empty(nodes, np.int64)
    cycle_ptr = np.zeros(nodes + 1, np.int64)
    cycle_edges = np.empty(2 * nodes, np.int64)
    cycles = 0
    for first in range(rows):
        node = _group(first, above)
        length = 0
        while seen[node] < 0:
            e = heap[node]
            while _group(start[e], above) == node:  # both ends were joined meanwhile
                _lower(e, key, owed, left, right)
                e = _merge(left[e], right[e], key, owed, left, right, rank)
            lowest = key[e]
            key[e] -= lowest
            owed[e] -= lowest
            _lower(e, key, owed, left, right)
            heap[node] = _merge(left[e], right[e], key, owed, left, right, rank)
            path[length] = node
            chosen[length] = e
            length += 1
            seen[node] = first
            node = _group(start[e], above)
            if seen[node] == first:
                cycle_joins[cycles] = joins
                filled = cycle_ptr[cycles]
                merged = np.int64(-1)
                closing = node
                while True:
                    length -= 1
                    member = path[length]
                    merged = _merge(merged, heap[member], key, owed, left, right, rank)
                    cycle_edges[filled] = chosen[length]
                    filled += 1
                    small = _group(closing, above)
                    large = _group(member, above)
                    if small != large:
                        if size[small] > size[large]:
                            small, large = large, small
                        above[small] = large
                        size[large] += size[small]
                        joined[joins] = small
                        joins += 1
                    if member == closing:
                        break
                node = _group(closing, above)
                heap[node] = merged
                seen[node] = -1
                cycle_node[cycles] = node
                cycles += 1
                cycle_ptr[cycles] = filled
        for step in range(length):
            incoming[_group(end[chosen[step]], above)] = chosen[step]
    for c in range(cycles - 1, -1, -1):
        entering = incoming[cycle_node[c]]
        while joins > cycle_joins[c]:
            joins -= 1
            small = joined[joins]
            size[above[small]] -= size[small]
            above[small] = -1
        for t in range(cycle_ptr[c], cycle_ptr[c + 1]):
            incoming[_group(end[cycle_edges[t]], above)] = cycle_edges[t]
        incoming[_group(end[entering], above)] = entering
    parent = np.empty(rows, np.int32)
    for v in range(rows):
        parent[v] = -1 if start[incoming[v]] == rows else start[incoming[v]]
    return parent
