"""Rows hold every conversation once; targets are answers and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.language.gpt import IGNORED
from espalier.language.tokenizer import ByteTokenizer
from espalier.language.tune import chat_rows
from espalier.language.tune.chat_template import CHATML, ChatTemplate
from espalier.recipe import Data
from espalier.recipe.errors import UserError

TEMPLATE = ChatTemplate(CHATML, {}, "test")


@given(st.lists(st.integers(1, 64), min_size=1, max_size=200))
@settings(max_examples=40, deadline=None)
def test_rows_hold_each_conversation_once_and_no_two_rows_fit_into_one(lengths: list[int]) -> None:
    rows = chat_rows.packed(lengths, 64)
    assert sorted(one for row in rows for one in row) == list(range(len(lengths)))
    full = sorted(sum(lengths[one] for one in row) for row in rows)
    assert full[-1] <= 64
    assert len(full) < 2 or full[0] + full[1] > 64


@pytest.fixture
def found(chats: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> chat_rows.ChatTokens:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return chat_rows.read(Data(path=str(chats)), ByteTokenizer(), TEMPLATE, pairs=False)


def test_targets_are_the_answers_and_their_ends(found: chat_rows.ChatTokens) -> None:
    rows = chat_rows.packed(found.lengths, 400)
    tokens, targets, positions, documents = chat_rows.filled(found, rows, 400, padding=0)
    assert tokens.shape == (len(rows), 400)
    for row, members in enumerate(rows):
        for number, one in enumerate(members, start=1):
            here = documents[row] == number
            text = bytes(found.tokens[found.starts[one] : found.starts[one + 1]].tolist()).decode()
            assert bytes(tokens[row, here].tolist()).decode() == text[:-1]
            assert positions[row, here].tolist() == list(range(len(text) - 1))
            asked = bytes(targets[row, here][targets[row, here] != IGNORED].tolist()).decode()
            answers = [part.partition("<|im_end|>")[0] for part in text.split("<|im_start|>assistant\n")[1:]]
            assert asked == "".join(f"{answer}<|im_end|>" for answer in answers)
    assert (targets[documents == 0] == IGNORED).all()


def test_what_was_read_before_is_read_from_the_cache_and_damage_is_mended(
    chats: Path, found: chat_rows.ChatTokens, tmp_path: Path
) -> None:
    (file,) = (tmp_path / "cache" / "espalier" / "chats").glob("*.npz")
    again = chat_rows.read(Data(path=str(chats)), ByteTokenizer(), TEMPLATE, pairs=False)
    assert again.fingerprint == found.fingerprint
    assert list(again.names) == list(found.names)
    file.write_bytes(file.read_bytes()[:100])
    assert (
        chat_rows.read(Data(path=str(chats)), ByteTokenizer(), TEMPLATE, pairs=False).fingerprint == found.fingerprint
    )


def test_both_sides_depend_on_contents_alone(found: chat_rows.ChatTokens) -> None:
    train, held_out, _ = chat_rows.divided(found, 0.3, 1000, "drop")
    assert len(train) + len(held_out) == len(found)
    backwards = found.at(range(len(found) - 1, -1, -1))
    assert set(chat_rows.divided(backwards, 0.3, 1000, "drop")[1].names) == set(held_out.names)
    assert len(chat_rows.divided(found, 1e-9, 1000, "drop")[1]) == 1


def test_longer_conversations_are_left_out_or_cut_and_counted(found: chat_rows.ChatTokens) -> None:
    lengths = np.diff(found.starts)
    limit = int(np.median(lengths))
    train, held_out, notes = chat_rows.divided(found, 0.3, limit - 1, "drop")
    over = int((lengths > limit).sum())
    assert len(train) + len(held_out) == len(found) - over
    assert notes[0].startswith(
        f"{over} conversations have more than train.sequence = {limit - 1} tokens and are left out"
    )
    train, held_out, notes = chat_rows.divided(found, 0.3, limit - 1, "cut")
    assert max(np.diff(train.starts).max(), np.diff(held_out.starts).max()) <= limit
    assert "lose their ends" in notes[0]
    with pytest.raises(UserError, match=r"can be trained on with train\.sequence = 4"):
        chat_rows.divided(found, 0.3, 4, "drop")


def test_preferences_and_answers_are_told_apart(chats: Path, pairs: Path, found: chat_rows.ChatTokens) -> None:
    with pytest.raises(UserError, match="is no preference"):
        chat_rows.read(Data(path=str(chats)), ByteTokenizer(), TEMPLATE, pairs=True)
    with pytest.raises(UserError, match="is a preference"):
        chat_rows.read(Data(path=str(pairs)), ByteTokenizer(), TEMPLATE, pairs=False)
    both = chat_rows.read(Data(path=str(pairs)), ByteTokenizer(), TEMPLATE, pairs=True)
    assert len(both) == 32
    sides = [
        bytes(both.tokens[a:b][both.answers[a:b]].tolist()).decode()
        for a, b in zip(both.starts, both.starts[1:], strict=False)
    ]
    assert sides[:2] == ["yes 0<|im_end|>", "no, 0, never<|im_end|>"]
