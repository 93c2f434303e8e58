"""Ranks as actors of a real Ray cluster: two nodes on this machine, an actor that is killed, a head that dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.cli import job_recipe

from espalier.cli import main as cli
from espalier.cli import ray_job
from espalier.cli.main import parsed
from espalier.recipe.errors import RunFailed, UserError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    job_recipe.write(tmp_path, monkeypatch, ranks=2, steps=120, every=10)
    return tmp_path


def events(run):
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if line.endswith("}")]


def curve(run):
    return {one["step"]: one["loss"] for one in events(run) if one["event"] == "step"}


def until(condition, seconds=300.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


# --- a real cluster ----------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes of one processor each, in processes of their own."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    try:
        yield made
    finally:
        made.shutdown()


def started(folder, cluster, run, *changes):
    command = [sys.executable, "-m", "espalier", "train", "recipe.toml", *changes, "--run", str(folder / run)]
    return subprocess.Popen(
        [*command, "--ray", cluster.address], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def alone(folder, run, *changes):
    """The same command without Ray."""
    command = [sys.executable, "-m", "espalier", "train", "recipe.toml", *changes, "--run", str(folder / run)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def ranks_of(run):
    """Programs of the run's ranks."""
    found = []
    for one in psutil.process_iter(["cmdline", "environ"]):
        if str(run) in (one.info["cmdline"] or []) and "RANK" in (one.info["environ"] or {}):
            found.append(one)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ranks_on_two_nodes_make_the_steps_of_ranks_forked_here_also_after_an_actor_was_killed(folder, cluster):
    job = started(folder, cluster, "ray")
    until(lambda: (folder / "ray" / "events.jsonl").exists() and len(curve(folder / "ray")) > 25)
    victim = next(one for one in ranks_of(folder / "ray") if one.info["environ"]["RANK"] == "1")
    psutil.Process(victim.pid).parent().send_signal(signal.SIGKILL)  # its actor, with which it ends
    said, _ = job.communicate(timeout=800)
    assert job.returncode == 0, said
    assert "Ranks were lost" in said
    assert any(one["event"] == "incident" and one["kind"] == "lost" for one in events(folder / "ray"))
    alone(folder, "whole")
    assert curve(folder / "ray") == curve(folder / "whole")
    assert set(curve(folder / "ray")) == set(range(1, 121))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_head_that_dies_ends_the_ranks_and_the_same_command_goes_on(folder, cluster):
    job = started(folder, cluster, "ray", "train.steps=200")
    until(lambda: (folder / "ray" / "events.jsonl").exists() and len(curve(folder / "ray")) > 25)
    ranks = ranks_of(folder / "ray")
    assert len(ranks) == 2
    cluster.remove_node(cluster.head_node, allow_graceful=False)
    said, _ = job.communicate(timeout=200)
    assert job.returncode == 1, said
    assert "Ray's head was lost" in said
    assert "goes on from its newest checkpoint" in said
    until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in ranks))
    assert max(curve(folder / "ray")) < 200
    alone(folder, "ray", "train.steps=200")
    assert set(curve(folder / "ray")) == set(range(1, 201))


# --- without a cluster -------------------------------------------------------------------------------------------


class Died(Exception):
    pass


class Library:
    """Stands for Ray where only the driver's decisions are asked: actors answer at once."""

    class exceptions:  # noqa: N801
        RayError = RayActorError = GetTimeoutError = Died

    def wait(self, left, timeout):
        return left[:1], left[1:]

    def get(self, what, timeout=None):
        if isinstance(what, Died):
            raise what
        return what


class Called:
    def __init__(self, answers):
        self.answers = answers

    def remote(self, *given):
        return self.answers(*given)


class Actor:
    """Its program's exit codes, one for each attempt."""

    def __init__(self, codes, on_run=lambda: None):
        self.codes, self.told, self.ran = list(codes), [], []
        self.place = Called(lambda: ("10.0.0.1", "node"))
        self.free_port = Called(lambda: 4000)
        self.signalled = Called(self.told.append)

        def run(command, folder, variables, log):
            on_run()
            self.ran.append(variables)
            return Answer(self.codes.pop(0))

        self.run = Called(run)


