"""`espalier predict RUN INPUT`: text that goes on from INPUT; what nodes, links or graphs named by INPUT are."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from espalier.errors import UserError
from espalier.graph import predict as graphs
from espalier.graph.workload import GraphWorkload
from espalier.language import generate, gpt
from espalier.language.workload import LanguageWorkload
from espalier.verbs.trained import Trained, open_trained


def run(arguments: argparse.Namespace) -> int:
    """Prints the prompt and its continuation as it is made; of a graph, a line for each answer."""
    prompt = None if arguments.input is None else _prompt(arguments.input)
    trained = open_trained(arguments.run)
    workload = trained.workload
    if isinstance(workload, GraphWorkload):
        return _answers(workload, trained, prompt, arguments.json)
    if not isinstance(workload, LanguageWorkload):
        raise UserError(
            f"The run in {arguments.run} holds a foreign module.",
            why="only its author knows what an input is",
            do="load runs/…/checkpoints with torch.distributed.checkpoint in your own code",
        )
    if prompt is None:
        raise UserError("espalier predict needs a text to go on from.", do=f"espalier predict {arguments.run} 'def '")
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


def _answers(workload: GraphWorkload, trained: Trained, text: str | None, as_json: bool) -> int:
    found = graphs.answers(workload, trained.model, text)
    if as_json:
        print(json.dumps({"answers": found, "step": trained.step}))
        return 0
    for one in found:
        chances = one["probabilities"] if "probabilities" in one else [one["probability"]]
        shown = " ".join(f"{chance:.4f}" for chance in chances)
        print("\t".join([one["name"], *([one["label"]] if "label" in one else []), shown]))
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
