"""Batch jobs of a real Slurm, with two node daemons on this machine: needs root and Debian's slurm-wlm."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli import job_recipe

from espalier.cli import main as cli

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scancel", "scontrol", "squeue")
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=20
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=normal Nodes=one,two Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=one,two State=UP PriorityTier=9 PreemptMode=OFF
"""


def call(*command, timeout=120, **more):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout, **more).stdout


def until(condition, seconds=200):
    """What `condition` gives once it gives something."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster of two nodes; its configuration is in SLURM_CONF."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing or os.geteuid():
        pytest.skip("needs root and slurm-wlm" if not missing else f"there is no {missing[0]}: apt install slurm-wlm")
    folder = Path("/run") / f"espalier-slurm-{os.getpid()}"  # munge refuses folders below one that others write
    for name in ("munge", "state"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    configuration = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    configuration.write_text(CONFIGURATION.format(host=host, folder=folder, ports=free_ports(3)))
    before, os.environ["SLURM_CONF"] = os.environ.get("SLURM_CONF"), str(configuration)
    path, os.environ["PATH"] = os.environ["PATH"], f"{os.environ['PATH']}:/usr/sbin"
    munge = [f"--{name}={folder}/munge/{file}" for name, file in MUNGE.items()]
    daemons = [["munged", "--foreground", "--force", *munge], ["slurmctld", "-D"]]
    daemons += [["slurmd", "-D", "-N", node] for node in ("one", "two")]
    started = []
    try:
        for command in daemons:
            started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            if command[0] == "munged":
                until((folder / "munge" / "socket").exists, 20)
        until(lambda: call("sinfo", "-h", "-t", "idle", "-o", "%D", "-p", "normal").strip() == "2", 60)
        yield folder
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
        os.environ["PATH"] = path
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before


MUNGE = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


@pytest.fixture
def home(slurm, tmp_path, monkeypatch):
    """A folder with a recipe for two ranks."""
    job_recipe.write(tmp_path, monkeypatch, ranks=2, steps=400)
    yield tmp_path
    subprocess.run(["scancel", "--user=root"], check=False)


def submitted(capsys, options, *changes):
    assert cli.main(["train", "recipe.toml", "--run", "runs/job", "--json", "--slurm", options, *changes]) == 0
    return json.loads(capsys.readouterr().out)["job"]


def events(home, run="job"):
    file = home / "runs" / run / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def steps(home, run="job"):
    return {event["step"]: event["loss"] for event in events(home, run) if event["event"] == "step"}


def state(job):
    shown = call("scontrol", "show", "job", job, "--oneliner")
    return dict(word.partition("=")[::2] for word in shown.split())["JobState"]


def finished(home, job):
    """The job has ended by itself."""
    assert (
        until(lambda: (found := state(job)) not in ("RUNNING", "PENDING", "COMPLETING") and found, 400) == "COMPLETED"
    ), (home / "runs" / "job" / f"slurm-{job}.log").read_text()


def reference(home, *changes):
    """The losses of the undisturbed run of two ranks, which nobody schedules."""
    command = [sys.executable, "-m", "espalier", "train", "recipe.toml", "--run", "runs/whole", *changes]
    call(*command, cwd=home, timeout=600)
    return steps(home, "whole")


TWO = "nodes=2 ntasks-per-node=1 time=0:10:00"


def test_ranks_on_two_nodes_make_the_steps_of_ranks_on_one_machine(home, capsys):
    job = submitted(capsys, TWO, "train.steps=20")
    finished(home, job)
    assert steps(home) == reference(home, "train.steps=20")


@pytest.mark.parametrize("options", [TWO, "ntasks=1 cpus-per-task=2 time=0:10:00"], ids=["ranks", "supervisor"])
def test_a_preempted_job_saves_is_requeued_and_ends_with_the_undisturbed_steps(home, capsys, options):
    job = submitted(capsys, options)
    until(lambda: len(steps(home)) > 5)
    call("srun", "--partition=urgent", "--nodes=2", "--exclusive", "true", timeout=300)
    finished(home, job)
    begun = [event["step"] for event in events(home) if event["event"] == "run"]
    assert begun[0] == 0 < begun[1] < 400
    assert steps(home) == reference(home)


def test_a_job_whose_time_is_nearly_up_is_requeued(home, capsys):
    job = submitted(capsys, "ntasks=1 cpus-per-task=2 time=0:02:00 signal=B:USR1@60", "train.steps=100000")
    until(
        lambda: len([event for event in events(home) if event["event"] == "run"]) > 1, 500
    )  # Slurm lets two minutes pass
    begun = [event["step"] for event in events(home) if event["event"] == "run"]
    assert begun[0] == 0 < begun[1]
    assert state(job) in ("RUNNING", "COMPLETING")


def test_a_cancelled_job_saves_and_is_not_requeued(home, capsys):
    job = submitted(capsys, TWO)
    until(lambda: len(steps(home)) > 5)
    call("scancel", job)
    assert until(lambda: (found := state(job)) not in ("RUNNING", "COMPLETING") and found) == "CANCELLED"
    assert [event["step"] for event in events(home) if event["event"] == "checkpoint"]
