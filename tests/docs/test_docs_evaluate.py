"""docs/evaluate.md: its figures are what was measured, and its questions can be asked."""

from __future__ import annotations

import json
import re
from pathlib import Path

from espalier.evaluate.multiple_choice import read

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "evaluate.md").read_text(encoding="utf-8")


def test_the_table_is_what_was_measured() -> None:
    tables = [json.loads(path.read_text()) for path in sorted((DOCS / "measured").glob("acme-*.json"))]
    measured = [row for table in tables for row in table["rows"] if "evaluate.py" in table["command"]]
    expected = []
    for row in measured:
        values = f"{row['ours']:.4g} {row['unit']} | {row['peer_value']:.4g} {row['unit']}"
        expected.append(f"| {row['case']} | {row['peer']} | {values} | {row['ratio']:.2f} ({row['spread']}) |")
    assert expected
    assert [line for line in TEXT.splitlines() if line in expected] == expected


def test_the_questions_shown_are_questions(tmp_path: Path) -> None:
    path = tmp_path / "shown.jsonl"
    path.write_text("\n".join(re.findall(r"^(\{.*\})$", TEXT, re.MULTILINE)))
    assert [question.right for question in read(path, "shown")] == [1, 1]
