"""`espalier predict RUN INPUT`: text that goes on from INPUT; what nodes, links or graphs named by INPUT are. With `-`
each line of standard input is an input, and is answered as it comes; with `--chat` lines are the turns of a chat; with
`--serve` programs ask over HTTP."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from espalier.cli import chat_server, infer_over_ranks
from espalier.cli.open_run import DataChoice, Trained, load_trained
from espalier.recipe.errors import UserError
from espalier.recipe.terminal import say, say_progress, visible
from espalier.train import run_folder as runs
from espalier.train import workload_registry
from espalier.train.workload_row import Chats, Predicts, Renders, Row, Sampling, Tokenizes


def run(arguments: argparse.Namespace) -> int:
    """Prints the answers as they are made. 2 where some line of standard input has none."""
    if arguments.chat:
        return _chat(arguments)
    if arguments.serve:
        return _serve(arguments)
    if arguments.turntable is not None:
        return _turntable(arguments)
    from espalier.cli.input_check import prompt  # has asked already, without torch, whether it can be read

    prompts = _lines() if arguments.input == "-" else [None if arguments.input is None else prompt(arguments.input)]
    if arguments.data is not None and isinstance(_row(arguments), Tokenizes):
        raise UserError("--data is for runs on graphs.", do=f"espalier predict {arguments.run} 'text to go on from'")
    choice = DataChoice(predicts=True, path=arguments.data)
    trained = infer_over_ranks.load_over_ranks(arguments.run, arguments.trust, choice)
    row = workload_registry.row(trained.recipe)
    if not isinstance(row, Predicts):
        raise UserError(
            f"The run in {arguments.run} holds a module of your own.",
            why="the inputs of the module are not known",
            do=f"in Python: espalier.open({arguments.run!r}).model(), which is your nn.Module",
        )
    trained.say_skipped(arguments.json)
    sampling = _sampling(arguments)
    failed = False
    for asked in prompts:
        try:
            reply = row.answer(trained.workload, trained.model, asked, sampling)
            _print({**reply.record(), **trained.checkpoint} if arguments.json else reply.text)
        except UserError as error:
            if arguments.input != "-":
                raise
            failed = True
            if arguments.json:
                _print({"error": error.what, "try": error.do, "input": asked})
            else:
                say_progress(f"espalier: {error}")
    return 2 if failed else 0


def _turntable(arguments: argparse.Namespace) -> int:
    """Writes an animation of a way round a scene."""
    row = _row(arguments)
    if not isinstance(row, Renders):
        raise UserError(f"The run in {arguments.run} is of no scene.", do=f"espalier predict {arguments.run}")
    if arguments.input is not None:
        raise UserError("--turntable takes no input.", do=f"espalier predict {arguments.run}")
    trained = load_trained(arguments.run, arguments.trust, DataChoice(predicts=True))
    trained.say_skipped(arguments.json)
    written = row.turntable(trained.workload, trained.model, Path(arguments.turntable))
    _print({"turntable": arguments.turntable, **trained.checkpoint} if arguments.json else iter([f"{written}\n"]))
    return 0


def _sampling(arguments: argparse.Namespace) -> Sampling:
    return Sampling(arguments.tokens, arguments.temperature, arguments.top_k, arguments.seed)


def _chat(arguments: argparse.Namespace) -> int:
    """Answers lines of standard input in their turn, each seeing all before. An empty line begins anew."""
    if arguments.input is not None:
        raise UserError(
            "--chat takes its questions from standard input.", do="leave the input out, or leave out --chat"
        )
    trained, reply = _chatting(arguments)
    trained.say_skipped(arguments.json)
    turns: list[tuple[str, str]] = []
    people = sys.stdin.isatty() and not arguments.json
    if people:
        say("Ask; an empty line begins a new chat, Ctrl-D ends.", flush=True)
    while (line := _asked(people)) is not None:
        if not line:
            turns = []
            continue
        turns.append(("user", line))
        pieces = list(_shown(reply(turns, _sampling(arguments)), arguments.json))
        turns.append(("assistant", "".join(pieces)))
        if arguments.json:
            print(json.dumps({"question": line, "text": turns[-1][1], **trained.checkpoint}), flush=True)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    """Answers requests until Ctrl-C."""
    if arguments.input is not None:
        raise UserError("--serve takes its questions from requests.", do="leave the input out, or leave out --serve")
    trained, reply = _chatting(arguments)
    trained.say_skipped()
    chat_server.serve(trained.folder.path.name, reply, _sampling(arguments), arguments.port)
    return 0


def _chatting(arguments: argparse.Namespace) -> tuple[Trained, chat_server.Reply]:
    """The trained model, and what answers turns. Raises UserError for a run that does not chat."""
    trained = load_trained(arguments.run, arguments.trust)
    row = workload_registry.row(trained.recipe)
    if not isinstance(row, Chats):
        raise UserError(f"The run in {arguments.run} does not answer in text.", do=f"espalier predict {arguments.run}")
    reply = partial(row.reply, trained.workload, trained.model)
    reply([], _sampling(arguments))  # refused before anything is asked
    return trained, reply


def _row(arguments: argparse.Namespace) -> Row:
    """Of the run's kind of model, which is not opened yet."""
    return workload_registry.row(runs.find(arguments.run).read())


def _asked(people: bool) -> str | None:
    """The next line without its end; None where there is none."""
    if people:
        sys.stdout.write("> ")
        sys.stdout.flush()
    read = sys.stdin.buffer.readline()
    return read.decode("utf-8", "replace").rstrip("\r\n") if read else None


def _shown(pieces: Iterator[str], silent: bool) -> Iterator[str]:
    """`pieces` as they come, printed as well."""
    for piece in pieces:
        if not silent:
            _print(iter([piece]))
        yield piece
    if not silent:
        _print(iter(["\n"]))


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
