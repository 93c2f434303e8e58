"""What an asynchronous save costs a loop of two ranks: how long it stands still, and how much slower its steps are.

One part of bench/acme.py. A decoder of 10.8 M parameters with AdamW (129 MB of state on each rank), 2 ranks with a
thread each on all cores here, so that whatever writes takes processor time from training. Each round: steps alone;
a copy of the same state into memory that is mapped already; our save and steps until it is on the disk; PyTorch's
`async_save` (its thread, with a stager that keeps its buffers) and steps until it is. All take turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from espalier.checkpoint import state_tree, young_daly
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.checkpoint.save_interval import choose
from espalier.language.workload import open_language
from espalier.machine.malloc_trim import keep_freed
from espalier.machine.peak_memory import bytes_held, peak_memory
from espalier.plan.base import Plan, Rank
from espalier.recipe import defaults, recipe_file
from espalier.train.rank_setup import RankSetup
from espalier.train.rank_spec import RankSpec
from espalier.train.trainer import Trainer
from espalier.train.worker import saving_group
from many_ranks import forks
from table import Row, compare

RANKS, LIMIT = 2, 280.0
ALONE = 4
"""Steps between two saves that nothing is written beside, after one that warms up."""
BLOCKS, SLOWS = 1.3, 0.05
"""The goals: a save stands still no longer than so many copies, and slows the loop by no more."""
PEER = "torch-dcp async_save"


class Turn(NamedTuple):
    """One save: seconds of standing still and of a step beside its writing; steps and seconds until it was written."""

    stood: float
    step: float
    steps: int
    written: float


class Told(NamedTuple):
    """What rank 0 measured: seconds of a step alone and of a copy, our saves and the peer's, and bytes."""

    alone: list[float]
    copies: list[float]
    ours: list[Turn]
    theirs: list[Turn]
    state: int
    before: int
    peak: int


