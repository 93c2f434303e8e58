"""`espalier report RUN`: writes report.html anew, or serves it live; `--trace FILE`: of the jobs of a cluster."""

from __future__ import annotations

import argparse
import json

from espalier import run as runs
from espalier.errors import UserError
from espalier.terminal import say
from espalier.track import report, serve, tables
from espalier.verbs import jobs, show


def run(arguments: argparse.Namespace) -> int:
    """Writes the report and says where it is."""
    if arguments.trace:
        return jobs.run(arguments.trace, arguments.json)
    if arguments.run is None:
        raise UserError("report needs the folder of a run, or --trace.", do="espalier report runs/NAME")
    folder = runs.find(arguments.run)
    if arguments.serve:
        serve.serve(folder.path, port=arguments.port)
        return 0
    page = report.write(folder.path)
    account = tables.open_run(folder.path).account
    if arguments.json:
        ledger = {"goodput": account.goodput, "failures": account.failures} if account.failures else {}
        print(json.dumps({"report": str(page), **show.results(folder.path), **ledger}))
    else:
        show.account(account)
        say(str(page))
    return 0
