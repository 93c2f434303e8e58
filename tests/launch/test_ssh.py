"""Programs on pretended hosts: started, compared, heard, and none of them left behind."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from espalier.launch.hosts import ssh
from espalier.launch.hosts.hosts import parse
from espalier.recipe import Launch
from espalier.recipe.errors import Interrupted, RunFailed, UserError

PROGRAM = """#!{python}
import os, signal, sys, time
from pathlib import Path
from espalier.recipe.errors import EspalierError, Interrupted, PeerLost, UserError
from espalier.train import version_check
from espalier.launch.hosts import host_agent

host, folder = os.environ["PRETENDED"], Path({folder!r})
if host == "silent":
    time.sleep(60)
if host == "away":
    sys.exit("no route to host")
own = version_check.identity()
if host == "otherpython":
    version_check.identity = lambda: {{**own, "python": "3.99"}}
if host == "latefolk":
    now = time.time
    time.time = lambda: now() + 3600
launcher = host_agent.Launcher()
try:
    host_agent.hello(launcher)
    place = host_agent.meet(launcher)
    asked = launcher.hear()
    (folder / f"{{host}}-{{place.local_rank}}").write_text(str(os.getpid()))
    launcher.tell("ready", identity={{"data": "other" if host == "otherdata" else "usual"}})
    launcher.hear()
    print(f"{{host}} is rank {{place.rank}} of {{place.world}} on {{os.environ.get('GLOO_SOCKET_IFNAME')}}")
    print("a word aside", file=sys.stderr, flush=True)
    if host == "killed":
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if host == "wrong":
        raise UserError("the real cause", do="this")
    if host == "bereft":
        raise PeerLost("someone is missing")
    if asked["stay"]:
        stop = []
        signal.signal(signal.SIGINT, lambda *_: stop.append(1))
        while not stop or asked["stay"] == "stubborn":
            time.sleep(0.02)
        raise Interrupted("saved")
    launcher.tell("done", rank=place.rank, seats=[place.host, place.port > 0, place.serves])
    launcher.hear()
except EspalierError as error:
    launcher.refuse(error)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def options(tmp_path: Path) -> Launch:
    """Hosts are pretended: each is this machine, and the program knows its name."""
    program = tmp_path / "program"
    program.write_text(PROGRAM.format(python=sys.executable, folder=str(tmp_path)))
    program.chmod(0o755)
    return Launch(command="env PRETENDED={host} sh -c {command}", python=str(program))


def heard(lines: list[str]) -> Any:
    return lambda far, stream, line: lines.append(f"{far.named}:{stream}:{line}")


def carried_out(options: Launch, names: str, tmp_path: Path, stay: str = "", **more: float) -> tuple[Any, list[str]]:
    lines: list[str] = []
    with ssh.Crowd(options, "x", heard(lines), **more) as crowd:
        notes = crowd.gather(parse(names))
        crowd.prepare({"is": "task", "stay": stay})
        crowd.log_to(tmp_path / "logs" / "hosts.log")
        done = crowd.carry_out()
    return (done, notes), lines


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def all_ended(tmp_path: Path, names: tuple[str, ...], within: float = 5.0) -> bool:
    pids = [int((tmp_path / f"{name}-0").read_text()) for name in names]
    deadline = time.monotonic() + within
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def test_hosts_and_their_ranks_are_numbered_and_their_lines_are_in_one_log(options, tmp_path) -> None:
    (done, notes), lines = carried_out(options, "a,b:2", tmp_path)
    assert done["rank"] == 0
    assert done["seats"][1:] == [True, True]
    assert notes == []
    log = (tmp_path / "logs" / "hosts.log").read_text().splitlines()
    said = [line.rpartition(" on ")[0] for line in sorted(log) if "is rank" in line]
    assert said == ["[a 0] a is rank 0 of 2", "[b 1,2] b is rank 1 of 2"]
    assert {line for line in log if "aside" in line} == {f"[{who}] a word aside" for who in ("a 0", "b 1,2")}
    assert "a 0:err:a word aside" in lines


def test_what_is_said_after_the_good_end_is_in_the_log_and_so_is_a_line_cut_short(options, tmp_path) -> None:
    """As ssh says that it closes its connection, and as threads of a rank may speak after its task."""
    later = "echo a late word >&2; printf unfinished >&2; printf cut"
    command = f"env PRETENDED={{host}} sh -c 'sh -c \"$0\"; {later}' {{command}}"
    _, lines = carried_out(Launch(command=command, python=options.python), "a,b", tmp_path)
    log = (tmp_path / "logs" / "hosts.log").read_text().splitlines()
    for word in ("a late word", "unfinished", "cut"):
        assert sorted(line for line in log if line.endswith(f"] {word}")) == [f"[a 0] {word}", f"[b 1] {word}"]
        assert [line for line in lines if line.endswith(f":{word}")]


def test_an_answer_that_overtakes_words_of_the_other_stream_loses_none(options, tmp_path, monkeypatch) -> None:
    select = selectors.DefaultSelector.select

    def answers_first(self: Any, seconds: float) -> Any:
        select(self, seconds)
        time.sleep(0.1)
        ready = select(self, 0)
        return [one for one in ready if one[0].data.open[one[0].fd][0] == "out"] or ready

    monkeypatch.setattr(selectors.DefaultSelector, "select", answers_first)
    _, lines = carried_out(options, "a,b", tmp_path)
    assert {line for line in lines if "aside" in line} == {"a 0:err:a word aside", "b 1:err:a word aside"}


