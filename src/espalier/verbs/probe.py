"""`espalier probe`: measures this machine, keeps the result for later plans, and writes it as a cluster file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from espalier import cluster as clusters
from espalier import folders, rank
from espalier.cluster import Cluster
from espalier.errors import UserError
from espalier.hardware import hosts, probe
from espalier.launch import base as launch
from espalier.launch import started
from espalier.plan import codecs
from espalier.terminal import say
from espalier.verbs import ready, show


def run(arguments: argparse.Namespace) -> int:
    """Probes anew, whatever is cached."""
    if arguments.overrides:
        raise UserError(
            f"probe takes no option {arguments.overrides[0]!r} without --hosts.", do="leave it out, or name hosts"
        )
    torch.set_num_threads(1)
    place = started.place()
    if place is None:
        found = codecs.measured(probe.probe(progress=ready.say, disk=Path(arguments.disk)))
        probe.save(found, say=ready.say)
    else:
        with rank.joined(place, timeout=120.0) as channel:
            found = _all(channel, place, arguments)
        if place.rank != 0:
            return 0
    out = Path(arguments.out)
    folders.replace(out, clusters.dumps(found))
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        say(show.cluster(found))
        say(f"\nWritten to {out}; plans use it from now on (espalier plan RECIPE --cluster {out} elsewhere).")
    return 0


def _all(channel: dist.ProcessGroup | None, place: launch.Place, arguments: argparse.Namespace) -> Cluster:
    """Under torchrun and its like: every machine, and the links between all ranks."""

    def measure() -> Cluster:
        return codecs.measured(probe.probe(progress=ready.say, disk=Path(arguments.disk)))

    return measure() if channel is None else hosts.probe_ranks(channel, place.local_rank, measure)
