"""Optimizer nodes, their standbys and aggregators as ranks of a run: each says where it listens, and serves until all
workers have left.

The files of the nodes are the run's checkpoint: in `optimizer/node-0` and so on of the run's folder, or in the folder
that `store.path` names. They hold the newest whole step, whatever ended the process that wrote them.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import nn

from espalier.comm import plain_collectives
from espalier.comm.plain_collectives import RankGroup
from espalier.machine import malloc_trim
from espalier.mechanisms.optimizer_node.aggregator import Aggregator
from espalier.mechanisms.optimizer_node.client import Client
from espalier.mechanisms.optimizer_node.local_steps import LocalRound, LocalSteps
from espalier.mechanisms.optimizer_node.node import OptimizerNode
from espalier.mechanisms.optimizer_node.reduction import ReductionServer
from espalier.mechanisms.optimizer_node.residuals import PushResiduals
from espalier.mechanisms.optimizer_node.standby import Replica, Standby
from espalier.mechanisms.optimizer_node.state import OptimizerNodeState
from espalier.mechanisms.optimizer_node.state_file import open_state, open_sums, read_layer
from espalier.mechanisms.optimizer_node.wire import Address, Times
from espalier.parallel.layer_client import LayerClient as Connected
from espalier.parallel.layer_client import filler, layers_of
from espalier.plan.axes.node_layout import FlatLayer, NodeJob, outer_method, push_of
from espalier.plan.base import RoundsState
from espalier.recipe import Adamw
from espalier.recipe.cache_dir import writing
from espalier.recipe.errors import RunFailed, UserError
from espalier.recipe.serialization import Value
from espalier.store.state_folder import locked
from espalier.track import events
from espalier.train.layer_window import rank_memory

if TYPE_CHECKING:
    from espalier.parallel.workload import Workload
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe
    from espalier.store.generations import Generations
    from espalier.train.mechanism import Build
    from espalier.train.rank_spec import RankSpec

_LOOK = 0.02
"""Seconds between two looks at who is there."""
_QUIET = 5.0
"""Seconds without a word of any worker after which all have left a process that was started again behind the last step.
"""
LONGEST_ROUND = 86_400.0
"""Seconds that a worker waits at the end of a round for one that still computes; one that is gone is noticed sooner."""
_WHOLE = "go on from the step before, which is whole"
_ROUNDED = "go on without: the last bits differ from those of an unbroken run"
POSTS = "posts.json"
"""Where all such processes serve, in the folder of each."""


TIMES = Times()
"""Seconds of the protocol in runs."""


class NodePost(Value, frozen=True):
    """Where a process serves others, as it tells every rank at the beginning: an address for each node that it is or
    stands before, the token it would choose, the step of its files, and what was damaged in the step after that. A
    worker has no address, and the step is the last that the run's log knows."""

    rank: int
    addresses: tuple[Address, ...] = ()
    token: str = ""
    step: int = 0
    restored: str = ""


Posts = Mapping[int, NodePost]
"""By rank."""


@dataclass(frozen=True)
class NodePlace:
    """A process of a run that serves its workers: an optimizer node, the standby of one, or an aggregator.

    Attributes:
        recipe, plan, workload: of the run.
        spec: its place among all ranks.
        run: folder of the run; the state is there, unless the recipe names another place.
        new: nothing of the run was there before.
        address: of this machine, at which workers reach it; empty: that on the way to where ranks meet.
    """

    recipe: Recipe
    plan: Plan
    workload: Workload
    spec: RankSpec
    run: Path
    new: bool = False
    address: str = ""

    @property
    def number(self) -> int:
        """Among those of its role."""
        return ranks_of(self.plan, self.spec.role).index(self.spec.rank)

    @property
    def folders(self) -> list[Path]:
        """Of its files, one on each disk."""
        return folders_of(self.recipe, self.run, self.spec.role, self.number)

    @property
    def folder(self) -> Path:
        """Of what is not striped over the disks."""
        return self.folders[0]


