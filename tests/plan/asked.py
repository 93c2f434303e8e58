"""Requests and clusters for the planner's tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster
from espalier.plan.axes.sharding import Division, StateBytes, StateSizes, cost
from espalier.plan.layouts import Layouts
from espalier.plan.request import Request
from espalier.recipe.cost import Anatomy, Cut, Product, Profile, Work

KEPT = {"none": 16.0, "selective": 12.0, "block": 1.0}
AGAIN = {"none": 0.0, "selective": 0.9, "block": 1.0}


def decoder(width: int = 64, layers: int = 2, sequence: int = 128, batch: int = 16, **more: Any) -> Request:
    """A made-up decoder: per layer one [width, 12 width] product; activations by the table above."""

    def anatomy(micro_batch: Any, recompute: str, precision: str, cut: Cut) -> Anatomy:
        rows, size = micro_batch * sequence / cut.sequence, {"bf16": 2, "fp16": 2, "fp64": 8}.get(precision, 4)
        each = rows * width * size / cut.tensor
        layer = Work(
            products=(Product(rows, width, 12 * width / cut.tensor),),
            attention=2.0 * rows * sequence * width / cut.tensor,
            moved=30.0 * each,
            saved=KEPT[recompute] * each,
            transient=0.0 * rows,
            again=AGAIN[recompute],
            samples=micro_batch,
            tokens=rows,
        )
        rest = Work((Product(rows, width, 256),), 0.0, 0.0, 0.0 * rows, rows * 256 * size, 0.0, micro_batch, rows)
        return Anatomy(layers, layer, rest)

    matrices = 12 * width * width * layers
    parameters = matrices + 2 * 256 * width
    profile = Profile(
        parameters=parameters, trainable=parameters, layers=layers, global_batch=batch,
        tokens_per_sample=float(sequence), anatomy=anatomy, outside=2 * 256 * width, tables=2,
        heads=8, kv_heads=8, width=width, kv_width=width,
    )  # fmt: skip
    return Request(profile=profile).changed(**more)


def processor(cores: int = 2, memory: str = "8GiB", count: int = 1, between: str = "1Gbit/s") -> Cluster:
    return clusters.loads(
        f'[[nodes]]\ndevice = "cpu"\ncores = {cores}\nmemory = "{memory}"\ncount = {count}\n'
        f'[links]\nbetween = "{between}"'
    )


def gpus(
    device: str = "A100-80GB", count: int = 1, devices: int = 8, between: str = "400Gbit/s", inside: str = ""
) -> Cluster:
    return clusters.loads(
        f'[[nodes]]\ndevice = "{device}"\ncount = {count}\ndevices = {devices}\n[links]\nbetween = "{between}"\n'
        + (f'inside = "{inside}"' if inside else "")
    )


def plain(ranks: int, threads: int = 1, micro_batch: Any = 1, recompute: str = "none") -> Layouts:
    """Data parallel with everything replicated."""
    return Layouts(dp=ranks, threads=threads, micro_batch=micro_batch, recompute=recompute)


def states(parameters: float, storage: StateBytes, layouts: Layouts) -> dict[str, Any]:
    """Bytes of the three states of so many parameters."""
    ranks = np.maximum(layouts.shards, layouts.optimizer)
    division = Division(layouts.params, layouts.grads, layouts.optimizer, ranks)
    found = cost(StateSizes(storage, elements=parameters), division).memory_bytes
    return {name: found[name] for name in ("params", "grads", "optimizer")}
