"""Rows of every chat format mean the turns that their authors meant; what cannot be trained on is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from espalier.language.tune.conversations import Conversation, Turn, conversation, conversations
from espalier.recipe import Data
from espalier.recipe.errors import UserError

ASKED, ANSWERED = Turn("user", "2+2?"), Turn("assistant", "4")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}, ANSWERED._asdict()]},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"prompt": "2+2?", "completion": "4"},
        {"prompt": [ASKED._asdict()], "completion": [ANSWERED._asdict()]},
        {"instruction": "2+2?", "output": "4", "input": ""},
    ],
)
def test_all_formats_give_the_same_turns(row: dict[str, Any]) -> None:
    assert conversation("a", row) == Conversation("a", (ASKED, ANSWERED))


def test_alpaca_s_input_follows_its_instruction_and_sharegpt_s_system_comes_first() -> None:
    assert conversation("a", {"instruction": "Add.", "input": "2, 2", "output": "4"}).turns[0].content == "Add.\n\n2, 2"
    row = {"system": "Be brief.", "conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}
    assert conversation("a", row).turns[0] == Turn("system", "Be brief.")


OTHER = Turn("assistant", "5")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"chosen": [ASKED._asdict(), ANSWERED._asdict()], "rejected": [ASKED._asdict(), OTHER._asdict()]},
        {
            "prompt": [ASKED._asdict()],
            "chosen": [ASKED._asdict(), ANSWERED._asdict()],
            "rejected": [ASKED._asdict(), OTHER._asdict()],
        },
    ],
)
def test_preferences_share_their_prompt(row: dict[str, Any]) -> None:
    assert conversation("a", row) == Conversation("a", (ASKED, ANSWERED), (OTHER,), 1)


def said(rows: list[Any], folder: Path) -> list[tuple[str, str]]:
    file = folder / "chats.jsonl"
    good = {"prompt": "2+2?", "completion": "4"}
    file.write_text("\n".join(json.dumps(row) for row in (good, *rows)))
    skipped: list[tuple[str, str]] = []
    assert len(list(conversations(Data(path=str(file)), skipped))) == 1
    return skipped


def turns(*each: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in each]}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (turns(("system", "a"), ("system", "b"), ("user", "c"), ("assistant", "d")), "2 system turns"),
        (turns(("user", "c"), ("system", "a"), ("assistant", "d")), "not the first"),
        (turns(("user", "c")), "no assistant turn"),
        (turns(("user", "c"), ("assistant", " \n")), "is empty"),
        (turns(("user", "c"), ("critic", "d"), ("assistant", "e")), "'critic'"),
        ({"messages": "hello"}, "no list"),
        ({"messages": [{"role": "user"}]}, "no role and text"),
    ],
)
def test_a_row_without_an_answer_is_left_out_and_named_with_its_line(row: Any, why: str, tmp_path: Path) -> None:
    ((name, reason),) = said([row], tmp_path)
    assert name == "chats.jsonl:2"
    assert why in reason


def test_a_preference_of_equal_answers_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "b"}))
    with pytest.raises(UserError, match=r"(?s)no conversation.*are the same"):
        list(conversations(Data(path=str(file)), []))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"text": "plain"}', "none of the known chat formats"),
        ("a.jsonl", '{"prompt": "a", "completion": "b"}\n[1]', "line 2"),
        ("a.jsonl", '{"prompt": "a", "completion": ', "line 1"),
        ("a.json", '{"prompt": "a"}', "none of the known chat formats"),
        ("a.txt", "plain text", "no file of conversations"),
    ],
)
def test_a_file_of_something_else_is_refused(name: str, content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        list(conversations(Data(path=str(tmp_path / name)), []))
    assert words in str(caught.value)


def test_files_of_a_folder_are_read_in_order_whatever_their_form(tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b"}
    (tmp_path / "1.json").write_text(json.dumps([row, row]))
    (tmp_path / "2.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    (tmp_path / "README.md").write_text("about")
    assert [one.name for one in conversations(Data(path=str(tmp_path)), [])] == ["1.json:1", "1.json:2", "2.jsonl.gz:1"]
