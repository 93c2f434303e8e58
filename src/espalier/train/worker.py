"""The worker: what one rank does, from joining its process group to leaving it."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from espalier import comm
from espalier.checkpoint import divergence_check, peer_copy, run_identity, young_daly
from espalier.checkpoint.coordination import Coordinator
from espalier.checkpoint.divergence_check import Alike
from espalier.checkpoint.in_memory import CopyOptions, Memory
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.checkpoint.save_interval import Pace, RunBeginning
from espalier.checkpoint.shared_memory import SharedMemory
from espalier.comm.abort import Connections
from espalier.comm.plain_collectives import RankGroup
from espalier.kernels import accelerator
from espalier.machine import malloc_trim, network_interface
from espalier.machine.peak_memory import peak_memory
from espalier.plan import checkpoint_cost
from espalier.plan.base import Plan
from espalier.recipe import Recipe, units
from espalier.recipe.errors import UserError
from espalier.track import events
from espalier.track.decision_log import Decisions, Recorded, recorded
from espalier.train import rank_spec as launch
from espalier.train import version_check
from espalier.train.rank_setup import RankSetup
from espalier.train.rejoin_signal import is_loss
from espalier.train.rollback import Healing
from espalier.train.signal_handling import handling
from espalier.train.table import recovery
from espalier.train.trainer import Trainer

SAVING = timedelta(minutes=30)
"""How long ranks wait for each other while a checkpoint is written."""


LONGEST = timedelta(days=1)
"""How long ranks wait for one that computes, whatever `comm.timeout` says of one that does not."""


def warm(plan: Plan) -> None:
    """Loads, before ranks are forked, what takes each of them more than a second."""
    if plan.compile or plan.recompute != "none":
        import_module("torch._dynamo")


@contextlib.contextmanager
def joined(place: launch.RankSpec, timeout: float, *, staged: bool = False) -> Iterator[RankGroup]:
    """This rank's Channel to the others, or None when it is alone. `staged`: see `Plan.staged`."""
    torch.set_num_threads(place.threads)
    malloc_trim.keep_freed()
    device = torch.device(place.device)
    accelerator.select(device)
    if place.world == 1 or place.alone:
        yield None
        return
    loopback = [
        address.interface
        for address in network_interface.addresses()
        if address.address == place.host and place.host[:4] == "127."
    ]
    if loopback:  # Gloo listens where the ranks meet, not at the address of the machine's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    inner = "staged" if staged else "nccl" if accelerator.is_on(device) else "gloo"
    # Keys of a dead attempt would lead to its addresses.
    store = PrefixStore(place.keys, launch.store(place, timeout))
    channel = comm.connect(store, place.rank, place.world, timeout=max(timeout, place.patience), inner=inner)
    channel.set_timeout(timedelta(seconds=timeout), longest=LONGEST)
    made = Connections(store)
    made.look()
    channel.line.watch.known = place.recall.called
    place.recall.released_by(made.cut, made.look)
    try:
        yield channel
    except BaseException:
        made.cut()
        raise
    finally:
        comm.disconnect()


def saving_group(channel: RankGroup) -> RankGroup:
    """A Gloo group of its own for checkpoints, also beside NCCL: they lie in host memory, and writing may take long."""
    if channel is None:
        return None
    members = getattr(channel, "members", None) or dist.get_process_group_ranks(channel)
    return dist.new_group(list(members), backend="gloo", timeout=SAVING, use_local_synchronization=True)


Program = Callable[[RankSetup, RankGroup], dict[str, Any]]
"""What a rank of one role does among all ranks (None: it is alone). Returns what the launcher is told at the end."""


