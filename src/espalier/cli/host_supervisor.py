"""Host supervisor of `train --hosts`: started once on each host, forks that host's ranks.

Ranks measure the hosts together, the first supervisor plans, and then all ranks train under `launch.hosts.leader`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from espalier.cli import resolve_recipe, run_data, run_resizer, start_run, train
from espalier.cli.start_run import RunInputs, RunStart
from espalier.comm import multihost_probe, plain_collectives
from espalier.kernels import accelerator
from espalier.launch.hosts import leader, supervisor_protocol
from espalier.launch.hosts.announcement import Announcement
from espalier.launch.hosts.host_agent import Launcher, Told
from espalier.launch.hosts.host_map import HostMap
from espalier.launch.hosts.supervisor_protocol import MeetingPoint
from espalier.launch.ranks import rank_assignment, store_server
from espalier.launch.ranks.supervisor import RestartOptions
from espalier.machine import cluster as clusters
from espalier.machine import probe, resource_limits
from espalier.mechanisms.codecs import choice as codecs
from espalier.plan import replan
from espalier.recipe import Recipe, cache_dir, recipe_file, units
from espalier.recipe.errors import UserError
from espalier.recipe.terminal import say_progress
from espalier.track.progress import waiting
from espalier.track.startup import STARTUP
from espalier.train import worker, workload_registry
from espalier.train.rank_spec import Entrypoint, RankSpec
from espalier.train.run_folder import RunFolder

_DECIDED = "espalier/decided"
"""Where the first supervisor tells what it has decided."""


@dataclass(frozen=True)
class HostPost:
    """One supervisor's place among them.

    Attributes:
        team: the hosts, with the ranks as the launcher counts them.
        given: the data, which each host has opened.
        launcher: who is told of hosts that are left out, and that have ranks again.
    """

    team: HostMap
    given: RunInputs
    launcher: Launcher

    def decide(self) -> train.Begun:
        measured = self.measured()
        assert measured is not None  # the leader has it, or raised
        STARTUP.ended("Measuring the hosts")
        text, machines = measured[0]
        cluster = clusters.loads(text)
        hosts = self.team.hosts
        more = sum(table.count for table in cluster.helpers)
        if more and max(hosts) + 1 != cluster.machines + more:
            raise UserError(
                f"{max(hosts) + 1} hosts were named, and the cluster file has {cluster.machines} machines that train "
                f"and {more} with other roles.",
                do="--hosts with one host each: those that train, then optimizer nodes, standbys, aggregators",
            )
        remaining = [process for process, host in enumerate(hosts) if not more or host < cluster.machines]
        job = start_run.start_run(
            self.given, lambda: cluster, len(remaining), [hosts[process] for process in remaining]
        )
        trainers = [rank.node for rank in job.plan.trainer_ranks]
        order = rank_assignment.numbered([machines[process] for process in remaining], trainers)
        there = [hosts[remaining[process]] for process in order]
        known = dict(zip(trainers, there, strict=True))
        return job, there + [known.get(rank.node, rank.node) for rank in job.plan.ranks[len(trainers) :]]

    def run(self, job: RunStart, hosts: Sequence[int]) -> bool:
        recipe = job.resolved.recipe
        care = train.care_of(job)
        team = self.doing("training", care.heartbeat, hosts)
        team = replace(team, roles=tuple(rank.role for rank in job.plan.ranks))

        def start(job: RunStart) -> Entrypoint:
            life = train.life(job)
            return lambda place: life(seated(place, recipe))

        cut = replan.cut(job.plan)
        if ("optimizer" in team.roles or cut) and recipe.faults.restarts:
            shapes = run_resizer.HostResizer(job, start, hosts, self._changed)
            care = replace(care, shapes=shapes, leaves=cut, heard=partial(run_resizer.heard, job, start))
        return leader.run(start(job), team, care, _threads(team)) is not None

    def _changed(self, host: int, out: bool) -> None:
        self.launcher.tell("without" if out else "again", host=host)

    def measured(self) -> list[Any] | None:
        """The hosts as they are, and the machine of each rank as the launcher counts them, from each rank of this host;
        None: the first host says why not."""
        team = self.doing("measuring")
        return leader.run(_measuring(self.given.resolved.recipe), team, RestartOptions(0), _threads(team))

    def doing(self, topic: str, heartbeat: float = 1.0, ranks: Sequence[int] | None = None) -> HostMap:
        """The team at one of the things that it does together, with keys of its own."""
        line = replace(self.team.line, topic=topic, heartbeat=heartbeat)
        return replace(self.team, line=line, hosts=self.team.hosts if ranks is None else tuple(ranks))


def opened(place: RankSpec, asked: Told) -> RunInputs:
    """Opens the data on this host, with what the run has made of it before."""
    torch.set_num_threads(1)  # ranks are forked from here; see launch.agent
    recipe = recipe_file.from_table(asked["recipe"], asked["origin"])
    run = RunFolder(Path(asked["run"]))
    first = run.kept() if not place.rank and run.exists() else None
    frozen = run_data.unpacked(asked["kept"]) if place.rank else first
    resolved = workload_registry.settle(recipe, Path(asked["beside"]), waiting, frozen, asked["trust"])
    return start_run.open_inputs(resolved, asked["run"], asked["quiet"], writes=not place.rank)


def supervise(launcher: Launcher, place: RankSpec, asked: Told, given: RunInputs) -> Told:
    """Says what data was `given`, and once all hosts agree measures, plans and trains. `place` is this host's among the
    hosts. One that was started in place of another (`life`) finds the plan where the others have left it."""
    recipe = given.resolved.recipe
    first = place.rank == 0
    own_identity = {
        "data": given.workload.fingerprint(),
        "recipe": cache_dir.hashed(recipe_file.to_table(recipe)),
    }
    absence = units.seconds(recipe.comm.timeout, "comm.timeout")
    team = _met(launcher, place, asked, own_identity, absence)
    post = HostPost(team, given, launcher)
    line = team.line
    names = team.names
    store = supervisor_protocol.opened(line.address, line.port, absence, f"host {names[0]}")
    others = Announcement(store, _DECIDED, f"Host {names[0]}", line.token, f"Host {names[line.host]}")
    launcher.led = 0.0 if first else absence
    if not (first or line.life) and post.measured() is None:
        return {"code": 1}  # the first says why

    def opened() -> RunInputs:
        launcher.tell("joined")
        return given

    begin = (lambda: train.announced(post.decide, others)) if first else (lambda: train.heard(opened, others))
    return {"code": train.carry_out(train.Ranks(begin, post.run, first), asked["quiet"])}


def _met(launcher: Launcher, place: RankSpec, asked: Told, own_identity: dict[str, str], absence: float) -> HostMap:
    """The hosts of the run, once each has said what it has (`own_identity`) and all are to begin."""
    launcher.tell("ready", identity=own_identity)
    launcher.hear()
    server = store_server.near(place, asked["token"])
    line = MeetingPoint(
        place.rank, len(asked["names"]), server.host, server.port, "", life=asked.get("life", 0), token=asked["token"],
        gate=(place.host, place.port) if place.rank else None,
    )  # fmt: skip
    return HostMap(line, tuple(asked["names"]), tuple(asked["nodes"]), absence)


# --- measuring ---------------------------------------------------------------------------------------------------


def _measuring(recipe: Recipe) -> Callable[[RankSpec], tuple[str, list[str]]]:
    def life(place: RankSpec) -> tuple[str, list[str]]:
        with place.pulse.elsewhere("storing"), worker.joined(seated(place, recipe), train.PROBING) as channel:
            machines = [multihost_probe.host()]
            if channel is not None:
                machines = plain_collectives.all_gather(multihost_probe.host(), channel)
            return clusters.dumps(resolve_recipe.machines_of(channel, place, recipe)), machines

    return life


def probed(launcher: Launcher, place: RankSpec, asked: Told) -> Told:
    """`probe --hosts`: this host measured anew, and the links to the others."""
    torch.set_num_threads(1)
    team = _met(launcher, place, asked, {}, train.PROBING)

    def measure() -> clusters.Cluster:
        cluster = codecs.measured(probe.probe(progress=say_progress, disk=Path(asked["disk"])))
        probe.save(cluster, say=say_progress)
        return cluster

    def life(place: RankSpec) -> str:
        with place.pulse.elsewhere("storing"), worker.joined(place, train.PROBING) as channel:
            if channel is None:
                return clusters.dumps(measure())
            cluster = multihost_probe.probe_ranks(channel, place.local_rank, measure)
            multihost_probe.keep(cluster, multihost_probe.key(channel))
            return clusters.dumps(cluster)

    returned = leader.run(life, team, RestartOptions(0), _threads(team))
    return {"cluster": returned[0]} if returned and not place.rank else {}


def _threads(team: HostMap) -> int:
    return max(1, resource_limits.cores() // max(1, len(team.own)))


def seated(place: RankSpec, recipe: Recipe) -> RankSpec:
    """With the device it computes on, and the threads that the recipe pins. In the rank: who asks a GPU cannot fork."""
    device = str(accelerator.of_rank(place.local_rank))
    return replace(place, device=device, threads=recipe.plan.pin.threads or place.threads)
