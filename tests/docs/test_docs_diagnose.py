"""What docs/diagnose.md says was measured is what the bench script wrote; its rules load, its example is real."""

from __future__ import annotations

import json
import re
from pathlib import Path

from espalier.cli.diagnose import told
from espalier.ops import incidents, rules
from espalier.ops.diagnosis import diagnose

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")


def test_its_figures_are_the_measured_ones() -> None:
    tables = [json.loads(path.read_text()) for path in sorted((ROOT / "docs" / "measured").glob("acme-*.json"))]
    runs = [one for one in tables if "bench/diagnose.py" in one["command"]]
    rows = [f"| {row['case']} | {row['peer_value']:.3g} | {row['ours']:.3g} |" for run in runs for row in run["rows"]]
    table = PAGE.partition("| case | plain | ours |\n|---|---|---|\n")[2].partition("\n\n")[0]
    shown = table.splitlines()
    assert shown == rows
    assert len(rows) > 20
    assert all(run["machine"] in PAGE for run in runs)


def test_its_rules_load(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    mine = tmp_path / "mine.toml"
    mine.write_text(text)
    (rule,) = rules.read(mine)
    assert rules.book((rule,)).first("LustreError: This client was evicted by fs-OST0001")
    assert incidents.read(mine)[0].reason == "Node Failure"


def test_its_example_is_what_is_printed(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    shown, example = re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[:2]
    log.write_text(shown, encoding="utf-8")
    (found,) = diagnose(log)
    said, lines = told(found), example.splitlines()
    assert [line.replace(str(log), "run.log") for line in (*said[:3], *said[-2:])] == [*lines[:3], *lines[-2:]]
