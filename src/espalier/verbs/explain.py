"""`espalier explain [NAME]`: what each system is, when it is chosen, what it costs, and its state; what a word of a
plan means."""

from __future__ import annotations

import argparse
import json

import msgspec

from espalier import records
from espalier.terminal import line, rows, say


def run(arguments: argparse.Namespace) -> int:
    """One system in full, a word of a plan, or all twenty systems in a table."""
    if arguments.name and (word := records.word(arguments.name)) is not None:
        if arguments.json:
            print(json.dumps(msgspec.to_builtins(word)))
            return 0
        line(f"{word.name}: {word.meaning}")
        if word.option:
            say(f"  option    {word.option} (espalier plan RECIPE {word.option}=… prices another choice)")
        say(f"  page      {word.page}")
        return 0
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
    say("\nespalier explain NAME tells more, also of the words of a plan (tp, slack).")
    return 0
