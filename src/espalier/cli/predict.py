"""`espalier predict RUN INPUT`: text that goes on from INPUT; what nodes, links or graphs named by INPUT are. With `-`
each line of standard input is an input, and is answered as it comes; with `--chat` lines are the turns of a chat; with
`--serve` programs ask over HTTP."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from espalier.cli import answer_table, chat_server, infer_over_ranks, input_check
from espalier.cli.open_run import DataChoice, Trained, load_trained, no_inputs
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import printable
from espalier.recipe.terminal import say, say_progress, visible
from espalier.train import run_folder as runs
from espalier.train import workload_registry
from espalier.train.workload_row import ROWS, Predicts, Renders, Row, Sampling, Tokenizes, Writer, Writes

if TYPE_CHECKING:
    from io import BufferedReader


def run(arguments: argparse.Namespace) -> int:
    """Prints the answers as they are made. 2 where some line of standard input has none."""
    if arguments.chat:
        return _chat(arguments)
    if arguments.serve:
        return _serve(arguments)
    if arguments.turntable is not None:
        return _turntable(arguments)
    if arguments.data is not None and isinstance(_row(arguments), Tokenizes):
        raise UserError("--data is for runs on graphs.", do=f"espalier predict {arguments.run} 'text to go on from'")
    choice = DataChoice(predicts=True, path=arguments.data)
    trained = infer_over_ranks.load_over_ranks(arguments.run, arguments.trust, choice)
    row = workload_registry.row(trained.recipe)
    if not isinstance(row, Predicts):
        raise no_inputs(arguments.run)
    trained.say_skipped(arguments.json)
    groups: Iterable[Sequence[str | None]] = _line_groups(ROWS if isinstance(row, Writes) else 1)
    if arguments.input != "-":
        groups = [[None if arguments.input is None else input_check.prompt(arguments.input)]]
    if arguments.out is not None:
        return _table(arguments, trained, row, chain.from_iterable(groups))
    refused = sum(_refused(arguments, trained, row, texts) for texts in groups)
    return 2 if refused else 0


def _table(arguments: argparse.Namespace, trained: Trained, row: Predicts, texts: Iterable[str | None]) -> int:
    """Writes the answers to all of `texts` into one table."""
    rows = (row.rows(trained.workload, trained.model, text, _sampling(arguments)) for text in texts)
    columns = answer_table.write(Path(arguments.out), chain.from_iterable(rows))
    line = f"{printable(arguments.out)}: columns {printable(', '.join(columns), 200)}\n"
    _print({"out": arguments.out, "columns": columns, **trained.checkpoint} if arguments.json else iter([line]))
    return 0


def _refused(arguments: argparse.Namespace, trained: Trained, row: Predicts, texts: Sequence[str | None]) -> int:
    """To how many of `texts` there are no answers; the others are printed."""
    try:
        answers = row.answers(trained.workload, trained.model, texts, _sampling(arguments))
    except UserError as error:
        if arguments.input != "-":
            raise
        if len(texts) > 1:  # some may have one
            return sum(_refused(arguments, trained, row, [text]) for text in texts)
        if arguments.json:
            _print({"error": error.what, "try": error.do, "input": texts[0]})
        else:
            say_progress(f"espalier: {error}")
        return 1
    for answer in answers:
        _print({**answer.record(), **trained.checkpoint} if arguments.json else answer.text)
    return 0


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
    trained, writer = _writing(arguments)
    writer.prompt([("user", "x")])  # refused before anything is asked
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
        answer = (piece.text for piece in writer.write([writer.prompt(turns)], [_sampling(arguments)]))
        pieces = list(_shown(answer, arguments.json))
        turns.append(("assistant", "".join(pieces)))
        if arguments.json:
            print(json.dumps({"question": line, "text": turns[-1][1], **trained.checkpoint}), flush=True)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    """Answers requests until Ctrl-C."""
    if arguments.input is not None:
        raise UserError("--serve takes its questions from requests.", do="leave the input out, or leave out --serve")
    trained, writer = _writing(arguments)
    trained.say_skipped()
    chat_server.serve(trained.folder.path.name, writer, _sampling(arguments), arguments.port)
    return 0


def _writing(arguments: argparse.Namespace) -> tuple[Trained, Writer]:
    """The trained model, and what continues its prompts. Raises UserError for a run of another kind."""
    trained = load_trained(arguments.run, arguments.trust)
    row = workload_registry.row(trained.recipe)
    if not isinstance(row, Writes):
        raise UserError(f"The run in {arguments.run} does not answer in text.", do=f"espalier predict {arguments.run}")
    writer = row.writer(trained.workload, trained.model)
    writer.write([writer.prompt("x")], [_sampling(arguments)])  # refused before anything is asked
    return trained, writer


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


def _line_groups(most: int) -> Iterator[list[str]]:
    """Lines of standard input without their ends, those that are empty left out: as many together as are there, up to
    `most`."""
    rest, stdin = b"", cast("BufferedReader", sys.stdin.buffer)
    while read := stdin.read1(1 << 16):
        *lines, rest = (rest + read).split(b"\n")
        yield from _texts(lines, most)
    yield from _texts([rest], most)


def _texts(lines: Sequence[bytes], most: int) -> Iterator[list[str]]:
    texts = [text for line in lines if (text := line.decode("utf-8", "replace").rstrip("\r"))]
    for start in range(0, len(texts), most):
        yield texts[start : start + most]
