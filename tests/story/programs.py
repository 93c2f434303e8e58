"""The command line, run as a program."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import traceback
from pathlib import Path

from espalier import cli

MACHINE = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n'
"""For plan.cluster, of programs that are to train and not to measure the machine, which takes ten seconds of CPU."""


def environment(folder: Path) -> dict[str, str]:
    """Of a program that keeps what it measured in `folder`."""
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "100"}


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Of an interpreter of its own."""
    command = [sys.executable, "-m", "espalier", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=150, check=False
    )


def forked(folder: Path, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    """The same, of a fork of this process: without the seconds that importing takes. `typed`: its standard input."""
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.chdir(folder)
            os.environ.update(environment(folder))
            for path, number in ((out, 1), (err, 2)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
            sys.stdin = io.TextIOWrapper(io.BytesIO(typed.encode()))
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            code = cli.main(arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return subprocess.CompletedProcess(list(arguments), code, out.read_text(), err.read_text())