def train(
    setting: RankSetup, identity: Mapping[str, str] | None, programs: Mapping[str, Program] | None = None
) -> dict[str, Any]:
    """Joins the others and runs the program of this rank's role.

    Args:
        identity: what all ranks must share (`handshake`); None: they were forked from one process, so they do.
        programs: by role; None: those there are.

    Raises UserError where there is none for the role.
    """
    place = setting.place
    program = (PROGRAMS if programs is None else programs).get(place.role)
    if program is None:
        raise UserError(
            f"Rank {place.rank} is planned as {place.role!r}, and no mechanism has a program for that role.",
            do="a plan whose ranks are all trainers",
        )
    timeout = units.seconds(setting.recipe.comm.timeout, "comm.timeout")
    with joined(place, timeout, staged=setting.plan.staged) as channel:
        if identity is not None:
            version_check.compare(identity, channel)
        return program(setting, channel)


def as_trainer(setting: RankSetup, channel: RankGroup) -> dict[str, Any]:
    """Trains on this rank from the newest checkpoint (if any) to the end. Returns the steps and tokens done."""
    trainer = None
    try:
        trainer = Trainer(setting, channel)
        with trainer.built.closing():
            return live(trainer)
    except Exception as error:
        from espalier.plan.oom_advice import exhausted, is_exhausted

        if not is_exhausted(error):
            raise
        raise exhausted(setting.plan, setting.place.rank, measured(trainer, setting)) from error


