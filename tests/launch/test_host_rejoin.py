"""A process that is lost is started again while the others wait; what keeps it away is named. Hosts are pretended."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from espalier.launch.hosts import host_rejoin, ssh
from espalier.launch.hosts.host_rejoin import Returning
from espalier.launch.hosts.hosts import parse
from espalier.recipe import Launch
from espalier.recipe.errors import EspalierError, HostLost, Interrupted, RunFailed, UserError

PROGRAM = """#!{python}
import os, signal, sys, time
from pathlib import Path

host, folder = os.environ["PRETENDED"], Path({folder!r})
with (folder / f"{{host}}-pids").open("a") as pids:
    pids.write(f"{{os.getpid()}} ")
life = len((folder / f"{{host}}-pids").read_text().split()) - 1
if life and host == "away" or 0 < life < 3 and host == "late":
    sys.exit("no route to host")

from espalier.recipe.errors import EspalierError, HostLost, Interrupted, UserError
from espalier.train import version_check
from espalier.launch.hosts import host_agent

own = version_check.identity()
if life and host == "newer":
    version_check.identity = lambda: {{**own, "python": "3.99"}}
launcher = host_agent.Launcher()
try:
    host_agent.hello(launcher)
    place = host_agent.meet(launcher)
    asked = launcher.hear()
    if life and host == "bare":
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
def test_a_host_that_cannot_be_reached_at_first_is_asked_again_with_growing_pauses(outcome) -> None:
    outcome.carry_out("a,late")
    assert outcome.error is None
    assert len(outcome.pids("late")) == 4
    assert list(host_rejoin.PAUSES) == sorted(host_rejoin.PAUSES)


@pytest.mark.slow
@pytest.mark.parametrize(("absence", "patience"), [pytest.param(4.0, 60.0, marks=pytest.mark.slow), (60.0, 4.0)])
def test_a_host_that_stays_away_ends_the_run_in_time_and_is_named(outcome, absence, patience) -> None:
    """By the launcher's clock, or where that is sooner by that of the first host."""
    begun = time.monotonic()
    outcome.carry_out("a,away", absence, patience)
    assert isinstance(outcome.error, RunFailed)
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
        pytest.param("bare", "On host bare: there is no data", marks=pytest.mark.slow),
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
