"""`espalier diagnose LOG… | RUN`: why a job failed, on which line it shows, whose fault it was, what to try."""

from __future__ import annotations

import argparse
import json
import sys

from espalier.ops import incidents, rules
from espalier.ops.diagnosis import Means, diagnose
from espalier.ops.taxonomy import NO_FAILURE, Diagnosis, as_dict, restart_helps
from espalier.recipe.errors import EspalierError, UserError
from espalier.recipe.terminal import line, say


def run(arguments: argparse.Namespace) -> int:
    """Prints one diagnosis for each log; with `--json` one object to a line. 2 when a log could not be read, else 0."""
    means = Means(
        rules=rules.with_users(arguments.rules) if arguments.rules else None,
        incidents=incidents.read(arguments.rules) if arguments.rules else (),
    )
    if len(arguments.logs) == 1:
        _tell(diagnose(arguments.logs[0], means), arguments.json)
        return 0
    failed = 0
    for at, path in enumerate(arguments.logs):
        if at and not arguments.json:
            say()
        try:
            _tell(diagnose(path, means), arguments.json)
        except UserError as error:
            failed = error.exit_code
            _refused(path, error, arguments.json)
    return failed


def _refused(path: str, error: EspalierError, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"file": path, "error": error.what, "why": error.why, "try": error.do}), flush=True)
    else:
        say(f"espalier: {error}", file=sys.stderr, flush=True)


def _tell(found: list[Diagnosis], as_json: bool) -> None:
    for at, one in enumerate(found):
        if as_json:
            print(json.dumps(as_dict(one)), flush=True)
            continue
        if at:
            say()
        for text in told(one):
            line(text)


WORDS = {
    "retry": "start it again; that can help",
    "isolate": "test the node, then start again without it",
    "rollback": "start again from an earlier checkpoint, without the data that followed it",
    "stop": "starting it again will not help",
    "none": "nothing to do",
}


def told(one: Diagnosis) -> list[str]:
    """A diagnosis as lines for people."""
    reason = one.reason if one.category == "Other" else f"{one.reason} ({one.category})"
    text = [f"{one.file}: {reason}"]
    whose = [f"line {one.root_line}"] if one.root_line else []
    whose += [f"rank {one.first_failing_rank}"] if one.first_failing_rank is not None else []
    whose += [f"node {one.suspect_node}"] if one.suspect_node else []
    text += [f"  cause    {', '.join(whose)}"] if whose else []
    text += [f"  line {entry.line:<6} {entry.text}   <- {entry.shows}" for entry in one.evidence]
    again = WORDS[one.action] if one.reason != NO_FAILURE or restart_helps(one) else ""
    text += [f"  restart  {one.action}: {again}"] if again else []
    text += [f"  try      {one.advice}"] if one.advice and one.advice != again else []
    return text