def folders_of(recipe: Recipe, run: Path, role: str, number: int) -> list[Path]:
    """Where process `number` of a role keeps its files of the run in `run`: there, or in the folders that the recipe
    names, over which the state is striped."""
    folders = run / "optimizer" if recipe.store is None else recipe.store.path or run / "optimizer"
    name = "node" if role == "optimizer" else role
    striped = folders if isinstance(folders, tuple) else [folders]
    return [Path(folder) / f"{name}-{number}" for folder in striped]


def ranks_of(plan: Plan, role: str) -> list[int]:
    """The ranks of that role."""
    return [number for number, rank in enumerate(plan.ranks) if rank.role == role]


def serving(plan: Plan, posts: Posts) -> list[list[int]]:
    """Of each node the ranks that hold its state, that with the newest step first: it serves, the other stands by.
    A standby that took over in an attempt before is thus a node in the next."""
    nodes = ranks_of(plan, "optimizer")
    standbys = ranks_of(plan, "standby")
    pairs = [[rank, *standbys[number : number + 1]] for number, rank in enumerate(nodes)]
    return [sorted(pair, key=lambda rank: -posts[rank].step) for pair in pairs]


def addresses_of(plan: Plan, posts: Posts) -> list[list[Address]]:
    """Of each node its address, and that of its standby."""
    return [[posts[rank].addresses[0] for rank in pair] for pair in serving(plan, posts)]


