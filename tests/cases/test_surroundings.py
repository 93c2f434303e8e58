"""Run folders whose names are no UTF-8, in a POSIX locale: trained, read, exported and shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RECIPE = """[model]
kind = "gpt"
width = 16
depth = 1
[data]
path = "text.txt"
tokenizer = "bytes"
[train]
steps = 2
sequence = 16
batch_tokens = 64
validate_tokens = 64
[plan]
trial = false
cluster = "machine.toml"
pin.ranks = 1
pin.threads = 1
"""
MACHINE = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n'
VERBS = (
    "plan r.toml",
    "train r.toml --run {run}",
    "report {run}",
    "eval {run}",
    "export {run} --out exported",
    "predict {run} a",
)
PROGRAM = """
import os, sys
from espalier.cli import main as cli

for verb in {verbs!r}:
    words = [os.fsdecode(b"r\\xe9\\n\\x1b") if word == "{{run}}" else word for word in verb.split()]
    print(f"{{verb}} ended with {{cli.main(words)}}", flush=True)
"""


def test_a_run_whose_folder_is_no_utf_8_works_in_a_posix_locale(tmp_path: Path) -> None:
    place = os.fsencode(tmp_path)
    home = tmp_path
    files = {"r.toml": RECIPE, "machine.toml": MACHINE, "program.py": PROGRAM.format(verbs=VERBS)}
    files["text.txt"] = "".join(f"line {number}: {number * number % 977} and more\n" for number in range(400))
    for name, text in files.items():
        (home / name).write_text(text, encoding="utf-8")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONUTF8"))}
    variables = {**plain, "LC_ALL": "POSIX", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=place, env=variables, capture_output=True, timeout=170, check=False
    )
    lines = [line for line in done.stdout.decode(errors="replace").splitlines() if " ended with " in line]
    assert lines == [f"{verb} ended with 0" for verb in VERBS], (done.stdout + done.stderr).decode(errors="replace")
    assert b"\x1b" not in done.stdout + done.stderr
    page = Path(os.fsdecode(place + b"/r\xe9\n\x1b/report.html")).read_bytes()
    assert b"\x1b" not in page
    page.decode()
