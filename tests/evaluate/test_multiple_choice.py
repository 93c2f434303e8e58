"""Multiple choice: likelihoods equal the plain sum, the right line is named, length does not decide."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_decoder import decoder, plainly

from espalier.evaluate.multiple_choice import COLUMNS, MultipleChoice, Question, loglikelihoods, marks, read
from espalier.language.tokenizer import open_tokenizer
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import FieldUse

IDS = st.lists(st.integers(0, 256), min_size=1, max_size=17)


@settings(max_examples=20)
@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=4))
@torch.no_grad()
def test_the_likelihood_of_a_batch_is_that_of_each_token_alone(pairs) -> None:
    model = decoder()
    for (total, greedy), (head, tail) in zip(loglikelihoods(model, pairs), pairs, strict=True):
        expected, all_likeliest = plainly(model, head, tail)
        assert total == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert greedy == all_likeliest


def written(folder: Path, *lines: str) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_a_question_is_answered_by_the_likeliest_choice(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '{"question": "2 + 2 =", "choices": ["3", "4 of course"], "answer": 1}',
        "",
        '{"context": "Cats purr.", "question": "What do cats do?", "choices": ["bark", "purr"], "answer": "purr"}',
    )
    task = MultipleChoice("facts", path, open_tokenizer("bytes"))
    assert task.records == 2
    question = Question(question="2 + 2 =", choices=("3", "4 of course"), answer=1)
    assert marks([-4.0, -9.0], question) == {"accuracy": (1.0, 1.0), "accuracy_unnormalised": (0.0, 1.0)}
    model = decoder()
    with torch.no_grad():
        head = [0, *b"Cats purr.\nWhat do cats do?"]
        found = [plainly(model, head, list(choice))[0] for choice in (b" bark", b" purr")]
        asked = Question(context="Cats purr.", question="What do cats do?", choices=("bark", "purr"), answer="purr")
        assert task.evaluate(model, 1) == marks(found, asked)
        assert {marks(each, asked)["accuracy"] for each in (found, found[::-1])} == {(0.0, 1.0), (1.0, 1.0)}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2"),
        ("\xff", "line 2"),
        ('{"question": "q", "choices": ["a"], "answer": 0}', "two choices"),
        ('{"question": "q", "choices": ["a", ""], "answer": 0}', "empty"),
        ('{"question": "q", "choices": ["a", "b"], "answer": 2}', "not within 0 to 1"),
        ('{"question": "q", "choices": ["a", "b"], "answer": "c"}', "none of its choices"),
        ('{"choices": ["a", "b"], "answer": 0}', "neither question nor context"),
        ('{"question": "q", "choices": ["a", "b"]}', "answer"),
        ('{"question": "q", "choices": ["a", "b\\ud800"], "answer": 0}', "half a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(b'{"question": "q", "choices": ["a", "b"], "answer": 0}\n' + line.encode("latin-1"))
    with pytest.raises(UserError, match=words) as caught:
        read(path, "facts")
    assert "line 2" in str(caught.value).lower()


def test_a_file_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "nowhere.jsonl", "facts")
    with pytest.raises(UserError, match="holds no question"):
        read(written(tmp_path, "", ""), "facts")


def test_questions_are_read_after_a_byte_order_mark_and_from_lists_and_other_columns_are_named(tmp_path: Path) -> None:
    row = '{"question": "q", "choices": ["a", "b"], "answer": 0, "subject": "x"}'
    for name, text in (("a.jsonl", f"{row}\n{row}"), ("b.JSON", f"[{row}, {row}]"), ("c.txt", f"{row}\n{row}\n")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        use = FieldUse(COLUMNS)
        assert [question.choices for question in read(tmp_path / name, "facts", use)] == [("a", "b")] * 2
        assert use.notes() == ("not used: column 'subject' (2 questions)",)
