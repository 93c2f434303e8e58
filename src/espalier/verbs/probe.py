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
from espalier.verbs import ready, show


def run(arguments: argparse.Namespace) -> int:
    """Probes anew, whatever is cached."""
    torch.set_num_threads(1)
    found = probe.probe(progress=ready.say, disk=Path(arguments.disk))
    probe.save(found, say=ready.say)
    out = Path(arguments.out)
    runs.replace(out, clusters.dumps(found))
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        print(show.cluster(found))
        print(f"\nWritten to {out}; plans use it from now on (espalier plan RECIPE --cluster {out} elsewhere).")
    return 0
