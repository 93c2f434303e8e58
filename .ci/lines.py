"""Lines of Python in each room, and in the files of each system beside its budget of 1,200. Run by `make check`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from espalier import records

BUDGET = 1200
PACKAGE = Path(records.__file__).parent


def count(paths: Iterable[Path]) -> int:
    """Lines of the Python files among `paths` and below them."""
    files = {file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))}
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> None:
    """Prints both tables."""
    rooms = {path.name: count([path]) for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    rooms["(top)"] = count(PACKAGE.glob("*.py"))
    told = ", ".join(f"{name} {lines:,}" for name, lines in sorted(rooms.items(), key=lambda one: -one[1]) if lines)
    print(f"{sum(rooms.values()):,} lines in {PACKAGE.name}: {told}")
    for record in records.all_records():
        lines = count(PACKAGE / file for file in record.files)
        if lines > BUDGET:
            print(f"  {record.name}: {lines:,} lines, {lines - BUDGET:,} more than its budget of {BUDGET:,}")


if __name__ == "__main__":
    main()
