"""One replica of bench/acme.py's part `replicas`: the same decoder and loop, guarded by us or by torchft.

    python acme_replica.py guard|torchft|lighthouse TASK

TASK is a JSON object. After each step it tells (time, step, replicas in it, whether it counts). SIGUSR1 makes its code
raise. `lighthouse` is torchft's server, which prints its address.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.functional import cross_entropy

from espalier.language import gpt
from espalier.recipe import Gpt


class Task(msgspec.Struct, frozen=True):
    """Where this replica meets the others and what it trains.

    `server`: port of our store, or the lighthouse's address; `silence`: seconds after which it is death; `message`:
    seconds in which one of torchft's has to come (ours: 30 s); `returns`: it takes the place of one that was lost.
    """

    told: str
    server: str
    member: int
    silence: float
    message: float
    returns: bool = False
    replicas: int = 2
    depth: int = 3
    width: int = 128
    sequence: int = 128
    batch: int = 4


def model_of(task: Task) -> torch.nn.Module:
    sizes = {"depth": task.depth, "width": task.width, "heads": 4, "kv_heads": 4, "feed_forward": 8 * task.width // 3}
    model = gpt.GPT(Gpt(**sizes, vocabulary=256, context=task.sequence, tied=False))
    gpt.initialise(model, 1)
    return model


def loss_of(model: torch.nn.Module, task: Task, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step * task.replicas + task.member)
    tokens = torch.randint(256, (task.batch, task.sequence + 1), generator=draw)
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def telling(task: Task) -> Callable[[int, int, bool], None]:
    def tell(step: int, replicas: int, counts: bool) -> None:
        with Path(task.told).open("a") as file:
            file.write(f"{time.time()!r} {step} {replicas} {int(counts)}\n")

    return tell


def guarded(task: Task) -> None:
    from torch.distributed import TCPStore

    from espalier.launch.resilience import guard
    from espalier.mechanisms.local_rounds.membership import MemberGroup

    store = TCPStore("127.0.0.1", int(task.server), timeout=timedelta(seconds=60))
    model = model_of(task)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    members = tuple(range(task.replicas))
    crew = MemberGroup(store, task.member, members, timeout=30.0, grace=0.5, returns=task.returns, silence=task.silence)
    run, tell = guard(model, optimizer, crew), telling(task)
    while True:
        optimizer.zero_grad()
        loss_of(model, task, run.step).backward()
        optimizer.step()
        tell(run.step, len(run.members.members), True)


def torchft(task: Task) -> None:
    """As torchft's own train_ddp.py (asynchronous quorum, its optimizer's wrapper), but the gradients travel as one
    tensor: when a peer dies in backward, its DistributedDataParallel ends the survivor too (`assert fut._fut`)."""
    from torch.distributed import TCPStore
    from torchft import Manager, Optimizer, ProcessGroupGloo

    model = model_of(task)
    inner = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def take(state: Any) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=task.message)),
        min_replica_size=1,
        load_state_dict=take,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=task.server,
        replica_id=f"replica_{task.member}",
        hostname="127.0.0.1",
    )
    optimizer, tell, parameters = Optimizer(manager, inner), telling(task), list(model.parameters())
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        loss_of(model, task, before).backward()
        gradients = [one.grad for one in parameters if one.grad is not None]
        flat = torch.cat([one.view(-1) for one in gradients])
        manager.allreduce(flat).wait()
        for one, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            one.copy_(part.view_as(one))
        optimizer.step()
        tell(manager.current_step(), manager.num_participants(), manager.current_step() > before)


def lighthouse(task: Task) -> None:
    """Its documented knobs, as quick as ours: as long a silence is death, and nobody is waited for longer."""
    from torchft.coordination import LighthouseServer

    limit = int(1000 * task.silence)
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=limit, quorum_tick_ms=20, heartbeat_timeout_ms=limit
    )
    print(f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}", flush=True)
    signal.pause()


def raising(*_: object) -> None:
    raise RuntimeError("as asked")


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGUSR1, raising)
    given = msgspec.json.decode(sys.argv[2], type=Task)
    with contextlib.suppress(KeyboardInterrupt):
        {"guard": guarded, "torchft": torchft, "lighthouse": lighthouse}[sys.argv[1]](given)
