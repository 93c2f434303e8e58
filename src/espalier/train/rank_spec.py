"""How do the ranks start? A RankSpec is what one process needs to know of itself to join the others."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from espalier.checkpoint.shared_memory import SharedMemory
from espalier.comm import rendezvous_wait, store_client
from espalier.comm.rendezvous_wait import Deadline
from espalier.recipe.errors import UserError
from espalier.train.heartbeat import SILENT, Pulse
from espalier.train.rejoin_signal import Recall

if TYPE_CHECKING:
    from espalier.plan.base import Plan

ROLES = ("trainer", "optimizer", "aggregator", "standby", "evaluator", "spare")

WhenKilled = Literal["", "restart", "leave"]
"""What becomes of the others where a process is killed: all begin anew, it alone is started again, or they go on."""


@dataclass(frozen=True)
class RankSpec:
    """One process of a run.

    Attributes:
        rank, world: its number among all processes, and how many there are.
        local_rank: its number on this host.
        seat: its number on this host when the run was started: where places are left out, ranks are numbered anew and
            seats are not.
        role: what it does, of `ROLES`.
        when_killed: see `when_killed`.
        alone: it was started again while the others stayed: it meets nobody, and serves where it served before.
        device: `cpu` or `cuda:N`.
        threads: compute threads it may use.
        attempt: how often the run was started before in this job; each attempt has its own key space.
        job: what else its keys begin with, where attempts share a store and cannot be counted (`announcement`).
        host, port: where the rendezvous store listens.
        source: the variable or option that `host` came from; empty: nobody gave it.
        server: who serves the store, for messages.
        serves: whether this process is the store's server; it listens on `listen_fd` if that is >= 0.
        log: file its standard error goes to (None: left where it is).
        stacks: descriptor that it writes its stacks to when asked (-1: standard error).
        pulse: where it shows its signs of life.
        refuge: memory for copies of its state that outlives it (None: there is none).
        recall: where it hears that another rank was replaced.
        patience: seconds in which the others come to meet it, where that is longer than usual.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    seat: int = 0
    role: str = "trainer"
    when_killed: WhenKilled = ""
    alone: bool = False
    device: str = "cpu"
    threads: int = 1
    attempt: int = 0
    job: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    source: str = ""
    server: str = "rank 0"
    serves: bool = False
    listen_fd: int = -1
    log: Path | None = None
    stacks: int = -1
    pulse: Pulse = SILENT
    refuge: SharedMemory | None = None
    recall: Recall = field(default_factory=Recall, compare=False)
    patience: float = 0.0

    @property
    def keys(self) -> str:
        """What the keys of this attempt in the store begin with."""
        return f"attempt{self.attempt}{self.job}"

    @property
    def where(self) -> str:
        """Where the store is, for messages."""
        return f"{self.host}:{self.port}{f' ({self.source})' if self.source else ''}"


def when_killed(roles: Sequence[str], rank: int) -> WhenKilled:
    """What is done where the rank is killed. The first standby is that of the first optimizer node, and so on: of such
    two one goes on."""
    nodes, standbys = ([index for index, name in enumerate(roles) if name == role] for role in ("optimizer", "standby"))
    if rank in standbys or rank in nodes[: len(standbys)]:
        return "leave"
    return "restart" if roles[rank] in ("optimizer", "aggregator") else ""


def places(plan: Plan, logs: Path | None = None) -> list[RankSpec]:
    """The places of a plan's ranks on one machine; each logs to a file of its own in `logs`."""
    roles = [rank.role for rank in plan.ranks]
    return [
        RankSpec(
            rank=index,
            world=len(plan.ranks),
            local_rank=index,
            seat=index,
            role=rank.role,
            when_killed=when_killed(roles, index) if rank.role != "trainer" else "",
            device=rank.device,
            threads=rank.threads,
            log=logs / f"{rank.role}-{index}.log" if logs is not None else None,
        )
        for index, rank in enumerate(plan.ranks)
    ]


class Entrypoint(Protocol):
    """What each process runs. What it returns is handed back by launchers that can: tensors, arrays and plain
    values (`serialization`)."""

    def __call__(self, place: RankSpec, /) -> Any:
        """Runs in the process at `place`."""


def store(place: RankSpec, timeout: float) -> Any:
    """The rendezvous store (a torch TCPStore) seen from `place`, one per process, whatever the timeouts of its calls.

    Waits at most `timeout` seconds, now and in what is asked of it until the next call. Raises PeerLost where it is not
    reached by then, UserError where this process serves it and cannot listen there.
    """
    from datetime import timedelta

    address = place.host, place.port
    if address not in _stores:
        if place.serves:
            # Where it listens on all addresses it connects by loopback, whatever others call this host.
            listens = place.listen_fd >= 0
            descriptor = place.listen_fd if listens else _listener(place).detach()
            host = place.host if listens else "127.0.0.1"
            served = store_client.connect(host, place.port, timeout, is_master=True, master_listen_fd=descriptor)
            _stores[address] = served
        else:
            _stores[address] = _reached(place, timeout)
    _stores[address].set_timeout(timedelta(seconds=timeout))
    return _stores[address]


def _listener(place: RankSpec) -> socket.socket:
    """A socket that listens at the port of `place` on all addresses."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", place.port), family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        raise UserError(
            f"Rank {place.rank} cannot listen at port {place.port}, where ranks are to meet: {error.strerror}.",
            do="MASTER_PORT=another port, the same for all ranks",
        ) from None


def _reached(place: RankSpec, timeout: float) -> Any:
    address = place.host, place.port
    deadline = Deadline(timeout, f"Rank {place.rank}")

    def connect(seconds: float) -> Any:
        rendezvous_wait.greet(*address, seconds)
        return store_client.connect(*address, timeout)

    return rendezvous_wait.reached(address, place.source, place.server, deadline, connect)


def gathered(place: RankSpec, key: str, value: str, timeout: float) -> list[str]:
    """What each rank says under `key` of this attempt, in order; this one says `value`. Raises PeerLost naming the
    ranks that did not come within `timeout` seconds."""
    met = store(place, timeout)
    keys = [f"espalier/{place.keys}/{key}/{rank}" for rank in range(place.world)]
    met.set(keys[place.rank], value)
    rendezvous_wait.present(met, keys, place.where, Deadline(timeout, f"Rank {place.rank}"))
    return [text.decode() for text in met.multi_get(keys)]


_stores: dict[tuple[str, int], Any] = {}
