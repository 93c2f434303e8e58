"""A process that is lost is started again while the others wait; what keeps it away is named. Hosts are pretended."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from espalier.launch.hosts import host_rejoin, ssh
from espalier.launch.hosts.host_errors import gone
from espalier.launch.hosts.host_rejoin import Returning
from espalier.launch.hosts.hosts import parse
from espalier.launch.hosts.remote_process import Far
from espalier.recipe import Launch
from espalier.recipe.errors import EspalierError, HostLost, Interrupted, PeerLost, RunFailed, UserError

PROGRAM = """#!{python}
import os, signal, sys, time
from pathlib import Path

host, folder = os.environ["PRETENDED"], Path({folder!r})
with (folder / f"{{host}}-pids").open("a") as pids:
    pids.write(f"{{os.getpid()}} ")
life = len((folder / f"{{host}}-pids").read_text().split()) - 1
if life and host == "away" or 0 < life < 3 and host == "late":
    sys.exit("no route to host")
if host == "boots" and life in (1, 2):
    print("Could not resolve hostname boots" if life == 1 else "port 22: Connection refused", file=sys.stderr)
    sys.exit(255)

from espalier.recipe.errors import EspalierError, HostLost, Interrupted, UserError
from espalier.train import version_check
from espalier.launch.hosts import host_agent

own = version_check.identity()
if life and host == "newer":
    version_check.identity = lambda: {{**own, "python": "3.99"}}
launcher = host_agent.Launcher()
try:
    host_agent.hello(launcher)
    if host == "boots" and life == 3:
        raise UserError("launch.interface = 'eth0' is not here")
    place = host_agent.meet(launcher)
    asked = launcher.hear()
    if life == 4 and host == "boots":
        raise UserError("there is no data")
    launcher.tell("ready", identity={{"data": "other" if life and host == "changed" else "usual"}})
    launcher.hear()
    assert asked.get("life", 0) == life, asked
    if place.rank and host != "early":
        launcher.tell("joined")
    print(f"{{host}} is {{place.rank}} of {{place.world}} at {{place.port > 0}}", flush=True)
    if not life and host not in ("a", "b", "without") or life == 1 and host == "twice":
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"{{host}}-back").touch()
    asleep = []
    signal.signal(signal.SIGINT, lambda *_: asleep.append(1))
    deadline = time.monotonic() + asked["patience"]
    if host == "without":
        launcher.tell("without", host=1)
        left = asked["names"][1]
        asked["names"] = [one for one in asked["names"] if one != left or left != "away"]
        time.sleep(asked["absence"] + 1.0)
    while not all((folder / f"{{one}}-back").exists() for one in asked["names"]):
        if asleep:
            (folder / f"{{host}}-saved").touch()
            raise Interrupted("saved")
        if time.monotonic() > deadline:
            raise HostLost("somebody was not heard")
        time.sleep(0.02)
    launcher.tell("done", pids=(folder / f"{{asked['names'][0]}}-pids").read_text().split())
    launcher.hear()
except EspalierError as error:
    launcher.refuse(error)
    sys.exit(error.exit_code)
"""


class Outcome:
    """What came of a run on pretended hosts: its end, what people were told, what was logged, who was started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.done: dict[str, Any] = {}
        self.error: EspalierError | None = None
        self.vanished: EspalierError | None = None

    def pids(self, host: str) -> list[int]:
        file = self.folder / f"{host}-pids"
        return [int(word) for word in file.read_text().split()] if file.exists() else []

    def carry_out(self, names: str, absence: float = 20.0, patience: float = 20.0) -> Outcome:
        program = self.folder / "program"
        program.write_text(PROGRAM.format(python=sys.executable, folder=str(self.folder)))
        program.chmod(0o755)
        options = Launch(command="env PRETENDED={host} sh -c {command}", python=str(program))
        with ssh.Crowd(options, "x", lambda *_: None) as crowd:
            crowd.gather(parse(names))
            crowd.prepare({"is": "task", "patience": patience, "absence": absence})
            crowd.log_to(self.folder / "hosts.log")
            crowd.returning = Returning(crowd, absence, self.said.extend)
            try:
                self.done = crowd.carry_out()
            except EspalierError as error:
                self.error = error
                self.vanished = crowd.vanished
        return self