def as_optimizer(setting: RankSetup, channel: RankGroup) -> dict[str, Any]:
    """Serves the trainers as an optimizer node, its standby or an aggregator until they have left. Returns the steps
    done.

    Raises UserError where there is no folder for its files.
    """
    role = import_module("espalier.mechanisms.optimizer_node.role")

    place = setting.place
    if setting.folder is None:
        raise UserError("An optimizer node needs a run folder for its files.", do="espalier train")
    node = role.NodePlace(setting.recipe, setting.plan, setting.workload, place, setting.folder, setting.new)
    bound = os.environ.get("GLOO_SOCKET_IFNAME")  # where ranks of other hosts reach this one
    node = replace(
        node,
        address=next((address.address for address in network_interface.addresses() if address.interface == bound), ""),
    )

    def stepped(step: int) -> None:
        place.pulse.stepped(step)

    with handling(lambda number, frame: None, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # trainers stop first
        return {"step": role.serve(node, channel, stepped)}


PROGRAMS: Mapping[str, Program] = {
    "trainer": as_trainer, "optimizer": as_optimizer, "standby": as_optimizer, "aggregator": as_optimizer,
}  # fmt: skip
"""The table of roles; a mechanism that needs ranks of another role adds its row."""


def measured(trainer: Trainer | None, setting: RankSetup) -> dict[str, float]:
    """Bytes this rank holds by kind, and the most it ever held."""
    peak = float(peak_memory(setting.device))
    if trainer is None:
        return {"peak": peak}
    entries = trainer.built.optimizer.state_dict().values()
    states = sum(value.nbytes for value in entries if isinstance(value, torch.Tensor))
    return {**trainer.built.sharding.bytes_held(), "optimizer": states, "peak": peak}


def checkpoints(
    recipe: Recipe, folder: Path, group: RankGroup, tell: Callable[..., Any], sharing: int = 1
) -> Checkpoints:
    """The checkpoints of the run in `folder`, for the ranks of `group` together; `tell` takes events. So many ranks are
    `sharing` what their machine may write."""
    options = recipe.checkpoint
    saved = Checkpoints(
        options.target or folder / "checkpoints",
        keep=options.keep,
        keep_best=options.keep_best,
        group=group,
        on_event=tell,
    )
    if options.rate is not None:
        saved.rate = units.rate(options.rate, "checkpoint.rate") / sharing
    if saved.team.rank == 0:  # which judges; at this path another host may have the folder of another run
        saved.run = run_identity.read(folder)
    return saved


def live(trainer: Trainer) -> dict[str, Any]:
    """Everything between joining and leaving. Returns the steps and tokens done."""
    setting = trainer.setting
    recipe = setting.recipe
    place = setting.place
    saved = None
    if setting.folder is not None:
        nodes = [rank.node for rank in setting.plan.ranks]
        group = saving_group(trainer.mesh.trainers)
        saved = checkpoints(recipe, setting.folder, group, setting.emit, nodes.count(nodes[place.rank]))
        why = recovery(recipe, setting.plan)
        foretold = setting.plan.predicted
        saved.waits = foretold is not None and foretold.memory_bytes.get(checkpoint_cost.STAGING) == 0
        saved.alike = _alike(trainer, saved.team) if why == "alike" else None
        if place.refuge is not None:
            trainer.memory = _memory(trainer, saved, place.refuge, why)
        trainer.healing = Healing(setting, saved, trainer.built.agreement.common)
        with place.pulse.elsewhere(saved.doing):
            trainer.restore(saved)
        if recipe.checkpoint.every == "auto":
            trainer.pace = _pace(trainer, saved)
    peak_memory(setting.device)  # from here on, what a step adds is told
    trainer.built.agreement.follow(place.recall)
    place.pulse.begins(trainer.step, trainer.source.startswith("memory"))
    about: dict[str, Any] = {"until": trainer.steps, **({"source": trainer.source} if trainer.source else {})}
    _begin(trainer, about)
    _replay(trainer, saved)
    while True:
        try:
            trainer.run(saved)
            break
        except Exception as error:
            if not is_loss(error):
                raise
            if trainer.step < trainer.steps and trainer.built.agreement.outlives and place.recall.goes_on():
                continue
            _leave(trainer, saved)
            raise
    if saved is not None:
        with place.pulse.elsewhere(saved.doing):
            saved.wait()
    with place.pulse.elsewhere("validating"):
        shown = trainer.sample()
    for artifact in shown if place.rank == 0 else ():
        setting.emit("sample", step=trainer.step, **artifact.fields)
    return {"step": trainer.step, "tokens": trainer.tokens}


def _begin(trainer: Trainer, about: Mapping[str, Any]) -> None:
    """Says that steps are made from now on, and of what."""
    setting = trainer.setting
    place = trainer.setting.place
    setting.emit("run", step=trainer.step, steps=trainer.total, pid=os.getpid(), **about, **setting.about)
    for what, action in trainer.built.context.damaged.items():
        setting.emit("incident", kind="damaged", what=what, rank=place.rank, step=trainer.step, action=action)
    predicted = setting.plan.predicted
    setting.emit("plan", predicted=msgspec.to_builtins(predicted) if predicted else None)


def _replay(trainer: Trainer, saved: Checkpoints | None) -> None:
    """What follows measurements is decided as the log of this run says, for steps that are done again, then as logs do
    that the recipe names; what is decided beyond goes into the log."""
    setting = trainer.setting
    paths = [] if setting.folder is None else [setting.folder / events.NAME]
    team = saved.team if saved is not None else Coordinator(None)
    for recorded_decisions in trainer.built.context.decisions:
        why = f"{recorded_decisions.signal}, or the log that it follows"

        def read(decisions: Decisions = recorded_decisions) -> dict[str, list[tuple[Any, ...]]]:
            logs = [*(log for log in paths if log.exists()), *decisions.logs]
            return {name: [tuple(recorded(log, name)) for log in logs] for name in decisions.now.values}

        def tell(name: str, step: int, value: int, why: str = why) -> None:
            setting.emit("rule", name=name, step=step, value=value, why=why)

        decided = team.agree("reading what was decided", lambda: None, lambda all_: [read()] * len(all_))
        recorded_decisions.tell = tell
        if trainer.step == 0:
            for name, value in recorded_decisions.now.values.items():
                tell(name, 0, value)
        recorded_decisions.replay({name: [Recorded(*log) for log in logs] for name, logs in decided.items()})


def _leave(trainer: Trainer, saved: Checkpoints | None) -> None:
    """Keeps what another rank can take up, and takes apart what others have left. This process may go on."""
    agreement = trainer.built.agreement
    if trainer.memory is not None and agreement.level and trainer.step < trainer.steps:
        # What was due after this step may not be done: it is when this copy has been taken up.
        about = {**trainer.meta(), "level": trainer.level, "report": trainer.reported}
        trainer.memory.stay(trainer.step, trainer.parts, about)
    trainer.setting.place.recall.release()  # from here on nobody here waits for the others
    agreement.close()
    if saved is not None:
        saved.abandon()


def _pace(trainer: Trainer, saved: Checkpoints) -> Pace:
    """When the run goes to the disk."""
    setting = trainer.setting
    place = trainer.setting.place
    first, expected = checkpoint_cost.first(setting.plan)
    between = young_daly.between_failures(0, place.attempt, expected)
    if place.refuge is not None:
        between = place.refuge.between_failures

    def mean(values: Sequence[float]) -> list[float]:
        agreed = torch.tensor(values, dtype=torch.float64)
        trainer.mean(agreed)
        return agreed.tolist()

    def tell(every: int, why: str) -> None:
        setting.emit("rule", name=checkpoint_cost.NAME, step=trainer.step, value=every, why=why)

    newest = 0 if setting.new else max(0, saved.newest())
    begin = RunBeginning(first, trainer.step, newest, between, place.attempt, expected)
    return Pace(saved, begin, mean, tell)


def _alike(trainer: Trainer, team: Coordinator) -> Alike | None:
    """Who compares what ranks hold; None where there is one, or, and that is told, where they may round differently."""
    if team.world == 1:
        return None
    buffers = frozenset(f"model/{name}" for name, _ in trainer.built.model.named_buffers())
    comparing = Alike(team.rank, team.world, trainer.mean, buffers)
    if trainer.setting.new and len({(rank.node, rank.threads) for rank in trainer.setting.plan.ranks}) == 1:
        return comparing  # forked from one process
    makes = team.agree("comparing processors", divergence_check.make, lambda all_: [all_] * len(all_))
    odd, _ = divergence_check.strangers(makes)
    if not odd:
        return comparing
    usual = next(make for rank, make in enumerate(makes) if rank not in odd)
    named = ", ".join(f"rank {rank} has {makes[rank]}" for rank in odd[:4])
    why = f"ranks may round differently: {named}, others {usual}"
    trainer.setting.emit("rule", name="comparing what ranks hold", step=trainer.step, value=0, why=why)
    return None


def _memory(trainer: Trainer, saved: Checkpoints, refuge: SharedMemory, why: str) -> Memory:
    """This rank's copies in `refuge`, given why ranks stay."""
    plan = trainer.setting.plan
    apart = 0 if why else peer_copy.distance([rank.node for rank in plan.ranks])
    kin = CopyOptions(why, trainer.setting.place.recall.answered, apart, saved.alike)
    return Memory(refuge, saved.team, partial(_copies, trainer), kin)


def _copies(trainer: Trainer, every: int, why: str) -> None:
    trainer.setting.emit("rule", name="faults.memory", step=trainer.step, value=every, why=why)


def trial(setting: RankSetup, seconds: float, hopeless: float = float("inf")) -> float:
    """Median seconds per step over about `seconds` of real steps, after one to warm up, or of the first where these
    take more than `hopeless` seconds each. Batches are made ahead as in a run, and waits for them
    count. Writes nothing."""
    with joined(setting.place, units.seconds(setting.recipe.comm.timeout, "comm.timeout")) as channel:
        trainer = Trainer(setting, channel)
        times = []
        with trainer.feed() as feed:
            for batches, waited in feed:
                begun = time.perf_counter()
                trainer.train_step(batches)
                times.append(time.perf_counter() - begun + waited)
                slow = min(times[1:], default=0.0) > hopeless
                budget = torch.tensor(-float("inf") if slow else seconds - sum(times))
                if channel is not None:
                    dist.broadcast(budget, 0, group=channel)
                over = float(budget) <= 0 if len(times) > 2 else budget.isneginf()
                if len(times) >= 50 or over:
                    break
        return statistics.median(times[1:] or times)
