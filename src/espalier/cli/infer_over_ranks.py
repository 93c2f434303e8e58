"""`espalier eval` and `predict` of a graph that was cut over ranks: over as many ranks, each of which reads its part.

Ranks of this machine are forked; under torchrun, srun or mpiexec they are there, and may be on other machines. What the
model says of all nodes then is with the first, which answers.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from espalier.cli import train
from espalier.cli.open_run import DataChoice, SavedRun, Trained, load_trained
from espalier.kernels import accelerator
from espalier.launch.launchers import detect_launcher
from espalier.launch.ranks import agent, rank_assignment
from espalier.parallel.mesh import ProcessMesh, of_plan
from espalier.parallel.sequence_slots import divided
from espalier.plan import base as plans
from espalier.plan.base import Plan, Rank, Unit
from espalier.recipe.units import seconds
from espalier.train import rank_spec as launch
from espalier.train import run_folder as runs
from espalier.train import table, worker
from espalier.train.mechanism import Build, Mechanism

PARTS = "rows of the graph cross"
"""Of mechanisms that give each rank its part of a graph."""


def load_over_ranks(path: str | Path, trust: bool, data: DataChoice) -> Trained:
    """As `open_run.load_trained`; where ranks have parts of a graph, its answers are theirs. Raises SystemExit on ranks
    of a launcher that leave the answer to the first. Raises UserError as `SavedRun.trained`, and for parts that are
    not on the machine of their rank."""
    folder = runs.find(path)
    plan = plans.read(folder.plan) if folder.plan.exists() else None
    recipe = folder.read()
    if (
        plan is None
        or len(plan.trainers) != len(plan.ranks)
        or recipe.graph is None
        or recipe.graph.inductive
        or not _parts(recipe, plan)
    ):
        return load_trained(path, trust, data)
    torch.set_num_threads(1)  # ranks are forked from here
    seat = detect_launcher.place()
    trained = SavedRun.find(path, trust, data).trained(torch.device("cpu"))
    workload = cast("Any", trained.workload)
    known = workload.graph.partition
    wanted = len(plan.ranks) if known is None else known.ranks
    if seat is None or seat.world == 1:
        if wanted == 1 or workload.graph.nodes < wanted or 0 < accelerator.count() < wanted:
            return load_trained(path, trust, data)
        asked = over(plan, [0] * wanted, workload.global_batch)
        logits = agent.run(lambda place: _first(trained, asked, place), launch.places(asked))[0]
    else:
        timeout = seconds(recipe.comm.timeout, "comm.timeout")
        place = train.seated(seat, timeout)
        hosts = train.hosts_of(place, timeout)
        names = list(dict.fromkeys(hosts))
        asked = over(plan, [names.index(host) for host in hosts], workload.global_batch)
        order = rank_assignment.numbered(hosts, [rank.node for rank in asked.ranks])
        logits = _first(trained, asked, replace(place, rank=order.index(place.rank)))
        if logits is None:
            raise SystemExit(0)
        workload.batching.part = None
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    workload.task.inference = lambda model: lambda ids: logits[ids]
    return trained


def over(plan: Plan, nodes: list[int], batch: int) -> Plan:
    """The plan for one rank on each of these machines: with its shares where it has as many, else with equal ones."""
    ends = divided(batch, [1] * len(nodes))
    same = len(plan.ranks) == len(nodes)
    threads = max(1, len(os.sched_getaffinity(0)) // max(map(nodes.count, nodes)))
    ranks = tuple(
        Rank(
            node=node,
            device=str(accelerator.of_rank(nodes[:at].count(node))),
            threads=threads,
            share=plan.ranks[at].share if same else (int(ends[at]), int(ends[at + 1])),
        )
        for at, node in enumerate(nodes)
    )
    return plan.changed(ranks=ranks, stages=(), units=(Unit(),))


def _parts(recipe: Any, plan: Plan) -> list[Mechanism]:
    """The mechanism that gives each rank its part, and those that it needs to know of it."""
    return [
        mechanism
        for mechanism in table.ordered(recipe, plan)
        if PARTS in mechanism.claim.changes | mechanism.claim.needs
    ]


def _first(trained: Trained, plan: Plan, place: launch.RankSpec) -> Tensor | None:
    """[nodes, outputs] of all nodes, on the first of the ranks, all of which call it; None on the others."""
    timeout = seconds(trained.recipe.comm.timeout, "comm.timeout")
    with worker.joined(place, timeout, staged=plan.staged) as channel:
        device = torch.device(place.device)
        workload = cast("Any", trained.workload)
        mesh = ProcessMesh(of_plan(plan), channel, place.rank)
        build = Build(trained.recipe, plan, workload, mesh, device, model=trained.model.to(device))
        for mechanism in _parts(trained.recipe, plan):
            mechanism.wrap(build)
        logits: Tensor = workload.batching.part.logits(trained.model.eval())
        return logits if place.rank == 0 else None