def test_one_rank_alone_needs_nobody_to_meet(options, tmp_path) -> None:
    (done, _), _ = carried_out(options, "a", tmp_path)
    assert done["seats"] == ["127.0.0.1", False, False]


@pytest.mark.extremes
@pytest.mark.parametrize(
    ("names", "named"),
    [
        ("a,otherpython,b", "do not agree on python: rank 1 on otherpython has 3.99; 2 of 3"),
        pytest.param(
            *("a,b,otherdata", "do not agree on data: rank 2 on otherdata has other; 2 of 3"), marks=pytest.mark.slow
        ),
        ("away,a", "Host away cannot be reached"),
        ("wrong,a", "On host wrong: the real cause"),
        pytest.param("bereft,wrong", "On host wrong: the real cause", marks=pytest.mark.slow),
    ],
)
def test_the_host_at_fault_is_named(options, tmp_path, names, named) -> None:
    with pytest.raises(UserError) as caught:
        carried_out(options, names, tmp_path)
    assert named in caught.value.what
    assert caught.value.do


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_waited_for_only_so_long(options, tmp_path) -> None:
    with pytest.raises(UserError, match="Host silent did not answer within 2 s"):
        carried_out(options, "silent", tmp_path, patience=2.0)


def test_a_clock_that_differs_is_told_and_does_no_harm(options, tmp_path) -> None:
    (_, notes), _ = carried_out(options, "a,latefolk", tmp_path)
    (note,) = notes
    assert "latefolk is 3,600 s ahead" in note.replace("3,601", "3,600").replace("3,599", "3,600")


def test_a_taken_port_is_named(options, tmp_path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"On host a: launch.port = {port} cannot be used"):
            carried_out(Launch(options.command, port=port, python=options.python), "a,b", tmp_path)


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_at_once_and_is_named(options, tmp_path) -> None:
    begun = time.monotonic()
    with pytest.raises(RunFailed, match=r"The supervisor on host killed was killed \(SIGKILL\)"):
        carried_out(options, "a,killed,c", tmp_path, stay="stubborn")
    assert all_ended(tmp_path, ("a", "killed", "c"))
    assert time.monotonic() - begun < 25


LAUNCHER = """
import sys
from espalier.recipe import Launch
from espalier.recipe.errors import EspalierError
from espalier.launch.hosts import ssh
from espalier.launch.hosts.hosts import parse
options = Launch(command=sys.argv[1], python=sys.argv[2])
try:
    with ssh.Crowd(options, "x", lambda far, stream, line: None) as crowd:
        crowd.gather(parse("a,b"))
        crowd.prepare({"is": "task", "stay": sys.argv[3]})
        print("begun", flush=True)
        crowd.carry_out()
except EspalierError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def started(options: Launch, tmp_path: Path, stay: str, *before: str) -> subprocess.Popen[str]:
    program = tmp_path / "launcher.py"
    program.write_text(textwrap.dedent(LAUNCHER))
    command = [sys.executable, str(program), options.command, str(options.python), stay]
    process = subprocess.Popen([*before, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.5)  # until both wait for signals
    return process


def test_the_first_interrupt_lets_all_hosts_save(options, tmp_path) -> None:
    process = started(options, tmp_path, "obeys")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == Interrupted.exit_code
    assert "saved" in out
    assert all_ended(tmp_path, ("a", "b"))


def test_the_second_interrupt_ends_those_that_do_not_obey(options, tmp_path) -> None:
    process = started(options, tmp_path, "stubborn")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == Interrupted.exit_code
    assert all_ended(tmp_path, ("a", "b"))


@pytest.mark.slow
def test_a_hangup_stops_the_run_and_under_nohup_it_does_not(options, tmp_path) -> None:
    process = started(options, tmp_path, "obeys", "nohup")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == Interrupted.exit_code
    process = started(options, tmp_path, "obeys")
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=30)
    assert process.returncode == Interrupted.exit_code
    assert all_ended(tmp_path, ("a", "b"))


@pytest.mark.extremes
@pytest.mark.parametrize(("stay", "within"), [("obeys", 3.0), pytest.param("stubborn", 15.0, marks=pytest.mark.slow)])
def test_no_rank_outlives_a_killed_launcher(options, tmp_path, stay, within) -> None:
    process = started(options, tmp_path, stay)
    process.kill()
    process.communicate(timeout=30)
    assert all_ended(tmp_path, ("a", "b"), within)


def test_what_a_login_script_prints_is_no_answer(options, tmp_path) -> None:
    chatty = Launch(command="sh -c 'echo welcome; PRETENDED={host} sh -c \"$0\"' {command}", python=options.python)
    (done, _), lines = carried_out(chatty, "a,b", tmp_path)
    assert done["rank"] == 0
    assert [line for line in lines if "welcome" in line]
    assert not [line for line in lines if ssh.MARK in line or json.dumps("hello") in line]
