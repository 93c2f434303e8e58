"""Formats of chat rows: what the keys of a row and of its turns mean.

Every key is read, counted as not used, or changes the meaning of the row and leaves it out by name. Text is what is
text: a number or an object in its place leaves the row out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

from espalier.language.row_files import text_fault
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import Fields, printable

KNOWN = "messages, conversations, prompt and completion, instruction and output, or chosen and rejected"
_TABLES = data_table(__file__)
ROLES: Mapping[str, str] = _TABLES["roles"]
"""Names of roles in other sets, and what chat templates call them."""
CALLS = "function_call"
TURN_NAMES = frozenset(_TABLES["turn"])
"""Keys of a turn that a chat template may know."""
ROW_NAMES = frozenset(_TABLES["row"])
"""Columns of a row that a chat template may know."""
COLUMNS = Fields("column", frozenset())
TURN_KEYS = Fields("key", frozenset(), unit="turn")
TEMPLATE_KEYS = Fields("key", frozenset(), unit="conversation")
Variables = Mapping[str, Any]
"""Of a chat template: tools, documents and such, by name."""
NOTHING: Variables = MappingProxyType({})

Row = Mapping[str, Any]


class Turn(NamedTuple):
    """What one side says. `role`: system, user, assistant or tool. `message`: what the chat template is given where
    that is more than role and content."""

    role: str
    content: str | None
    message: Mapping[str, Any] | None = None


class Conversation(NamedTuple):
    """Turns in their order. `name`: file and row, for messages. `rejected`: of a preference, the turns that take the
    place of the last ones of `turns` from the turn `shared` on; empty: none. `masked`: numbers of answers that are not
    learned. `variables` of the chat template: tools, documents. `unused_columns` and `unused_keys` (of turns) are not
    read."""

    name: str
    turns: tuple[Turn, ...]
    rejected: tuple[Turn, ...] = ()
    shared: int = 0
    masked: frozenset[int] = frozenset()
    variables: Variables = NOTHING
    unused_columns: tuple[str, ...] = ()
    unused_keys: tuple[str, ...] = ()


class Unusable(Exception):
    """A row that is left out, and why."""


class _Format(NamedTuple):
    """`needs`: columns that tell the format; `read`: columns that it may have besides."""

    needs: tuple[str, ...]
    read: frozenset[str]
    turns: Callable[[Row], list[Row]]


def conversation(name: str, row: Row) -> Conversation:
    """What a row says. Raises `Unusable`, also for an unknown format."""
    row = _openai_preference(row)
    form = next((form for form in _FORMATS if all(row.get(key) is not None for key in form.needs)), None)
    form = form or next((form for form in _FORMATS if all(key in row for key in form.needs)), None)
    if form is None:
        has = printable(", ".join(sorted(map(str, row))[:8])) or "no keys"
        raise Unusable(f"it is in none of the known chat formats (it has {has})")
    _check_columns(row)
    variables = _variables(row)
    used = {*form.needs, *form.read, "system", "weight", "functions", *ROW_NAMES}
    columns = tuple(str(key) for key, value in row.items() if key not in used and value is not None)
    if form.needs == _PREFERENCE:
        columns = tuple(name for name in columns if name not in _question(row)[0])
        talk = _preference(name, row)
    else:
        messages = [*_system(row), *form.turns(row)]
        turns = tuple(map(_turn, messages))
        masked = _masked(messages)
        talk = _checked(Conversation(name, turns, masked=masked, unused_keys=tuple(_unused_keys(messages))))
    return talk._replace(variables=variables, unused_columns=columns)


def _check_columns(row: Row) -> None:
    """Raises `Unusable` for columns that change the meaning of the others and are not understood."""
    _refuse_media(row, "it")
    label = next((key for key in _TABLES["kto"] if str(row.get(key)).lower() in _TABLES["good_or_bad"]), None)
    if label is not None:
        raise Unusable(f"its {label!r} may say whether the answer is good (KTO), which is not learned from")
    if row.get("weight") not in (None, 1):
        raise Unusable(f"it has the weight {printable(row['weight'])}; all rows count alike")


def _refuse_media(row: Row, what: str) -> None:
    if media := [key for key in _TABLES["media"] if row.get(key)]:
        raise Unusable(f"{what} has {media[0]!r}, and a language model reads text alone")


def _variables(row: Row) -> Variables:
    functions = _functions(_objects(row.get("functions"), "functions"))
    tools = _objects(row.get("tools"), "tools") or functions
    documents = _objects(row.get("documents"), "documents")
    options = _decoded(row.get("chat_template_kwargs")) or {}
    if not isinstance(options, Mapping):
        raise Unusable("'chat_template_kwargs' is no object")
    return {**({"tools": tools} if tools else {}), **({"documents": documents} if documents else {}), **options}


def _decoded(value: Any) -> Any:
    """What JSON in a text says, as cells of tables hold lists; else the value."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _objects(value: Any, key: str) -> list[Row]:
    """A list of objects, also as JSON text; nothing for nothing."""
    value = _decoded(value)
    return _messages(value, key, "") if value else []


