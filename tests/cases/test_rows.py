"""Rows of text and chats as people have them: each is read for what it is, named, or refused by name."""

from __future__ import annotations

import gzip
import json
import string
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from row_inputs import lines, put

from espalier.language import text_sources
from espalier.language.tokenizer import ByteTokenizer, open_tokenizer
from espalier.language.tune import chat_rows, workload
from espalier.language.tune.chat_rows import ChatTokens
from espalier.language.tune.chat_template import CHATML, ChatTemplate
from espalier.language.tune.conversations import Turn, Unusable, conversation
from espalier.recipe import Data
from espalier.recipe.errors import UserError

MARK = b"\xef\xbb\xbf"
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}"
    "{% if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + call.function | tojson + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
)
"""As Qwen's: with tools, their calls, and reasoning."""
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLED = {
    "tools": [TOOL],
    "messages": [
        {"role": "user", "content": "Weather in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
        {"role": "assistant", "content": "It is 21 degrees."},
    ],
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def read(path: Path, **options: Any) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """Texts, what was left out, and notes."""
    skipped: list[tuple[str, str]] = []
    notes: list[str] = []
    texts = text_sources.documents(Data(path=str(path), **options), None, skipped, notes)
    return [document.data.decode() for document in texts], skipped, notes


def chats(path: Path, template: str = CHATML, pairs: bool = False) -> ChatTokens:
    return chat_rows.read(Data(path=str(path)), ByteTokenizer(), ChatTemplate(template, {}, "test"), pairs)


def text_of(found: ChatTokens, number: int = 0) -> str:
    return bytes(found.tokens[found.starts[number] : found.starts[number + 1]].tolist()).decode()


def learned(found: ChatTokens, number: int = 0) -> str:
    part = slice(int(found.starts[number]), int(found.starts[number + 1]))
    return bytes(found.tokens[part][found.answers[part]].tolist()).decode()


# --- text --------------------------------------------------------------------------------------------------------


ROWS = [{"text": "first", "id": 1}, {"text": "second\nline", "id": 2}]
FORMS = {
    "a.jsonl": lines(*ROWS),
    "A.JSONL": lines(*ROWS),
    "a.ndjson": MARK + lines(*ROWS),
    "a.json": lines(*ROWS),
    "b.json": MARK + json.dumps(ROWS).encode(),
    "c.Json": json.dumps(ROWS, indent=2).encode(),
    "d.json": json.dumps({"version": 1, "data": ROWS}).encode(),
    "list.jsonl": json.dumps(ROWS).encode(),
    "rows.txt": lines(*ROWS),
    "rows": MARK + lines(*ROWS),
    "a.csv": MARK + b'text,id\r\nfirst,1\r\n"second\nline",2\r\n',
    "semi.CSV": b'id;text\n1;first\n2;"second\nline"\n',
    "a.tsv": b'text\tid\nfirst\t1\n"second\nline"\t2\n',
    "a.jsonl.gz": gzip.compress(MARK + lines(*ROWS)),
    "a.json.ZST": zstandard.ZstdCompressor().compress(json.dumps(ROWS).encode()),
    "a.csv.gz": gzip.compress(b'text,id\nfirst,1\n"second\nline",2\n'),
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_read_by_their_content_whatever_the_ending_and_other_columns_are_named(
    name: str, tmp_path: Path
) -> None:
    texts, skipped, notes = read(put(tmp_path, name, FORMS[name]))
    assert texts == ["first", "second\nline"]
    assert skipped == []
    assert notes[0] == "not used: column 'id' (2 rows)"
    assert any("read as rows" in note for note in notes) == name.startswith("rows")


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1), min_size=1),
    keys=st.permutations(["text", "id", "url"]),
)
def test_the_order_of_columns_and_the_form_change_nothing(
    rows: list[str], keys: Sequence[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    table = [{key: row if key == "text" else 1 for key in keys} for row in rows]
    compact = [json.dumps(row, ensure_ascii=False).encode() + b"\r\n" for row in table]
    forms = {
        "a.jsonl": b"".join(compact),
        "b.json": json.dumps(table).encode(),
        "c.ndjson.gz": gzip.compress(lines(*table)),
    }
    assert all(read(put(folder, name, content))[0] == rows for name, content in forms.items())


def test_crlf_and_line_separators_inside_strings_end_no_row(tmp_path: Path) -> None:
    rows = [{"text": f"a\u2028b\u0085c {number}"} for number in range(100)]
    content = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\r\n" for row in rows)
    assert read(put(tmp_path, "a.jsonl", content))[0] == [row["text"] for row in rows]


def test_half_a_surrogate_pair_leaves_the_row_out_of_text_and_chats(tmp_path: Path) -> None:
    texts, skipped, _ = read(put(tmp_path, "a.jsonl", lines({"text": "whole"}, {"text": "cut \ud83d"})))
    assert (texts, skipped) == (["whole"], [("a.jsonl:2", "'text' has half a surrogate pair")])
    good = {"prompt": "a", "completion": "b"}
    found = chats(put(tmp_path, "c.jsonl", lines(good, {"prompt": "a \udc00", "completion": "b"})))
    assert found.skipped == [("c.jsonl:2", "'prompt' has half a surrogate pair")]


def test_numbers_that_only_python_reads_are_read(tmp_path: Path) -> None:
    assert read(put(tmp_path, "a.jsonl", b'{"text": "a", "score": NaN}\n{"text": "b", "score": 1}\n'))[0] == ["a", "b"]


def test_a_single_document_is_text_in_a_folder_of_text_and_refused_alone(tmp_path: Path) -> None:
    put(tmp_path, "code/main.py", "print()")
    put(tmp_path, "code/package.json", '{\n "name": "x"\n}')
    texts, _, notes = read(tmp_path / "code")
    assert texts == ["print()", '{\n "name": "x"\n}']
    assert "1 file (package.json) are JSON without rows: read as text" in notes
    with pytest.raises(UserError, match="JSON without rows") as caught:
        read(tmp_path / "code" / "package.json")
    assert "there are name" in caught.value.do


@pytest.mark.parametrize("name", ["a.pkl", "a.PDF", "a.zip", "a.xlsx", "a.bin"])
def test_endings_that_are_no_text_are_named_and_refused_alone(name: str, tmp_path: Path) -> None:
    put(tmp_path, name, "looks like text")
    with pytest.raises(UserError, match=f"a {Path(name).suffix.lower()} file, which is no text"):
        read(tmp_path / name)
    put(tmp_path, "b.txt", "text")
    texts, skipped, _ = read(tmp_path)
    assert (texts, [skip for skip, _ in skipped]) == (["text"], [name])


def test_rows_of_chats_are_not_trained_on_as_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'text' is missing") as caught:
        read(put(tmp_path, "a.txt", lines(CALLED, CALLED)))
    assert "[tune]" in caught.value.do


def test_several_lists_in_one_object_and_other_encodings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="several lists of rows: train, test"):
        read(put(tmp_path, "a.json", json.dumps({"train": ROWS, "test": ROWS})))
    with pytest.raises(UserError, match="UTF-16"):
        read(put(tmp_path, "b.jsonl", '{"text": "a"}\n'.encode("utf-16")))
    with pytest.raises(UserError, match="UTF-16"):
        read(put(tmp_path, "c.txt", "text".encode("utf-16")))


def test_parquet_text_is_read_by_row_groups_and_its_columns_are_named(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"text": ["a", None, "", "d"], "url": ["u"] * 4, "n": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "a.PARQUET", row_group_size=2)
    texts, skipped, notes = read(tmp_path / "a.PARQUET")
    assert texts == ["a", "d"]
    assert [reason for _, reason in skipped] == ["'text': is null", "'text': empty"]
    assert notes == ["not used: column 'n' (4 rows)", "not used: column 'url' (4 rows)"]
    with pytest.raises(UserError, match="'n': is a number, not text"):
        read(tmp_path / "a.PARQUET", field="n")
    pq.write_table(pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()}), tmp_path / "d.parquet")
    assert read(tmp_path / "d.parquet")[0] == ["a", "b", "a"]
    put(tmp_path, "b.parquet", b"PAR1 no more")
    with pytest.raises(UserError, match=r"b\.parquet cannot be read"):
        read(tmp_path / "b.parquet")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"text,text\na,b\n", "two columns"),
        (b"text,id\na,1,2\n", "line 2 has 3 cells"),
        (b'text\n"a\n', "cannot be read"),
    ],
)
def test_a_broken_table_is_named(content: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        read(put(tmp_path, "a.csv", content))


def test_a_folder_of_hugging_face_is_read_as_its_split(tmp_path: Path) -> None:
    put(tmp_path, "README.md", "# about")
    for name in ("data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl", "data/validation.jsonl"):
        put(tmp_path, name, lines({"text": name}))
    texts, _, notes = read(tmp_path)
    assert texts == ["data/train-00000-of-00001.jsonl"]
    assert {"not used: split 'test' (1 file)", "not used: split 'validation' (1 file)"} <= set(notes)
    assert "not used: file 'README.md'" in notes
    assert read(tmp_path, split="test")[0] == ["data/test-00000-of-00001.jsonl"]
    with pytest.raises(UserError, match="no such split"):
        read(tmp_path, split="tset")


def test_configs_of_a_readme_name_the_files_of_a_split(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    config = "---\nconfigs:\n- config_name: a\n  data_files:\n  - split: train\n    path: 'parts/*.jsonl'\n"
    put(tmp_path, "README.md", config + "---\n# about\n")
    put(tmp_path, "parts/one.jsonl", lines({"text": "one"}))
    put(tmp_path, "other.jsonl", lines({"text": "other"}))
    texts, _, notes = read(tmp_path)
    assert texts == ["one"]
    assert "not used: file 'other.jsonl'" in notes


def test_a_table_of_llama_factory_names_columns_and_roles(tmp_path: Path) -> None:
    table = {
        "mine": {
            "file_name": "mine.json",
            "formatting": "sharegpt",
            "columns": {"messages": "talk"},
            "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "person", "assistant_tag": "machine"},
        },
        "other": {"file_name": "alpaca.json", "columns": {"prompt": "ask", "response": "answer"}},
    }
    put(tmp_path, "dataset_info.json", json.dumps(table))
    put(
        tmp_path, "mine.json", json.dumps([{"talk": [{"who": "person", "what": "a"}, {"who": "machine", "what": "b"}]}])
    )
    put(tmp_path, "alpaca.json", json.dumps([{"ask": "a", "answer": "b"}]))
    put(tmp_path, "loose.json", json.dumps([{"prompt": "x", "completion": "y"}]))
    found = chats(tmp_path)
    assert [learned(found, number) for number in range(2)] == ["b<|im_end|>"] * 2
    assert [note for note in found.notes if note.startswith("not used")] == ["not used: file 'loose.json'"]
    assert text_of(chats(tmp_path / "mine.json")) == text_of(found)
    table["other"]["columns"]["images"] = "pictures"  # type: ignore[index]
    put(tmp_path, "dataset_info.json", json.dumps(table))
    with pytest.raises(UserError, match="'images'"):
        chats(tmp_path)


# --- chats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", [None, 5, {"a": 1}, ["b"], "cut \ud83d"])
def test_only_text_is_an_answer(output: Any, tmp_path: Path) -> None:
    rows = [{"instruction": "a", "output": "b"}, {"instruction": "a", "output": output}]
    found = chats(put(tmp_path, "a.jsonl", lines(*rows)))
    assert [name for name, _ in found.skipped] == ["a.jsonl:2"]
    assert "'output'" in found.skipped[0][1]


SYSTEM = {"system": "Be a pirate."}
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Arr"}]
SHARED = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Arr"}]
ALIKE: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "Be a pirate."}, *TURNS]},
    {"messages": TURNS, **SYSTEM},
    {"messages": json.dumps(TURNS), **SYSTEM},
    {"conversations": [{"from": "system", "value": "Be a pirate."}, *SHARED]},
    {"conversations": SHARED, **SYSTEM},
    {"prompt": "Hi", "completion": "Arr", **SYSTEM},
    {"instruction": "Hi", "output": "Arr", "history": [], "input": None, **SYSTEM},
    {"messages": [TURNS[0] | {"weight": None}, TURNS[1] | {"weight": 1, "tool_calls": []}], "tools": None, **SYSTEM},
]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), row=st.sampled_from(ALIKE))
def test_formats_that_say_the_same_give_the_same_turns_in_any_order_of_keys(data: st.DataObject, row: Any) -> None:
    shuffled = {key: row[key] for key in data.draw(st.permutations(list(row)))}
    assert conversation("a", shuffled) == conversation("a", ALIKE[0])


