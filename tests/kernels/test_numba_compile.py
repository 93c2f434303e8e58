"""Compiled kernels: TBB's threads, torch's thread count, alive after a fork, cached by all that they are made of."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from awkward import pretend_threads

from espalier.kernels import numba_compile
from espalier.kernels.numba_compile import jit, threads


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


@pytest.mark.slow
def test_a_program_that_forks_as_soon_as_threads_have_begun_ends() -> None:
    """On one core, where no thread of TBB has run yet when it forks."""
    script = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from espalier.kernels import numba_compile
from numba.np.ufunc import parallel
parallel._launch_threads()
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


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
        keys.append(numba_compile._key(numba_compile._Options(parallel=True, fastmath=False, uses=(used,))))
    assert keys[0] == keys[2] != keys[1]
    plain = numba_compile._Options(parallel=False, fastmath=False, uses=())
    assert len({numba_compile._key(plain), numba_compile._key(numba_compile._Options(True, False, ())), keys[0]}) == 3


MODULE = """
import numpy as np
from espalier.kernels.numba_compile import jit

@jit("(int64[::1],)", "(float64[::1],)")
def increase(x):
    x += 1
"""


def test_code_is_kept_on_disk_by_source_and_dtype(tmp_path: Path) -> None:
    path = tmp_path / "counting.py"

    def increase(text: str, dtype: torch.dtype) -> tuple[float, int]:
        """What becomes of 1, and how often the code was on disk."""
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("counting", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        x = torch.ones(1, dtype=dtype)
        module.increase(x)
        (code,) = module.increase._compiled.values()
        return x.item(), sum(code.stats.cache_hits.values())

    assert [increase(MODULE, torch.int64) for _ in range(2)] == [(2, 0), (2, 1)]
    assert [increase(MODULE, torch.float64) for _ in range(2)] == [(2.0, 0), (2.0, 1)]
    assert len([*tmp_path.rglob("*.nbi")]) == 2, "an index for each dtype: processes that write one at once would lose"
    assert increase(MODULE.replace("1\n", "20\n"), torch.int64) == (21, 0)


@pytest.fixture
def program() -> Any:
    """tests/compile_kernels.py."""
    spec = importlib.util.spec_from_file_location("compile_kernels", Path(__file__).parents[1] / "compile_kernels.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_another_clone_gets_the_code_that_was_compiled_from_the_same_text(program: Any, tmp_path: Path) -> None:
    program.KEPT = tmp_path / "kept"
    first, second, changed = (tmp_path / name / "a.py" for name in ("first", "second", "changed"))
    for path, text in ((first, "1"), (second, "1"), (changed, "2")):
        path.parent.mkdir()
        path.write_text(text)
        program.copy_codes(program.kept(path), path.parent / "codes")
        for name in ("a.sum.nbi", "a.sum.1.nbc", "b.sum.nbi"):
            (path.parent / name).write_text(path.parent.name)
        program.copy_codes(path.parent, program.kept(path), "a.*")
    copied = {file.name: file.read_text() for file in (second.parent / "codes").iterdir()}
    assert copied == {"a.sum.nbi": "first", "a.sum.1.nbc": "first"}
    assert not [*(changed.parent / "codes").iterdir()]


def test_kernels_are_compiled_before_the_tests_where_something_has_changed(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ("espalier.sparse.sddmm_kernels", "attend") in program.kernels(program.sources())
    monkeypatch.setattr(program, "PACKAGE", tmp_path)
    monkeypatch.setattr(program, "CACHE", tmp_path / "kernels" / "__pycache__")
    monkeypatch.setattr(program, "KEPT", tmp_path / "kept")
    asked: list[list[Path]] = []
    monkeypatch.setattr(program, "kernels", lambda files: asked.append(files) or [])
    program.CACHE.mkdir(parents=True)
    kernel, code, compiled = tmp_path / "a.py", program.CACHE / "a.nbi", tmp_path / "kernels" / "numba_compile.py"
    kernel.write_text("from espalier.kernels.numba_compile import jit")
    code.touch()
    compiled.touch()
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: None,
        lambda: kernel.write_text("from espalier.kernels.numba_compile import jit, njit"),
        lambda: compiled.write_text("changed"),
        code.unlink,
        lambda: None,
    ]
    counts = []
    for change in changes:
        change()
        program.main()
        counts.append(len(asked))
    assert counts == [1, 1, 2, 3, 4, 4]
    assert asked[0] == [kernel]


def test_kernels_import_no_compiler_before_they_run() -> None:
    script = "import sys, espalier.kernels\nassert not {'numba', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=150)


def test_a_layer_that_the_user_chose_is_kept() -> None:
    script = """
import numba
numba.config.THREADING_LAYER = "workqueue"
from espalier.kernels.numba_compile import threads
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
