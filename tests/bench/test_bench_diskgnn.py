"""The caches that packed batches are timed beside hold the rows that their plans say, and Belady's misses least."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def misses(world, policy: str) -> int:
    """Rows that are read in one pass; every row must come from where the plan says it is."""
    world.plan_cache(policy)
    plan, features = np.load(world.folder / f"{policy}.npz"), np.array(world.graph.features)
    cache, count = np.zeros((int(plan["rows"]), features.shape[1]), np.float32), 0
    cache[: len(plan["first"])] = features[plan["first"]]
    for at, nodes in enumerate(world.nodes):
        held, slots, missing, kept, into = (
            plan[f"{name}{at}"] for name in ("held", "slots", "missing", "kept", "into")
        )
        assert sorted([*held, *missing]) == list(range(len(nodes)))
        assert np.array_equal(cache[slots], features[nodes[held]])
        cache[into] = features[nodes[kept]]
        count += len(missing)
    return count


def test_caches_serve_the_rows_of_their_plans(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "bench"), *sys.path])
    import diskgnn

    world = diskgnn.World(diskgnn.Size(3000, 4, 6, held=0.2), tmp_path, None)
    every = sum(map(len, world.nodes))
    by_next_use, by_last_use = misses(world, "belady"), misses(world, "lru")
    assert 0 < by_next_use < by_last_use < every