def test_history_comes_before_the_question() -> None:
    turns = conversation("a", {"instruction": "c", "output": "d", "history": [["a", "b"]]}).turns
    assert [turn.content for turn in turns] == ["a", "b", "c", "d"]


@settings(max_examples=60, deadline=None)
@given(
    row=st.sampled_from(ALIKE),
    name=st.text(string.ascii_letters, min_size=12).map(lambda letters: f"x{letters}"),
    value=st.integers() | st.text(),
)
def test_columns_and_keys_that_are_not_known_are_counted(row: Any, name: str, value: Any) -> None:
    assert name in conversation("a", row | {name: value}).unused_columns
    talk = {"messages": [TURNS[0] | {name: value}, TURNS[1]]}
    assert conversation("a", talk).unused_keys == (name,)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a", "completion": "b", "label": False}, "KTO"),
        ({"prompt": "a", "completion": "b", "weight": 0.3}, "weight 0.3"),
        ({"prompt": "a", "completion": "b", "images": ["x.png"]}, "images"),
        ({"prompt": "a", "completion": "b", "system": {"a": 1}}, "'system' is an object"),
        ({"prompt": "a", "completion": "b", "tools": "none"}, "'tools' is no list"),
        ({"prompt": "a", "completion": "b", "history": ["a"]}, "history"),
        ({"messages": [TURNS[0], TURNS[1] | {"weight": 0.5}]}, "weight 0.5"),
        ({"messages": [TURNS[0], TURNS[1] | {"weight": 0}]}, "no answer of it is to be learned"),
        ({"messages": [TURNS[0] | {"train": True}, TURNS[1]]}, "is to be learned"),
        ({"messages": [TURNS[0], TURNS[1] | {"loss_mask": 0}]}, "loss_mask"),
        ({"messages": [TURNS[0], {"role": "assistant", "content": {"a": 1}}]}, "is an object, not text"),
        ({"messages": [{"role": "developer", "content": "x"}, *TURNS]}, "'developer'"),
        ({"conversations": [{"from": "narrator", "value": "x"}, *SHARED]}, "'narrator'"),
        ({"conversations": [SHARED[0], {"from": "function_call", "value": "not JSON"}]}, "function_call"),
        ({"chosen": [*TURNS[:1], TURNS[1] | {"weight": 0}], "rejected": TURNS}, "weight 0"),
    ],
)
def test_rows_of_another_meaning_are_left_out_by_name(row: Any, why: str) -> None:
    with pytest.raises(Unusable, match=why):
        conversation("a", row)


