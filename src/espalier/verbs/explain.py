"""`espalier explain [NAME]`: what each system is, when it is chosen, what it costs, and its state."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.table import Table

from espalier import records


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
    table = Table("system", "question it answers", "state", box=None, pad_edge=False)
    for record in every:
        table.add_row(record.name, record.question, record.state)
    Console().print(table)
    print("\nespalier explain NAME tells more.")
    return 0
