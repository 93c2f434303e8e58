"""Ranks that srun has started: who they are, and where they meet."""

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.launch.launchers import detect_launcher, srun
from espalier.recipe.errors import UserError

STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_RESTART_COUNT": "2",
}


@pytest.fixture(autouse=True)
def _only_these(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", known("gpu03", "10.0.0.3"))
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "MV2_", "PMI_", "MPI_", "MASTER_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


def known(*hosts):
    """A name service that has these."""

    def look_up(host, _, **options):
        if host not in hosts:
            raise socket.gaierror(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 0))]

    return look_up


def under(monkeypatch, **changes):
    for name, value in {**STEP, **changes}.items():
        monkeypatch.setenv(name, value)
    return detect_launcher.place()


def test_srun_says_rank_world_and_first_host(monkeypatch):
    place = under(monkeypatch)
    assert (place.rank, place.world, place.local_rank, place.attempt) == (3, 4, 1, 2)
    assert (place.host, place.serves) == ("gpu03", False)
    assert under(monkeypatch, SLURM_PROCID="0").serves


def test_a_node_that_only_slurm_knows_is_asked_for_there(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "getaddrinfo", known("10.0.0.3"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="No address is known for gpu03, the first host of this job"):
        under(monkeypatch)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("""#!/bin/bash
[ "$*" = "show node gpu03 --oneliner" ] && echo "NodeName=gpu03 Gres=(null) NodeAddr=10.0.0.3 NodeHostName=x"
""")
    scontrol.chmod(0o755)
    assert under(monkeypatch).host == "10.0.0.3"


def test_all_tasks_of_a_step_meet_at_one_port_and_other_jobs_elsewhere(monkeypatch):
    ports = {under(monkeypatch, SLURM_PROCID=str(rank)).port for rank in range(4)}
    ports |= {under(monkeypatch, SLURM_JOB_ID="78").port, under(monkeypatch, SLURM_STEP_ID="1").port}
    assert len(ports) == 3
    assert all(10_000 <= port < 30_000 for port in ports)


def test_on_one_host_ranks_meet_on_the_loopback_and_torchs_variables_come_first(monkeypatch):
    assert under(monkeypatch, SLURM_STEP_NUM_NODES="1").host == "127.0.0.1"
    place = under(monkeypatch, MASTER_ADDR="10.0.0.9", MASTER_PORT="4242")
    assert (place.host, place.port) == ("10.0.0.9", 4242)


@pytest.mark.parametrize(
    "changes",
    [{"SLURM_STEP_NUM_TASKS": "1"}, {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MASTER_ADDR": "h"}],
)
def test_one_task_and_what_mpiexec_started_are_no_ranks_of_sruns(monkeypatch, changes):
    for name, value in {**STEP, **changes}.items():
        monkeypatch.setenv(name, value)
    assert srun.place() is None


def test_a_batch_script_itself_is_no_rank(monkeypatch):
    for name, value in STEP.items():
        if "STEP" not in name:
            monkeypatch.setenv(name, value)
    assert detect_launcher.place() is None


def test_a_task_beyond_their_number_is_refused(monkeypatch):
    with pytest.raises(UserError, match="SLURM_PROCID=4"):
        under(monkeypatch, SLURM_PROCID="4")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,7],x1", "gpu03"),
        ("x1,gpu[03-05]", "x1"),
        ("rack[1-2]n[08,10-12]", "rack1n08"),
        ("a.cluster-b", "a.cluster-b"),
        ("n[7]", "n7"),
    ],
)
def test_the_first_of_slurms_list_of_hosts(nodes, first):
    assert srun.first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",x", "a b"])
def test_a_list_without_a_first_host_is_refused(nodes):
    with pytest.raises(UserError, match="names no first host"):
        srun.first_host(nodes)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=5))
def test_tasks_of_each_node_are_read_from_slurms_short_form(counts):
    text = ",".join(f"{tasks}(x{times})" if times > 1 else str(tasks) for tasks, times in counts)
    plain = [tasks for tasks, times in counts for _ in range(times)]
    assert [srun.tasks_here(text, node) for node in range(len(plain))] == plain