def test_a_turn_of_weight_0_or_train_false_is_not_learned(tmp_path: Path) -> None:
    for mask in ({"weight": 0}, {"train": False}):
        turns = [TURNS[0], {"role": "assistant", "content": "WRONG", **mask}, *TURNS]
        for template in (CHATML, CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")):
            found = chats(put(tmp_path, "a.jsonl", lines({"messages": turns})), template)
            assert learned(found) == "Arr<|im_end|>"
            assert "WRONG<|im_end|>" in text_of(found)


def test_tools_their_calls_and_reasoning_reach_the_template(tmp_path: Path) -> None:
    talk = [TURNS[0], {"role": "assistant", "content": "56", "reasoning_content": "7*8"}]
    found = chats(
        put(tmp_path, "a.jsonl", lines(CALLED, CALLED | {"tools": json.dumps([TOOL])}, {"messages": talk})), TOOLS
    )
    assert '"name": "weather"' in text_of(found).split("<|im_end|>")[0]
    assert learned(found).startswith('<call>{"name": "weather"')
    assert text_of(found, 1) == text_of(found)
    assert learned(found, 2) == "<think>7*8</think>56<|im_end|>"
    assert found.notes == ["not used: key 'tool_call_id' (2 conversations)"]


def test_what_the_template_does_not_read_leaves_the_row_out(tmp_path: Path) -> None:
    reasoning = [TURNS[0], TURNS[1] | {"reasoning_content": "hm"}]
    rows = [{"messages": TURNS}, CALLED, {"messages": reasoning}, {"messages": [TURNS[0] | {"name": "Al"}, TURNS[1]]}]
    found = chats(put(tmp_path, "a.jsonl", lines(*rows)))
    assert [reason for _, reason in found.skipped] == [
        "the chat template does not read its 'tools'",
        "the chat template does not read 'reasoning_content' of its turns",
        "the chat template does not read 'name' of its turns",
    ]


def test_a_call_without_text_is_left_out_where_the_template_knows_no_calls(tmp_path: Path) -> None:
    found = chats(put(tmp_path, "a.jsonl", lines({"messages": TURNS}, {"messages": CALLED["messages"]})))
    assert [reason for _, reason in found.skipped] == ["the chat template does not read 'tool_calls' of its turns"]


@pytest.mark.parametrize("label", [True, False, "False", 0, 1.0, "good"])
def test_labels_of_good_and_bad_answers_are_no_answers_to_learn(label: Any) -> None:
    with pytest.raises(Unusable, match="KTO"):
        conversation("a", {"prompt": "a", "completion": "b", "label": label})
    assert conversation("a", {"prompt": "a", "completion": "b", "label": "sports"}).unused_columns == ("label",)


def test_preferences_name_their_scores_and_take_llama_factory_s_turns() -> None:
    row = {"chosen": SHARED[1], "rejected": {"from": "gpt", "value": "no"}, "conversations": SHARED[:1], "score": 3}
    talk = conversation("a", row)
    assert [turn.content for turn in (*talk.turns, *talk.rejected)] == ["Hi", "Arr", "no"]
    assert talk.unused_columns == ("score",)


def test_calls_of_other_formats_are_the_same_calls(tmp_path: Path) -> None:
    call = {"name": "weather", "arguments": {"city": "Rome"}}
    ask, said = {"role": "user", "content": "Rome?"}, {"role": "assistant", "content": "21"}
    openai = [ask, {"role": "assistant", "tool_calls": [{"function": call}]}, {"role": "tool", "content": "21"}, said]
    legacy = [ask, {"role": "assistant", "function_call": call}, {"role": "function", "content": "21"}, said]
    shared = [("human", "Rome?"), ("function_call", json.dumps(call)), ("observation", "21"), ("gpt", "21")]
    rows = [
        {"messages": openai},
        {"messages": legacy},
        {"conversations": [{"from": role, "value": value} for role, value in shared]},
    ]
    found = chats(put(tmp_path, "a.jsonl", lines(*rows)), TOOLS)
    assert len({text_of(found, number) for number in range(3)}) == len(found) - 2 == 1


@pytest.mark.parametrize(("text", "usable"), [("\\u0002", True), ("\x02", False), ("a\x03", False)])
def test_marks_of_answers_are_no_part_of_what_is_said(text: str, usable: bool, tmp_path: Path) -> None:
    talks = [
        {"prompt": text, "completion": "b"},
        {"messages": [TURNS[0], TURNS[1] | {"reasoning_content": text}]},
        {"messages": TURNS, "tools": [{"name": text}]},
    ]
    found = chats(put(tmp_path, "a.jsonl", lines({"prompt": "a", "completion": "b"}, *talks)), TOOLS)
    assert len(found) == (4 if usable else 1)


def test_the_template_gives_what_transformers_gives() -> None:
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    messages: list[Any] = CALLED["messages"]  # type: ignore[assignment]
    plain = TOOLS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (theirs,), _ = render_jinja_template([messages], tools=[TOOL], chat_template=plain)
    talk = conversation("a", CALLED)
    assert ChatTemplate(plain, {}, "test").render(talk.turns, variables=talk.variables) == theirs


@pytest.mark.parametrize("name", ["a.json", "a.JSONL", "a.ndjson", "a.csv", "a.txt", "a.json.gz", "data/train.jsonl"])
def test_chats_are_read_from_every_form(name: str, tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b"}
    content = MARK + (b"prompt,completion\na,b\na,b\n" if name.endswith("csv") else lines(row, row))
    put(tmp_path, name, gzip.compress(content) if name.endswith("gz") else content)
    put(tmp_path, "README.md", "about")
    found = chats(tmp_path)
    assert [text_of(found, number) for number in range(2)] == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    ] * 2
    assert "not used: file 'README.md'" in found.notes


def test_notes_are_those_of_the_first_reading_when_tokens_are_in_the_cache(tmp_path: Path) -> None:
    file = put(tmp_path, "a.jsonl", lines({"messages": TURNS, "source": "x"}, {"messages": TURNS, "source": "y"}, {}))
    first, second = chats(file), chats(file)
    assert list(first.notes) == list(second.notes) == ["not used: column 'source' (2 rows)"]
    assert list(first.skipped) == list(second.skipped)
    assert list(first.unused) == list(second.unused) == [1, 1]


def test_the_preview_shows_the_first_the_longest_and_the_strangest(tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": f"{n}", "completion": "b" * (9 if n == 3 else 1)} for n in range(6)]
    rows[4] |= {"colour": "red", "shape": "round"}
    found = chats(put(tmp_path, "a.jsonl", lines(*rows)))
    shown = workload.preview(ByteTokenizer(), found)
    assert [row.split(":")[0] for row in shown] == [
        "this one",
        "the longest",
        "the one with the most that is not used",
    ]
    assert ["a.jsonl:1 " in shown[0], "a.jsonl:4 " in shown[1], "a.jsonl:5 " in shown[2]] == [True] * 3
    assert "⟦bbbbbbbbb<|im_end|>⟧" in shown[1]


def test_conversations_that_are_cut_and_left_out_are_counted_apart(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": f"{n}"} for n in range(3)]
    rows += [{"prompt": "a", "completion": "b" * 200}, {"prompt": "a" * 200, "completion": "b"}]
    found = chats(put(tmp_path, "a.jsonl", lines(*rows)))
    _, _, (note,) = chat_rows.divided(found, 0.3, 100, "cut")
    assert "1 lose their ends and 1 are left out, as no answer is left" in note


# --- templates ---------------------------------------------------------------------------------------------------


BOMBS = [
    "{{ 1/0 }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}",
    "{{ 'a' * 999999999999 }}",
    "{{ (1e308 * 10) | int }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "{{ 'a' * 1100000 }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x == n.x }}",
    "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:>{}}'.format(1, 999999999) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "{{ range(99999) | map('string') | join('a' * 99999) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[0].content[5].upper().nothing() }}",
]


@pytest.mark.parametrize("text", BOMBS)
def test_a_template_that_fails_or_does_too_much_is_one_sentence(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier.language.tune.template_sandbox.SECONDS", 0.2)
    start = time.thread_time()
    with pytest.raises(UserError, match=r"The chat template of test (fails|is no Jinja template): "):
        ChatTemplate(text, {}, "test").render([Turn("user", "hi")])
    assert time.thread_time() - start < 3


def test_limits_leave_large_conversations_alone() -> None:
    turns = [Turn("user" if number % 2 else "assistant", "word " * 2000) for number in range(200)]
    assert len(ChatTemplate(TOOLS, {}, "test").render(turns)) > 2_000_000


def test_the_preview_shows_special_tokens(tmp_path: Path) -> None:
    import tokenizers

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=special, initial_alphabet=letters, show_progress=False)
    inner.train_from_iterator(["user assistant"], trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path))
    data = Data(path=str(put(tmp_path, "a.jsonl", lines({"prompt": "a", "completion": "b"}))))
    (shown,) = workload.preview(tokenizer, chat_rows.read(data, tokenizer, ChatTemplate(CHATML, {}, "test"), False))
    assert json.loads(shown.partition("a.jsonl:1 ")[2]) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
    )
