"""The examples of docs/sparse.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "sparse.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[number], str(PAGE), "exec"), {})


def test_each_part_has_its_example() -> None:
    shown = "\n".join(EXAMPLES)
    assert len(EXAMPLES) == 5
    for name in ("matmul", "CBM.from_csr", "best_format", "cbsr_aggregate", "attention_aggregate", "rcmpp", "order("):
        assert name in shown
