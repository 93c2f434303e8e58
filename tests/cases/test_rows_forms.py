"""Files of other programs in forms that they have beside the usual ones: saved data sets, transcripts, single rows."""

from __future__ import annotations

import gzip
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from row_inputs import lines, put

from espalier.cli import main as cli
from espalier.language import text_sources, tokenizer_files
from espalier.language.tokenizer import ByteTokenizer
from espalier.language.tune.chat_template import ChatTemplate, open_template
from espalier.language.tune.conversations import ChatReport, Turn, Unusable, conversation, conversations
from espalier.recipe import Data
from espalier.recipe.errors import UserError

ASKED, GOOD, BAD = (
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "assistant", "content": "5"},
)
SYSTEM = {"role": "system", "content": "Be brief."}


def read(path: Path, **options: Any) -> tuple[list[str], list[str]]:
    """Texts and notes."""
    notes: list[str] = []
    texts = text_sources.documents(Data(path=str(path), **options), None, None, notes)
    return [document.data.decode() for document in texts], notes


def said(turns: tuple[Turn, ...]) -> list[tuple[str, str | None]]:
    return [(turn.role, turn.content) for turn in turns]


# --- preferences -------------------------------------------------------------------------------------------------

SIDES = {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}
TRANSCRIPTS = {
    "chosen": "\n\nHuman: 2 + 2?\n\nAssistant: 4",
    "rejected": "\n\nHuman: 2 + 2?\n\nAssistant: 5",
}


@pytest.mark.parametrize(
    "row",
    [
        SIDES,
        {"prompt": "2 + 2?", **SIDES},
        {"input": {"messages": [ASKED]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
        TRANSCRIPTS,
        {"prompt": "2 + 2?", **TRANSCRIPTS},
        {"prompt": "\n\nHuman: 2 + 2?\n\nAssistant:", "chosen": "4", "rejected": "5"},
    ],
)
def test_preferences_of_openai_and_of_transcripts_are_the_same_turns(row: Any) -> None:
    talk = conversation("a", row)
    assert said(talk.turns) == [("user", "2 + 2?"), ("assistant", "4")]
    assert (said(talk.rejected), talk.shared, talk.unused_columns) == ([("assistant", "5")], 1, ())


def test_a_prompt_that_both_sides_repeat_after_a_system_turn_stands_once() -> None:
    whole = {key: [SYSTEM, *turns] for key, turns in SIDES.items()}
    column = {"system": SYSTEM["content"], **SIDES}
    for row in (whole, {"prompt": "2 + 2?", **whole}, column, {"prompt": [ASKED], **column}):
        talk = conversation("a", row)
        assert said(talk.turns) == [("system", "Be brief."), ("user", "2 + 2?"), ("assistant", "4")]
        assert talk.shared == 2


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"chosen": "4", "rejected": "5"}, "no question"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "no question"),
        ({"prompt": "3 + 3?", **SIDES}, "its prompt is another"),
    ],
)
def test_a_preference_without_its_question_is_left_out_by_name(row: Any, why: str) -> None:
    with pytest.raises(Unusable, match=why):
        conversation("a", row)


def test_columns_of_openai_s_input_are_named_and_its_tools_are_read() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    asked = {"messages": [ASKED], "tools": [tool], "parallel_tool_calls": True}
    talk = conversation("a", {"input": asked, "preferred_output": [GOOD], "non_preferred_output": [BAD]})
    assert talk.variables == {"tools": [tool]}
    assert talk.unused_columns == ("parallel_tool_calls",)


def test_a_transcript_has_all_its_turns_and_other_texts_stay_one() -> None:
    long = "\n\nHuman: a\n\nAssistant: b\n\nc\n\nHuman: d\n\nAssistant:"
    talk = conversation("a", {"prompt": long, "completion": "e"})
    assert said(talk.turns) == [("user", "a"), ("assistant", "b\n\nc"), ("user", "d"), ("assistant", "e")]
    plain = conversation("a", {"prompt": "Who wrote 'Human: a'?", "completion": "I did."})
    assert said(plain.turns) == [("user", "Who wrote 'Human: a'?"), ("assistant", "I did.")]


