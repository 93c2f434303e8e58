"""The codecs round mpi4py: laws on real MPI ranks where mpi4py is installed, and what is refused without it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from espalier.comm import mpi
from espalier.recipe.errors import UserError

SIZES = (0, 1, 5, 9000, 300_001)


class Alone:
    """A communicator of one rank; `ranks` otherwise, for what is refused before anything is sent."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks

    def Get_size(self) -> int:
        return self.ranks

    def Get_rank(self) -> int:
        return 0


def drawn(rank: int, size: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(rank).standard_normal(size).astype(dtype)


# --- one rank, and no MPI --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_one_rank_gets_what_its_codec_leaves(dtype: Any) -> None:
    for size in SIZES:
        array = drawn(0, size, dtype)
        same = mpi.allreduce(Alone(), array, codec="split")
        assert same.dtype == dtype
        assert np.array_equal(same, array)
        assert np.abs(mpi.allreduce(Alone(), array) - array).max(initial=0) < 0.05
        assert np.array_equal(mpi.allgather(Alone(), array)[0], array)
        assert np.array_equal(mpi.alltoall(Alone(), array), array)
        assert np.array_equal(mpi.reduce_scatter(Alone(), array, codec="mpc"), array)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mpi.allreduce(Alone(), np.arange(5)), "dtype int64"),
        (lambda: mpi.allreduce(Alone(), drawn(0, 5), codec="int7"), "No codec is called"),
        (lambda: mpi.allreduce(Alone(), drawn(0, 5), residual=np.zeros(4, np.float32)), "4 values"),
        (lambda: mpi.allreduce(Alone(), drawn(0, 5), residual=np.zeros(5)), "residual has dtype float64"),
        (lambda: mpi.alltoall(Alone(3), drawn(0, 5)), "3 ranks do not divide"),
        (lambda: mpi.reduce_scatter(Alone(2), np.float32(1.0)), "2 ranks do not divide"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()


def test_without_mpi4py_the_extra_is_named(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for call in (lambda: mpi.allreduce(Alone(2), drawn(0, 5)), lambda: mpi.MpiProgress(Alone(2))):
        with pytest.raises(UserError, match=r"espalier\[mpi\]"):
            call()


# --- real ranks ------------------------------------------------------------------------------------------------------


def of_all(comm: Any, codec_name: str, size: int) -> dict[str, Any]:
    """Every collective once: are ranks alike, and how far are they off, in units of the largest value?"""
    rank, ranks = comm.Get_rank(), comm.Get_size()
    array = drawn(rank, size)
    every = np.stack([drawn(one, size) for one in range(ranks)]).astype(np.float64)
    total = mpi.allreduce(comm, array, codec=codec_name)
    gathered = mpi.allgather(comm, array, codec=codec_name)
    rows = drawn(rank, ranks * size)
    each = np.stack([drawn(one, ranks * size) for one in range(ranks)]).reshape(ranks, ranks, size)[:, rank]
    part = mpi.reduce_scatter(comm, rows, codec=codec_name)
    turned = mpi.alltoall(comm, rows, codec=codec_name).reshape(ranks, size)
    off = [total - every.sum(0), gathered - every, part - each.sum(0, dtype=np.float64), turned - each]
    alike = all(one == total.tobytes() for one in comm.allgather(total.tobytes()))
    alike &= all(one == gathered.tobytes() for one in comm.allgather(gathered.tobytes()))
    return {"alike": alike, "off": [float(np.abs(one).max(initial=0)) for one in off]}


def parts_of_it(comm: Any) -> Any:
    """Communicators that come and go, each with its own ranks, in another order."""
    found = []
    for turn in range(3):
        sub = comm.Split(0, -comm.Get_rank() if turn % 2 else comm.Get_rank())
        mine = np.full(9000, float(sub.Get_rank()), np.float32)
        found.append(mpi.allgather(sub, mine)[:, 0].tolist())
        sub.Free()
    return found


def disagreeing(comm: Any) -> str:
    try:
        mpi.allreduce(comm, drawn(0, 9000), codec="int8" if comm.Get_rank() else "int4")
    except UserError as error:
        return error.what
    return "nothing was said"


def exposed(comm: Any, in_place: Any) -> bool:
    """Whether a large sum is there at once after computing beside it for a while, longer where the machine is busy."""
    with mpi.MpiProgress(comm):
        for seconds in (0.5, 2.0, 6.0):
            array = np.ones(2**22, np.float32)
            request = comm.Iallreduce(in_place, array)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                sum(range(1000))
            there = request.Test()
            request.Wait()
            if all(comm.allgather(bool(there and (array == comm.Get_size()).all()))):
                return True
    return False


def main() -> None:
    """What each rank runs under mpiexec; rank 0 prints it all."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    laws = {name: {size: of_all(comm, name, size) for size in SIZES} for name in ("split", "int8")}
    told = {"laws": laws, "parts": parts_of_it(comm), "told": disagreeing(comm), "there": exposed(comm, MPI.IN_PLACE)}
    every = comm.gather(told)
    if comm.Get_rank() == 0:
        sys.stdout.write(json.dumps(every) + "\n")


@pytest.fixture(scope="module")
def outcomes(mpiexec: str) -> Any:
    done = subprocess.run(
        [mpiexec, "-n", "3", sys.executable, __file__], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bound"), [("split", 1e-5), ("int8", 0.1)])
def test_real_ranks_end_alike_and_within_the_codecs_bound(outcomes: Any, name: str, bound: float) -> None:
    for rank in outcomes:
        for size in SIZES:
            assert rank["laws"][name][str(size)]["alike"]
            assert max(rank["laws"][name][str(size)]["off"]) < bound


def test_communicators_that_come_and_go_are_not_mixed_up(outcomes: Any) -> None:
    assert all(rank["parts"] == [[0.0, 1.0, 2.0]] * 3 for rank in outcomes)


def test_ranks_with_other_codecs_are_told_at_once(outcomes: Any) -> None:
    assert {rank["told"] for rank in outcomes} == {
        "Ranks disagree about the codec of mpi: rank 0 has 'int4', rank 1 has 'int8', rank 2 has 'int8'."
    }


def test_with_progress_a_sum_is_there_when_the_computing_ends(outcomes: Any) -> None:
    assert all(rank["there"] for rank in outcomes)


if __name__ == "__main__":
    main()