def site_of(plan: Plan, rank: int) -> int | None:
    """The aggregator through which a worker reaches the nodes: the one on its machine, else of those on machines
    without workers the one for its part of the workers; None: it has none."""
    workers = plan.trainers
    by_machine = {plan.ranks[site].node: site for site in ranks_of(plan, "aggregator")}
    near = {plan.ranks[worker].node for worker in workers} & {*by_machine}
    if near or not by_machine:
        return by_machine.get(plan.ranks[rank].node)
    return [*by_machine.values()][workers.index(rank) * len(by_machine) // len(workers)]


def job_of(recipe: Recipe, plan: Plan, layers: Sequence[FlatLayer]) -> NodeJob:
    """What nodes and workers agree on. Raises UserError where the plan asks for what they cannot do."""
    options = recipe.train.optimizer
    if not isinstance(options, Adamw):
        raise UserError(
            f"train.optimizer.kind = {options.__struct_config__.tag!r}, and an optimizer node runs AdamW.",
            do='train.optimizer.kind = "adamw"',
        )
    rounds = plan.state(RoundsState)
    pushed, section = ("outer_step", "sync") if rounds.replicas else ("gradients", "comm")
    codecs = {exchange.codec for exchange in plan.exchanges if exchange.traffic == pushed}
    outer = None
    push = push_of(codecs or {"exact"}, section)
    if rounds.replicas:
        outer = outer_method(rounds.method, rounds.settings, rounds.replicas)
    return NodeJob(tuple(layers), options, push, workers=len(plan.trainers), outer=outer)


def jobs_of(recipe: Recipe, plan: Plan, layers: Sequence[FlatLayer]) -> list[tuple[list[int], NodeJob]]:
    """Of each node the numbers of its layers, and its job."""
    return job_of(recipe, plan, layers).parts(len(ranks_of(plan, "optimizer")))


# --- processes that serve --------------------------------------------------------------------------------------------


def serve(place: NodePlace, channel: RankGroup, stepped: Callable[[int], None]) -> int:
    """The life of such a process: returns its step when all workers have left. `stepped` is called with each new step.

    Raises UserError where the model has no layers, and where its files are of another or cannot be written.
    """
    malloc_trim.map_blocks()
    model, value = place.workload.skeleton()
    layers = layers_of(model, place.workload.pieces(model))[0]
    jobs = [job for _, job in jobs_of(place.recipe, place.plan, layers)]
    if place.spec.alone and not (place.folder / POSTS).exists():
        raise _gone(place)
    for folder in place.folders:
        with writing(folder, "name another folder in store.path"):
            folder.mkdir(parents=True, exist_ok=True)
    times = replace(TIMES, unheard=place.spec.pulse.reconnects)
    if place.spec.role == "aggregator":
        return _aggregate(place, jobs, channel, stepped, times)
    job = jobs[place.number]
    with (
        locked(place.folder),
        closing(open_state(place.folders, job, filler(job.layers, value))) as state,
        ExitStack() as opened,
    ):
        if place.new and state.step and not place.spec.alone:
            raise UserError(
                f"{place.folder} is of step {state.step}, and the run is new.",
                do="name another folder in store.path, or the run's own with --run FOLDER",
            )
        _tell_restored(state)
        posts, (door,) = _posted(place, channel, opened, (state.step, state.restored))
        token = _token(posts)
        pair = serving(place.plan, posts)[place.number]
        serves = place.spec.rank == pair[0]
        files = (state, open_sums(place.folder, job))
        link = place.plan.state(OptimizerNodeState).node_link
        if not place.spec.alone:
            _go_back(place, state, posts)
        server = OptimizerNode if serves else Standby
        node = server(job, files, door, token, replace(times, link=link))
        node.complete = True
        if serves and len(pair) > 1:
            node.replica = Replica(job, (posts[pair[1]].addresses[0], token), node.name, times)
        node.start()
        try:
            _until_left(place, node, stepped)
            if node.replica is not None:
                node.replica.finished = True
        finally:
            node.close()
        return state.step


def _aggregate(
    place: NodePlace,
    jobs: Sequence[NodeJob],
    channel: RankGroup,
    stepped: Callable[[int], None],
    times: Times,
) -> int:
    """One aggregator for each node, for the workers of this machine."""
    with ExitStack() as opened:
        posts, doors = _posted(place, channel, opened, (0, ""), len(jobs))
        sites = [site_of(place.plan, rank) for rank in place.plan.trainers]
        workers = sites.count(place.spec.rank)
        aggregators = []
        nodes = addresses_of(place.plan, posts)
        for job, door, addresses in zip(jobs, doors, nodes, strict=True):
            local_job = replace(job, workers=workers)
            node = (addresses, _token(posts))
            aggregators.append(Aggregator(local_job, node, door, place.number, times))
            aggregators[-1].complete = True
            opened.callback(aggregators[-1].start().close)
        stepped(0)
        came = False
        while not came or any(each.members or each.session is None for each in aggregators):
            came = came or all(len(each.members) == workers for each in aggregators)
            if _quiet(place, aggregators) and aggregators[0].status({})["step"] >= last_of(place):
                break
            time.sleep(_LOOK)
        for aggregator in aggregators:
            aggregator.leave()
    return 0


def _until_left(place: NodePlace, node: OptimizerNode, stepped: Callable[[int], None]) -> None:
    """Returns when every worker (or aggregator for some) has come and left, or a standby is not needed any more.
    Raises what the node failed with."""
    sites = [site_of(place.plan, rank) for rank in place.plan.trainers]
    due = len(set(sites) - {None}) + sites.count(None)
    stands_by = isinstance(node, Standby)
    came = 0
    step = -1
    while True:
        error = node.error  # before a look at the files, which it may come of
        gone = None if (place.folder / "state").exists() else _gone(place)
        if error is not None:
            raise gone or error
        with node.lock:
            members = len(node.members)
            again = node.forgotten and not stands_by  # those that it forgot come again
        came = max(came, members)
        if stands_by and isinstance(node, Standby) and node.promoted:
            stands_by = False
            came = members
        whole = came >= (1 if stands_by else due) and not members and not again
        if whole or (_quiet(place, [node]) and node.state.step >= last_of(place)):
            return
        if node.state.step != step:
            step = node.state.step
            if gone is not None:
                node.fail(gone)  # first: its threads find the closed file otherwise, and the workers hear of that
                raise gone
            stepped(step)
        time.sleep(_LOOK)


def last_of(place: NodePlace) -> int:
    """The last step of the run's nodes: their steps are rounds where there are any."""
    return -(-(place.recipe.train.steps or 0) // place.plan.state(RoundsState).steps)


def _quiet(place: NodePlace, servers: Sequence[ReductionServer]) -> bool:
    """Whether it was started again alone, when some workers may have left, and those that had not would be here."""
    if not place.spec.alone or any(server.members for server in servers):
        return False
    quiet = time.monotonic() > max(server.asked for server in servers) + _QUIET
    if not quiet:
        place.spec.pulse.reconnects()
    return quiet


def _gone(place: NodePlace) -> UserError:
    return UserError(
        f"The files of {place.spec.role} {place.number} are gone from {place.folder}.",
        why="they are the state of the run, and somebody removed them, or their disk, while it went on",
        do="put them back and run the same command to go on, or start a new run with --run FOLDER",
    )


def _posted(
    place: NodePlace, channel: RankGroup, opened: ExitStack, state: tuple[int, str], doors: int = 1
) -> tuple[Posts, list[socket.socket]]:
    """What all such processes say of themselves, by rank, and the sockets at which this one listens. It is kept in the
    folder, so that a process that is started alone again serves where it did."""
    file = place.folder / POSTS
    rank = place.spec.rank
    if place.spec.alone:
        posts = _by_rank(msgspec.json.decode(file.read_bytes(), type=list[NodePost]))
        addresses = posts[rank].addresses
        return posts, [opened.enter_context(socket.create_server(address)) for address in addresses]
    own_doors = [opened.enter_context(_door(place)) for _ in range(doors)]
    addresses = tuple(door.getsockname()[:2] for door in own_doors)
    posts = _gather(NodePost(rank, addresses, secrets.token_hex(16), *state), channel)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:  # the token is in it
        out.write(msgspec.json.encode(list(posts.values())))
    return posts, own_doors


def _tell_restored(state: Generations) -> None:
    if state.restored:
        sys.stderr.write(f"{state.restored} The state of step {state.step} is whole.\n")


def _go_back(place: NodePlace, state: Generations, posts: Posts) -> None:
    """Gives up the last step where the run's log has no line of it: rank 0 ended in between. No worker has begun the
    step after, so the one before is there. A round stays, as workers' own files are of its end."""
    logged = posts[0].step if 0 in posts else -1
    if state.step == logged + 1 > 0 and not place.plan.replicas:
        with suppress(UserError):  # it is not whole: the log may have lost more than a line
            state.revert(verify=True)


def _token(posts: Posts) -> str:
    return next(post.token for _, post in sorted(posts.items()) if post.token)


def _door(place: NodePlace) -> socket.socket:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((place.spec.host, 9))
        return socket.create_server((place.address or probe.getsockname()[0], 0))


def _gather(local_post: NodePost | None, channel: RankGroup) -> Posts:
    """What the processes that serve say of themselves; all ranks of the run call it once, as they begin."""
    if channel is None:
        return _by_rank([] if local_post is None else [local_post])
    every = plain_collectives.all_gather(local_post and msgspec.json.encode(local_post), channel)
    return _by_rank(msgspec.json.decode(post, type=NodePost) for post in every if post)


def _by_rank(posts: Iterable[NodePost]) -> Posts:
    return {post.rank: post for post in posts}


# --- the model without its nodes ------------------------------------------------------------------------------------


@torch.no_grad()
def load_into(model: nn.Module, workload: Workload, recipe: Recipe, plan: Plan, run: Path) -> int:
    """Fills `model`, which is whole, from the files of the nodes of the run in `run`, or of a standby where those are
    newer. Returns their step.

    Raises UserError where a node's files are not here, or are of another step than the first's.
    """
    layers, _, parameters = layers_of(model, workload.pieces(model))
    steps = []
    for node, (numbers, job) in enumerate(jobs_of(recipe, plan, layers)):
        folders = [folders_of(recipe, run, role, node) for role in ("optimizer", "standby")]
        with ExitStack() as opened:
            states = [
                opened.enter_context(closing(open_state(striped, job, lambda *_: None)))
                for striped in folders
                if (striped[0] / "state").exists()
            ]
            if not states:
                raise UserError(
                    f"The files of optimizer node {node} are not in {folders[0][0]}.",
                    why="they hold the run's model",
                    do="copy them there from the host of that node",
                )
            state = max(states, key=lambda state: state.step)
            _tell_restored(state)
            steps.append(state.step)
            for local, number in enumerate(numbers):
                views = layers[number].views(read_layer(state, job, local))
                for parameter, values in zip(parameters[number], views, strict=True):
                    parameter.copy_(values)
    if len(set(steps)) > 1:
        raise UserError(
            f"The optimizer nodes' files are of steps {', '.join(map(str, steps))}.",
            do="run espalier train again: nodes come to the same step when they meet",
        )
    rounds = plan.state(RoundsState)
    return min(steps[0] * rounds.steps, recipe.train.steps or 0) if rounds.replicas else steps[0]


# --- a worker's way there ------------------------------------------------------------------------------------------


def connect(context: Build, layers: Sequence[FlatLayer]) -> Connected:
    """The connection of a worker to the nodes of its run, through the aggregator of its machine if there is one. All
    ranks of the run take part.

    Raises RunFailed where no node says where it is.
    """
    plan = context.plan
    rank = context.mesh.rank
    job = job_of(context.recipe, plan, layers)
    log = None if context.folder is None or rank else context.folder / events.NAME
    line = None if log is None else events.last(log, "step", "run")
    logged = -1 if line is None else int(line.get("step", -1))
    posts = _gather(NodePost(rank, step=logged) if logged >= 0 else None, context.mesh.channel)
    context.damaged |= {post.restored: _WHOLE for post in posts.values() if post.restored}
    site = site_of(plan, rank)
    if not set(ranks_of(plan, "optimizer")) <= set(posts):
        raise RunFailed("A rank is planned as an optimizer node, and does not say where it listens.")
    addresses = addresses_of(plan, posts)
    if site is not None:
        addresses = [[address] for address in posts[site].addresses]
    answer = LONGEST_ROUND if plan.replicas else TIMES.answer
    near = site is not None and plan.ranks[site].node == plan.ranks[rank].node
    link = 0.0 if near else plan.state(OptimizerNodeState).node_link
    times = replace(TIMES, answer=answer, unheard=context.reconnects, link=link)
    client = Client(addresses, rank, job, _token(posts), times)
    client.ledger = getattr(context.mesh.channel, "ledger", client.ledger)
    _feed_back(context, client)
    return _local(context, plan.state(RoundsState), client) if plan.replicas else client


def _feed_back(context: Build, client: Client) -> None:
    """Where the plan leaves memory for what rounding leaves, that is kept, and what is there of it is taken up."""
    plan = context.plan
    rank = client.rank
    predicted = {} if plan.predicted is None else plan.predicted.memory_bytes
    spare = rank_memory(context) - predicted.get("peak", 0.0)
    client.feedback = sum(4 * layer.numel for layer in client.job.layers) <= spare
    if client.job.push != "int8" or context.folder is None:
        return
    if client.feedback:
        folder = folders_of(context.recipe, context.folder, "worker", rank)[0]
        client.residuals = PushResiduals(client.job, rank, folder / "residuals")
    lacking = client.feedback and client.residuals.lacking(client.step)
    mine = rank if lacking else None
    team = context.mesh.trainers
    ranks = [mine] if team is None else plain_collectives.all_gather(mine, team)
    what = f"What rounding left of the pushes before step {client.step + 1} is not there"
    context.damaged |= {f"{what} on rank {rank}.": _ROUNDED for rank in ranks if rank is not None}


def _local(context: Build, outer: RoundsState, client: Client) -> LocalSteps:
    """Steps of a worker's own between the nodes', in a folder beside theirs."""
    plan = context.plan
    rank = context.mesh.rank
    replica = next(number for number, ranks in enumerate(outer.replicas) if rank in ranks)
    samples = [plan.ranks[ranks[0]].samples for ranks in outer.replicas]
    steps = max(1, round((outer.paces[replica] if outer.paces else 1.0) * outer.steps))
    weight = samples[replica] / max(1, *samples) * steps / outer.steps
    if context.folder is None:
        raise UserError("Workers that take steps of their own need a run folder for their files.", do="espalier train")
    folder = folders_of(context.recipe, context.folder, "worker", rank)[0]
    return LocalSteps(client, folder, LocalRound(steps, outer.steps, weight or 1.0))
