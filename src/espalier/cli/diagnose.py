"""`espalier diagnose LOG… | RUN`: why a job failed, on which line it shows, whose fault it was, what to try."""

from __future__ import annotations

import argparse
import json

from espalier.ops import incidents, model_diagnosis, rules
from espalier.ops.diagnosis import Means, diagnose
from espalier.ops.taxonomy import NO_FAILURE, Diagnosis, as_dict, restart_helps
from espalier.recipe.errors import UserError
from espalier.recipe.terminal import line, say, say_progress


def run(arguments: argparse.Namespace) -> int:
    """Prints one diagnosis for each log; with `--json` one object to a line. 2 when a log could not be read, else 0."""
    if arguments.model is not None:
        model_diagnosis.check(arguments.model)
    means = Means(
        rules=rules.with_users(arguments.rules) if arguments.rules else None,
        incidents=incidents.read(arguments.rules) if arguments.rules else (),
        model=arguments.model,
    )
    failed = 0
    for at, path in enumerate(arguments.logs):
        if at and not arguments.json:
            say()
        try:
            _tell(diagnose(path, means), arguments.json)
        except UserError as error:
            if len(arguments.logs) == 1:
                raise
            failed = error.exit_code
            if arguments.json:
                print(json.dumps({"file": path, **error.table}), flush=True)
            else:
                say_progress(f"espalier: {error}")
    return failed


def _tell(diagnoses: list[Diagnosis], as_json: bool) -> None:
    for at, diagnosis in enumerate(diagnoses):
        if as_json:
            print(json.dumps(as_dict(diagnosis)), flush=True)
            continue
        if at:
            say()
        for text in told(diagnosis):
            line(text)


WORDS = {
    "retry": "start it again; that can help",
    "isolate": "test the node, then start again without it",
    "rollback": "start again from an earlier checkpoint, without the data that followed it",
    "stop": "starting it again will not help",
    "none": "nothing to do",
}


def told(diagnosis: Diagnosis) -> list[str]:
    """A diagnosis as lines for people."""
    reason = diagnosis.reason if diagnosis.category == "Other" else f"{diagnosis.reason} ({diagnosis.category})"
    text = [f"{diagnosis.file}: {reason}"]
    whose = [f"line {diagnosis.root_line}"] if diagnosis.root_line else []
    whose += [f"rank {diagnosis.first_failing_rank}"] if diagnosis.first_failing_rank is not None else []
    whose += [f"node {diagnosis.suspect_node}"] if diagnosis.suspect_node else []
    text += [f"  cause    {', '.join(whose)}"] if whose else []
    text += [f"  line {entry.line:<6} {entry.text}   <- {entry.shows}" for entry in diagnosis.evidence]
    again = WORDS[diagnosis.action] if diagnosis.reason != NO_FAILURE or restart_helps(diagnosis) else ""
    text += [f"  restart  {diagnosis.action}: {again}"] if again else []
    text += [f"  try      {diagnosis.advice}"] if diagnosis.advice and diagnosis.advice != again else []
    return text
