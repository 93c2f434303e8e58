"""Conversations and preferences: rows of the ecosystem's chat formats, read from files, folders or the hub.

A row is one of `messages` (OpenAI), `conversations` (ShareGPT), `prompt` and `completion`, `instruction` and `output`
(Alpaca), or a preference: `chosen` and `rejected`, with or without a `prompt`. Which of them is seen from its keys.
`python:docstrings` are signatures and docstrings of the standard library; as preferences, the docstring of a function
is preferred to that of the next.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from espalier.config import Data
from espalier.errors import UserError, missing_extra
from espalier.language import text_sources

DOCSTRINGS = "python:docstrings"
KNOWN = "messages, conversations, prompt and completion, instruction and output, or chosen and rejected"
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant"}
"""Names of roles in ShareGPT's sets, and what chat templates call them."""
_SHORT, _LONG = 40, 2_000
"""Characters of a docstring that is a good answer."""


class Turn(NamedTuple):
    """What one side says. `role`: system, user, assistant or tool."""

    role: str
    content: str


class Conversation(NamedTuple):
    """Turns in their order. `name`: file and row, for messages. `rejected`: of a preference, the turns that take the
    place of the last ones of `turns` from the turn `shared` on; empty: none."""

    name: str
    turns: tuple[Turn, ...]
    rejected: tuple[Turn, ...] = ()
    shared: int = 0


class Unusable(Exception):
    """A row that is left out, and why."""


Skipped = list[tuple[str, str]]


def conversations(
    data: Data, skipped: Skipped, progress: Callable[[int, int], None] | None = None, pairs: bool = False
) -> Iterator[Conversation]:
    """The conversations of `data`, in a fixed order. Rows that cannot be trained on are appended to `skipped` as
    (name, reason). `pairs`: preferences are made of what has none (`python:docstrings`).

    Raises UserError for a file that cannot be read, a malformed row (file and line), a row of an unknown format, or
    when no conversation is left.
    """
    found = False
    for name, row in _rows(data, progress or (lambda done, total: None), pairs):
        try:
            one = conversation(name, row)
        except Unusable as reason:
            skipped.append((name, str(reason)))
            continue
        found = True
        yield one
    if not found:
        first = "; ".join(f"{name}: {reason}" for name, reason in skipped[:3])
        raise UserError(
            f"data.path = {data.path!r} holds no conversation.",
            why=f"{len(skipped)} skipped ({first})" if skipped else "it is empty",
            do=f"rows with {KNOWN}, or data.path = {DOCSTRINGS!r}",
        )


# --- one row -----------------------------------------------------------------------------------------------------


def conversation(name: str, row: Mapping[str, Any]) -> Conversation:
    """What a row says. Raises UserError for an unknown format, and `Unusable`."""
    if "chosen" in row and "rejected" in row:
        return _preference(name, row)
    for keys, read in _FORMATS:
        if all(key in row for key in keys):
            return _checked(Conversation(name, tuple(read(row))))
    raise UserError(
        f"{name} is in none of the known chat formats.",
        why=f"it has {', '.join(sorted(map(str, row))[:8]) or 'no keys'}",
        do=f"rows with {KNOWN}",
    )


def _messages(row: Mapping[str, Any]) -> list[Turn]:
    return _turns(row["messages"])


def _sharegpt(row: Mapping[str, Any]) -> list[Turn]:
    turns = _turns(row["conversations"])
    system = row.get("system")
    return [Turn("system", str(system)), *turns] if system else turns


def _completion(row: Mapping[str, Any]) -> list[Turn]:
    return _said(row["prompt"], "user") + _said(row["completion"], "assistant")


def _alpaca(row: Mapping[str, Any]) -> list[Turn]:
    more = str(row.get("input") or "")
    asked = str(row["instruction"]) + (f"\n\n{more}" if more else "")
    return [Turn("user", asked), Turn("assistant", str(row["output"]))]


_FORMATS: Sequence[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], list[Turn]]]] = (
    (("messages",), _messages),
    (("conversations",), _sharegpt),
    (("prompt", "completion"), _completion),
    (("instruction", "output"), _alpaca),
)


def _preference(name: str, row: Mapping[str, Any]) -> Conversation:
    prompt = _said(row["prompt"], "user") if row.get("prompt") else []
    chosen, rejected = ([*prompt, *_said(row[key], "assistant")] for key in ("chosen", "rejected"))
    if not prompt:  # both sides begin with it
        while len(prompt) < min(len(chosen), len(rejected)) and chosen[len(prompt)] == rejected[len(prompt)]:
            prompt.append(chosen[len(prompt)])
    elif chosen[: 2 * len(prompt)] == prompt * 2:  # the prompt is given, and repeated on both sides
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if chosen == rejected:
        raise Unusable("the chosen and the rejected answer are the same")
    other = _checked(Conversation(name, tuple(rejected)), "the rejected side")
    return _checked(Conversation(name, tuple(chosen), other.turns[len(prompt) :], len(prompt)), "the chosen side")


