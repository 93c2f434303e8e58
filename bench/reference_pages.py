"""Writes the pages that are made from the code, into the folder given: docs/command-line.md from the arguments of the
command line, docs/extras.md from pyproject.toml, docs/options.md from the tables of docs/recipe.md, docs/python.md from
the names that other pages use:

    python bench/reference_pages.py docs      (`make pages`)
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import sys
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import espalier
from espalier.cli import main as cli
from espalier.recipe.errors import DISTRIBUTION

ROOT = Path(__file__).parents[1]
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
LEADS = ROOT / "src" / "espalier" / "recipe" / "recipe_errors.toml"
PAGES = ("README.md", "docs/*.md", "src/espalier/mechanisms/*/README.md", "examples/*.py")
"""Where the names of the package are looked for that it promises."""
MADE = "Made by `make pages`; a test compares it with the code."

COMMAND_LINE = f"""# Command line

{MADE}
`espalier --help` lists the commands, `espalier train --help` the arguments of one. Options and
changes of the recipe (`train.steps=50`) may stand in any order. `--json` prints one JSON object instead of text.

Exit codes: 0 success; 1 the run failed, or `diagnose` found a failure; 2 a mistake in the input; 130 interrupted.

| command | what it does |
|---|---|"""

EXTRAS = f"""# Extras: optional packages

{MADE}
Install an extra with `pip install "{DISTRIBUTION}[graph]"`, several as `[graph,hub]`; in a clone of the repository with
`pip install -c constraints.txt -e ".[graph]"`. What needs an extra that is not there says which.

| extra | for | brings |
|---|---|---|"""

OPTIONS = f"""# Options by the words of the field

{MADE}
Each heading is what other programs call it; below it is the option of a recipe, from [the table of all
options](recipe.md#all-keys). An option is set in the recipe, or for one run on the command line:
`espalier train recipe.toml train.steps=50`.
"""

PYTHON = f"""# Python API

{MADE}
These are the names that the pages of this documentation use; other names may change without notice. `import espalier`
loads no torch: each name loads what it needs when it is first used.
"""


def command_line() -> str:
    """docs/command-line.md."""
    verbs = cli.parsers()[1]
    rows = [f"| [`espalier {name}`](#espalier-{name}) | {capital(verbs[name].description)} |" for name in verbs]
    sections = [line for name, parser in verbs.items() for line in verb_section(name, parser)]
    return "\n".join([COMMAND_LINE, *rows, *sections]) + "\n"


def verb_section(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """The lines of one command."""
    actions = [action for action in parser._actions if action.dest not in ("help", "json")]
    yield from ("", f"## espalier {name}", "", f"{capital(parser.description)}. {TABLES['commands'][name]}", "")
    yield from ("| argument | meaning |", "|---|---|")
    for action in actions:
        words = (action.help or "").replace("\n", " ").replace("|", "\\|")
        if action.choices:
            words += f": {', '.join(f'`{choice}`' for choice in action.choices)}"
        yield f"| `{written(action)}` | {words} |"


def capital(words: str | None) -> str:
    """A sentence's begin."""
    return f"{(words or '')[:1].upper()}{(words or '')[1:]}"


def written(action: argparse.Action) -> str:
    """An argument as it is typed."""
    metavar = action.metavar or action.dest.upper()
    value = metavar if isinstance(metavar, str) else " ".join(metavar)
    if not action.option_strings:
        return {"?": f"[{value}]", "*": f"[{value} …]", "+": f"{value} …"}.get(str(action.nargs), value)
    flag = action.option_strings[0]
    if action.nargs == 0:
        return flag
    return f"{flag} [{value}]" if action.nargs == "?" else f"{flag} {value}"


def extras() -> str:
    """docs/extras.md. Raises KeyError for an extra of which bench/reference_pages.toml does not say what it is for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [EXTRAS]
    for extra, packages in project["optional-dependencies"].items():
        lines.append(f"| `{extra}` | {TABLES['extras'][extra]} | {', '.join(packages)} |")
    return "\n".join(lines) + "\n"


def option_rows(page: str) -> dict[str, tuple[str, str, str]]:
    """Of each option in a page's tables: the cell that names it, its default, its meaning."""
    rows = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0].startswith("`"):
            first, *more = re.findall(r"`([^`]+)`", cells[0])
            prefix = first.rpartition(".")[0]
            for key in (first, *more):
                rows.setdefault(f"{prefix}{key}" if key.startswith(".") else key, tuple(cells))
    return rows