@pytest.fixture
def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    monkeypatch.setattr(host_rejoin, "PAUSES", (0.0, 0.1, 0.2))
    return Outcome(tmp_path)


def test_only_the_lost_process_is_started_again_and_its_lines_are_in_the_same_log(outcome) -> None:
    outcome.carry_out("a,b,dies")
    assert outcome.error is None
    assert [len(outcome.pids(host)) for host in ("a", "b", "dies")] == [1, 1, 2]
    log = (outcome.folder / "hosts.log").read_text().splitlines()
    assert log.count("[dies 2] dies is 2 of 3 at True") == 2
    assert outcome.said[0].startswith("incident: The supervisor on host dies was killed (SIGKILL). -> start it again")
    assert outcome.said[1].startswith("Host dies is back after")


def test_two_hosts_come_back_at_the_same_time_and_one_that_is_lost_again_too(outcome) -> None:
    outcome.carry_out("a,dies,twice")
    assert outcome.error is None
    assert [len(outcome.pids(host)) for host in ("a", "dies", "twice")] == [1, 2, 3]
    assert len([line for line in outcome.said if "is back" in line]) == 3


@pytest.mark.slow
def test_a_host_that_boots_is_asked_again_whatever_it_lacks(outcome) -> None:
    """A name, an open port, the network of the others, its disks: one after the other."""
    outcome.carry_out("a,boots", absence=60.0, patience=60.0)
    assert outcome.error is None
    assert len(outcome.pids("boots")) == 6
    assert list(host_rejoin.PAUSES) == sorted(host_rejoin.PAUSES)


def refusal(number: int) -> tuple[EspalierError, bool]:
    """What a try comes to, and whether the host itself said so."""
    host = parse("b")[0]
    return [
        (gone(host, False, ["ssh"], 255, "ssh: Could not resolve hostname b: Name or service not known"), False),
        (gone(host, False, ["ssh"], 255, "ssh: connect to host b port 22: Connection refused"), False),
        (gone(host, False, ["ssh"], 255, "ssh: connect to host b port 22: No route to host"), False),
        (gone(host, False, ["ssh"], 127, "python: not found"), False),
        (UserError("On host b: launch.interface = 'eth0' is not here."), True),
        (UserError("On host b: there is no data."), True),
        (PeerLost("Rank 1 waited for rank 0."), True),
    ][number]


class Pretended(Far):
    """A process that says what it is given to say."""

    def tell(self, message: Mapping[str, Any]) -> None:
        if message["is"] == "go":
            self.joined = True


class Booting:
    """Two hosts, of which the second fails in every way before it is back."""

    patience = 60.0
    message: ClassVar[dict[str, Any]] = {"is": "task"}

    def __init__(self, tries: int) -> None:
        self.tries = tries
        self.started = 0
        same = {"torch": "2", "data": "1"}
        self.all = [Pretended(host, ["ssh"], None, rank, identity=same) for rank, host in enumerate(parse("a,b"))]
        self.all[1].joined, self.all[1].code = True, 255
        self.all[1].error = RunFailed("The connection to host b (the supervisor) was lost.")

    def again(self, rank: int) -> Far:
        far = Pretended(self.all[rank].host, ["ssh"], None, reached={"is": "reach"})
        if self.started < self.tries:
            far.error, far.reported = refusal(self.started % 7)
        answers = {"hello": {"torch": "2"}, "reached": {}, "ready": {"data": "1"}}
        far.messages = [{"is": kind, "identity": identity} for kind, identity in answers.items()]
        self.started += 1
        self.all[rank] = far
        return far

    def seat(self, far: Far) -> dict[str, Any]:
        return {"rank": far.rank}


def looked(crowd: Booting, absence: float, monkeypatch: pytest.MonkeyPatch) -> Returning:
    """After two minutes of a clock of the test's own."""
    now = [0.0]
    monkeypatch.setattr(host_rejoin, "time", SimpleNamespace(monotonic=lambda: now[0]))
    returning = Returning(crowd, absence)
    while now[0] < 120.0 and not (returning.over() or (now[0] and not returning.awaits(crowd.all[1]))):
        returning.look(stopping=False)
        now[0] += 0.5
    return returning


