"""Prints the lines of Python per folder, and the longest files: `python tests/size_of_the_code.py`."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Blank lines count: it is what a reader scrolls through."""
    sizes = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines())
        for top in ("src", "tests", "bench")
        for path in (ROOT / top).rglob("*.py")
    }
    folders: Counter[str] = Counter()
    for path, size in sizes.items():
        folders[str(path.parent)] += size
        folders[path.parts[0]] += size
    longest = sorted(sizes, key=lambda path: (-sizes[path], path))[:5]
    rows = [(name, folders[name]) for name in sorted(folders)] + [("longest:", 0)]
    rows += [(f"  {path}", sizes[path]) for path in longest]
    sys.stdout.writelines(f"{name:40} {size or '':>7}\n" for name, size in rows)


if __name__ == "__main__":
    main()
