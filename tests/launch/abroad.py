"""Struck runs on two or three hosts: a supervisor for each, forked, in namespaces of their own where there is a lab."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from struck import Struck, plan_of

from espalier.launch.hosts import leader
from espalier.launch.hosts.host_map import HostMap
from espalier.launch.hosts.supervisor_protocol import MeetingPoint
from espalier.launch.ranks.store_server import near
from espalier.recipe.errors import EspalierError
from espalier.train.rank_spec import RankSpec

ADDRESS = "10.213.77.1"  # of the lab's first host
NAMES = ("here", "there", "yonder")
TOKEN = "of this run"


@dataclass
class Abroad(Struck):
    """A run whose ranks are on two hosts. What its supervisors do goes on in processes of their own."""

    hosts: tuple[int, ...] = (0, 1)
    lab: Any = None
    absence: float = 20.0
    supervisors: list[int] = field(default_factory=list)
    former: list[int] = field(default_factory=list)
    lives: int = 0
    port: int = 0

    @property
    def count(self) -> int:
        """Of hosts."""
        return max(self.hosts) + 1

    def start(self) -> Abroad:
        """Starts the supervisors."""
        self.folder.mkdir(exist_ok=True)
        torch.set_num_threads(1)
        self.port = port = free_port() if self.lab is None else 29_611
        for host in range(self.count):
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                self._supervise(host, port)
            self.supervisors.append(pid)
        return self

    def again(self, host: int) -> None:
        """Starts another supervisor in place of one that was lost."""
        self.lives += 1
        pid = os.fork()
        if pid == 0:
            self._supervise(host, self.port)
        self.former.append(self.supervisors[host])
        self.supervisors[host] = pid

    def _supervise(self, host: int, port: int) -> None:
        try:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo" if self.lab is None else "eth0"
            if self.lab is not None:
                self.lab.enter(host)
            os.dup2(os.open(self.folder / f"supervisor-{host}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            address = "127.0.0.1" if self.lab is None else ADDRESS
            fd = -1 if host else socket.create_server((address, port)).detach()
            here = near(RankSpec(host, self.count, host=address, port=port, serves=host == 0, listen_fd=fd), TOKEN)
            life, gate = (self.lives, (address, port)) if host else (0, None)
            line = MeetingPoint(host, self.count, here.host, here.port, "run", self.heartbeat, life, TOKEN, gate)
            found: Any = None
            plan = self.plan or plan_of(self.recipe, self.world)
            roles = tuple(one.role for one in plan.ranks)
            try:
                found = leader.run(
                    self.life(plan), HostMap(line, NAMES[: self.count], self.hosts, self.absence, roles), self.care
                )
            except EspalierError as error:
                found = error
            (self.folder / f"outcome-{host}").write_bytes(pickle.dumps(found))
            if host == 0:
                time.sleep(0.3)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(0)

    def finish(self, within: float = 50.0) -> Abroad:
        """Waits for their end."""
        deadline = time.monotonic() + within
        try:
            for pid in self.supervisors + self.former:
                while os.waitpid(pid, os.WNOHANG)[0] == 0:
                    assert time.monotonic() < deadline, self.said()
                    time.sleep(0.02)
        finally:
            for pid in self.supervisors + self.former:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        first = self.outcome(0)
        if isinstance(first, list):
            self.parameters = first[0]
        return self

    def run(self) -> Abroad:
        """Both."""
        return self.start().finish()

    def said(self) -> str:
        """What supervisors and ranks wrote."""
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("supervisor-*.log")))

    def outcome(self, host: int) -> Any:
        """What a host's supervisor returned or raised; None where it could not."""
        file = self.folder / f"outcome-{host}"
        return pickle.loads(file.read_bytes()) if file.exists() else None

    def reaches(self, step: int, within: float = 30.0) -> None:
        """Waits until the run has done `step` steps."""
        deadline = time.monotonic() + within
        while True:
            with contextlib.suppress(FileNotFoundError):
                if step in self.losses:
                    return
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)


def free_port() -> int:
    """A port of loopback that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