def recipe_of(corpus: Path, quick: bool) -> Any:
    depth, width = (3, 256) if quick else (6, 384)
    table = {
        "name": "save",
        "model": {"depth": depth, "width": width},
        "data": {"path": str(corpus), "cache": str(corpus.parent / "cache")},
        "train": {"steps": 10_000, "sequence": 128, "batch_tokens": 512, "optimizer": {"kind": "adamw"}},
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


class Loop:
    """Training on one rank. Has state: the trainer, and the number of the next step."""

    def __init__(self, channel: Any, workload: Any, recipe: Any) -> None:
        samples = recipe.train.batch_tokens // recipe.train.sequence
        cuts = [samples * one // RANKS for one in range(RANKS + 1)]
        plan = Plan(ranks=tuple(Rank(share=(cuts[one], cuts[one + 1])) for one in range(RANKS)), micro_batch=2)
        place = RankSpec(rank=channel.rank(), world=RANKS)
        self.trainer = Trainer(RankSetup(recipe, plan, workload, place), channel)
        self.workload, self.shard = workload, self.trainer.setting.shard
        self.flag, self.group = torch.zeros(1), dist.new_group(backend="gloo")

    def step(self, busy: Callable[[], bool] = lambda: False) -> tuple[float, bool]:
        """Seconds of one step, and whether anything is still being written on any rank."""
        began = time.perf_counter()
        self.trainer.train_step(self.workload.batches(self.trainer.step, self.shard))
        self.flag.fill_(float(busy()))
        dist.all_reduce(self.flag, group=self.group)
        return time.perf_counter() - began, bool(self.flag)

    def beside(self, save: Callable[[], Any], busy: Callable[[], bool]) -> Turn:
        """A save, and steps until it is written."""
        dist.barrier(group=self.group)
        began = time.perf_counter()
        save()
        stood, times, more = time.perf_counter() - began, [], True
        while more:
            took, more = self.step(busy)
            times.append(took)
        return Turn(stood, statistics.fmean(times), len(times), time.perf_counter() - began)

    def copy(self, room: dict[str, torch.Tensor]) -> float:
        """Seconds of copying the state into `room`."""
        tensors, _ = state_tree.flatten(self.trainer.parts())
        own = {name: state_tree.local(one) for name, one in tensors.items()}
        for name, one in own.items():
            room.setdefault(name, torch.zeros_like(one))
        dist.barrier(group=self.group)
        began = time.perf_counter()
        for name, one in own.items():
            room[name].copy_(one)
        return time.perf_counter() - began


def life(channel: Any, workload: Any, recipe: Any, folder: Path, rounds: int) -> Told:
    """One rank's turns."""
    keep_freed()
    loop = Loop(channel, workload, recipe)
    saved = Checkpoints(folder / "ours", keep=1, group=saving_group(channel))
    for _ in range(3):
        loop.step()
    state = sum(state_tree.local(one).nbytes for one in state_tree.flatten(loop.trainer.parts())[0].values())
    peak_memory(torch.device("cpu"))
    before = bytes_held()

    def save() -> None:
        saved.save(loop.trainer.step, loop.trainer.parts(), {"step": loop.trainer.step})

    loop.beside(save, lambda: saved.busy)  # maps the buffers
    ours = [loop.beside(save, lambda: saved.busy) for _ in range(3)]
    peak = peak_memory(torch.device("cpu"))
    ours.clear()
    peer = Peer(loop, folder / "theirs")
    loop.beside(peer.save, peer.busy)
    alone, copies, theirs, room = [], [], [], {}  # type: ignore[var-annotated]
    loop.copy(room)
    for _ in range(rounds):
        loop.step()
        alone.append(statistics.fmean(loop.step()[0] for _ in range(ALONE)))
        copies.append(loop.copy(room))
        ours.append(loop.beside(save, lambda: saved.busy))
        loop.step()
        theirs.append(loop.beside(peer.save, peer.busy))
    saved.close()
    return Told(alone, copies, ours, theirs, state, before, peak)


class Peer:
    """torch.distributed.checkpoint at its best here: buffers kept, its own group, the thread. Has state: the save."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        self.loop, self.folder, self.number = loop, folder, 0
        self.group = dist.new_group(backend="gloo")
        self.stager = DefaultStager(StagingOptions(False, False, False, False))
        self.running: Any = None

    def save(self) -> None:
        if self.running is not None:
            self.running.result()
        built = self.loop.trainer.built
        state = {"model": built.model.state_dict(), "optimizer": dict(built.optimizer.state_dict())}
        self.number += 1
        # Two folders in turn, as `keep=1` needs of ours.
        writer = dcp.FileSystemWriter(self.folder / str(self.number % 2), overwrite=True)
        self.running = dcp.async_save(state, storage_writer=writer, process_group=self.group, async_stager=self.stager)

    def busy(self) -> bool:
        return not self.running.done()


def rows(rounds: int, quick: bool) -> list[Row]:
    """Runs both and asserts that memory stays bounded."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="acme-save-") as name:
        folder = Path(name)
        corpus = folder / "corpus"
        corpus.mkdir()
        (corpus / "text.txt").write_text("".join(f"{n} comes before {n + 1}.\n" for n in range(60_000)))
        recipe = recipe_of(corpus, quick)
        told: Told = forks(RANKS, life, open_language(recipe), recipe, folder, rounds, timeout=LIMIT)[0]
    grown = told.peak - told.before
    case = f"save of {told.state / 2**20:.0f} MiB a rank, 2 ranks on all cores"
    if grown > 1.5 * told.state:
        raise SystemExit(f"{case}: memory grew by {grown:,} bytes, more than a staged copy and a half")
    return table(case, told)


def table(case: str, told: Told) -> list[Row]:
    slower = [mine.step / alone - 1 for mine, alone in zip(told.ours, told.alone, strict=True)]
    lost = [turn.stood + turn.steps * (turn.step - alone) for turn, alone in zip(told.ours, told.alone, strict=True)]
    step = statistics.median(told.alone)
    written = statistics.median(turn.written for turn in told.ours)
    chosen = choose(max(1e-9, statistics.median(lost)), written, step, young_daly.ASSUMED)
    share = [one / (one + chosen.steps * step) for one in lost]
    peer = [turn.step / alone - 1 for turn, alone in zip(told.theirs, told.alone, strict=True)]

    def goal(what: str, goal: float, values: Sequence[float], unit: str) -> Row:
        middle = statistics.median(values)
        low, high = min(values), max(values)
        said = f"{low:.3f}-{high:.3f} of ours (n={len(values)})"
        return Row(f"{case}: {what}", "goal", goal, middle, goal / middle if middle > 0 else float("inf"), unit, said)

    stood = [(mine.stood, copy) for mine, copy in zip(told.ours, told.copies, strict=True)]
    both = [(mine.stood, other.stood) for mine, other in zip(told.ours, told.theirs, strict=True)]
    steps = [(mine.step, alone) for mine, alone in zip(told.ours, told.alone, strict=True)]
    return [
        compare(f"{case}: stands still", "memcpy", "s", stood, False),
        compare(f"{case}: stands still", PEER, "s", both, False),
        goal("stands still, in copies", BLOCKS, [mine / copy for mine, copy in stood], "copies"),
        compare(f"{case}: a step while it is written", "no save", "s", steps, False),
        compare(
            f"{case}: a step while it is written", PEER, "s",
            [(mine.step, other.step) for mine, other in zip(told.ours, told.theirs, strict=True)], False,
        ),
        goal("steps slower while it is written", SLOWS, slower, "share"),
        Row(f"{case}: steps slower while it is written", PEER, statistics.median(peer), statistics.median(slower),
            statistics.median(peer) / max(1e-9, statistics.median(slower)), "share",
            f"peer {min(peer):.3f}-{max(peer):.3f}"),
        goal(f"loop slower, a save every {chosen.steps} steps (as chosen)", SLOWS, share, "share"),
        compare(
            f"{case}: until it is written", PEER, "s",
            [(mine.written, other.written) for mine, other in zip(told.ours, told.theirs, strict=True)], False,
        ),
        goal("memory grows by, in states", 1.5, [(told.peak - told.before) / told.state], "states"),
    ]  # fmt: skip
