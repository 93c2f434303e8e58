"""`espalier explain [NAME]`: what each system is, when it is chosen, what it costs, and its state."""

from __future__ import annotations

import argparse
import json

from espalier import records
from espalier.terminal import rows, say


def run(arguments: argparse.Namespace) -> int:
    """One system in full, or all twenty in a table."""
    if arguments.name:
        record = records.get(arguments.name)
        print(json.dumps(records.as_dict(record), indent=2) if arguments.json else records.explain(record.name))
        return 0
    every = records.all_records()
    if arguments.json:
        print(json.dumps([records.as_dict(record) for record in every], indent=2))
        return 0
    table = [(record.name, record.state, record.title, record.question) for record in every]
    rows(("system", "state", "what it is", "question it answers"), table, cut=True)
    say("\nespalier explain NAME tells more.")
    return 0
