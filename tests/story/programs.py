"""The command line, run as a program."""

from __future__ import annotations

import io
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from espalier.cli import main as cli
from espalier.machine import probe

MACHINE = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n'
"""For plan.cluster, of programs that are to train and not to measure the machine, which takes ten seconds of CPU."""


def environment(folder: Path) -> dict[str, str]:
    """Of a program that keeps what it measured in `folder`."""
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "100"}


def known(folder: Path, machine: dict[str, Any]) -> None:
    """Programs in `folder` find this machine measured: `machine` is the fixture of that name."""
    file = folder / "cache" / "espalier" / probe.cache_file().name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(machine["text"])


def with_tokens(folder: Path, tokens: Path) -> None:
    """Programs in `folder` keep token shards in `tokens`, the fixture of that name, with those of other tests."""
    (folder / "cache" / "espalier").mkdir(parents=True, exist_ok=True)
    (folder / "cache" / "espalier" / "tokens").symlink_to(tokens)


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Of an interpreter of its own."""
    command = [sys.executable, "-m", "espalier", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=150, check=False
    )


def forked(folder: Path, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    """The same, of a fork of this process: without the seconds that importing takes. `typed`: its standard input."""
    return _ended(folder, partial(cli.main, arguments), list(arguments), typed)


def scripted(folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """The Python file at `path`, run by a fork of this process in `folder`."""
    return _ended(folder, script(path), [str(path)], "")


def _ended(folder: Path, run: Callable[[], Any], arguments: list[str], typed: str) -> subprocess.CompletedProcess[str]:
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    pid = _fork(folder, run, (out, err), environment(folder), typed)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())


def launched(folder: Path, run: Callable[[], Any], ranks: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """`run` in forks of this process that stand where torchrun would start ranks of one thread, without its agent."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files, pids = [(folder / f"stdout{rank}.txt", folder / f"stderr{rank}.txt") for rank in range(ranks)], []
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    try:
        for rank in range(ranks):
            own = {key: str(value) for key, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
            variables = {**environment(folder), **own, "OMP_NUM_THREADS": "1"}
            pids.append(_fork(folder, run, files[rank], variables))
        codes = [os.waitstatus_to_exitcode(os.waitpid(pids.pop(0), 0)[1]) for _ in range(ranks)]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [
        subprocess.CompletedProcess([], code, out.read_text(), err.read_text())
        for code, (out, err) in zip(codes, files, strict=True)
    ]


def script(path: Path) -> Callable[[], Any]:
    """Runs the Python file at `path`, as `python path` does."""
    return partial(runpy.run_path, str(path), run_name="__main__")


def _fork(
    folder: Path, run: Callable[[], Any], files: tuple[Path, Path], variables: dict[str, str], typed: str = ""
) -> int:
    """The process that runs `run` in `folder` and writes to `files`; it ends with what `run` returns or exits with."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.chdir(folder)
            os.environ.update(variables)
            for path, number in zip(files, (1, 2), strict=True):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
            sys.stdin = io.TextIOWrapper(io.BytesIO(typed.encode()))
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            returned = run()
            code = returned if isinstance(returned, int) else 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid
