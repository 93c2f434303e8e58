"""One thread and deterministic algorithms for every test: forks of this process then cannot hang, and memory that was
never written is NaN."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

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

# Shared machines stall for seconds now and then: how long a draw or an example took says nothing of the code.
WHOLE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("whole", WHOLE)
settings.register_profile("normal", WHOLE, max_examples=20)
settings.load_profile("normal")


def pytest_addoption(parser: pytest.Parser) -> None:
    """See `.ci/slice.py`."""
    parser.addoption("--slice", metavar="K/N", help="only test functions whose name's hash is K modulo N")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All cases of a function are in one slice."""
    if config.option.slice is None:
        return
    number, slices = map(int, config.option.slice.split("/"))
    of_slice = {item: xxhash.xxh3_64_intdigest(item.nodeid.partition("[")[0].encode()) % slices for item in items}
    chosen = [item for item in items if of_slice[item] == number]
    config.hook.pytest_deselected(items=[item for item in items if of_slice[item] != number])
    items[:] = chosen


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
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """This machine as `probe` measures it, once for all workers of a session: the cluster's file, the seconds it took,
    what was said, the load at its end, and what it changed in the process that asked."""
    folder = of_all_workers(tmp_path_factory)
    file = folder / "machine.json"
    with (folder / "machine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            said: list[str] = []
            begin = time.monotonic()
            text = cluster.dumps(probe.probe(progress=said.append, disk=folder))
            found = {"text": text, "seconds": time.monotonic() - begin, "said": said, "load": os.getloadavg()[0]}
            left = {"threads": torch.get_num_threads(), "cuda": torch.cuda.is_initialized()}
            file.write_text(json.dumps(found | left))
    made: dict[str, Any] = json.loads(file.read_text())
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
    pytest.importorskip("mpi4py", reason="espalier[mpi] is not installed")
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if found is None:
        pytest.skip("there is no mpiexec")
    return found
