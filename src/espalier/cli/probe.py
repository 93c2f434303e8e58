"""`espalier probe`: measures this machine, keeps the result for later plans, and writes it as a cluster file."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from espalier.cli import printing
from espalier.comm import multihost_probe
from espalier.launch.launchers import detect_launcher
from espalier.machine import probe
from espalier.machine.cluster import Cluster
from espalier.mechanisms.codecs import choice as codecs
from espalier.recipe.errors import UserError
from espalier.recipe.terminal import say_progress
from espalier.train import worker


def run(arguments: argparse.Namespace) -> int:
    """Probes anew, whatever is cached."""
    if arguments.overrides:
        raise UserError(
            f"probe takes no option {arguments.overrides[0]!r} without --hosts.", do="leave it out, or name hosts"
        )
    torch.set_num_threads(1)
    place = detect_launcher.place()

    def measure() -> Cluster:
        return codecs.measured(probe.probe(progress=say_progress, disk=Path(arguments.disk)))

    if place is None:
        cluster = probe.better(measure(), probe.cached(), say_progress)
        probe.save(cluster, say=say_progress)
    else:
        with worker.joined(place, timeout=120.0) as channel:
            cluster = (  # every machine, and the links between all ranks
                measure() if channel is None else multihost_probe.probe_ranks(channel, place.local_rank, measure)
            )
        if place.rank != 0:
            return 0
    remark = f"; plans use it from now on (espalier plan RECIPE --cluster {arguments.out} elsewhere)."
    printing.write_cluster(cluster, arguments.out, arguments.json, remark)
    return 0
