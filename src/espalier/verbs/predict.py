"""`espalier predict RUN INPUT`: text that goes on from INPUT; what nodes, links or graphs named by INPUT are. With `-`
each line of standard input is an input, and is answered as it comes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from espalier import workload_registry
from espalier.errors import UserError
from espalier.terminal import say, visible
from espalier.verbs.load_run import open_trained
from espalier.workload_row import Sampling


def run(arguments: argparse.Namespace) -> int:
    """Prints the answers as they are made. 2 where some line of standard input has none."""
    prompts = _lines() if arguments.input == "-" else [None if arguments.input is None else _prompt(arguments.input)]
    trained = open_trained(arguments.run, arguments.trust)
    answer = workload_registry.row(trained.recipe).answer
    if answer is None:
        raise UserError(
            f"The run in {arguments.run} holds a module of your own.",
            why="the inputs of the module are not known",
            do=f"load {arguments.run}/checkpoints with torch.distributed.checkpoint in your own code",
        )
    sampling = Sampling(arguments.tokens, arguments.temperature, arguments.top_k, arguments.seed)
    failed = False
    for prompt in prompts:
        try:
            found = answer(trained.workload, trained.model, prompt, sampling)
            _print({**found.record(), "step": trained.step} if arguments.json else found.text)
        except UserError as error:
            if arguments.input != "-":
                raise
            failed = True
            if arguments.json:
                _print({"error": error.what, "try": error.do, "input": prompt})
            else:
                say(f"espalier: {error}", file=sys.stderr, flush=True)
    return 2 if failed else 0


def _print(answer: Mapping[str, Any] | Iterator[str]) -> None:
    if isinstance(answer, Mapping):
        print(json.dumps(answer), flush=True)
        return
    shown = visible if sys.stdout.isatty() else str  # in a file the text is data
    for piece in answer:
        sys.stdout.write(shown(piece))
        sys.stdout.flush()


def _lines() -> Iterator[str]:
    """Lines of standard input without their ends, those that are empty left out."""
    for line in sys.stdin.buffer:
        if text := line.decode("utf-8", "replace").rstrip("\r\n"):
            yield text


def _prompt(text: str) -> str:
    if not text.startswith("@"):
        return os.fsencode(text).decode("utf-8", "replace")  # the shell may pass bytes that are not UTF-8
    if text == "@":
        raise UserError("The input @ names no file.", do="@FILE, such as @prompt.txt")
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        name = os.fsencode(text[1:]).decode("utf-8", "replace")
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8 text"
        raise UserError(f"The input file {name} cannot be read: {reason}.", do="check the path") from None
