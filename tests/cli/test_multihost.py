"""`--hosts` from the command line: what is refused before anything starts, and a run on two pretended hosts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from espalier.cli import main as cli
from espalier.cli import multihost
from espalier.launch.hosts.hosts import Host, parse
from espalier.recipe import recipe_file
from espalier.recipe.errors import HostLost, RunFailed, UserError

RECIPE = """
[model]
depth = 1
width = 32
heads = 2

[data]
path = "corpus"
validation = 0.2
cache = "cache"

[train]
steps = 4
sequence = 32
batch_tokens = 256
validate_tokens = 1024

[plan]
trial = false
cluster = "machine.toml"

[plan.pin]
threads = 1
"""

MACHINE = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n'
SAME = "launch.command=sh -c {command}"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    (tmp_path / "corpus").mkdir()
    for number in range(9):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"{number} comes before {number + 1}.\n" * 30)
    (tmp_path / "machine.toml").write_text(MACHINE)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path


@pytest.mark.parametrize("model", ['kind = "sage"', 'kind = "gin"', "depth = 1"])
def test_the_hosts_are_given_the_recipe_as_it_is(home, monkeypatch, model) -> None:
    """A value that the defaults of its task fill in later is not the one that the key has by itself."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(multihost, "_attempt", lambda recipe, chosen, message, folder: sent.append(message) or 0)
    (home / "recipe.toml").write_text(f"[model]\n{model}\n")
    cli.main(["train", "recipe.toml", "--hosts", "a,b"])
    received = json.loads(json.dumps(sent[0]))
    assert recipe_file.from_table(received["recipe"], received["origin"]) == recipe_file.load("recipe.toml")


def losses(home: Path, run: str) -> list[float]:
    file = home / "runs" / run / "events.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [event["loss"] for event in map(json.loads, lines) if event["event"] == "step"]


def refused(capfd, *arguments: str) -> str:
    assert cli.main(list(arguments)) == 2
    return capfd.readouterr().err


def test_two_hosts_train_as_two_ranks_of_one_machine_do_and_keep_one_log(home, capfd) -> None:
    assert cli.main(["train", "recipe.toml", "--hosts", "hosta,hostb", "name=far", SAME]) == 0
    out = capfd.readouterr().out
    assert out.count("step 1/4") == 1, "progress is shown once"
    assert "Done in" in out
    assert cli.main(["train", "recipe.toml", "plan.pin.ranks=2", "name=near", "--json"]) == 0
    assert losses(home, "far") == losses(home, "near")
    assert len(losses(home, "far")) == 4
    log = (home / "runs" / "far" / "logs" / "hosts.log").read_text()
    assert "[hosta 0] " in log
    assert "hosta" not in out


@pytest.mark.slow
def test_hosts_go_on_with_the_tokenizer_of_the_run_when_the_text_has_changed(home, capfd) -> None:
    command = ["train", "recipe.toml", "--hosts", "hosta,hostb", SAME, "data.tokenizer=bpe:300", "--run", "runs/far"]
    assert cli.main(command) == 0
    tokenizer = home / "runs" / "far" / "preprocessing" / "tokenizer.json"
    table = tokenizer.read_bytes()
    (home / "corpus" / "extra.txt").write_text("zebra quartz jukebox vixen. " * 400)
    assert "corpus/extra.txt is new since" in refused(capfd, *command, "train.steps=6")
    assert cli.main([*command, "train.steps=6", "faults.changed_data=accept"]) == 0
    assert tokenizer.read_bytes() == table
    (sent,) = (home / "xdg" / "espalier" / "runs").iterdir()
    assert (sent / "preprocessing" / "tokenizer.json").read_bytes() == table
    assert len(losses(home, "far")) == 6


LACKING = """
import pathlib, runpy, sys
there = pathlib.Path.is_dir
pathlib.Path.is_dir = lambda path: str(path) != sys.argv[1] and there(path)
runpy.run_module("espalier.cli.host_worker", run_name="__main__")
"""


