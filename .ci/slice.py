"""Runs one slice of the slow tests and notes in tests/slices.json which commit passed it.

    python .ci/slice.py            the slice of this commit: number of commits modulo the number of slices
    python .ci/slice.py 3          that slice
    python .ci/slice.py --oldest   prints which slice was passed longest ago

Every slow or soak test case belongs to one slice by a hash of its name, so all of them run within as many landings as
there are slices.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "slices.json"
MINUTES = 25


def git(*words: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def table() -> dict[str, Any]:
    """`slices`, their number, and `passed`: slice to commit and date."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def run(number: int, slices: int) -> int:
    """The exit status of pytest; a slice that takes longer than MINUTES fails."""
    pytest = [sys.executable, "-m", "pytest", "-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
    selection = ["-m", "slow or soak", "--slice", f"{number}/{slices}"]
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    tests = subprocess.Popen([*pytest, *selection], cwd=ROOT, env=variables, start_new_session=True)
    try:
        return tests.wait(60 * MINUTES)
    except subprocess.TimeoutExpired:
        print(f"Slice {number} took more than {MINUTES} minutes. Try: more slices in {FILE.relative_to(ROOT)}")
        return 1
    finally:
        if tests.returncode is None:
            os.killpg(tests.pid, signal.SIGKILL)


def oldest() -> str:
    """A sentence on the slice that was passed longest ago."""
    known = table()
    never = [number for number in range(known["slices"]) if str(number) not in known["passed"]]
    if never:
        return f"slow tests: slice {never[0]} of {known['slices']} has not been passed yet"
    number, passed = min(known["passed"].items(), key=lambda row: row[1]["date"])
    return f"slow tests: slice {number} of {known['slices']} was passed longest ago, on {passed['date']}"


def main(words: list[str]) -> int:
    """See the module."""
    if words == ["--oldest"]:
        print(oldest())
        return 0
    known = table()
    slices = known["slices"]
    number = int(words[0]) if words else int(git("rev-list", "--count", "HEAD")) % slices
    status = run(number, slices)
    if status == 0:
        known["passed"][str(number)] = {"commit": git("rev-parse", "HEAD"), "date": git("show", "-s", "--format=%cI")}
        FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
