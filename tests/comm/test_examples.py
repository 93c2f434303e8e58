"""The stand-alone uses run as they stand: a DDP hook, FSDP2, and MPI."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["ddp_hook.py", pytest.param("fsdp2.py", marks=pytest.mark.slow)])
def test_it_trains(name: str, tmp_path: Path) -> None:
    first, second = programs.launched(tmp_path, programs.script(ROOT / "examples" / name))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    said = first.stdout
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", said)]
    assert losses[-1] < 0.7 * losses[0]
    sent = re.search(r"sent ([\d.]+)", said)
    assert sent is None or float(sent[1]) < 0.28


@pytest.mark.slow
def test_mpi_ranks_get_the_same_sum(mpiexec: str) -> None:
    said = run(mpiexec, "-n", "3", sys.executable, "examples/mpi_sum.py")
    error = re.search(r"3 ranks, relative error ([\d.e-]+), all alike: True", said)
    assert error is not None
    assert 0 < float(error[1]) < 0.02
    kept = re.search(r"kept for the next sum: ([\d.e-]+)", said)
    assert kept is not None
    assert float(kept[1]) < 1e-5
