"""Writes docs/systems.md, the record of each of the twenty systems, and the tables in docs/measured/NAME.md, what the
bench of each measured, into the folder given: `python bench/systems.py docs` (`make pages`).

A page in docs/measured is written by hand down to the line TABLES.
"""

from __future__ import annotations

import sys
from pathlib import Path

from espalier.recipe import records
from espalier.recipe.records import Record
from table import files, markdown, measured

OTHERS = {
    "tune": ("Fine-tuning", "bench/tune.py", "bench/smollm2.py"),
    "faults": ("Faults, long runs and narrow surroundings", "bench/faults.py"),
    "report": ("Reports of long runs", "bench/report.py"),
    "gpu": ("On one GPU", "bench/gpu.py", "bench/language.py"),
}
"""Name of the tables in docs/measured that belong to no system: a heading, and the scripts that print them."""
TABLES = "<!-- Tables, made by `make pages` -->"
HEAD = """# The twenty systems

Made by `make pages` from the records in the code; a test compares the two. `espalier explain NAME` prints one of them.
A law is a property that the named test checks. A ratio above 1 means that Espalier is better; it is the median of the
ratios of paired runs, not that of the two medians. All tables, and what was tried, are in the page of each system in
docs/measured.

| system | what it is | state | code | measured |
|---|---|---|---|---|"""


def page() -> str:
    """One table of all systems, then a section for each."""
    systems = records.all_records()
    sections = [line for record in systems for line in section(record)]
    for name, (heading, *scripts) in OTHERS.items():
        names = " and ".join(f"`{script}`" for script in scripts)
        sections += ["", f"## {heading}", "", f"Printed by {names}: [tables](measured/{name}.md)."]
    return "\n".join([HEAD, *map(row, systems), *sections]) + "\n"


def row(record: Record) -> str:
    """The system in the table of all."""
    what = record.title.partition(": ")[2]
    state = record.state.partition(":")[0]
    link = f"[{record.name}](#{record.name})"
    return f"| {link} | {what} | {state} | `{record.files[0]}` | [tables](measured/{record.name}.md) |"


def section(record: Record) -> list[str]:
    """What the record says."""
    texts = dict(records.lines(record)) | {
        "code": ", ".join(f"`src/espalier/{file}`" for file in record.files),
        "cost": f"`{record.cost}`",
        "law": f"{record.law} (`{record.law_test}`)",
        "measured": f"{record.headline} (`{record.bench}`; [all tables](measured/{record.name}.md))",
    }
    return [
        "",
        f"## {record.name}",
        "",
        f"**{record.title}.**",
        "",
        *(f"- {key}: {text}" for key, text in texts.items()),
    ]


def tables(name: str) -> str:
    """What was measured of `name`: each run's command, machine and rows, beside the raw file."""
    lines = [TABLES]
    for path, run in zip(files(name), measured(name), strict=True):
        lines += ["", f"`{run.command}` on {run.machine} ([raw rows]({path.name})):", "", *markdown(run.rows)]
    return "\n".join(lines) + "\n"


def write(docs: Path) -> None:
    """Writes docs/systems.md, and the tables below what people wrote in docs/measured."""
    (docs / "systems.md").write_text(page(), encoding="utf-8")
    for name in [*OTHERS, *(record.name for record in records.all_records())]:
        path = docs / "measured" / f"{name}.md"
        prose = path.read_text(encoding="utf-8").partition(TABLES)[0]
        path.write_text(prose + tables(name), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
