"""Cluster: devices, memory, cores, disks and links; the value all planners read. Imports no torch.

Written by `espalier probe` (every pair measured) or by hand (`[[nodes]]` and `[links]`, see docs/cluster.md).
"""

from __future__ import annotations

from msgspec import Struct


class Device(Struct, frozen=True, kw_only=True):
    """One compute device. `flops`: precision -> sustained or peak FLOP/s of dense matrix products, per device."""

    name: str
    kind: str  # "cpu" | "cuda"
    memory: int  # bytes a rank may use
    memory_bandwidth: float  # bytes/s
    flops: dict[str, float]
    peak: bool = True
    """True when `flops` are the vendor's peak, False when measured."""
    source: str = ""


class Link(Struct, frozen=True, kw_only=True):
    """alpha-beta plus a price per launch: seconds = launch + latency·hops + bytes / bandwidth."""

    bandwidth: float  # bytes/s, one direction
    latency: float  # seconds
    launch: float = 0.0  # seconds per collective call, whatever its size
    source: str = ""
