"""docs/sparse.md shows each part by an example; tests/docs/test_docs_commands.py runs them."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "sparse.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_each_part_has_its_example() -> None:
    shown = "\n".join(EXAMPLES)
    assert len(EXAMPLES) == 5
    for name in ("matmul", "CBM.from_csr", "cbsr_aggregate", "attention_aggregate", "rcmpp", "order("):
        assert name in shown
