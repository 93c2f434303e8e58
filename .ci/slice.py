"""Runs one slice of the slow tests and notes in tests/slices.json which commit passed it.

    python .ci/slice.py            the slice of this commit: number of commits modulo the number of slices; where git
                                   knows no commits, the one that was passed longest ago
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


def oldest(known: dict[str, Any]) -> tuple[int, str]:
    """The slice that was passed longest ago, and when; empty: it was never passed."""
    dates = {number: known["passed"].get(str(number), {"date": ""})["date"] for number in range(known["slices"])}
    return min(dates.items(), key=lambda row: row[1])


def of_this_commit(known: dict[str, Any]) -> int:
    """See the module."""
    try:
        return int(git("rev-list", "--count", "HEAD")) % int(known["slices"])
    except (OSError, subprocess.CalledProcessError):
        return oldest(known)[0]


def note(known: dict[str, Any], number: int) -> None:
    """Writes that this commit has passed the slice."""
    known["passed"][str(number)] = {"commit": git("rev-parse", "HEAD"), "date": git("show", "-s", "--format=%cI")}
    FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main(words: list[str]) -> int:
    """See the module."""
    known = table()
    if words == ["--oldest"]:
        number, date = oldest(known)
        passed = f"was passed longest ago, on {date}" if date else "has not been passed yet"
        print(f"slow tests: slice {number} of {known['slices']} {passed}")
        return 0
    number = int(words[0]) if words else of_this_commit(known)
    status = run(number, known["slices"])
    if status == 0 and (ROOT / ".git").exists():
        note(known, number)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
