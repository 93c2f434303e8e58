"""Starts processes on hosts that the user names, over ssh or any other command, and watches them from here.

One for each host, which starts that host's ranks itself (`launch.hosts.leader`), on a command of its own whose
standard input
is its lifeline (`launch.hosts.host_agent`). PyTorch's store and Gloo or NCCL do everything between the ranks; this
file only
starts, hears and ends. Commands run in process groups of their own: Ctrl-C reaches this process, which passes it on. No
torch.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from espalier.comm.rendezvous_wait import Deadline
from espalier.launch.hosts import message_auth
from espalier.launch.hosts.host_agent import MARK, PATIENCE, Told
from espalier.launch.hosts.host_errors import gone, retold, together, unanswered
from espalier.launch.hosts.host_rejoin import Returning
from espalier.launch.hosts.hosts import Host, command, resolve
from espalier.launch.hosts.remote_process import Far, compare
from espalier.launch.ranks import postmortem
from espalier.machine import network_interface
from espalier.recipe import Launch
from espalier.recipe.errors import EspalierError, HostLost, UserError
from espalier.recipe.resource import Resource
from espalier.recipe.terminal import say_progress
from espalier.train.signal_handling import handling

AWAITED = {
    "hello": "answer", "serving": "listen", "reached": "reach the first host", "kept": "say what the run keeps",
    "ready": "open the data",
}  # fmt: skip
"""What a host is to do, by the word that it says then."""
ANSWER_SECONDS = 60.0
"""How long a host may take to start a process and let it speak."""
OTHERS_SECONDS = 3.0
"""How long the others may take to tell their own trouble once one has told its own."""
SAVE_SECONDS = 60.0
"""How long the first may take to save the state once a host has stayed away."""
END_SECONDS = 5.0
"""How long processes may take to end once they were told to."""
CLOCK_SECONDS = 5.0
"""A clock that differs by more is spoken of."""

Show = Callable[[Far, str, str], None]
"""Called with a process, `out` or `err`, and a line that it wrote."""


class Crowd(Resource):
    """The processes on all hosts. Has state: them, and their log. Use with `with`: none is left behind.

    Args:
        options, module: what to start, and by which command.
        show: see `Show`.
        patience: seconds that a host may take to answer.
    """

    def __init__(self, options: Launch, module: str, show: Show, patience: float = ANSWER_SECONDS) -> None:
        self.nodes: list[int] = []
        """Of each rank, the number of its host."""
        self.options = options
        self.module = module
        self.show = show
        self.patience = patience
        self.all: list[Far] = []
        self.message: Told = {}
        """What all were told that it is about."""
        self.returning = Returning(self)
        self._selector = selectors.DefaultSelector()
        self._log: Any = None
        self._waiting: list[str] = []

    def close(self) -> None:
        """Ends all processes."""
        self._end()
        self._selector.close()
        if self._log is not None:
            self._log.close()

    def log_to(self, file: Path) -> None:
        """Every line of every process goes to `file` from now on, and those heard before now. Lines name the
        host and its ranks."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._log = file.open("a", encoding="utf-8", buffering=1)
        self._log.writelines(self._waiting)
        self._waiting.clear()

    # --- starting ----------------------------------------------------------------------------------------------------

    def gather(self, hosts: Sequence[Host]) -> list[str]:
        """Starts a process on each host, in place of those there were, has them compare who they are and find each
        other. Returns what to tell the user. Raises UserError naming the host that cannot be reached, is another, or
        is not met by the others."""
        self._end()
        self.nodes = []
        self.all = [self._run(host) for host in hosts]
        greetings = self.ask(self.all, None, "hello", self.patience)
        notes = _agree(self.all, greetings)
        for number, (far, greeting) in enumerate(zip(self.all, greetings, strict=True)):
            ranks = range(len(self.nodes), len(self.nodes) + (far.host.ranks or max(1, greeting["gpus"])))
            self.nodes += [number] * len(ranks)
            far.rank, far.label = number, f"{far.host.name} {','.join(map(str, ranks))}"
        known = {
            far.host: [network_interface.Address(**address) for address in greeting["addresses"]]
            for far, greeting in zip(self.all, greetings, strict=True)
        }
        self._meet(known)
        return notes

    def again(self, rank: int) -> Far:
        """Another process in place of one that has ended. It has no number before it has answered."""
        old = self.all[rank]
        self._close(old)
        far = self._run(old.host)
        far.label = old.label
        far.identity = old.identity
        far.reached = old.reached
        self.all[rank] = far
        return far

    def _run(self, host: Host) -> Far:
        argv = command(host, self.options, self.module)
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
            )
        except OSError as error:
            raise UserError(
                f"launch.command cannot be run: {argv[0]}: {error.strerror}.", do="correct launch.command"
            ) from None
        far = Far(host, argv, process)
        assert process.stdout is not None
        assert process.stderr is not None
        for stream, name in ((process.stdout, "out"), (process.stderr, "err")):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream.fileno(), selectors.EVENT_READ, far)
            far.open[stream.fileno()] = (name, b"")
        return far

    def _meet(self, known: Mapping[Host, Sequence[network_interface.Address]]) -> None:
        """The first listens; the others find an address of it that answers."""
        first, *others = self.all
        if not others:
            first.tell({"is": "alone", **self.seat(first)})
            return
        serve = {"is": "serve", "port": self.options.port, "interface": self.options.interface, **self.seat(first)}
        (serving,) = self.ask([first], lambda far: serve, "serving", self.patience)
        addresses = [network_interface.Address(**address) for address in serving["addresses"]]
        names = resolve(first.host)

        def search(far: Far) -> Told:
            targets = network_interface.in_order(addresses, names, known[far.host])
            rest = {"port": serving["port"], "word": serving["word"], "interface": self.options.interface}
            return {"is": "reach", "addresses": targets, **rest, **self.seat(far)}

        most = len(addresses) * network_interface.TRY_SECONDS + self.patience
        answers = self.ask(others, search, ("reached", "lost"), most)
        lost = [far for far, answer in zip(others, answers, strict=True) if answer["is"] == "lost"]
        if lost:
            tried = ", ".join(f"{address.address}:{serving['port']}" for address in addresses)
            raise UserError(
                f"Host {lost[0].host.name} does not reach the first host, {first.host.name}.",
                why=f"nothing answered at {tried}",
                do=f"open TCP between the hosts in their firewalls (docs/hosts.md), or set launch.interface; "
                f"launch.port = {self.options.port or 29500} makes the port a fixed one",
            )
        for far, answer in zip(others, answers, strict=True):
            rest = {"port": serving["port"], "word": "", "interface": self.options.interface}
            far.reached = {"is": "reach", "addresses": [answer["address"]], **rest}
        first.tell({"is": "met", "address": answers[0]["address"]})

    def seat(self, far: Far) -> Told:
        """What a process is told of its place."""
        return {"rank": far.rank, "world": len(self.all), "host": far.host.name}

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask(
        self, whom: Sequence[Far], message: Callable[[Far], Told] | None, kind: str | tuple[str, ...], seconds: float
    ) -> list[Told]:
        """Says `message` to each (if there is one), and waits for an answer of `kind` from each; the answers, in order.

        Raises the error of the one that failed (of all, where they fail alike), or UserError for one that is silent
        for `seconds`.
        """
        kinds = (kind,) if isinstance(kind, str) else kind
        if message is not None:
            for far in whom:
                far.tell(message(far))
        deadline = time.monotonic() + seconds
        failing = False
        limit = Deadline(seconds, "This machine")
        silent_until = time.monotonic() + limit.quiet
        while (late := [far for far in whom if not far.answered(kinds)]) and time.monotonic() < deadline:
            if time.monotonic() >= silent_until:
                awaited = f"{', '.join(far.host.name for far in late)} to {AWAITED[kinds[0]]}"
                say_progress(limit.first_line(awaited))
                silent_until = math.inf
            self._listen(min(0.5, limit.quiet, max(0.0, deadline - time.monotonic())))
            failed = [far for far in self.all if far.error is not None]
            if failed and not failing:
                failing = True
                deadline = min(deadline, time.monotonic() + OTHERS_SECONDS)
            if failed and not [far for far in late if far.error is None]:
                break
        self._raise(late, seconds, failing)
        return [far.messages.pop(0) for far in whom]

    def _raise(self, late: Sequence[Far], seconds: float, failing: bool) -> None:
        failed = [far.error for far in self.all if far.error is not None]
        if failed:
            raise together(failed)
        if late and not failing:
            others = [far.host.name for far in late[1:]]
            raise unanswered(late[0].host, late[0].argv, seconds, late[0].last, others)

    def prepare(self, message: Told, first: str = "") -> None:
        """Tells every host what it is about and who is there, waits until all have opened their data, and compares what
        they found. `first`: what the first host says at once, which the others are told too."""
        there = {"nodes": self.nodes, "names": [far.host.name for far in self.all], "token": message_auth.token()}
        self.message = {**message, **there}
        self.all[0].tell(self.message)
        if first:
            (answer,) = self.ask(self.all[:1], None, first, PATIENCE)
            self.message[first] = answer[first]
        for far in self.all[1:]:
            far.tell(self.message)
        answers = self.ask(self.all, None, "ready", PATIENCE)
        compare(self.all, [(far, answer["identity"]) for far, answer in zip(self.all, answers, strict=True)])

    def carry_out(self) -> Told:
        """Lets all begin and waits for their end; what the first had to say. Raises the error that ended them.

        The first Ctrl-C, SIGTERM or SIGHUP asks the ranks to save and stop, the second ends them at once. A host that
        was lost may come back meanwhile (`host_rejoin`).
        """
        with self._passing_on_signals() as interrupted:
            for far in self.all:
                far.tell({"is": "go"})
            while self._busy() and len(interrupted) < 2:
                self._listen(0.5)
                self.returning.look(bool(interrupted))
                if self._failed():
                    self._hear_out()
                    break
        failed = [] if len(interrupted) > 1 else self._failed()
        if failed or len(interrupted) > 1 or (interrupted and not self.all[0].done):
            raise postmortem.shown(failed, bool(interrupted))
        return self.all[0].done

    def _busy(self) -> list[Far]:
        """Who is waited for. Once the first has done its part, not for who was to come back."""
        over = bool(self.all[0].done)
        busy = [far for far in self.all if far.code is None and not far.done]
        return [far for far in busy if not (over and self.returning.awaits(far))]

    def _failed(self) -> list[EspalierError]:
        errors = [far.error for far in self.all if far.error is not None and not self.returning.awaits(far)]
        return errors if self.all[0].done else errors + self.returning.over()

    def _hear_out(self) -> None:
        """Lets the others end by themselves, for a while, and say why. Where a host stays away, the first saves."""
        first = self.all[0]
        saves = first.error is None and bool(self.returning.over())
        if saves:
            first.tell({"is": "stop"})
        deadline = time.monotonic() + (SAVE_SECONDS if saves else OTHERS_SECONDS)
        while self._busy() and time.monotonic() < deadline and not (saves and first.error):
            self._listen(0.1)

    @contextmanager
    def _passing_on_signals(self) -> Iterator[list[int]]:
        seen = []

        def pass_on(number: int, frame: FrameType | None) -> None:
            seen.append(number)
            if len(seen) == 1:
                for far in self.all:
                    far.tell({"is": "stop"})

        with handling(pass_on, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            yield seen

    @property
    def vanished(self) -> EspalierError | None:
        """That a process has ended and said nothing, or a host was not heard: others on the hosts could not help, and
        all may be started again. Not because of a host that was not brought back."""
        lost = [far for far in self.all if self.returning.awaits(far)]
        errors = [far.error for far in self.all if far.error is not None and far.silent and far not in lost]
        errors += [far.error for far in self.all if isinstance(far.error, HostLost) and not lost]
        return next(iter(errors), None)

    # --- hearing -----------------------------------------------------------------------------------------------------

    def _listen(self, seconds: float) -> None:
        """Takes in whatever the processes say within `seconds` at most, and notices those that have ended."""
        for key, _ in self._selector.select(seconds):
            self._read(key.data, key.fd)
        for far in self.all:
            if far.code is None and far.process.poll() is not None:
                self._drain(far)
                far.code = far.process.returncode
                if far.error is None and not far.done:
                    far.error = gone(far.host, far.rank >= 0, far.argv, far.code, far.last)

    def _drain(self, far: Far) -> None:
        """Takes in what an ended process has left behind, a line that it did not finish too. A multiplexing ssh leaves
        its standard error open behind it, so its end is not asked for."""
        for descriptor, (name, _) in list(far.open.items()):
            while self._read(far, descriptor):
                pass
            if descriptor in far.open and (rest := far.open[descriptor][1]):
                far.open[descriptor] = (name, b"")
                self._take(far, name, rest.decode(errors="replace"))

    def _read(self, far: Far, descriptor: int) -> bool:
        """Takes in what is there to read; whether there was anything."""
        name, rest = far.open[descriptor]
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        *lines, rest = (rest + data).split(b"\n")
        if not data:
            self._selector.unregister(descriptor)
            del far.open[descriptor]
            lines = [rest] if rest else []
        else:
            far.open[descriptor] = (name, rest)
        for line in lines:
            self._take(far, name, line.decode(errors="replace"))
        return bool(data)

    def _take(self, far: Far, name: str, line: str) -> None:
        text, mark, message = line.partition(MARK)
        if mark and name == "out":
            report = json.loads(message)
            kind = report["is"]
            if kind == "failed":
                far.error = retold(far.host, report)
                far.reported = True
            elif kind == "joined":
                far.joined = True
            elif kind in ("without", "again"):
                self.returning.told(report["host"], kind)
            else:
                far.messages.append(report)
        if text or not mark:
            if name == "err" and text.strip():
                far.last = text.strip()[-300:]
            entry = f"[{far.named}] {text}\n"
            if self._log is not None:
                self._log.write(entry)
            else:
                self._waiting.append(entry)
            self.show(far, name, text)

    # --- ending ------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """No process is left: they are told to end, and commands are killed if need be. Last words are taken in."""
        try:
            for far in self.all:
                if far.code is None:
                    far.tell({"is": "end"})
                far.hang_up()
            deadline = time.monotonic() + END_SECONDS
            while [far for far in self.all if far.code is None] and time.monotonic() < deadline:
                self._listen(0.02)
        finally:
            for far in self.all:
                self._close(far)

    def _close(self, far: Far) -> None:
        """Ends its command, if need be, and takes in what it has left behind."""
        far.kill()
        try:
            self._drain(far)
        finally:
            for descriptor in far.open:
                self._selector.unregister(descriptor)
            far.open.clear()
            far.close()


def _agree(fars: Sequence[Far], greetings: Sequence[Told]) -> list[str]:
    """Raises UserError when the hosts' versions differ; says whose clock does."""
    compare(fars, [(far, greeting["identity"]) for far, greeting in zip(fars, greetings, strict=True)])
    now = time.time()
    notes = []
    for far, greeting in zip(fars, greetings, strict=True):
        ahead = greeting["time"] - now
        if abs(ahead) > CLOCK_SECONDS:
            way = "ahead of" if ahead > 0 else "behind"
            notes.append(
                f"The clock of host {far.host.name} is {abs(ahead):,.0f} s {way} the one here. That is harmless: ranks "
                "never compare clocks, and the run log is written by the first host alone."
            )
    return notes