# --- turns of each format ----------------------------------------------------------------------------------------


def _functions(parts: Sequence[Row]) -> list[Row]:
    return [{"type": "function", "function": part} for part in parts]


def _text(row: Row, key: str) -> str:
    reason = text_fault(row.get(key)) if key in row else "is missing"
    if reason not in ("", "is empty"):
        raise Unusable(f"{key!r} {reason}")
    return str(row[key])


def _optional(row: Row, key: str) -> str:
    return "" if row.get(key) is None else _text(row, key)


def _system(row: Row) -> list[Row]:
    system = _optional(row, "system")
    return [{"role": "system", "content": system}] if system else []


def _history(row: Row) -> Iterator[Row]:
    pairs = _decoded(row.get("history")) or []
    if not isinstance(pairs, list | tuple) or any(
        not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs
    ):
        raise Unusable("'history' is no list of pairs of a question and an answer")
    for asked, answered in pairs:
        yield {"role": "user", "content": asked}
        yield {"role": "assistant", "content": answered}


def _asked(row: Row) -> Row:
    more = _optional(row, "input")
    return {"role": "user", "content": _text(row, "instruction") + (f"\n\n{more}" if more else "")}


def _side(row: Row, key: str, role: str) -> list[Row]:
    """A text that `role` says, or a turn, or a list of turns."""
    value = row.get(key)
    if isinstance(value, Mapping):
        return [value]
    if isinstance(value, list | tuple):
        return _messages(value, key)
    text = _text(row, key)
    return _transcript(text) or [{"role": role, "content": text}]


def _transcript(text: str) -> list[Row]:
    """The turns of a text as Anthropic's HH-RLHF has them, without an answer that is still to come; else nothing."""
    if not text.startswith("\n\nHuman:"):
        return []
    parts = _SPEAKER.split(text)[1:]
    turns: list[Row] = [
        {"role": _SPEAKERS[who], "content": words.strip()} for who, words in zip(parts[::2], parts[1::2], strict=True)
    ]
    return turns[: -1 if turns[-1] == {"role": "assistant", "content": ""} else None]


def _openai_preference(row: Row) -> Row:
    """A preference of OpenAI's fine-tuning as one with prompt, chosen and rejected; other rows as they are."""
    names = {"preferred_output": "chosen", "non_preferred_output": "rejected"}
    asked = _decoded(row.get("input"))
    if not row.keys() >= names.keys() or not isinstance(asked, Mapping):
        return row
    given = {names.get(key, key): value for key, value in {**row, **asked}.items() if key not in ("input", "messages")}
    return {**given, "prompt": asked.get("messages")}


def _messages(value: Any, key: str, what: str = ": its turns") -> list[Row]:
    value = _decoded(value)
    if not isinstance(value, list | tuple) or not all(isinstance(part, Mapping) for part in value):
        raise Unusable(f"{key!r} is no list of objects{what}")
    return list(value)


_PREFERENCE = ("chosen", "rejected")
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_ALPACA = frozenset({"input", "history"})
_FORMATS = (
    _Format(_PREFERENCE, frozenset(), lambda row: []),
    _Format(("messages",), frozenset(), lambda row: _messages(row["messages"], "messages")),
    _Format(("conversations",), frozenset(), lambda row: _messages(row["conversations"], "conversations")),
    _Format(
        ("prompt", "completion"),
        frozenset({"history"}),
        lambda row: [*_history(row), *_side(row, "prompt", "user"), *_side(row, "completion", "assistant")],
    ),
    _Format(
        ("instruction", "output"),
        _ALPACA,
        lambda row: [*_history(row), _asked(row), {"role": "assistant", "content": _text(row, "output")}],
    ),
)