# --- templates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asks", ["tools is not none", "tools is defined", "documents is none", "documents is defined"])
def test_a_template_is_given_none_for_tools_and_documents_as_transformers_does(asks: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        utils = pytest.importorskip("transformers.utils.chat_template_utils")
    text = f"{{{{ 'yes' if {asks} else 'no' }}}}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
    wanted = utils.render_jinja_template(conversations=[[ASKED]], chat_template=text)[0][0]
    assert ChatTemplate(text, {}, "test").render([Turn("user", "2 + 2?")]) == wanted


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [{"messages": [ASKED, GOOD], "tools": [{"name": "f"}]}, SIDES])
def test_a_file_of_one_row_with_several_lists_is_one_row(row: Any, tmp_path: Path) -> None:
    for name, indent in (("a.json", None), ("b.json", 1), ("c.jsonl", 1)):
        file = put(tmp_path, name, json.dumps(row, indent=indent))
        talks = list(conversations(Data(path=str(file)), [], report=ChatReport()))
        assert said(talks[0].turns) == [("user", "2 + 2?"), ("assistant", "4")]


def test_compression_is_seen_from_the_first_bytes_whatever_the_name(tmp_path: Path) -> None:
    rows = lines({"text": "a"}, {"text": "b"})
    for number, content in enumerate((gzip.compress(rows), zstandard.ZstdCompressor().compress(rows), rows)):
        for ending in ("jsonl", "jsonl.gz", "jsonl.zst", "txt"):
            assert read(put(tmp_path, f"{number}.{ending}", content))[0] == ["a", "b"]
    long = "word " * 40_000
    assert read(put(tmp_path, "long.txt", gzip.compress(long.encode())))[0] == [long]


def test_a_first_line_of_excel_names_the_separator_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    assert read(put(tmp_path, "a.csv", "sep=;\r\nid;text\r\n1;a, b\r\n"))[0] == ["a, b"]
    with pytest.raises(UserError, match="line 3 has 3 cells"):
        read(put(tmp_path, "b.csv", "sep=;\nid;text\n1;a;b\n"))


def test_json_lines_called_csv_are_rows(tmp_path: Path) -> None:
    assert read(put(tmp_path, "a.csv", lines({"text": "a"}, {"text": "b"})))[0] == ["a", "b"]


