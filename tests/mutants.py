"""Mutants: each row of mutants.toml breaks one line of a system's formula, and the test that it names must fail.

    python tests/mutants.py                 all rows
    python tests/mutants.py --only CO2      those of one system

A fork for each row runs its test with a copy of the package, so that nothing of the checkout changes. The tests of a
system are first run without a mutant, unless `--quick` says that they are known to pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "espalier"
TABLE = ROOT / "tests" / "mutants.toml"
SECONDS = 150
"""For one run of a row's test: a mutant that only makes it hang is not killed."""
PASSED, FAILED = 0, 1
"""Exit codes of pytest. Others say that no test was run, or that a file could not be imported."""
OPTIONS = ("-q", "-x", "-n0", "-p", "no:cacheprovider", "--hypothesis-seed=0")


class Mutant(NamedTuple):
    """One row of the table.

    Attributes:
        system: as in docs/papers.md.
        file: below src/espalier.
        line: text that stands once in the file.
        mutation: what stands there instead.
        test: the node id of a test that then fails.
    """

    system: str
    file: str
    line: str
    mutation: str
    test: str

    def text(self) -> str:
        """The file with the mutation. Raises ValueError where the line does not stand there exactly once."""
        original = (PACKAGE / self.file).read_text(encoding="utf-8")
        count = original.count(self.line)
        if count != 1:
            raise ValueError(f"{self.file} has {self.line!r} {count} times: mend its row in {TABLE.name}")
        return original.replace(self.line, self.mutation)


def mutants(table: Path = TABLE) -> list[Mutant]:
    """The rows in their order."""
    return [Mutant(**row) for row in tomllib.loads(table.read_text(encoding="utf-8"))["mutant"]]


def run_tests(tests: list[str], folder: Path) -> int:
    """In a fork: pytest with the package in `folder`/src. Ends the process by pytest's exit code."""
    os.setsid()
    output = os.open(folder / "output.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = -1
    try:
        for key in [key for key in os.environ if key.startswith("PYTEST_")]:
            del os.environ[key]
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # kernels are kept beside the copy's own files
        os.environ |= {"PYTHONPATH": str(folder / "src"), "XDG_CACHE_HOME": str(folder / "cache")}
        os.chdir(ROOT)
        sys.path.insert(0, str(folder / "src"))
        import pytest

        import compile_kernels

        compile_kernels.note()  # of what is not compiled here, the process of the tests compiles what it loads
        code = pytest.main([*OPTIONS, f"--basetemp={folder / 'base'}", *tests])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(child: int) -> int | None:
    """The exit code of the fork; None: it took longer than SECONDS and was killed."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def run_in_copy(tests: list[str], mutant: Mutant | None = None) -> tuple[int | None, str]:
    """(exit code of the tests, the end of what they wrote) with a copy of the package, in which the mutant lives."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        shutil.copytree(PACKAGE, folder / "src" / "espalier")
        if mutant is not None:
            (folder / "src" / "espalier" / mutant.file).write_text(mutant.text(), encoding="utf-8")
        sys.stdout.flush()
        child = os.fork()
        if not child:
            run_tests(tests, folder)
        code = wait(child)
        return code, (folder / "output.txt").read_text(errors="replace")[-2000:]


def failures(rows: list[Mutant]) -> list[str]:
    """Where the tests of rows do not all pass without a mutant: how pytest ended."""
    tests = list(dict.fromkeys(row.test for row in rows))
    code, output = run_in_copy(tests)
    return [] if code == PASSED else [f"without a mutant, {' '.join(tests)} ended with {code}\n{output}"]


def survivors(rows: list[Mutant]) -> list[str]:
    """The mutants with which their tests do not fail, and how pytest ended."""
    wrong = []
    for row in rows:
        code, output = run_in_copy([row.test], row)
        sys.stdout.write(f"{row.system}: {row.line} -> {row.mutation}: {'killed' if code == FAILED else code}\n")
        sys.stdout.flush()
        if code != FAILED:
            wrong.append(f"{row.file}: {row.line!r} -> {row.mutation!r}: {row.test} ended with {code}\n{output}")
    return wrong


def warm() -> None:
    """Compiles what is not compiled yet, and imports what every fork would."""
    variables = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, str(ROOT / "tests" / "compile_kernels.py")], env=variables, check=True)
    import numba
    import pytest
    import torch

    assert numba
    assert pytest
    torch.set_num_threads(1)


def main(words: list[str] | None = None) -> int:
    """0 if every mutant of the chosen systems was killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    systems = list(dict.fromkeys(row.system for row in mutants()))
    parser.add_argument("--only", choices=systems, metavar="SYSTEM", help=", ".join(systems))
    parser.add_argument("--quick", action="store_true", help="run no test without a mutant")
    chosen = parser.parse_args(words)
    warm()
    wrong = []
    for system in [chosen.only] if chosen.only else systems:
        rows = [row for row in mutants() if row.system == system]
        wrong += (not chosen.quick and failures(rows)) or survivors(rows)
    sys.stdout.writelines(f"{line}\n" for line in wrong)
    return len(wrong) > 0


if __name__ == "__main__":
    sys.exit(main())