def _preference(name: str, row: Row) -> Conversation:
    asked = _question(row)[1]
    sides = [_side(row, key, "assistant") for key in _PREFERENCE]
    if any(_masked(side) for side in sides):
        raise Unusable("an answer of a preference has the weight 0")
    prompt, chosen, rejected = (list(map(_turn, part)) for part in (asked, *sides))
    shared = [turn for turn, _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))]
    if any(shared[start : start + len(prompt)] == prompt for start in range(len(shared) - len(prompt) + 1)):
        prompt, chosen, rejected = shared, chosen[len(shared) :], rejected[len(shared) :]  # both sides begin with it
    elif prompt and prompt[-1].role == "user" == (chosen[:1] or prompt)[0].role:
        raise Unusable("its prompt is another than the one that its sides begin with")
    if chosen == rejected:
        raise Unusable("the chosen and the rejected answer are the same")
    prompt = [*map(_turn, _system(row)), *prompt]
    if all(turn.role != "user" for turn in prompt):
        raise Unusable("it has no question: no prompt, and none that both sides begin with")
    _checked(Conversation(name, (*prompt, *rejected)), "the rejected side")
    talk = Conversation(name, (*prompt, *chosen), tuple(rejected), len(prompt))
    return _checked(talk, "the chosen side")._replace(unused_keys=tuple(_unused_keys([*asked, *sides[0], *sides[1]])))


def _question(row: Row) -> tuple[set[str], list[Row]]:
    """The prompt of a preference and the columns that it stands in; nothing where both sides begin with it."""
    if row.get("prompt"):
        return {"prompt"}, _side(row, "prompt", "user")
    if isinstance(row["chosen"], list | tuple) and len(row["chosen"]) > 1:
        return {"prompt"}, []
    if row.get("conversations"):
        return {"conversations"}, _messages(row["conversations"], "conversations")
    return ({"instruction", *_ALPACA}, [*_history(row), _asked(row)]) if "instruction" in row else ({"prompt"}, [])


# --- one turn ----------------------------------------------------------------------------------------------------


def _turn(row: Row) -> Turn:
    stated = row.get("role", row.get("from"))
    if not isinstance(stated, str):
        raise Unusable("a turn has no role")
    key = "content" if "content" in row else "value"
    extras = {name: value for name in TURN_NAMES if (value := row.get(name)) not in (None, "", [])}
    content = _joined(row.get(key))
    calls = _calls(row, stated, content)
    if calls:
        extras["tool_calls"] = calls
    content = "" if stated == CALLS else content
    reason = text_fault(content)
    if reason not in ("", "is empty") and not (content is None and calls):
        raise Unusable(f"{key!r} of a turn of {stated!r} {reason}" if key in row else "a turn has no role and text")
    role = ROLES.get(stated, stated)
    if not extras and content is not None:
        return Turn(role, content)
    try:
        json.dumps(extras, ensure_ascii=False, default=str).encode()
    except (ValueError, RecursionError):
        raise Unusable("a turn has half a surrogate pair, or what is no JSON") from None
    given = {} if content is None and key not in row else {"content": content}
    return Turn(role, content, {"role": role, **given, **extras})


def _joined(content: Any) -> Any:
    """The text of parts of text, as of models that see images; anything else as it is."""
    if not isinstance(content, list | tuple):
        return content
    kinds = ("text", "input_text", "output_text")
    parts = [part for part in content if isinstance(part, Mapping) and part.get("type", "text") in kinds]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return "".join(texts) if texts and len(texts) == len(content) else list(content)


def _calls(row: Row, role: str, content: Any) -> list[Row]:
    """The calls of a turn as `tool_calls` has them, also of OpenAI's `function_call` and of ShareGPT's role."""
    if role == CALLS:
        value = _decoded(content)
        calls = _objects([value] if isinstance(value, Mapping) else value, CALLS)
        if not calls or not all("name" in call and "arguments" in call for call in calls):
            raise Unusable(f"a turn of {CALLS!r} is no JSON with name and arguments")
        return _functions(calls)
    calls = _objects(row.get("tool_calls"), "tool_calls")
    legacy = row.get(CALLS)
    if legacy is not None and not isinstance(legacy, Mapping):
        raise Unusable(f"{CALLS!r} of a turn is no object")
    return calls or _functions([legacy] if legacy else [])


