"""`espalier predict RUN INPUT`: text that goes on from INPUT; what nodes, links or graphs named by INPUT are."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from espalier import workload_registry
from espalier.errors import UserError
from espalier.terminal import visible
from espalier.verbs.load_run import open_trained
from espalier.workload_row import Sampling


def run(arguments: argparse.Namespace) -> int:
    """Prints the answer as it is made."""
    prompt = None if arguments.input is None else _prompt(arguments.input)
    trained = open_trained(arguments.run, arguments.trust)
    answer = workload_registry.row(trained.recipe).answer
    if answer is None:
        raise UserError(
            f"The run in {arguments.run} holds a module of your own.",
            why="the inputs of the module are not known",
            do=f"load {arguments.run}/checkpoints with torch.distributed.checkpoint in your own code",
        )
    sampling = Sampling(arguments.tokens, arguments.temperature, arguments.top_k, arguments.seed)
    found = answer(trained.workload, trained.model, prompt, sampling)
    if arguments.json:
        print(json.dumps({**found.record(), "step": trained.step}))
        return 0
    shown = visible if sys.stdout.isatty() else str  # in a file the text is data
    for piece in found.text:
        sys.stdout.write(shown(piece))
        sys.stdout.flush()
    return 0


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
