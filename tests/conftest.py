"""One thread and deterministic algorithms for every test: forks of this process then cannot hang, and memory that was
never written is NaN."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Ranks with two threads would spin at each barrier while other workers compute: a run of two steps takes 0.3 s of CPU,
# and would take 4. torch reads this when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, settings

from espalier.comm import store_client
from espalier.machine import cluster, probe

torch.set_num_threads(1)
WORKER, SET_NUM_THREADS = os.getpid(), torch.set_num_threads


def set_num_threads(count: int) -> None:
    """Of torch, but 1 in the main thread of this process, whatever is asked: a fork of a process whose main thread has
    computed in several would hang at its first parallel operation."""
    own = os.getpid() == WORKER and threading.current_thread() is threading.main_thread()
    SET_NUM_THREADS(1 if own else count)


torch.set_num_threads = set_num_threads
torch.use_deterministic_algorithms(True)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; programs of tests inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
store_client.own_process()  # stores of tests wait for no name server
os.register_at_fork(after_in_child=gc.freeze)  # what tests before left behind belongs to threads that no fork has

COMPILE = Path(__file__).with_name("compile_kernels.py")
BUILDERS = {file.stem: file for file in Path(__file__).parent.rglob("*.py") if not file.name.startswith("test_")}
"""By the name by which tests import them."""

# Shared machines stall for seconds now and then: how long a draw or an example took says nothing of the code.
WHOLE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("whole", WHOLE)
settings.register_profile("normal", WHOLE, max_examples=20)
settings.load_profile("normal")


STARTS = re.compile(
    r"^ *(?:from|import) .*\b(?:subprocess|multiprocessing|agent|supervisor|rank_process|child_process|forks?|probe)\b"
    r"|os\.fork|\bfork(?:ed|s)?\(|\bmachine: |, machine\b|\(machine\b|\bmpiexec\b",
    re.MULTILINE,
)
"""In the source of tests that start processes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The tiers of tests beside the normal suite; see CONTRIBUTING.md."""
    parser.addoption("--slice", metavar="K/N", help="only test cases whose name's hash is K modulo N")
    parser.addoption("--quick", action="store_true", help="only files of tests that start no process")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that `--quick` leaves out are not even imported."""
    left_out = config.option.quick and collection_path.name.startswith("test_") and starts_processes(collection_path)
    return True if left_out else None


def starts_processes(file: Path, *readers: Path) -> bool:
    """Whether the tests of a file do, or the builders of example data and the tests beside it that it imports."""
    text = file.read_text(encoding="utf-8")
    if STARTS.search(text):
        return True
    names = re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE)
    imported = [BUILDERS[name] for name in names if name in BUILDERS]
    modules = re.findall(r"^ *from (tests\.[\w.]+) import", text, re.MULTILINE)
    imported += [Path(__file__).parents[1] / f"{module.replace('.', '/')}.py" for module in modules]
    read = (file, *readers)
    return any(starts_processes(other, *read) for other in imported if other not in read and other.exists())


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is in a slice stays there when its file moves to another folder."""
    mark_slow_between_extremes(items)
    mark_slow_unsampled(items)
    if config.option.slice is None:
        return
    number, slices = map(int, config.option.slice.split("/"))
    of_slice = {item: xxhash.xxh3_64_intdigest(slice_unit(item).encode()) % slices for item in items}
    chosen = [item for item in items if of_slice[item] == number]
    config.hook.pytest_deselected(items=[item for item in items if of_slice[item] != number])
    items[:] = chosen


def slice_unit(item: pytest.Item) -> str:
    """What stays in one slice: a case, or a file that is slow as a whole, whose tests share what they have built."""
    module = item.getparent(pytest.Module)
    whole = module is not None and any(module.get_closest_marker(name) for name in ("slow", "soak"))
    return item.path.name if whole else f"{item.path.name}::{item.nodeid.partition('::')[2]}"


def mark_slow_between_extremes(items: list[pytest.Item]) -> None:
    """Of a function marked `extremes` those cases that are neither its first nor its last, of those without a mark."""
    for cases in quick_cases(items, "extremes"):
        for item in cases[1:-1]:
            item.add_marker(pytest.mark.slow)


def mark_slow_unsampled(items: list[pytest.Item]) -> None:
    """Of a function marked `sampled(n)` all but the n cases whose names have the lowest hashes, of those without a
    mark."""
    for cases in quick_cases(items, "sampled"):
        mark = cases[0].get_closest_marker("sampled")
        assert mark is not None
        (count,) = mark.args
        for item in sorted(cases, key=lambda item: xxhash.xxh3_64_intdigest(slice_unit(item).encode()))[count:]:
            item.add_marker(pytest.mark.slow)


def quick_cases(items: list[pytest.Item], mark: str) -> list[list[pytest.Item]]:
    """By function with this mark: its cases without the mark `slow`."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker(mark) and not item.get_closest_marker("slow"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return list(functions.values())


