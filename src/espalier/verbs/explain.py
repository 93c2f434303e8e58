"""`espalier explain [NAME ...]`: what each system is, when it is chosen, what it costs, and its state; what a word of a
plan means."""

from __future__ import annotations

import argparse
import json

from espalier import records
from espalier.terminal import line, rows, say


def run(arguments: argparse.Namespace) -> int:
    """Systems in full, words of a plan, or all twenty systems in a table."""
    if arguments.names:
        found = [records.word(name) or records.get(name) for name in arguments.names]
        if arguments.json:
            told = [records.as_dict(one) for one in found]
            print(json.dumps(told if len(told) > 1 else told[0], indent=2))
            return 0
        for number, one in enumerate(found):
            if number:
                say("")
            if isinstance(one, records.Word):
                _word(one)
            else:
                say(records.explain(one.name))
        return 0
    every = records.all_records()
    if arguments.json:
        print(json.dumps([records.as_dict(record) for record in every], indent=2))
        return 0
    table = [(record.name, record.state, record.title, record.question) for record in every]
    rows(("system", "state", "what it is", "question it answers"), table, cut=True)
    say("\nespalier explain NAME tells more, also of the words of a plan (tp, slack).")
    return 0


def _word(word: records.Word) -> None:
    line(f"{word.name}: {word.meaning}")
    if word.option:
        say(f"  option    {word.option} (espalier plan RECIPE --what-if {word.option}=… prices it or says why not)")
    say(f"  page      {word.page}")
