"""docs/evaluate.md: its table is what was measured, and its questions can be asked."""

from __future__ import annotations

import re
from pathlib import Path

from espalier import records
from espalier.resilience.acme.evaluate.choices import read

TEXT = (Path(__file__).parent.parent / "docs" / "evaluate.md").read_text(encoding="utf-8")
PEERS = ("fifo", "fifo, decoupled", "longest first, uncut")


def test_the_table_of_makespans_is_the_measured_one() -> None:
    ratios = {(row.case, row.peer): row.ratio for table in records.measured("acme") for row in table.rows}
    found = re.findall(r"^\| ([a-z ]+) \| ([14]) × 8 \| (.*) \|$", TEXT, re.MULTILINE)
    assert len(found) == 8
    for shape, nodes, cells in found:
        case = f"simulated, 63 {shape} datasets, {nodes} × 8 workers"
        expected = [f"{ratios[case, peer]:.2f}" for peer in PEERS]
        expected += [f"{1 / ratios[one, 'lower bound']:.2f}" for one in (case, f"{case}, priors off by up to 2×")]
        assert cells.split(" | ") == expected


def test_the_questions_shown_are_questions(tmp_path: Path) -> None:
    path = tmp_path / "shown.jsonl"
    path.write_text("\n".join(re.findall(r"^    (\{.*\})$", TEXT, re.MULTILINE)))
    assert [question.right for question in read(path, "shown")] == [1, 1]
