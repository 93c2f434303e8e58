"""The programs of bench/acme.py: the same decoder under our supervisor, and in a plain DDP loop under torchrun.

    python acme_rank.py ours TASK            espalier train, which starts its ranks itself
    torchrun … acme_rank.py ddp TASK         one rank: DDP, torch.save every few steps, resume

TASK is a JSON object. Both are struck at the same steps by `many_ranks.faults` (tests/support); both tell
(time, what, step) in a line each. The peer's group meets under a prefix of its own in each attempt, or over Gloo it
would never recover.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from many_ranks.faults import Fault, strike


class Task(msgspec.Struct, frozen=True):
    """What to train, and what happens on the way: `faults` are (what, step), all to the last rank.

    `timeout`: seconds of the peer's collectives; `every`: steps between checkpoints on disk (None: as by default);
    `due`: what stands in the file of that name ("what rank") happens once, besides; `cluster`: the machine, where it is
    not to be measured.
    """

    folder: str
    ranks: int
    steps: int
    faults: tuple[tuple[str, int], ...]
    depth: int = 3
    width: int = 128
    sequence: int = 128
    batch: int = 8
    every: int | None = 5
    timeout: float = 10.0
    due: bool = False
    cluster: str = ""


def striking(task: Task, rank: int) -> Callable[[int], None]:
    """Called before the step after `step`: tells that a fault is due, and carries it out."""
    due = [Fault(task.ranks - 1, step, do) for do, step in task.faults]  # type: ignore[arg-type]
    folder = Path(task.folder)

    def before(step: int) -> None:
        for fault in due:
            mark = folder / f"{fault.do}-{fault.rank}-{fault.step}"
            if (fault.rank, fault.step) == (rank, step) and not mark.exists():
                tell(folder, fault.do, step)
                strike([fault], rank, step, folder)
        what, who = due_now(folder) if task.due else ("", -1)
        if who == rank:
            (folder / "due").unlink()
            tell(folder, what, step)
            strike([Fault(rank, step, what)], rank, step)  # type: ignore[arg-type]

    return before


def due_now(folder: Path) -> tuple[str, int]:
    """What stands in the file `due`, and the rank that it is to happen to; -1 where there is none, or none any more:
    all ranks look, and the one that is meant takes the file away."""
    try:
        what, who = (folder / "due").read_text().split()
    except FileNotFoundError:
        return "", -1
    return what, int(who)


def tell(folder: Path, what: str, step: int) -> None:
    with (folder / "told").open("a") as file:
        file.write(f"{time.time()!r} {what} {step}\n")


def ours(task: Task) -> int:
    from espalier.cli import main as cli
    from espalier.train import trainer

    plain_step, plain_restore = trainer.Trainer.train_step, trainer.Trainer.restore
    strikes: dict[int, Callable[[int], None]] = {}

    def train_step(self: Any, batches: Any) -> Any:
        rank = self.setting.place.rank
        if self.setting.folder is not None:
            strikes.setdefault(rank, striking(task, rank))(self.step)
        agreed = plain_step(self, batches)
        if rank == 0 and self.setting.folder is not None:
            tell(Path(task.folder), "step", self.step)
        return agreed

    def restore(self: Any, saved: Any) -> None:
        plain_restore(self, saved)
        if self.setting.place.rank == 0:
            tell(Path(task.folder), "run", self.step)

    trainer.Trainer.train_step, trainer.Trainer.restore = train_step, restore  # type: ignore[method-assign]
    cluster = f'cluster = "{task.cluster}"\n' if task.cluster else ""
    every = "" if task.every is None else f"[checkpoint]\nevery = {task.every}\n"
    recipe = Path(task.folder) / "recipe.toml"
    (Path(task.folder) / "text.txt").write_text("".join(f"{n} comes before {n + 1}.\n" for n in range(30_000)))
    recipe.write_text(
        f"[model]\ndepth = {task.depth}\nwidth = {task.width}\nheads = 4\n"
        f'[data]\npath = "text.txt"\ncache = "cache"\n'
        f"[train]\nsteps = {task.steps}\nsequence = {task.sequence}\nbatch_tokens = {task.batch * task.sequence}\n"
        f'validate_every = 100000\noptimizer.kind = "adamw"\n'
        f"{every}[plan]\ntrial = false\n{cluster}"
        f"[plan.pin]\nranks = {task.ranks}\nthreads = 1\n"
    )
    os.chdir(task.folder)
    return cli.main(["train", str(recipe), "--run", "run", "--json"])


def ddp(task: Task) -> None:
    import torch
    import torch.distributed as dist

    from espalier.language import gpt
    from espalier.recipe import Gpt

    torch.set_num_threads(1)
    rank, attempt = int(os.environ["RANK"]), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    limit = timedelta(seconds=task.timeout)
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)
    store = dist.PrefixStore(f"attempt{attempt}", agent)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task.ranks, timeout=limit)
    sizes = {"depth": task.depth, "width": task.width, "heads": 4, "kv_heads": 4, "feed_forward": 8 * task.width // 3}
    model = gpt.GPT(Gpt(**sizes, vocabulary=256, context=task.sequence, tied=False))
    gpt.initialise(model, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    saved, step = Path(task.folder) / "saved.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    before, folder = striking(task, rank), Path(task.folder)
    if rank == 0:
        tell(folder, "run", step)
    while step < task.steps:
        before(step)
        generator = torch.Generator().manual_seed(step * task.ranks + rank)
        tokens = torch.randint(256, (task.batch // task.ranks, task.sequence + 1), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(wrapped(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if rank == 0:
            tell(folder, "step", step)
            if task.every and step % task.every == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, saved.with_suffix(".part"))
                saved.with_suffix(".part").rename(saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[2], type=Task)
    if sys.argv[1] == "ours":
        sys.exit(ours(given))
    ddp(given)
