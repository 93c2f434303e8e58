"""`espalier report RUN`: writes report.html anew, or serves it live. Without a run it lists the runs in runs/, with
several it compares them; `--trace FILE`: of the jobs of a cluster."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from espalier.cli import printing
from espalier.ops import job_report, job_trace
from espalier.recipe.errors import UserError
from espalier.recipe.terminal import rows, say
from espalier.track import live_report, report, run_comparison
from espalier.track.run_tables import RunTables
from espalier.train import run_folder as runs


def run(arguments: argparse.Namespace) -> int:
    """Writes the report and says where it is."""
    if arguments.trace:
        _trace(Path(arguments.trace), arguments.json)
        return 0
    arguments.runs = [place for run in arguments.runs for place in runs.splits_in(run) or [run]]
    if len(arguments.runs) != 1:
        if arguments.serve:
            raise UserError(
                f"report --serve shows one run, not {len(arguments.runs)}.", do="espalier report runs/NAME --serve"
            )
        (_compare if arguments.runs else _list)(arguments)
        return 0
    folder = runs.find(arguments.runs[0])
    if arguments.serve:
        live_report.serve(folder.path, port=arguments.port)
        return 0
    tables = RunTables.read(folder.path)
    page, account = report.write(tables), tables.account
    if arguments.json:
        ledger = {"goodput": account.goodput, "failures": account.failures} if account.failures else {}
        spent = {"time": account.parts} if account.useful else {}
        print(json.dumps({"report": str(page), **printing.results(tables), **spent, **ledger}))
    else:
        printing.account(account)
        say(str(page))
    return 0


def _trace(path: Path, as_json: bool) -> None:
    """Prints the tables of a trace and writes the page beside it."""
    characters = job_trace.characterise(job_trace.of_runs(path) if path.is_dir() else job_trace.read(path))
    page = job_report.write(path / "trace.html" if path.is_dir() else path.with_name(f"{path.stem}.html"), characters)
    if as_json:
        print(json.dumps({"trace": str(path), "report": str(page), **job_report.as_dict(characters)}))
    else:
        job_report.tell(characters)
        say(f"\nPlots: {page}")


def _list(arguments: argparse.Namespace) -> None:
    """Of the runs where recipes put them."""
    summaries = run_comparison.runs_in("runs")
    if arguments.json:
        print(json.dumps([_plain(summary) for summary in summaries]))
    else:
        rows(run_comparison.HEAD, [run_comparison.row(summary) for summary in summaries], cut=True)


def _compare(arguments: argparse.Namespace) -> None:
    """Prints what differs between runs, and writes the page beside the first."""
    summaries = [run_comparison.summary(runs.find(run).path) for run in arguments.runs]
    page = run_comparison.write(summaries, summaries[0].run.folder.parent)
    if arguments.json:
        figures = {name: figure._asdict() for name, figure in run_comparison.repeated(summaries).items()}
        plain = {"runs": [_plain(summary) for summary in summaries], **({"repeated": figures} if figures else {})}
        print(json.dumps({"comparison": str(page), **plain}))
        return
    spread = run_comparison.spread(summaries)
    if spread:
        rows(("figure", f"mean ± standard deviation of {len(summaries)} runs"), spread)
        say()
    for title, table in (
        ("figure", run_comparison.figures(summaries)),
        ("option", run_comparison.differences(summaries)),
    ):
        if table:
            rows(
                (title, *(summary.name for summary in summaries)), [(name, *values) for name, values in table], cut=True
            )
            say()
    say(str(page))


def _plain(summary: run_comparison.Summary) -> dict[str, Any]:
    named = {name.replace(" ", "_"): value for name, value in summary.metrics.items()}
    return {"run": summary.name, "state": summary.state, "step": summary.step, "steps": summary.steps, **named}