def pytest_configure(config: pytest.Config) -> None:
    """More examples where the slow tests run."""
    settings.load_profile("normal" if "not slow" in config.option.markexpr else "whole")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: the tests of one worker wait for timers and processes while others compute."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_sessionstart(session: pytest.Session) -> None:
    """Several workers find the kernels compiled."""
    if session.config.getoption("numprocesses", 0) and not session.config.option.collectonly:
        compile_kernels()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What tests and their forks would do again and again: load kernels, look through all that is imported."""
    if session.config.option.collectonly:
        return
    if "espalier.kernels" in sys.modules:
        if not hasattr(session.config, "workerinput"):
            compile_kernels()
        load_kernels()
    wait_for_nobody()
    gc.collect()
    gc.freeze()


def wait_for_nobody() -> None:
    """Threads that write checkpoints and packed sets yield to training. Beside workers that keep all cores busy they
    would get a thirtieth of one, and tests wait for them."""
    for name in ("espalier.checkpoint.save_and_restore", "espalier.mechanisms.disk_batches.rolling_pool"):
        if name in sys.modules:
            sys.modules[name].NICE = os.getpriority(os.PRIO_PROCESS, 0)  # type: ignore[attr-defined]


def compile_kernels() -> None:
    """Nothing is done where the sources have not changed."""
    subprocess.run([sys.executable, str(COMPILE)], check=True)


def load_kernels() -> None:
    """From the cache on disk."""
    spec = importlib.util.spec_from_file_location(COMPILE.stem, COMPILE)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.load()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Every test begins with one thread, whatever the one before has set: forks of several would hang."""
    torch.set_num_threads(1)


def of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a session, whichever worker asks."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where programs keep token shards of the standard library, which takes seconds: once for all workers."""
    folder = of_all_workers(tmp_path_factory) / "tokens"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], Any]], Any]:
    """`once(name, make)`: what `make(folder)` returned in that worker of the session that asked for it first, as JSON;
    `folder` is of the name and stays."""
    base = of_all_workers(tmp_path_factory)

    def made(name: str, make: Callable[[Path], Any]) -> Any:
        folder, file = base / name, base / f"{name}.json"
        folder.mkdir(exist_ok=True)
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                file.write_text(json.dumps(make(folder)))
        return json.loads(file.read_text())

    return made


def loop_seconds(clock: Callable[[], float]) -> float:
    """Of a loop of a million steps, on `clock`: how fast this machine is now. The median of five."""
    seconds = []
    for _ in range(5):
        begin = clock()
        for _ in range(1_000_000):
            pass
        seconds.append(clock() - begin)
    return sorted(seconds)[2]


@pytest.fixture
def loop_cpu_seconds() -> float:
    """Processor seconds of a loop of a million steps: the measure of what a test may take."""
    return loop_seconds(time.process_time)


@pytest.fixture
def slowness() -> float:
    """How many times longer than on an idle machine a loop takes now, by the clock; at least 1."""
    return max(1.0, loop_seconds(time.monotonic) / 0.012)


@pytest.fixture(scope="session")
def machine(once: Callable[[str, Callable[[Path], Any]], Any]) -> dict[str, Any]:
    """This machine as `probe` measures it: the cluster's file, the seconds it took, by the clock and of processors,
    what was said, the processor seconds of a loop of a million steps before or after (the longer ones), and what it
    changed in the process that asked."""

    def measured(folder: Path) -> dict[str, Any]:
        said: list[str] = []
        before = loop_seconds(time.process_time)
        begin, busy = time.monotonic(), sum(os.times()[:4])
        text = cluster.dumps(probe.probe(progress=said.append, disk=folder))
        spent = {"seconds": time.monotonic() - begin, "cpu_seconds": sum(os.times()[:4]) - busy}
        left = {"threads": torch.get_num_threads(), "cuda": torch.cuda.is_initialized()}
        loop = max(before, loop_seconds(time.process_time))
        return {"text": text, "said": said, "loop": loop, **spent, **left}

    made: dict[str, Any] = once("machine", measured)
    return made


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Measured tables: the folder in ESPALIER_DATA, else one beside the repository; a test that needs it is skipped
    where neither is there."""
    named = os.environ.get("ESPALIER_DATA")
    folder = Path(named) if named else Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no measured tables: set ESPALIER_DATA to their folder")
    return folder


@pytest.fixture(scope="session")
def mpiexec() -> str:
    """The mpiexec beside this Python, or on the path; a test that needs it is skipped where it or mpi4py is missing."""
    pytest.importorskip("mpi4py", reason="espalier-train[mpi] is not installed")
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if found is None:
        pytest.skip("there is no mpiexec")
    return found