def test_folders_that_datasets_saves_are_read_by_splits(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    about = {"dataset_info.json": '{"features": {"text": {}}}', "state.json": '{"_split": "train"}'}
    put(tmp_path, "dataset_dict.json", '{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        table = pa.table({"text": [split, None, split], "n": [1, 2, 3]})
        file = put(tmp_path, f"{split}/data-00000-of-00001.arrow", b"")
        with pa.ipc.new_stream(str(file), table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
        for name, content in about.items():
            put(tmp_path, f"{split}/{name}", content)
    texts, notes = read(tmp_path)
    assert texts == ["train", "train"]
    assert {"not used: column 'n' (3 rows)", "not used: split 'test' (1 file)"} <= set(notes)
    assert read(tmp_path, split="test")[0] == ["test", "test"]
    assert read(tmp_path / "test")[0] == ["test", "test"]
    with pa.ipc.new_file(str(tmp_path / "b.feather"), table.schema) as feather:
        feather.write_table(table)
    assert read(tmp_path / "b.feather")[0] == ["test", "test"]
    with pytest.raises(UserError, match=r"c\.arrow cannot be read"):
        read(put(tmp_path, "c.arrow", file.read_bytes()[:100]))


@pytest.mark.parametrize(
    ("configs", "texts"),
    [
        ("- config_name: a\n  data_files:\n    train: x/*.jsonl\n    test: y/*.jsonl\n", ["x/one"]),
        ("- config_name: a\n  data_dir: y\n", ["y/one"]),
        ("- config_name: a\n  data_dir: y\n  data_files: one.jsonl\n", ["y/one"]),
        ("- config_name: a\n  data_files: z/*.jsonl\n", "names data files that are not there"),
        ("- config_name: a\n  data_dir: x\n- config_name: b\n  data_dir: y\n", "names 2 configurations"),
    ],
)
def test_each_way_of_a_readme_to_name_files_is_read_or_refused(
    configs: str, texts: list[str] | str, tmp_path: Path
) -> None:
    pytest.importorskip("yaml")
    put(tmp_path, "README.md", f"---\nconfigs:\n{configs}---\n# about\n")
    for folder in "xy":
        put(tmp_path, f"{folder}/one.jsonl", lines({"text": f"{folder}/one"}))
    if isinstance(texts, list):
        assert read(tmp_path)[0] == texts
        return
    with pytest.raises(UserError, match=texts):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"text,source\na,web\n", "text: rows with text"),
        ("b.csv", b"instruction,output,source\na,b,web\n", "conversations"),
        ("c.csv", b"source,target\na,b\n", "columns called source and target"),
        ("d.jsonl", lines({"input": {}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}), "preferences"),
    ],
)
def test_init_takes_a_column_called_source_alone_for_no_edges(
    name: str, content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = put(tmp_path, name, content)
    code = cli.main(["init", str(file), "--out", str(tmp_path / "recipe.toml")])
    captured = capsys.readouterr()
    assert words in captured.out + captured.err
    assert code == (2 if name == "d.jsonl" else 0)  # preferences begin with weights


@pytest.mark.parametrize(("role", "dropped"), [("system", 0), ("tool", 2)])
def test_a_template_that_leaves_a_turn_out_leaves_the_row_out_by_name(role: str, dropped: int) -> None:
    text = (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
        "<{{ m.role }}>{{ m.content }}</>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    template = ChatTemplate(text, {}, "test")
    turns = [Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c"), Turn("assistant", "d")]
    assert template.marked(turns)[0].count("<assistant>") == 2
    with pytest.raises(Unusable, match=f"leaves out its turn of '{role}'"):
        template.marked([*turns[:dropped], Turn(role, "x"), *turns[dropped:]])
    whole = ChatTemplate("{% for m in messages %}{{ m.values() | join(':') }}\n{% endfor %}", {}, "test")
    assert whole.marked([Turn(role, "x"), *turns])[0].startswith(f"{role}:x\n")


def test_keys_of_a_table_of_llama_factory_that_are_not_used_are_named(tmp_path: Path) -> None:
    table = {"a": {"file_name": "a.json", "num_samples": 1}}
    put(tmp_path, "dataset_info.json", json.dumps(table))
    put(tmp_path, "a.json", json.dumps([{"instruction": "a", "output": "b"}] * 2))
    for path in (tmp_path, tmp_path / "a.json"):
        report = ChatReport()
        assert len(list(conversations(Data(path=str(path)), [], report=report))) == 2
        assert "not used: key 'num_samples' (dataset_info.json of a.json: 1)" in report.notes()


@pytest.mark.parametrize(
    ("config", "text", "words"),
    [
        ({"chat_template": {"default": "D", "rag": "R"}}, "D", "config.json"),
        ({"chat_template": [{"name": "rag", "template": "R"}, {"name": "tool_use", "template": "T"}]}, "R", "('rag')"),
        ({"chat_template": []}, None, ""),
        ({"chat_template": 5}, "", "chat_template is 5"),
        ({"eos_token": ["</s>"]}, "", "eos_token = "),
        ({"bos_token": 1}, "", "bos_token = 1"),
    ],
)
def test_templates_and_tokens_of_a_tokenizer_are_named_or_refused(
    config: Any, text: str | None, words: str, tmp_path: Path
) -> None:
    put(tmp_path, "tokenizer.json", "{}")
    put(tmp_path, "tokenizer_config.json", json.dumps(config))
    if text == "":
        with pytest.raises(UserError) as caught:
            tokenizer_files.read(tmp_path / "tokenizer.json")
        assert words in str(caught.value)
        return
    files = tokenizer_files.read(tmp_path / "tokenizer.json")
    assert files.template == text
    assert files.origin.endswith(words)


def test_a_template_that_writes_a_token_the_tokenizer_does_not_have_is_refused() -> None:
    plain = ByteTokenizer()
    files = replace(plain.files, template="{{ bos_token }}{{ messages[0].content }}", special_tokens={})
    plain.files = replace(files, special_tokens={"bos_token": "<|none|>"})
    with pytest.raises(UserError, match=r"bos_token = '<\|none\|>'"):
        open_template(None, plain)
    plain.files = replace(files, special_tokens={"pad_token": "<|none|>"})
    assert open_template(None, plain).text == files.template
