"""Tensors are on the device that computes: one step of every workload and mechanism on `cuda`, without a GPU."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.kernels import accelerator
from espalier.recipe.cache_dir import cache_folder

HERE = Path(__file__).parent
SOURCES = HERE.parent / "src" / "espalier"
CASES = re.findall(r'^    "([a-z0-9 ]+)": \(', (HERE / "cuda_steps.py").read_text(), re.M)
CASES += [f"graph, {kind}" for kind in ("gcn", "sage", "gat", "gin")]
WITH_VALUES = re.findall(r'^    "([a-z0-9 -]+)": \(', (HERE / "cuda_values.py").read_text(), re.M)
FORGOTTEN = "one tensor forgotten"
STEPS = ("decoder", "scene", "graph, gat", "tasks")
"""Of CASES, those that run every time; FakeTensorMode takes a second and more for each."""
VALUES = ("codec int8", "sylvie")
"""Of WITH_VALUES, those that run every time; two ranks take two seconds each."""


def marked(cases: list[str], normal: tuple[str, ...]) -> list[Any]:
    """Those that are not `normal` run in the slow suite."""
    return [pytest.param(one, marks=() if one in normal else pytest.mark.slow) for one in cases]


def chosen(request: pytest.FixtureRequest, test: str) -> list[str]:
    """The cases of a test that this session runs."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.originalname == test]
    return [item.callspec.params["case"] for item in items]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With it PyTorch takes `cuda` for a device of this machine."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("needs a C++ compiler: apt-get install g++")
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this PyTorch knows the device by itself")
    folder, root = tmp_path_factory.mktemp("cuda"), Path(torch.__file__).parent
    link = [f"-I{root}/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-lc10", "-ltorch_cpu"]
    source = HERE / "cuda_without_gpu.cpp"
    command = [compiler, "-O0", "-std=c++20", "-shared", "-fPIC", str(source), *link]
    made = hashlib.sha256(source.read_bytes() + f"{command[:5]} {link} {torch.__version__}".encode()).hexdigest()[:32]
    library = cache_folder() / "kernels" / made / "library.so"  # compiling takes half a minute
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([*command, "-o", str(folder / "library.so")], check=True, timeout=170)
        partial = library.with_name(f"library.so.{os.getpid()}")
        shutil.copyfile(folder / "library.so", partial)
        partial.replace(library)
    return library


def told_by(program: str, library: Path, folder: Path, *cases: str) -> dict[str, Any]:
    """`all`, the names of its cases; and `failed`: of each of `cases` an empty text, or where it failed."""
    command = [sys.executable, "-W", "ignore", str(HERE / program), str(library), str(folder), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def steps(library: Path, once: Any, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the program says, which the workers of a session run once."""
    cases = [FORGOTTEN, *chosen(request, "test_a_step_on_cuda_finds_all_its_tensors_there")]
    answer: dict[str, Any] = once("cuda_steps", lambda folder: told_by("cuda_steps.py", library, folder, *cases))
    return answer


@pytest.fixture(scope="module")
def steps_of_ranks(library: Path, once: Any, request: pytest.FixtureRequest) -> dict[str, Any]:
    cases = chosen(request, "test_steps_of_ranks_that_read_values_find_their_tensors_on_cuda")
    answer: dict[str, Any] = once("cuda_values", lambda folder: told_by("cuda_values.py", library, folder, *cases))
    return answer


@pytest.mark.parametrize("case", marked(CASES, STEPS))
def test_a_step_on_cuda_finds_all_its_tensors_there(steps: dict[str, Any], case: str) -> None:
    assert steps["failed"][case] == ""


def test_every_case_is_one_of_these(steps: dict[str, Any]) -> None:
    assert sorted(steps["all"]) == sorted(CASES)
    assert set(STEPS) <= set(CASES)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", marked(WITH_VALUES, VALUES))
def test_steps_of_ranks_that_read_values_find_their_tensors_on_cuda(steps_of_ranks: dict[str, Any], case: str) -> None:
    assert steps_of_ranks["failed"][case] == ""
    assert sorted(steps_of_ranks["all"]) == sorted(WITH_VALUES)


def test_a_tensor_that_was_forgotten_on_the_processor_is_found(steps: dict[str, Any]) -> None:
    """So the steps above can fail."""
    assert "FakeTensorDeviceMismatchError" in steps["failed"][FORGOTTEN]


def test_only_one_module_and_gpu_kernels_name_the_driver() -> None:
    named = re.compile(r"torch\.cuda\b|\.is_cuda\b")
    found = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if named.search(path.read_text())}
    allowed = {one for one in found if one.startswith("kernels/") and one.endswith("_gpu.py")}
    assert found - allowed <= {"kernels/accelerator.py"}


def test_a_machine_without_an_accelerator_computes_on_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert not accelerator.available()
    assert accelerator.count() == 0
    assert [accelerator.of_rank(rank) for rank in (0, 3)] == [torch.device("cpu")] * 2
    accelerator.select(accelerator.CPU)


def test_another_maker_s_accelerator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert accelerator.of_rank(0) == torch.device("cpu")


def test_counting_does_not_start_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_available` does, and ranks forked afterwards could not use it (seen on an H100)."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: pytest.fail("the driver was started"))
    assert accelerator.available()
    assert accelerator.of_rank(3) == torch.device("cuda", 1)


def test_a_rank_that_sees_its_own_gpu_only_uses_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert accelerator.of_rank(5) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    assert accelerator.of_rank(5) == torch.device("cuda", 5)
