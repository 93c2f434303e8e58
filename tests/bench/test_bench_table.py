"""The table that every bench script prints and writes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table() -> Any:
    spec = importlib.util.spec_from_file_location("bench_table", ROOT / "bench" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_middle_of_paired_ratios_is_told_with_its_spread(table: Any) -> None:
    row = table.compare("a case", "a peer", "s", [(1.0, 2.0), (2.0, 6.0), (1.0, 1.0)], higher_is_better=False)
    assert (row.peer_value, row.ours, row.ratio) == (2.0, 1.0, 2.0)
    assert row.spread == "1.000-3.000 (n=3)"


def test_what_is_written_is_shown_and_names_no_folder_of_this_machine(
    table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "measured"
    folder.mkdir()
    file = folder / "rtopk.json"
    words = ["bench/rtopk.py", "--pairs", "3", "--data", str(tmp_path), "--json", str(file), "--only", "large"]
    monkeypatch.setattr(sys, "argv", words)
    row = table.compare("a case", "a peer", "s", [(1.0, 2.0)] * 9, higher_is_better=False)
    table.publish([row], str(file))
    assert "| a case | a peer | 2 | 1 | 2.00 | s | 2.000-2.000 (n=9) |" in capsys.readouterr().out
    (found,) = table.measured("rtopk", folder)
    assert found.command == "python bench/rtopk.py --pairs 3 --data DATA --only large"
    assert str(tmp_path) not in file.read_text()
    assert table.measured("rtop", folder) == []
    assert json.loads(file.read_text())["rows"] == [msgspec.to_builtins(found.rows[0])]


def test_every_measured_table_stands_in_the_page_of_its_system(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    systems = importlib.import_module("systems")
    page = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    sections = dict(zip(headings, re.split(r"^## .+$", page, flags=re.MULTILINE)[1:], strict=True))
    names = {heading: name for name, (heading, *_) in systems.OTHERS.items()}
    files = sorted((ROOT / "docs" / "measured").glob("*.json"))
    assert len(files) == sum(len(table.measured(names.get(one, one))) for one in headings) > 0
    for heading in headings:
        name = names.get(heading, heading)
        assert f"](measured/{name}.md)" in sections[heading]
        tables = (ROOT / "docs" / "measured" / f"{name}.md").read_text(encoding="utf-8")
        for path, run in zip(table.files(name), table.measured(name), strict=True):
            assert f"`{run.command}` on {run.machine} ([raw rows]({path.name})):" in tables
            assert all(f"| {row.case} | {row.peer} |" in tables for row in run.rows)


def test_what_takes_too_long_is_ended_and_what_does_not_is_left_alone(table: Any) -> None:
    with pytest.raises(TimeoutError, match=r"not done in 0\.05 s"), table.within(0.05):
        threading.Event().wait(30.0)
    with table.within(0.05):
        pass
    time.sleep(0.1)