def _unused_keys(messages: Sequence[Row]) -> Iterator[str]:
    known = TURN_NAMES.union(_TABLES["read"])
    for row in messages:
        mask = next((key for key in row if key in _TABLES["masks"] and row[key] is not None), None)
        if mask is not None:
            raise Unusable(f"a turn has the key {mask!r}; 'weight': 0 or 'train': false leave a turn out of the loss")
        _refuse_media(row, "a turn")
        yield from (str(key) for key, value in row.items() if key not in known and value is not None)


def _masked(messages: Sequence[Row]) -> frozenset[int]:
    """Which turns are left out of the loss by `weight` (OpenAI) or `train` (axolotl)."""
    return frozenset(number for number, row in enumerate(messages) if not _learned(row))


def _learned(row: Row) -> bool:
    weight = row.get("weight")
    train = row.get("train")
    if weight not in (None, 0, 1):
        raise Unusable(f"a turn has the weight {printable(weight)}; 0 and 1 are understood")
    if train is not None and not isinstance(train, bool):
        raise Unusable(f"a turn has 'train' = {printable(train)}; true and false are understood")
    role = row.get("role", row.get("from"))
    if train and ROLES.get(role, role) != "assistant":
        raise Unusable(f"a turn of {printable(role)!r} is to be learned ('train'); answers are")
    return weight != 0 and train is not False


def _checked(talk: Conversation, side: str = "it") -> Conversation:
    """Raises `Unusable` for what has no answer to be trained on."""
    roles = [turn.role for turn in talk.turns]
    strange = next((role for role in roles if role not in ("system", "user", "assistant", "tool")), None)
    if strange is not None:
        raise Unusable(f"{side} has a turn of {printable(strange)!r}, which is no role of chat templates")
    if roles.count("system") > 1:
        raise Unusable(f"{side} has {roles.count('system')} system turns")
    if "system" in roles[1:]:
        raise Unusable(f"the system turn of {side} is not the first")
    answers = [number for number, role in enumerate(roles) if role == "assistant"]
    if not answers:
        raise Unusable(f"{side} has no assistant turn")
    for turn in talk.turns:  # one that calls a tool may have no text
        if turn.role == "assistant" and not (turn.content or "").strip() and "tool_calls" not in (turn.message or ()):
            raise Unusable(f"an answer of {side} is empty")
    if talk.masked.issuperset(answers):
        raise Unusable(f"no answer of {side} is to be learned (weight 0)")
    return talk


# --- dataset_info.json of LLaMA-Factory --------------------------------------------------------------------------


def renaming(file: str, table: Row) -> Callable[[Row], Row]:
    """Gives rows the names that are known here, as LLaMA-Factory's table of a file says. Raises UserError for columns
    that are not understood."""
    columns = table.get("columns") or {}
    tags = table.get("tags") or {}
    names_of = _TABLES["llama_factory"]
    alpaca = table.get("formatting", "alpaca") == "alpaca"
    known = names_of["alpaca" if alpaca else "sharegpt"] | names_of["both"]
    strange = sorted({*columns} - known.keys()) or sorted({*tags}.difference(names_of["tags"], names_of["role_tags"]))
    if strange:
        raise UserError(
            f"dataset_info.json names {printable(strange[0])!r} for {printable(file)}, which is not understood.",
            why="it changes what the rows mean",
            do="name another file as data.path",
        )
    names = {columns[key]: ours for key, ours in known.items() if key in columns}
    keys, roles = (
        {tags[key]: ours for key, ours in names_of[group].items() if key in tags} for group in ("tags", "role_tags")
    )

    def turn(row: Any) -> Any:
        if not isinstance(row, Mapping):
            return row
        renamed = {keys.get(key, key): value for key, value in row.items()}
        return {**renamed, "from": roles.get(renamed["from"], renamed["from"])} if "from" in renamed else renamed

    def value(cell: Any) -> Any:
        return [turn(part) for part in cell] if isinstance(cell, list) else turn(cell)

    def rename(row: Row) -> Row:
        return {names.get(key, key): value(cell) for key, cell in row.items()}

    return rename