def leads() -> dict[str, list[str]]:
    """Of each option, the words of other programs that its errors know."""
    words = defaultdict(list)
    for lead in tomllib.loads(LEADS.read_text(encoding="utf-8"))["lead"]:
        words[lead.get("to")] += lead["words"].split()
    return words


def options() -> str:
    """docs/options.md."""
    rows, words = option_rows((ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")), leads()
    lines = [OPTIONS]
    for heading, keys in TABLES["options"].items():
        lines += [f"## {heading}", "", "| option | default | meaning |", "|---|---|---|"]
        lines += dict.fromkeys(f"| {' | '.join(rows[key])} |" for key in keys)
        if other := [word for key in keys for word in words[key]]:
            lines += ["", f"Also called {', '.join(f'`{word}`' for word in other)}."]
        lines.append("")
    return "\n".join(lines)


def names() -> dict[str, set[str]]:
    """The names of the package that pages use in Python blocks, or call in a sentence, or examples import, each with
    the pages and examples."""
    pages = [path for pattern in PAGES for path in ROOT.glob(pattern)]
    used: dict[str, set[str]] = {f"espalier.{name}": set() for name in espalier.__all__}
    for page in sorted(pages):
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^ *```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
        blocks += [text] * (page.suffix == ".py")
        shown = [name for block in blocks for name in imported(ast.parse(textwrap.dedent(block)))]
        for name in (*shown, *re.findall(r"`(espalier(?:\.\w+)+)\(", text)):
            used.setdefault(name, set()).add(page.relative_to(ROOT).as_posix())
    return used


def imported(tree: ast.Module) -> Iterator[str]:
    """The dotted names of the package that a program uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "espalier":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Attribute) and ast.unparse(node.value) == "espalier" and node.attr in espalier.__all__
        ):
            yield ast.unparse(node)


def python() -> str:
    """docs/python.md."""
    rooms = defaultdict(list)
    for name, pages in sorted(names().items()):
        room, _, rest = name.partition(".")[2].partition(".")
        rooms[room if rest else "espalier"].append((name, pages))
    lines = [PYTHON]
    for room in [room for room in TABLES["rooms"] if room in rooms]:
        lines += [f"## {TABLES['rooms'][room]}", ""]
        for name, pages in rooms.pop(room):
            lines += [f"### {name}", ""]
            if pages:
                lines += [f"Used in {', '.join(map(link, sorted(pages)))}.", ""]
            lines += described(name)
    assert not rooms, f"bench/reference_pages.toml has no heading for {sorted(rooms)}"
    return "\n".join(lines)


def link(page: str) -> str:
    """To a page, from docs/."""
    path = Path(page)
    title = path.parent.name.replace("_", " ") if path.name == "README.md" and path.parent.name else path.stem
    return f"[{title}]({page.removeprefix('docs/') if page.startswith('docs/') else f'../{page}'})"


def described(name: str) -> list[str]:
    """The lines that mkdocstrings replaces by the docstring of a name; of a module or a value a sentence."""
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute, None)
    if value is None:  # a module that its package does not load
        value = importlib.import_module(name)
    if isinstance(value, type(sys)):
        return [(value.__doc__ or "").partition("\n\n")[0].replace("\n", " "), ""]
    home = getattr(value, "__module__", module) if hasattr(value, "__qualname__") else module
    lines = [f"::: {home}.{getattr(value, '__qualname__', attribute)}", ""]
    result: Any = getattr(value, "__annotations__", {}).get("return", "")
    if name == "espalier.open":
        lines += [f"::: {home}.{result}", "    options: { inherited_members: true }", ""]
    return lines


def write(docs: Path) -> None:
    """Writes the pages."""
    pages = {"command-line": command_line(), "extras": extras(), "options": options(), "python": python()}
    for name, text in pages.items():
        (docs / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
