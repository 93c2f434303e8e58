"""`espalier predict RUN INPUT`: text that goes on from INPUT."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from espalier.errors import UserError
from espalier.language import generate, gpt
from espalier.language.workload import LanguageWorkload
from espalier.verbs.trained import open_trained


def run(arguments: argparse.Namespace) -> int:
    """Prints the prompt and its continuation as it is made."""
    prompt = _prompt(arguments.input)
    trained = open_trained(arguments.run)
    workload = trained.workload
    if not isinstance(workload, LanguageWorkload):
        raise UserError(
            f"The run in {arguments.run} holds a foreign module.",
            why="only its author knows what an input is",
            do="load runs/…/checkpoints with torch.distributed.checkpoint in your own code",
        )
    tokenizer = workload.tokenizer
    ids = [tokenizer.boundary, *(int(token) for token in tokenizer.encode(prompt.encode()))]
    assert isinstance(trained.model, gpt.GPT)
    fresh = generate.generate(
        trained.model,
        torch.tensor(ids),
        tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
        stop=workload.tokenizer.boundary,
    )
    if arguments.json:
        made = [int(token) for token in fresh]
        text = workload.tokenizer.decode(made)
        print(json.dumps({"prompt": prompt, "text": text, "tokens": len(made), "step": trained.step}))
        return 0
    _print_as_it_comes(prompt, fresh, workload)
    return 0


def _print_as_it_comes(prompt: str, fresh, workload: LanguageWorkload) -> None:  # type: ignore[no-untyped-def]
    sys.stdout.write(prompt)
    made: list[int] = []
    shown = ""
    for token in fresh:
        made.append(int(token))
        text = workload.tokenizer.decode(made)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character is still incomplete
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    sys.stdout.write(workload.tokenizer.decode(made)[len(shown) :] + "\n")


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
