"""Lines of Python in each folder, and in the files of each system beside its budget of 1,200. Run by `make check`.

Fails where a system is over its budget and docs/size.md does not say why.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from espalier.recipe import records

BUDGET = 1200
PAGE = Path(__file__).parents[1] / "docs" / "size.md"
PACKAGE = Path(records.__file__).parent


def count(paths: Iterable[Path]) -> int:
    """Lines of the Python files among `paths` and below them."""
    files = {file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))}
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> int:
    """Prints both tables. Returns how many systems over their budget have no reason."""
    folders = {path.name: count([path]) for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    folders["(top)"] = count(PACKAGE.glob("*.py"))
    told = ", ".join(f"{name} {lines:,}" for name, lines in sorted(folders.items(), key=lambda one: -one[1]) if lines)
    print(f"{sum(folders.values()):,} lines in {PACKAGE.name}: {told}")
    page, missing = PAGE.read_text(encoding="utf-8"), 0
    for record in records.all_records():
        lines = count(PACKAGE / file for file in record.files)
        if lines > BUDGET:
            reason = re.search(
                rf"^- {record.title.partition(':')[0].partition(' (')[0]}, .*(?:\n  .*)*", page, re.MULTILINE
            )
            missing += reason is None
            why = " ".join(reason[0].split()[2:]) if reason else "docs/size.md does not say why"
            print(f"  {record.name}: {lines:,} lines, {lines - BUDGET:,} more than its budget of {BUDGET:,} ({why})")
    return missing


if __name__ == "__main__":
    sys.exit(main())