def _said(value: Any, role: str) -> list[Turn]:
    return [Turn(role, value)] if isinstance(value, str) else _turns(value)


def _turns(rows: Any) -> list[Turn]:
    if not isinstance(rows, list | tuple) or not all(isinstance(one, Mapping) for one in rows):
        raise Unusable("its turns are no list of objects")
    return [_turn(one) for one in rows]


def _turn(row: Mapping[str, Any]) -> Turn:
    role, content = row.get("role", row.get("from")), row.get("content", row.get("value"))
    if isinstance(content, list):  # parts, as of models that see images
        texts = [one["text"] for one in content if isinstance(one, Mapping) and isinstance(one.get("text"), str)]
        content = "".join(texts) if texts and len(texts) == len(content) else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise Unusable("a turn has no role and text")
    return Turn(ROLES.get(role, role), content)


def _checked(one: Conversation, side: str = "it") -> Conversation:
    """Raises `Unusable` for what has no answer to be trained on."""
    roles = [turn.role for turn in one.turns]
    strange = next((role for role in roles if role not in ("system", "user", "assistant", "tool")), None)
    if strange is not None:
        raise Unusable(f"{side} has a turn of {strange!r}, which is no role of chat templates")
    if roles.count("system") > 1:
        raise Unusable(f"{side} has {roles.count('system')} system turns")
    if "system" in roles[1:]:
        raise Unusable(f"the system turn of {side} is not the first")
    if "assistant" not in roles:
        raise Unusable(f"{side} has no assistant turn")
    if any(turn.role == "assistant" and not turn.content.strip() for turn in one.turns):
        raise Unusable(f"an answer of {side} is empty")
    return one


# --- rows of files -----------------------------------------------------------------------------------------------


def _rows(data: Data, progress: Callable[[int, int], None], pairs: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if data.path == DOCSTRINGS:
        yield from _preferred(_docstrings(progress)) if pairs else _docstrings(progress)
        return
    if data.path.startswith("hf:"):
        yield from _hub_rows(data)
        return
    listed = text_sources.listing(data)
    done, whole = 0, len(listed.entries) == 1
    for entry in listed.entries:
        if entry.name.endswith(text_sources.JSON_LINES):
            yield from _json_lines(entry)
        elif entry.name.endswith((".json", ".parquet")):
            yield from (_json_rows if entry.name.endswith(".json") else _parquet_rows)(entry)
        elif whole:
            raise UserError(
                f"data.path = {data.path!r} is no file of conversations.",
                why="[tune] reads .jsonl (also .gz, .zst), .json and .parquet",
                do="one JSON object with messages in each line, or leave [tune] out to train on plain text",
            )
        done += entry.size
        progress(done, listed.bytes)


def _json_lines(entry: text_sources.SourceFile) -> Iterator[tuple[str, Mapping[str, Any]]]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    for number, line in text_sources.numbered_lines(entry):
        try:
            yield f"{entry.name}:{number}", decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(
                f"{entry.path}, line {number} is not a JSON object: {error}.", do="repair or remove the line"
            ) from None


def _json_rows(entry: text_sources.SourceFile) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        rows = json.loads(Path(entry.path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{entry.path} cannot be read: {error}.", do="a JSON list of objects") from None
    if not isinstance(rows, list) or not all(isinstance(one, dict) for one in rows):
        raise UserError(f"{entry.path} is no JSON list of objects.", do="one object for each conversation")
    yield from ((f"{entry.name}:{number}", one) for number, one in enumerate(rows, start=1))


def _parquet_rows(entry: text_sources.SourceFile) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise missing_extra("pyarrow", "graph", f"data.path = {entry.path!r}") from None
    number = 0
    for batch in parquet.ParquetFile(entry.path).iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"{entry.name}:{number}", row


def _hub_rows(data: Data) -> Iterator[tuple[str, Mapping[str, Any]]]:
    name = data.path.removeprefix("hf:")
    for number, row in enumerate(text_sources.hub_table(data), start=1):
        yield f"{name}:{number}", row


def _docstrings(progress: Callable[[int, int], None]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    listed = text_sources.listing(Data(path="python:stdlib"))
    done = 0
    for entry in listed.entries:
        done += entry.size
        progress(done, listed.bytes)
        if "test" in entry.name:
            continue
        try:
            tree = ast.parse(Path(entry.path).read_bytes())
        except (SyntaxError, ValueError):  # files that are kept to test the compiler
            continue
        for number, (signature, answer) in enumerate(_documented(tree), start=1):
            asked = f"Write the docstring of this Python function.\n\n{signature}"
            yield f"{entry.name}:{number}", {"prompt": asked, "completion": answer}


def _preferred(rows: Iterator[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for (name, row), (_, following) in pairwise(rows):
        yield name, {"prompt": row["prompt"], "chosen": row["completion"], "rejected": following["completion"]}


def _documented(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            answer = ast.get_docstring(node)
            if answer is not None and _SHORT <= len(answer) <= _LONG:
                yield f"def {node.name}({ast.unparse(node.args)}):", answer
