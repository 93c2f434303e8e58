"""A network of slow links on one machine: hosts on nodes, fast inside a node, as slow as you say between nodes.

    python bench/netlab.py --nodes 2 --hosts 2 --rate 200mbit --delay 2ms [--loss 1] [--cpu 1.0,0.4] -- COMMAND ...

Each host is a network namespace with one interface, eth0, on its node's bridge, and has a name and a /dev/shm of its
own (MPIs talk through shared memory to whoever bears their host's name). A node's uplink is limited by the kernel
(tbf), both ways; a delay, in one direction, and loss come from a small program that forwards frames between uplinks, as
many kernels have no netem. Without them that is a bridge too. Needs root, iproute2, and veth, bridge and sch_tbf in the
kernel. Each command gets torch's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and NETLAB_NODES: the node of each
rank, with commas. Exit status: the first that is not 0.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import heapq
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SUBNET = "10.213.77."
PORT = 29500
QUEUE = 0.1
"""Seconds of its rate that a limited link holds in its queue."""
CPU_PERIOD = 20_000
"""Microseconds in which a host may use its share of the processor."""
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
CLONE_NEWNET = 0x40000000
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
OWN = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
"""What a host does before its command, in namespaces of its own."""
HEADER = 10  # bytes of a virtio_net_hdr, which keeps offloaded segments and checksums whole
LARGEST = 70_000


@dataclass(frozen=True)
class Shape:
    """What the network is to be.

    Attributes:
        nodes, hosts: how many nodes, and hosts on each.
        rate: bits/s of a node's uplink, each way; 0: unlimited. rates: those of the first nodes, where they differ.
        rack, rack_rate: nodes of a rack, and bits/s of its uplink, each way; 0: there are no racks. Without delay and
            loss only.
        delay: seconds from a node to another.
        loss: share of the frames between nodes that is lost; the kernel hands over up to 64 KiB of packets as one.
        cpu: cores that each host may use (empty: all there are); repeated until all hosts have one.
        congestion: TCP's congestion control on all hosts (`cubic`, `bbr`); empty: this machine's.
        period: microseconds in which it may use them.
    """

    nodes: int = 2
    hosts: int = 2
    rate: float = 0.0
    delay: float = 0.0
    loss: float = 0.0
    cpu: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    rack: int = 0
    rack_rate: float = 0.0
    congestion: str = ""
    period: int = CPU_PERIOD

    @property
    def node_of(self) -> list[int]:
        """The node of each host."""
        return [host // self.hosts for host in range(self.nodes * self.hosts)]


class Lab:
    """The network, while it is there. Has state: namespaces, control groups, the forwarder. Use with `with`."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._name = f"netlab-{os.getpid()}"
        self._forwarder = 0
        self._groups: list[Path] = []
        self._made: list[Path] = []
        self._allowed = ""

    def __enter__(self) -> Lab:
        if os.geteuid():
            raise SystemExit("netlab needs root: it makes network namespaces")
        signal.signal(signal.SIGTERM, _stop)  # so that it is taken down when it is told to end
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._forwarder:
            os.kill(self._forwarder, signal.SIGKILL)
            os.waitpid(self._forwarder, 0)
        spaces = [self._host(index) for index in range(len(self.shape.node_of))]
        hubs = [self._hub(node) for node in range(self.shape.nodes)]
        for space in [*spaces, *hubs, *self._racks, self._wire]:
            _run("ip", "netns", "del", space, check=False)
        for group in self._groups:
            with contextlib.suppress(OSError):
                group.rmdir()
        if self._allowed:
            ALLOWED.write_text(self._allowed)
        for file in self._made:
            file.unlink()
            file.parent.rmdir()

    # --- building ----------------------------------------------------------------------------------------------------

    def _host(self, index: int) -> str:
        return f"{self._name}-host{index}"

    def _hub(self, node: int) -> str:
        return f"{self._name}-node{node}"

    @property
    def _wire(self) -> str:
        return f"{self._name}-wire"

    @property
    def _racks(self) -> list[str]:
        count = self.shape.nodes // self.shape.rack if self.shape.rack else 0
        return [f"{self._name}-rack{rack}" for rack in range(count)]

    def _above(self, node: int) -> str:
        """Where the uplink of a node ends."""
        return self._racks[node // self.shape.rack] if self.shape.rack else self._wire

    def _build(self) -> None:
        allowed = ALLOWED.read_text().split()
        if self.shape.congestion and self.shape.congestion not in allowed:  # else namespaces may not choose it
            self._allowed = " ".join(allowed)
            ALLOWED.write_text(f"{self._allowed} {self.shape.congestion}")
        _run("ip", "netns", "add", self._wire)
        for index, rack in enumerate(self._racks):
            _run("ip", "netns", "add", rack)
            _bridge(rack)
            _cable(rack, "uplink", self._wire, f"r{index}")
            _run("ip", "-n", rack, "link", "set", "uplink", "master", "bridge")
            _limit(rack, "uplink", self.shape.rack_rate)
            _limit(self._wire, f"r{index}", self.shape.rack_rate)
        for node in range(self.shape.nodes):
            hub = self._hub(node)
            _run("ip", "netns", "add", hub)
            _bridge(hub)
            _cable(hub, "uplink", self._above(node), f"u{node}")
            _run("ip", "-n", hub, "link", "set", "uplink", "master", "bridge")
            rate = (*self.shape.rates, *[self.shape.rate] * self.shape.nodes)[node]
            _limit(hub, "uplink", rate)
            _limit(self._above(node), f"u{node}", rate)
        for index, node in enumerate(self.shape.node_of):
            self._add_host(index, self._hub(node))
        if self.shape.delay or self.shape.loss:
            self._forward()
            return
        _bridge(self._wire)
        for node in range(self.shape.nodes):
            _run("ip", "-n", self._above(node), "link", "set", f"u{node}", "master", "bridge")
        for index in range(len(self._racks)):
            _run("ip", "-n", self._wire, "link", "set", f"r{index}", "master", "bridge")

    def _add_host(self, index: int, hub: str) -> None:
        space = self._host(index)
        _run("ip", "netns", "add", space)
        _cable(hub, f"p{index}", space, "eth0")
        _run("ip", "-n", hub, "link", "set", f"p{index}", "master", "bridge")
        _run("ip", "-n", space, "link", "set", "eth0", "address", _mac(index).hex(":"))
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "addr", "add", f"{_address(index)}/24", "dev", "eth0")
        if self.shape.congestion:
            tcp = f"net.ipv4.tcp_congestion_control={self.shape.congestion}"
            _run("ip", "netns", "exec", space, "sysctl", "-qw", tcp)
        for other in range(len(self.shape.node_of)):
            if other != index:  # static neighbours: nobody need ask
                known = ("lladdr", _mac(other).hex(":"), "dev", "eth0", "nud", "permanent")
                _run("ip", "-n", space, "neigh", "replace", _address(other), *known)

    def _forward(self) -> None:
        read, write = os.pipe()
        self._forwarder = os.fork()
        if self._forwarder == 0:
            try:
                os.close(read)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
                _forwarding(self._wire, self.shape, write)
            finally:
                os._exit(1)
        os.close(write)
        ready = os.read(read, 1)
        os.close(read)
        if not ready:
            raise RuntimeError("netlab: the forwarder did not start")

    # --- running -----------------------------------------------------------------------------------------------------

    def start(
        self, command: Sequence[str], extra: Mapping[str, str] | None = None, hosts: int | None = None
    ) -> list[subprocess.Popen[str]]:
        """Starts `command` on every host, or on the first `hosts`; what they print can be read, and they be written
        to."""
        count = len(self.shape.node_of) if hosts is None else hosts
        return [self._start_on(index, command, extra or {}) for index in range(count)]

    def _start_on(self, index: int, command: Sequence[str], extra: Mapping[str, str]) -> subprocess.Popen[str]:
        group = self._share(index)
        environment = {
            **os.environ,
            **ranked(index, self.shape.node_of, _address(0)),
            "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # no reverse look-up of names in here
            **extra,
        }
        whole = [*self._entering(self._host(index), f"host{index}"), *command]
        if group is not None:  # a shell joins the group and becomes the command
            whole = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *whole]
        return subprocess.Popen(whole, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start_mpi(self, mpiexec: str, command: Sequence[str]) -> subprocess.Popen[str]:
        """Starts `command` on every host by MPICH's `mpiexec`, which runs on the first."""
        enter = Path(tempfile.mkdtemp(prefix="netlab-")) / "enter"
        self._made.append(enter)
        inside = " ".join(self._entering(f'"{self._name}-host$index"', "host$index")).replace(OWN, f"'{OWN}'")
        skip = 'while [ "${1#-}" != "$1" ]; do shift; done'  # what ssh would take
        enter.write_text(f'#!/bin/sh\n{skip}\nindex=$((${{1##*.}} - 1)); shift\nexec {inside} sh -c "$*"\n')
        enter.chmod(0o755)
        hosts = len(self.shape.node_of)
        names = ",".join(_address(index) for index in range(hosts))
        how = ["-launcher", "ssh", "-launcher-exec", str(enter), "-iface", "eth0", "-hosts", names, "-ppn", "1"]
        whole = [*self._entering(self._host(0), "host0"), mpiexec, *how, "-n", str(hosts), *command]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        return subprocess.Popen(whole, env=environment, stdout=subprocess.PIPE, text=True)

    def enter(self, index: int) -> None:
        """This thread, and what it starts from now on, is on host `index`."""
        _enter(self._host(index))

    @staticmethod
    def _entering(space: str, name: str) -> list[str]:
        """What stands before a host's command."""
        return ["ip", "netns", "exec", space, "unshare", "--uts", "--ipc", "--mount", "sh", "-c", OWN, name]

    @contextlib.contextmanager
    def cut(self, node: int) -> Iterator[None]:
        """Node `node` has no uplink inside the block; what was on its way is lost."""
        device = ("dev", "uplink")
        _run("ip", "-n", self._hub(node), "link", "set", *device, "down")
        try:
            yield
        finally:
            _run("ip", "-n", self._hub(node), "link", "set", *device, "up")

    def _share(self, index: int) -> Path | None:
        """A control group that may use the host's share of the processor (version 1 or 2)."""
        if not self.shape.cpu:
            return None
        period = self.shape.period
        quota = int(period * self.shape.cpu[index % len(self.shape.cpu)])
        first = Path("/sys/fs/cgroup/cpu")
        group = (first if first.is_dir() else first.parent) / f"{self._name}-{index}"
        group.mkdir(exist_ok=True)
        self._groups.append(group)
        if first.is_dir():
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {period}")
        return group


def _stop(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # `timeout` says it twice; once is to be taken down
    raise SystemExit(128 + number)


def ranked(index: int, node_of: Sequence[int], master: str, port: int = PORT) -> dict[str, str]:
    """The environment of one of several ranks."""
    return {
        "RANK": str(index), "WORLD_SIZE": str(len(node_of)), "LOCAL_RANK": "0", "MASTER_ADDR": master,
        "MASTER_PORT": str(port), "NETLAB_NODES": ",".join(map(str, node_of)), "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def _address(index: int) -> str:
    return f"{SUBNET}{index + 1}"


def _mac(index: int) -> bytes:
    return bytes((2, 0x6E, 0x6C, 0, index >> 8, index & 255))


def _run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _bridge(space: str) -> None:
    _run("ip", "-n", space, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", space, "link", "set", "bridge", "up")


def _limit(space: str, device: str, rate: float) -> None:
    if rate:
        burst, queue = 66_000, int(max(rate / 8 * QUEUE, 4 * 66_000))  # a burst holds one offloaded segment
        settings = ("rate", f"{int(rate)}bit", "burst", str(burst), "limit", str(queue))
        _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *settings)


def _cable(space: str, device: str, other: str, end: str) -> None:
    """A pair of interfaces, one in each of two namespaces."""
    _run("ip", "-n", space, "link", "add", device, "type", "veth", "peer", "name", end, "netns", other)
    _run("ip", "-n", space, "link", "set", device, "up")
    _run("ip", "-n", other, "link", "set", end, "up")


# --- the forwarder -------------------------------------------------------------------------------------------------


def _forwarding(wire: str, shape: Shape, ready: int) -> None:
    """Passes frames on from uplink to uplink, each after its delay; never returns."""
    _enter(wire)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    ports = [_port(f"u{node}") for node in range(shape.nodes)]
    home = {_mac(host): ports[node] for host, node in enumerate(shape.node_of)}
    os.write(ready, b"1")
    os.close(ready)
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    count, chance = 0, random.Random(1)
    while True:
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, port, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # no room: the frame is lost
                port.send(frame)
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for port in select.select(ports, [], [], left)[0]:
            for frame in _frames(port):
                target = home.get(frame[HEADER : HEADER + 6])
                if target is not None and target is not port and chance.random() >= shape.loss:
                    count += 1
                    heapq.heappush(waiting, (time.monotonic() + shape.delay, count, target, frame))


def _enter(space: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}", "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def _port(device: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 8 << 20)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 8 << 20)
    port.bind((device, 0))
    port.setblocking(False)
    return port


def _frames(port: socket.socket) -> Iterator[bytes]:
    with contextlib.suppress(OSError):
        for _ in range(32):
            yield port.recv(LARGEST)


# --- the command ---------------------------------------------------------------------------------------------------


def rate(text: str) -> float:
    """Bits/s of `500kbit`, `200mbit`, `1gbit`."""
    for suffix, factor in (("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)):
        if text.endswith(suffix):
            return float(text.removesuffix(suffix)) * factor
    return float(text)


def duration(text: str) -> float:
    """Seconds of `500us`, `2ms`, `1s`."""
    for suffix, factor in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if text.endswith(suffix):
            return float(text.removesuffix(suffix)) * factor
    return float(text)


def first_said(ranks: Sequence[subprocess.Popen[str]]) -> str:
    """The last line that rank 0 printed, once all have ended. Raises RuntimeError when one failed."""
    try:
        said = [rank.communicate(timeout=3600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("a rank failed; its error is above")
    return said[0].splitlines()[-1]


def main() -> int:
    """Runs a command on every host and prints what they say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=2, help="on each node")
    parser.add_argument("--rate", type=rate, default=0.0, help="of a node's uplink, each way: 200mbit")
    parser.add_argument("--delay", type=duration, default=0.0, help="from node to node: 2ms")
    parser.add_argument("--loss", type=float, default=0.0, help="of the frames from node to node: 1 (percent)")
    parser.add_argument("--cpu", default="", help="cores of each host: 1.0,0.4")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    cpu = tuple(float(part) for part in asked.cpu.split(",") if part)
    shape = Shape(asked.nodes, asked.hosts, asked.rate, asked.delay, asked.loss / 100, cpu)
    with Lab(shape) as lab:
        started = lab.start(asked.command)
        for index, process in enumerate(started):
            for line in process.communicate()[0].splitlines():
                print(f"[{index}] {line}")
    return next((process.returncode for process in started if process.returncode), 0)


if __name__ == "__main__":
    sys.exit(main())