def test_no_failure_of_a_host_that_boots_ends_the_wait_for_it(monkeypatch) -> None:
    crowd = Booting(tries=7)
    assert looked(crowd, 60.0, monkeypatch).over() == []
    assert crowd.started == 8
    assert crowd.all[1].joined


@pytest.mark.parametrize("last", range(7))
def test_a_host_that_stays_away_is_no_mistake_of_the_users(monkeypatch, last) -> None:
    crowd = Booting(tries=1000)
    monkeypatch.setattr(f"{__name__}.refusal", lambda number, given=refusal: given(last))
    (error,) = looked(crowd, 60.0, monkeypatch).over()
    assert error.exit_code == 1
    assert error.what == "Host b was lost and did not come back within 60 s."
    assert refusal(last)[0].what in error.why
    assert error.do.startswith("resume with --hosts a, or run the same command")
    assert crowd.started > 7


@pytest.mark.parametrize(("absence", "patience"), [(1.0, 60.0), pytest.param(60.0, 4.0, marks=pytest.mark.slow)])
def test_a_host_that_stays_away_ends_the_run_in_time_and_is_named(outcome, absence, patience) -> None:
    """By the launcher's clock, or where that is sooner by that of the first host."""
    begun = time.monotonic()
    outcome.carry_out("a:1,away", absence, patience)
    assert isinstance(outcome.error, RunFailed)
    assert outcome.error.do.startswith("resume with --hosts a:1, or run the same command")
    assert (outcome.folder / "a-saved").exists() == (absence < patience), "the first is told to save"
    assert not isinstance(outcome.error, HostLost)
    assert outcome.error.what == f"Host away was lost and did not come back within {absence:.0f} s."
    assert "The supervisor on host away was killed (SIGKILL)." in outcome.error.why
    assert "Host away cannot be reached." in outcome.error.why
    assert outcome.vanished is None, "it is not tried again"
    assert time.monotonic() - begun < 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "named"),
    [
        ("newer", "do not agree on python: rank 2 on newer has 3.99; 2 of 3"),
        pytest.param("changed", "do not agree on data: rank 2 on changed has other; 2 of 3", marks=pytest.mark.slow),
    ],
)
def test_what_comes_back_as_another_is_named_at_once(outcome, host, named) -> None:
    outcome.carry_out(f"a,b,{host}")
    assert isinstance(outcome.error, UserError)
    assert named in outcome.error.what
    assert len(outcome.pids(host)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "absence"),
    [
        ("first,b", 20.0),
        pytest.param("a,early", 20.0, marks=pytest.mark.slow),
        pytest.param("a,dies", 0.0, marks=pytest.mark.slow),
    ],
)
def test_the_first_host_one_before_there_is_a_plan_and_one_without_restarts_end_all(outcome, names, absence) -> None:
    outcome.carry_out(names, absence)
    assert "was killed (SIGKILL)" in str(outcome.error)
    assert outcome.vanished is outcome.error, "all may be started again"
    assert outcome.said == []


@pytest.mark.extremes
@pytest.mark.parametrize("host", ["late", pytest.param("away", marks=pytest.mark.slow)])
def test_a_host_that_the_others_go_on_without_is_started_whenever_that_works(outcome, host) -> None:
    outcome.carry_out(f"without,{host}", absence=0.3, patience=90.0)
    assert outcome.error is None
    assert outcome.done
    assert len(outcome.pids(host)) >= (4 if host == "late" else 2)
    back = [line for line in outcome.said if line.startswith(f"Host {host} is back after")]
    assert [line.endswith("it has ranks again where that pays.") for line in back] == [True] * (host == "late")


def test_an_interrupt_while_a_host_is_waited_for_ends_all(outcome) -> None:
    def interrupt() -> None:
        while not outcome.said:
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome.carry_out("a,away")
    thread.join()
    assert isinstance(outcome.error, Interrupted)
    assert outcome.error.what == "saved"
