"""Ranks under mpiexec: who they are, where they meet, and what is said when they cannot."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from espalier.launch.launchers import detect_launcher
from espalier.launch.launchers import mpiexec as launcher
from espalier.recipe.errors import UserError

MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MVAPICH = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}
MET = {"MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "99"}


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: Any) -> Iterator[None]:
    for name in (*MPICH, *OPEN_MPI, *MVAPICH, *MET, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    launcher._met.cache_clear()


def told(monkeypatch: Any, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


class Comm:
    """As much of mpi4py as a meeting takes. `ranks`: how many it sees; `said`: what rank 0 would say."""

    THREAD_MULTIPLE = 3

    def __init__(self, ranks: int, said: Any = None) -> None:
        self.ranks, self.said = ranks, said
        self.COMM_WORLD = self.MPI = self

    def Get_size(self) -> int:
        return self.ranks

    def Get_library_version(self) -> str:
        return "Some MPI 1.2"

    def bcast(self, value: Any, root: int) -> Any:
        self.heard = value
        return self.said or value


def test_nobody_started_us() -> None:
    assert detect_launcher.place() is None


@pytest.mark.parametrize("variables", [MPICH, OPEN_MPI, MVAPICH], ids=["mpich", "open mpi", "mvapich2"])
def test_a_place_is_read_from_the_environment(monkeypatch: Any, variables: dict[str, str]) -> None:
    told(monkeypatch, **variables, **MET)
    place = detect_launcher.place()
    assert place is not None
    assert (place.rank, place.world, place.local_rank) == (3, 4, 1)
    assert (place.host, place.port, place.serves, place.listen_fd) == ("10.1.2.3", 99, False, -1)


def test_torchruns_variables_come_first(monkeypatch: Any) -> None:
    told(monkeypatch, **MPICH, **MET, RANK="0", WORLD_SIZE="2")
    place = detect_launcher.place()
    assert place is not None
    assert (place.rank, place.world) == (0, 2)


def test_one_rank_needs_no_mpi4py(monkeypatch: Any) -> None:
    told(monkeypatch, PMI_RANK="0", PMI_SIZE="1")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    place = launcher.place()
    assert place is not None
    assert (place.rank, place.world, place.serves) == (0, 1, True)
    os.close(place.listen_fd)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PMI_RANK": "one", "PMI_SIZE": "4"}, "PMI_RANK='one'"),
        ({"PMI_RANK": "4", "PMI_SIZE": "4"}, "PMI_RANK=4 with PMI_SIZE=4"),
        ({**MPICH, "MASTER_ADDR": "host"}, "MASTER_ADDR is set, and MASTER_PORT is not"),
        ({**MPICH, "MASTER_PORT": "99"}, "MASTER_PORT is set, and MASTER_ADDR is not"),
        ({**MPICH, "MASTER_ADDR": "host", "MASTER_PORT": "0"}, "MASTER_PORT=0"),
    ],
)
def test_variables_that_cannot_be_are_refused_by_name(
    monkeypatch: Any, variables: dict[str, str], message: str
) -> None:
    told(monkeypatch, **variables)
    with pytest.raises(UserError, match=re.escape(message)):
        launcher.place()


def test_without_mpi4py_the_extra_is_named_and_the_other_way(monkeypatch: Any) -> None:
    told(monkeypatch, **MPICH)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UserError, match=r"espalier-train\[mpi\]'; or set MASTER_ADDR"):
        launcher.place()


def test_an_mpi4py_of_another_mpi_is_refused(monkeypatch: Any) -> None:
    told(monkeypatch, **MPICH)
    monkeypatch.setitem(sys.modules, "mpi4py", Comm(1))
    with pytest.raises(UserError, match=r"mpiexec started 4 ranks, and mpi4py sees 1[\s\S]*Some MPI 1.2"):
        launcher.place()


def test_rank_0_listens_and_the_others_take_the_address_that_answers(monkeypatch: Any) -> None:
    zero = Comm(4)
    monkeypatch.setitem(sys.modules, "mpi4py", zero)
    told(monkeypatch, PMI_RANK="0", PMI_SIZE="4", MPI_LOCALNRANKS="2")
    first = launcher.place()
    assert first is not None
    assert first == launcher.place(), "they meet once"
    addresses, port = zero.heard
    assert (first.host, first.port, first.serves) == ("127.0.0.1", port, True)
    monkeypatch.setitem(sys.modules, "mpi4py", Comm(4, (["0.0.0.1", *addresses], port)))
    told(monkeypatch, PMI_RANK="3")
    other = launcher.place()
    assert other is not None
    assert other.host in addresses
    assert (other.port, other.serves, other.listen_fd) == (port, False, -1)
    os.close(first.listen_fd)


def test_addresses_that_do_not_answer_are_named(monkeypatch: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    monkeypatch.setitem(sys.modules, "mpi4py", Comm(4, (["127.0.0.1"], port)))
    told(monkeypatch, **MPICH)
    with pytest.raises(UserError, match=rf"none of its addresses \(127.0.0.1\), port {port}"):
        launcher.place()


PROGRAM = """
import os

import torch
import torch.distributed as dist
from espalier.comm import connect, disconnect
from espalier.launch.launchers import detect_launcher
from espalier.train.rank_spec import store

place = detect_launcher.place()
channel = connect(store(place, 30.0), place.rank, place.world, timeout=30.0)
x = torch.full((3,), float(place.rank))
dist.all_reduce(x)
os.write(1, f"{place.rank} {place.local_rank} {x.tolist()}\\n".encode())  # at once: nothing comes between
disconnect()
"""


@pytest.mark.slow
def test_real_ranks_meet(mpiexec: str) -> None:
    done = subprocess.run(
        [mpiexec, "-n", "3", sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=55, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"\d \d \[[^]]*\]", done.stdout)) == [f"{r} {r} [3.0, 3.0, 3.0]" for r in range(3)]
