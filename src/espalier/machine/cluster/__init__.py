"""Cluster: devices, memory, cores, disks and links; the value all planners read. Imports no torch.

Written by `espalier probe` (measured) or by hand (`[[nodes]]` and `[links]`, see docs/cluster.md); named devices come
from `devices.toml`, where each constant has its source.
"""

from espalier.machine.cluster.catalogue import default_link, device, known, known_devices
from espalier.machine.cluster.file import dumps, loads, read
from espalier.machine.cluster.values import Cluster, CodecSpeed, Copy, Device, Disk, Link, Node, Pair, Place, Rate

__all__ = [
    "Cluster",
    "CodecSpeed",
    "Copy",
    "Device",
    "Disk",
    "Link",
    "Node",
    "Pair",
    "Place",
    "Rate",
    "default_link",
    "device",
    "dumps",
    "known",
    "known_devices",
    "loads",
    "read",
]
