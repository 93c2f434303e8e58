"""Host agent: a process that `--hosts` started on a host, and its line to the launcher. No torch.

The launcher speaks on standard input, a JSON object a line; the process answers on standard output, where a line that
begins with `MARK` is an answer and everything else is what somebody printed. Standard input is also the lifeline: when
it ends, the launcher is gone, and so is this process soon after, saving its state if it can. Where another host's
process leads, only the line to this one may be cut: then it goes on, for as long as somebody may take its place.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from espalier.comm import store_client
from espalier.machine import network_interface, resource_limits
from espalier.recipe import process_environment
from espalier.recipe.errors import EspalierError, PeerLost
from espalier.recipe.units import show_seconds
from espalier.train import version_check
from espalier.train.rank_spec import RankSpec

MARK = "\x1e"
LAST_SECONDS = 10.0
"""How long a process may take to save and end once its launcher is gone."""
PATIENCE = 3600.0
"""Longest wait for the launcher's next word, while another host may still be building its token shards (seconds)."""

Told = dict[str, Any]


class Launcher:
    """What a started process sees of its launcher. Has state: what was heard and not yet read."""

    led = 0.0
    """Seconds to go on without a launcher, where another host's process says when to save and stop."""

    def __init__(self) -> None:
        self._heard: queue.SimpleQueue[Told] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    def tell(self, what_is: str, /, **fields: Any) -> None:
        """Says one thing to the launcher. A launcher that is gone is not missed: the lifeline sees to that."""
        sys.stdout.flush()
        data = (MARK + json.dumps({"is": what_is, **fields}) + "\n").encode()
        try:
            while data:
                data = data[os.write(1, data) :]
        except OSError:
            return

    def hear(self) -> Told:
        """The launcher's next word."""
        try:
            return self._heard.get(timeout=PATIENCE)
        except queue.Empty:
            what = f"The program that started this process said nothing for {show_seconds(PATIENCE)}."
            raise PeerLost(what, do="start it again") from None

    def waiting(self) -> bool:
        """Whether there is something to hear."""
        return not self._heard.empty()

    def refuse(self, error: EspalierError) -> None:
        """Tells what went wrong; the launcher raises it in its own process."""
        self.tell("failed", kind=type(error).__name__, what=error.what, why=error.why, do=error.do)

    def _listen(self) -> None:
        rest = b""
        while part := _read(0):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                _obey(line, self._heard)
        if self.led:
            self._heard.put({"is": "gone"})
            time.sleep(self.led)
        _interrupt()
        time.sleep(LAST_SECONDS)
        os._exit(1)


def _interrupt() -> None:
    """As Ctrl-C does: this goes to the main thread, which may sleep in a wait."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""


def _obey(line: bytes, heard: queue.SimpleQueue[Told]) -> None:
    try:
        order: Told = json.loads(line)
    except ValueError:
        return  # typed by hand; the lifeline goes on
    if order["is"] == "stop":
        _interrupt()
    elif order["is"] == "end":
        os._exit(1)
    else:
        heard.put(order)


def hello(launcher: Launcher) -> None:
    """Says who this is, before anything heavy is loaded."""
    own_identity = {key: value for key, value in version_check.identity().items() if key != "host"}
    addresses = [asdict(address) for address in network_interface.addresses()]
    launcher.tell("hello", identity=own_identity, addresses=addresses, gpus=_visible_gpus(), time=time.time())


def _visible_gpus() -> int:
    """NVIDIA devices that a program started here would see; asks the driver, as torch is not loaded yet."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return len([part for part in hidden.split(",") if part.strip() and part.strip() != "-1"])
    count = len(resource_limits.gpus())
    if count:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return 0  # a device without a driver to use it
    return count


def meet(launcher: Launcher) -> RankSpec | None:
    """Finds the other hosts: the first listens, the others look for it; the interface found is Gloo's and NCCL's. Who
    is started when the others have met long since is told no word: that their store answers is enough.

    None when the first host does not answer, which the launcher is told. Raises UserError when the port is taken or the
    interface is not there.
    """
    asked = launcher.hear()
    if asked["is"] == "alone":
        return _place(asked)
    if asked["is"] == "serve":
        met, addresses = network_interface.meeting(asked["interface"], asked["port"], asked["host"])
        launcher.tell("serving", addresses=[asdict(address) for address in addresses], port=met.port, word=met.word)
        met.answer(launcher.waiting)
        order = launcher.hear()
        _bind(network_interface.interface_of(order["address"], addresses))
        os.set_inheritable(met.socket.fileno(), True)
        return _place(asked, order["address"], met.port, met.socket.detach())
    local_addresses = network_interface.addresses()
    via = (
        network_interface.chosen(asked["interface"], local_addresses, asked["host"])[0] if asked["interface"] else None
    )
    reached = network_interface.reach(asked["addresses"], asked["port"], asked["word"], via)
    if reached is None:
        launcher.tell("lost", addresses=[address.address for address in local_addresses])
        return None
    _bind(network_interface.interface_of(reached[1], local_addresses))
    launcher.tell("reached", address=reached[0])
    return _place(asked, reached[0], asked["port"])


def _place(asked: Told, host: str = "127.0.0.1", port: int = 0, descriptor: int = -1) -> RankSpec:
    return RankSpec(
        rank=asked["rank"], world=asked["world"], host=host, port=port, serves=descriptor >= 0, listen_fd=descriptor
    )


def _bind(interface: str) -> None:
    """Keeps Gloo and NCCL on one interface, and settles the rest that torch reads when it is imported."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    process_environment.settle()
    store_client.own_process()
