"""Compiled kernels: TBB's threads, torch's thread count, alive after a fork, cached by all that they are made of."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from awkward import pretend_threads

from espalier.kernels import compiled
from espalier.kernels.compiled import jit, threads


@jit("(float32[:, ::1], float32[::1])", parallel=True)
def row_sums(x: np.ndarray, sums: np.ndarray) -> None:
    for row in numba.prange(x.shape[0]):
        total = np.float32(0)
        for column in range(x.shape[1]):
            total += x[row, column]
        sums[row] = total


@jit("int64(int64)", "float64(float64)")
def twice(x: float) -> float:
    return x + x


def summed(x: torch.Tensor) -> torch.Tensor:
    sums = torch.empty(x.shape[0])
    row_sums(x, sums)
    return sums


WHOLE = torch.arange(1200.0).view(300, 4)
SUMS = [16.0 * row + 6 for row in range(300)]


def test_tensors_are_passed_without_a_copy() -> None:
    assert summed(WHOLE).tolist() == SUMS
    assert summed(WHOLE.clone().requires_grad_()).tolist() == SUMS
    assert numba.threading_layer() == "tbb"


def test_what_no_signature_names_is_refused() -> None:
    assert (twice(3), twice(1.5)) == (6, 3.0)
    for wrong in (WHOLE.double(), WHOLE.T, WHOLE[0]):
        with pytest.raises(TypeError):
            summed(wrong)


def test_as_many_threads_as_torch_has_but_no_more_than_there_are() -> None:
    try:
        for wanted in (2, 1, 500):
            pretend_threads(wanted)
            summed(WHOLE)
            assert numba.get_num_threads() == threads() == min(wanted, numba.config.NUMBA_NUM_THREADS)
    finally:
        pretend_threads(1)


def test_a_forked_child_runs_kernels_and_so_does_its_parent() -> None:
    summed(WHOLE)
    child = os.fork()
    if child == 0:
        os._exit(0 if summed(WHOLE).tolist() == SUMS else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert summed(WHOLE).tolist() == SUMS


def test_several_threads_may_run_kernels_at_once() -> None:
    right = []

    def run() -> None:
        right.append(all(summed(WHOLE).tolist() == SUMS for _ in range(30)))

    runners = [threading.Thread(target=run) for _ in range(4)]
    for one in runners:
        one.start()
    for one in runners:
        one.join(timeout=30)
    assert right == [True] * 4


def test_the_cache_knows_options_and_other_modules(tmp_path: Path) -> None:
    used = types.ModuleType("used")
    used.__file__ = str(tmp_path / "used.py")
    keys = []
    for text in ("a = 1", "a = 2", "a = 1"):
        Path(used.__file__).write_text(text)
        keys.append(compiled._key(compiled._Options(parallel=True, fastmath=False, uses=(used,))))
    assert keys[0] == keys[2] != keys[1]
    plain = compiled._Options(parallel=False, fastmath=False, uses=())
    assert len({compiled._key(plain), compiled._key(compiled._Options(True, False, ())), keys[0]}) == 3


def test_warm_compiles_what_is_imported() -> None:
    @jit("int64(int64)")
    def next_one(x: int) -> int:
        return x + 1

    assert not next_one._compiled
    compiled.warm()
    assert next_one._compiled
    assert next_one(1) == 2


def test_kernels_import_no_compiler_before_they_run() -> None:
    script = "import sys, espalier.kernels\nassert not {'numba', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=150)


def test_a_layer_that_the_user_chose_is_kept() -> None:
    script = """
import numba
numba.config.THREADING_LAYER = "workqueue"
from espalier.kernels.compiled import threads
assert numba.config.THREADING_LAYER == "workqueue"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=150)


def test_a_parameters_storage_can_be_resized_after_a_kernel_has_read_it() -> None:
    """As that of a sharded parameter is after every use; it is a view, and passed on without autograd."""
    flat = torch.arange(12.0)
    weight = torch.nn.Parameter(flat.view(3, 4))
    with torch.no_grad():
        for one in (weight, weight.view(3, 4), weight[:2]):
            assert torch.equal(summed(one), one.sum(1))
    assert summed(torch.nn.Parameter(torch.empty(0, 4))).shape == (0,)
    assert flat.untyped_storage().resizable()
    with pytest.raises(TypeError):
        summed(weight.t())


def test_only_the_dtype_that_is_asked_for_is_compiled() -> None:
    def scaled(x: np.ndarray, by: float) -> None:
        for at in range(len(x)):
            x[at] *= by

    kernel = jit("(float32[::1], float64)", "(float64[::1], float64)")(scaled)
    for dtype in (torch.float64, torch.float32):
        x = torch.ones(3, dtype=dtype)
        kernel(x, 2.0)
        assert x.tolist() == [2.0] * 3
        assert torch.empty(0, dtype=dtype).numpy().dtype in kernel._compiled
        assert len(kernel._compiled) == (1 if dtype == torch.float64 else 2)
    with pytest.raises(TypeError):
        kernel(torch.ones(3, dtype=torch.int64), 2.0)
