"""`espalier report RUN`: writes report.html anew, or serves it live; `--trace FILE`: of the jobs of a cluster."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from espalier import run as runs
from espalier.errors import UserError
from espalier.ops import job_report, job_trace
from espalier.terminal import say
from espalier.track import live_report, report, run_tables
from espalier.verbs import printing


def run(arguments: argparse.Namespace) -> int:
    """Writes the report and says where it is."""
    if arguments.trace:
        _trace(Path(arguments.trace), arguments.json)
        return 0
    if arguments.run is None:
        raise UserError("report needs the folder of a run, or --trace.", do="espalier report runs/NAME")
    folder = runs.find(arguments.run)
    if arguments.serve:
        live_report.serve(folder.path, port=arguments.port)
        return 0
    page = report.write(folder.path)
    account = run_tables.open_run(folder.path).account
    if arguments.json:
        ledger = {"goodput": account.goodput, "failures": account.failures} if account.failures else {}
        print(json.dumps({"report": str(page), **printing.results(folder.path), **ledger}))
    else:
        printing.account(account)
        say(str(page))
    return 0


def _trace(path: Path, as_json: bool) -> None:
    """Prints the tables of a trace and writes the page beside it."""
    found = job_trace.characterise(job_trace.of_runs(path) if path.is_dir() else job_trace.read(path))
    page = job_report.write(path / "trace.html" if path.is_dir() else path.with_name(f"{path.stem}.html"), found)
    if as_json:
        print(json.dumps({"trace": str(path), "report": str(page), **job_report.as_dict(found)}))
    else:
        job_report.tell(found)
        say(f"\nPlots: {page}")