@pytest.mark.slow
def test_a_host_without_the_data_is_named(home, capfd) -> None:
    """The second host has another current folder and lacks the launcher's."""
    (home / "elsewhere").mkdir()
    (home / "lacking.py").write_text(LACKING)
    program = home / "python"
    lacking = f"cd elsewhere; exec {sys.executable} {home}/lacking.py {home}"
    program.write_text(f'#!/bin/sh\nif [ "$PRETENDED" = hostb ]; then {lacking}; fi\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    command = "launch.command=env PRETENDED={host} sh -c {command}"
    text = refused(capfd, "train", "recipe.toml", "--hosts", "hosta,hostb", command, f"launch.python={program}")
    assert "On host hostb" in text
    assert f"no folder {home}" in text
    assert not (home / "runs" / "recipe" / "run.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "recipe.toml", "--hosts", ""], "names no host"),
        (["train", "recipe.toml", "--hosts", "a,a"], "a more than once"),
        (["train", "none.toml", "--hosts", "a"], "none.toml"),
        (["train", "recipe.toml", "--hosts", "a", "launch.command=ssh {host}"], "has no {command}"),
        (["train", "recipe.toml", "--hosts", "a", "launch.port=70000"], "launch.port = 70000"),
        (["train", "recipe.toml", "--hosts", "a", "launch.command=not-a-program {command}"], "not-a-program"),
        (["probe", "--hosts", "a", "train.steps=3"], "train.steps=3"),
        (["probe", "train.steps=3"], "train.steps=3"),
        (["probe", "--hosts", "a", "launch.command=sh -c 'exit 255' {command}"], "Host a cannot be reached"),
        (["probe", "--hosts", "a,b", SAME, "launch.interface=eth77"], "launch.interface = 'eth77'"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(home, capfd, arguments, named) -> None:
    assert named in refused(capfd, *arguments)
    assert not (home / "runs").exists()


def test_hosts_and_torchrun_are_not_both_obeyed(home, capfd, monkeypatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "RANK and WORLD_SIZE are set" in refused(capfd, "train", "recipe.toml", "--hosts", "a,b")


STRIKING = """
import os, pathlib, runpy, signal, sys
from espalier.train import trainer
plain = trainer.Trainer.train_step
def struck(self, batches):
    mark = pathlib.Path(sys.argv[1])
    if self.step == 2 and self.setting.place.rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, batches)
trainer.Trainer.train_step = struck
runpy.run_module("espalier.cli.host_worker", run_name="__main__")
"""


@pytest.mark.slow
def test_a_killed_rank_is_forked_again_by_its_hosts_supervisor(home, capfd) -> None:
    (home / "striking.py").write_text(STRIKING)
    striking = f"launch.command={sys.executable} {home / 'striking.py'} {home / 'struck'} # {{command}}"
    arguments = ["train", "recipe.toml", "--hosts", "hosta,hostb:2", "name=struck", "checkpoint.every=1", striking]
    assert cli.main([*arguments, "train.batch_tokens=384"]) == 0
    assert "On host hostb: Rank 1 was killed (SIGKILL)" in capfd.readouterr().err
    events = list(map(json.loads, (home / "runs" / "struck" / "events.jsonl").read_text().splitlines()))
    assert [event["step"] for event in events if event["event"] == "run"] in ([0, 1], [0, 2])
    (incident,) = [event for event in events if event["event"] == "incident" and event["kind"] != "lost"]
    assert incident["rank"] == 1
    assert [event["seconds"] < 4.0 for event in events if event["event"] == "recovered"] == [True]


@pytest.mark.slow
@pytest.mark.parametrize(("host", "again"), [(0, True), (1, False)])
def test_after_the_first_hosts_supervisor_dies_all_are_started_again_after_anothers_only_that(
    home, capfd, host, again
) -> None:
    killing = STRIKING.replace("os.getpid()", "os.getppid()").replace("rank == 1", f"rank == {host}")
    (home / "striking.py").write_text(killing)
    striking = f"launch.command={sys.executable} {home / 'striking.py'} {home / 'struck'} # {{command}}"
    arguments = ["train", "recipe.toml", "--hosts", "hosta,hostb", "name=struck", "checkpoint.every=1", striking]
    assert cli.main(arguments) == 0
    errors = capfd.readouterr().err
    assert f"The supervisor on host host{'ab'[host]} was killed (SIGKILL)" in errors
    assert ("start supervisors and ranks again on all hosts" in errors) == again
    assert ("Host hostb is back after" in errors) != again
    assert len(set(losses(home, "struck"))) == 4, "what is done again comes to the same"


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_is_shut_down_in_order_stops_the_run_which_the_same_command_takes_up(home, capfd, host) -> None:
    """Every program of a machine that reboots gets SIGTERM, its supervisor too."""
    code = STRIKING.replace("os.getpid(), signal.SIGKILL", "os.getppid(), signal.SIGTERM").replace("== 2", "> 2")
    (home / "striking.py").write_text(code.replace("rank == 1", f"rank == {host}"))
    striking = f"launch.command={sys.executable} {home / 'striking.py'} {home / 'struck'} # {{command}}"
    arguments = ["train", "recipe.toml", "--hosts", "hosta,hostb", "name=struck", "train.steps=5000", striking]
    assert cli.main(arguments) == 130
    assert "the state is saved" in capfd.readouterr().err
    reached = len(losses(home, "struck"))
    assert 2 < reached < 5000
    (home / "struck").unlink()
    assert cli.main(arguments) == 130, "it went on, and was struck again"
    steps = [json.loads(line) for line in (home / "runs" / "struck" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in steps if event["event"] == "run"] == [0, reached], "nothing was done again"


def test_the_policy_is_asked_about_the_supervisor_that_vanished(tmp_path) -> None:
    killed = RunFailed("The supervisor on host a was killed (SIGKILL).", why="a reason")
    asked = multihost._failure(killed, tmp_path / "none")
    assert (asked.kind, asked.rank, asked.what, asked.step) == ("killed", -1, killed.what, 0)
    (tmp_path / "events").write_text('{"event":"step","time":1.0,"step":7,"loss":1.0}\n')
    unheard = multihost._failure(HostLost("Host b was not heard for 60 s."), tmp_path / "events")
    assert (unheard.kind, unheard.step) == ("lost", 7)


class Asked:
    """Hosts that are asked to start again, of which the second refuses so many times. Its clock has no need to wait."""

    patience = 60.0

    def __init__(self, refusals: int) -> None:
        self.refusals, self.asked, self.now = refusals, 0, 0.0
        self.all: list[Any] = []

    def gather(self, chosen: list[Host]) -> list[str]:
        self.asked += 1
        refused = UserError("Host b cannot be reached.", why="No route to host", do="run that command by hand")
        errors = [None, refused if self.asked <= self.refusals else None]
        identity = {"torch": "2"}
        self.all = [
            SimpleNamespace(host=host, error=error, identity=identity, messages=[])
            for host, error in zip(chosen, errors, strict=True)
        ]
        if errors[1] is not None:
            raise errors[1]
        return []

    def prepare(self, message: dict[str, Any], first: str) -> None:
        """Opens nothing."""

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def met(crowd: Asked, lost: RunFailed | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multihost, "time", crowd)
    multihost._meet(crowd, parse("a,b:2"), {}, lost)


def test_after_a_loss_all_hosts_are_asked_again_until_the_time_is_over(monkeypatch) -> None:
    lost = HostLost("Host b was not heard for 60 s.")
    crowd = Asked(refusals=5)
    met(crowd, lost, monkeypatch)
    assert crowd.asked == 6
    assert crowd.now < crowd.patience
    crowd = Asked(refusals=1000)
    with pytest.raises(RunFailed, match=r"Host b cannot be reached\.") as raised:
        met(crowd, lost, monkeypatch)
    assert crowd.now >= crowd.patience
    assert raised.value.exit_code == 1
    assert raised.value.why == "Host b was not heard for 60 s. For 60 s all were asked to start again; No route to host"
    assert raised.value.do.startswith("resume with --hosts a, or run the same command")


def test_at_the_first_start_a_host_that_is_not_reached_is_named_at_once(monkeypatch) -> None:
    crowd = Asked(refusals=1)
    with pytest.raises(UserError, match=r"Host b cannot be reached\."):
        met(crowd, None, monkeypatch)
    assert crowd.asked == 1


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_an_interrupt_saves_on_all_hosts_and_the_same_command_resumes(home) -> None:
    arguments = ["train", "recipe.toml", "--hosts", "hosta,hostb", "name=long", SAME, "train.steps=100000"]
    command = [sys.executable, "-m", "espalier", *arguments, "train.validate_every=100000", "checkpoint.every=100000"]
    reached = 0
    for end, code in ((signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 90
        while len(losses(home, "long")) < reached + 5:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        pids = {event["pid"] for event in events(home) if event["event"] == "run"}
        process.send_signal(end)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code, errors
        assert code < 0 or "the state is saved" in errors
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline + 20
            time.sleep(0.1)
        reached = len(losses(home, "long"))
    steps = [event["step"] for event in events(home) if event["event"] == "step"]
    assert steps == list(range(1, len(steps) + 1)), "saved and taken up each time"


def events(home: Path) -> list[dict[str, Any]]:
    file = home / "runs" / "long" / "events.jsonl"
    return list(map(json.loads, file.read_text().splitlines())) if file.exists() else []
