"""Names at the top of src/espalier, and arrows between its rooms, beside their goals. Run by `make check`.

A room is a folder at the top, and each folder of mechanisms/. An arrow is a pair of rooms one of which imports
the other anywhere: at the top of a module, in a function, or for type checkers. It points upward unless it leads
to a lower line of the import contract in pyproject.toml.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "espalier"
NAMES, ARROWS, UPWARD = 22, 300, 0
"""Goals, at most."""
Arrow = tuple[str, str]


def names(package: Path) -> list[str]:
    """Folders and modules at the top."""
    paths = [path for path in package.iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))]
    return sorted(path.stem for path in paths if not path.stem.startswith("__"))


def room(module: str) -> str:
    """Of a module, whose name begins with that of the package."""
    parts = module.split(".")[1:] or ["__init__"]
    return "/".join(parts[:2]) if parts[0] == "mechanisms" else parts[0]


def imported(path: Path) -> Iterator[str]:
    """Modules that a file imports; of `from a import b` a.b, which may be a name in the module a."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(package: Path) -> Counter[Arrow]:
    """Imports between each pair of rooms."""
    pairs: Counter[Arrow] = Counter()
    for path in package.rglob("*.py"):
        module = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for name in imported(path):
            pair = room(module), room(name)
            if name.startswith(f"{package.name}.") and pair[0] != pair[1]:
                pairs[pair] += 1
    return pairs


def lines(pyproject: Path) -> dict[str, int]:
    """Name at the top to its line of the contract, counted from above."""
    contracts = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return {name: number for number, line in enumerate(layers) for name in re.findall(r"\w+", line)}


def upward(pairs: Counter[Arrow], line: dict[str, int]) -> Counter[Arrow]:
    """The arrows that lead to no lower line; rooms outside the contract are left out."""

    def height(name: str) -> int | None:
        return line.get(name.partition("/")[0])

    levels = {pair: (height(pair[0]), height(pair[1])) for pair in pairs}
    return Counter({pair: pairs[pair] for pair, (a, b) in levels.items() if a is not None and b is not None and a >= b})


def main() -> None:
    """Prints the three numbers, and the arrows that point upward."""
    pairs = arrows(PACKAGE)
    wrong = upward(pairs, lines(ROOT / "pyproject.toml"))
    print(
        f"{len(names(PACKAGE))} names at the top (goal {NAMES}), {len(pairs)} arrows between rooms (goal {ARROWS}), "
        f"{len(wrong)} upward (goal {UPWARD})"
    )
    for (importer, target), count in sorted(wrong.items()):
        print(f"  upward: {importer} imports {target} ({count})")


if __name__ == "__main__":
    main()
