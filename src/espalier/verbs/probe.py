"""`espalier probe`: measures this machine, keeps the result for later plans, and writes it as a cluster file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec
import torch

from espalier import cluster as clusters
from espalier import run as runs
from espalier.hardware import probe
from espalier.verbs import ready


def run(arguments: argparse.Namespace) -> int:
    """Probes anew, whatever is cached."""
    torch.set_num_threads(1)
    with ready.waiting("Measuring this machine") as progress:
        found = probe.probe(progress=progress, disk=Path(arguments.disk))
    probe.save(found)
    out = Path(arguments.out)
    runs.replace(out, clusters.dumps(found))
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        print(probe.describe(found))
        print(f"\nWritten to {out}; plans use it from now on (espalier plan RECIPE --cluster {out} elsewhere).")
    return 0