class Answer(int):
    """A result that is told from an equal one."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


def job(tmp_path, attempts=2):
    return ray_job.RayJob(("true",), str(tmp_path), tmp_path / "run", None, attempts, 60.0)


def test_attempts_that_save_nothing_come_to_an_end_and_others_go_on(tmp_path):
    actors = [Actor([1] * 9), Actor([-9] * 9)]
    with pytest.raises(RunFailed, match="nothing was saved in the last 2"):
        ray_job._attempts(Library(), actors, job(tmp_path))
    assert [one["TORCHELASTIC_RESTART_COUNT"] for one in actors[0].ran] == ["0", "1"]
    assert [one["LOCAL_RANK"] for one in (actors[0].ran[0], actors[1].ran[0])] == ["0", "1"]

    def saves():
        (tmp_path / "run" / "checkpoints" / str(len(saving.ran))).mkdir(parents=True)

    saving = Actor([1, 1, 1, 1, 0], saves)
    assert ray_job._attempts(Library(), [saving], job(tmp_path)) == 0


def test_a_user_s_mistake_is_not_tried_again(tmp_path):
    actor = Actor([2])
    assert ray_job._attempts(Library(), [actor], job(tmp_path)) == 2
    assert len(actor.ran) == 1


def test_the_others_are_stopped_where_one_fails(tmp_path):
    actors = [Actor([1]), Actor([0])]
    with pytest.raises(RunFailed):
        ray_job._attempts(Library(), actors, job(tmp_path, attempts=1))
    assert actors[1].told == [signal.SIGTERM]


def test_a_driver_that_ends_without_a_word_means_that_the_head_was_lost(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", Library())
    monkeypatch.setattr(ray_job, "drive", lambda address, job: os._exit(1))
    assert cli.main(["train", "recipe.toml", "--ray"]) == 1
    assert "Ray's head was lost (auto)" in capsys.readouterr().err


def test_what_the_driver_refuses_is_said(folder, monkeypatch, capsys):
    def drive(address, job):
        raise UserError("There is no room.", why="it is full", do="wait")

    monkeypatch.setitem(sys.modules, "ray", Library())
    monkeypatch.setattr(ray_job, "drive", drive)
    assert cli.main(["train", "recipe.toml", "--ray", "10.0.0.1:6379"]) == 2
    assert "There is no room." in capsys.readouterr().err


def test_without_ray_the_extra_is_named(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["train", "recipe.toml", "--ray"]) == 2
    assert "espalier-train[ray]" in capsys.readouterr().err


def test_a_program_s_output_is_followed(tmp_path, capsys):
    path = tmp_path / "log"
    path.write_text("of before\n")
    follower = ray_job.LogFollower(path)
    with Path(path).open("a") as log:
        log.write("a step\n")
    follower.show()
    follower.show()
    assert capsys.readouterr().out == "a step\n"


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ("train --ray recipe.toml train.steps=3", "auto"),
        ("train --ray train.steps=3 recipe.toml", "auto"),
        ("train recipe.toml train.steps=3 --ray", "auto"),
        ("--ray train recipe.toml train.steps=3", "auto"),
        ("train --ray --json recipe.toml train.steps=3", "auto"),
        ("train --ray ./a:1/recipe.toml train.steps=3", "auto"),
        ("train --ray auto recipe.toml train.steps=3", "auto"),
        ("train --ray local recipe.toml train.steps=3", "local"),
        ("train --ray head:6379 recipe.toml train.steps=3", "head:6379"),
        ("train --ray [::1]:6379 recipe.toml train.steps=3", "[::1]:6379"),
        ("train --ray ray://head:10001 recipe.toml train.steps=3", "ray://head:10001"),
        ("train --ray=anything recipe.toml train.steps=3", "anything"),
        ("train recipe.toml train.steps=3", None),
    ],
)
def test_a_recipe_behind_ray_is_no_address(words, address):
    arguments = parsed(words.split())
    assert arguments.ray == address
    assert arguments.recipe.endswith("recipe.toml")
    assert arguments.overrides == ["train.steps=3"]
