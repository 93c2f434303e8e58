"""Answers are found in the text that a template makes, as transformers finds them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from espalier.language.tokenizer import ByteTokenizer, HfTokenizer, open_tokenizer
from espalier.language.tune.chat_rows import _answers
from espalier.language.tune.chat_template import CHATML, ChatTemplate, open_template
from espalier.language.tune.conversations import Turn, Unusable
from espalier.recipe.errors import UserError

TURNS = [
    Turn("system", "s"),
    Turn("user", "hi"),
    Turn("assistant", "hello\n"),
    Turn("user", "bye"),
    Turn("assistant", "c"),
]
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Of SmolLM2-Instruct (shortened): without `generation` blocks."""
LLAMA = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% elif message.role == 'assistant' %} {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)


def answers(template: ChatTemplate, turns: list[Turn] = TURNS) -> list[str]:
    text, spans = template.marked(turns)
    return [text[start:stop] for start, stop in spans]


def test_answers_end_with_the_end_of_their_turn() -> None:
    for text in (CHATML, SMOLLM):
        template = ChatTemplate(text, {}, "test")
        assert answers(template) == ["hello\n<|im_end|>", "c<|im_end|>"]
        assert template.ending == "<|im_end|>"
    template = ChatTemplate(LLAMA, {"bos_token": "<s>", "eos_token": "</s>"}, "test")
    assert answers(template, TURNS[1:]) == ["hello\n</s>", "c</s>"]


def test_a_prompt_ends_where_the_answer_begins() -> None:
    template = ChatTemplate(SMOLLM, {}, "test")
    text, spans = template.marked(TURNS[1:3])
    assert text[: spans[0][0]] == template.render(TURNS[1:2], answering=True)


def test_what_a_template_refuses_is_left_out_and_what_is_broken_is_named() -> None:
    with pytest.raises(Unusable, match="only user and assistant"):
        ChatTemplate(LLAMA, {"bos_token": "", "eos_token": ""}, "test").marked(TURNS)
    with pytest.raises(UserError, match="is no Jinja template"):
        ChatTemplate("{% for %}", {}, "test").render(TURNS)
    with pytest.raises(UserError, match="fails"):
        ChatTemplate("{{ messages[9].content.upper() }}", {}, "test").render(TURNS)
    backwards = "{% for message in messages | reverse %}{{ message.content }}{% endfor %}"
    with pytest.raises(UserError, match="does not say which tokens are answers"):
        ChatTemplate(backwards, {}, "test").marked(TURNS)


def test_a_template_cannot_run_code() -> None:
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(UserError, match="fails"):
        ChatTemplate(evil, {}, "test").render(TURNS)


def test_the_template_is_the_recipe_s_then_the_tokenizer_s_then_chatml(tmp_path: Path) -> None:
    assert open_template(None, ByteTokenizer()).text == CHATML
    ByteTokenizer().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "own", "eos_token": {"content": "e"}}))
    own = open_template(None, open_tokenizer(str(tmp_path)))
    assert (own.text, own.tokens) == ("own", {"eos_token": "e"})
    (tmp_path / "mine.jinja").write_text("mine")
    assert open_template(str(tmp_path / "mine.jinja"), open_tokenizer(str(tmp_path))).text == "mine"
    with pytest.raises(UserError, match=r"tune\.template"):
        open_template(str(tmp_path / "none"), ByteTokenizer())


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    """A byte-pair tokenizer with ChatML's tokens."""
    import tokenizers

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["system user assistant hello bye hi naïve 你好"] * 20, trainer)
    folder = tmp_path_factory.mktemp("marked")
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    found = open_tokenizer(str(folder))
    assert isinstance(found, HfTokenizer)
    return found


@pytest.mark.parametrize("text", ["hello", "naïve 你好", "a <|im_end|> b"])
def test_tokens_and_answers_are_those_of_transformers(marked: HfTokenizer, text: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        from transformers import PreTrainedTokenizerFast

        marked.save(tmp_path)
        theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    turns = [Turn("user", "hi"), Turn("assistant", text), Turn("user", "bye"), Turn("assistant", "c")]
    template = ChatTemplate(CHATML, {}, "test")
    told, spans = template.marked(turns)
    ids, places = marked.encode_marked([told])[0]
    found = theirs.apply_chat_template(
        [turn._asdict() for turn in turns],
        chat_template=CHATML,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert ids.tolist() == found["input_ids"]
    assert _answers(places, spans).tolist() == [bool(one) for one in found["assistant_masks"]]


def test_bytes_have_no_special_tokens() -> None:
    ids, places = ByteTokenizer().encode_marked(["é<|im_end|>"])[0]
    assert bytes(ids.tolist()).decode() == "é<|im_end|>"
    assert np.array_equal(places[:3], [[0, 1], [0, 1], [1, 2]])
