"""Writes docs/systems.md (`make pages`): the record of each of the twenty systems, and what its bench measured; then
what was measured of other parts."""

from __future__ import annotations

import sys

from espalier.recipe import records
from table import markdown, measured

OTHERS = {
    "tune": ("Fine-tuning", "bench/tune.py", "bench/smollm2.py"),
    "gpu": ("On one GPU", "bench/gpu.py", "bench/language.py"),
}
"""Name of the tables in docs/measured, and what stands over them: a heading, and the scripts that print them."""


def page() -> str:
    """One table of all systems, then a section for each."""
    every = records.all_records()
    lines = [
        "# The twenty systems",
        "",
        "Made by `make pages` from the code's own records and the tables in docs/measured; a test compares the two.",
        "`espalier explain NAME` prints one of them. A law is a property that the named test checks. A ratio above 1",
        "means that Espalier is better; it is the median of the ratios of paired runs, not that of the two medians.",
        "",
        "| system | question | file | state | law's test | bench | last GPU run |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in every:
        files = ", ".join(f"`{file}`" for file in record.files)
        test, bench = (f"`{text}`" if text else "none yet" for text in (record.law_test, record.bench))
        cells = (f"[{record.name}](#{record.name})", record.question, files, record.state, test, bench, record.gpu)
        lines.append(f"| {' | '.join(cells)} |")
    for record in every:
        told = dict(records.lines(record)) | {"cost": f"`{record.cost}`", "bench": record.bench or "none yet"}
        lines += ["", f"## {record.name}", "", f"**{record.title}.**", ""]
        lines += [f"- {key}: {value}" for key, value in told.items()]
        for run in measured(record.name):
            lines += ["", f"`{run.command}` on {run.machine}:", "", *markdown(run.rows)]
    for name, (heading, *scripts) in OTHERS.items():
        lines += ["", f"## {heading}", "", f"Printed by {' and '.join(f'`{one}`' for one in scripts)}."]
        runs = measured(name)
        for run in runs:
            lines += ["", f"`{run.command}` on {run.machine}:", "", *markdown(run.rows)]
        lines += [] if runs else ["Not measured yet."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
