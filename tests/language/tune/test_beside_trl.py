"""Losses and gradients are those of trl's trainers on the same weights and conversations, where trl is installed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier import recipe as config
from espalier.language import gpt, hf
from espalier.language.tokenizer import ByteTokenizer
from espalier.language.tune.workload import TuneWorkload
from espalier.parallel.workload import Shard

Opened = Callable[..., TuneWorkload]
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<end>{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""An answer's turn is the last thing of a text: trl takes all that follows the prompt for an answer."""
LENGTH = 400


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def template(tmp_path: Path) -> str:
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    return str(tmp_path / "mine.jinja")


def theirs(folder: Path) -> Any:
    """Their model and tokenizer."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    ByteTokenizer().save(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.chat_template = TEMPLATE
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer


def rows_of(file: Path) -> Any:
    import datasets

    return datasets.Dataset.from_list([json.loads(line) for line in file.read_text().splitlines()])


def arguments(kind: Any, folder: Path, **more: Any) -> Any:
    own = {"use_cpu": True, "bf16": False, "report_to": [], "max_length": LENGTH, "gradient_checkpointing": False}
    return kind(output_dir=str(folder), per_device_train_batch_size=100, disable_tqdm=True, **own, **more)


def whole(workload: TuneWorkload) -> Any:
    """One batch of all training rows."""
    rows = workload.train_rows
    assert workload.chats.train is not None
    return workload._batch(workload.chats.train, rows, Shard(0, len(rows), len(rows)))


def of_names(names: set[str], file: Path, rows: Any) -> Any:
    """The rows that are trained on; others are held out."""
    return rows.select([number for number in range(len(rows)) if f"{file.name}:{number + 1}" in names])


def stirred(model: gpt.GPT) -> gpt.GPT:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def built(workload: TuneWorkload) -> gpt.GPT:
    model = workload.build(torch.device("cpu"), torch.float32)
    assert isinstance(model, gpt.GPT)
    return model


def same_gradients(model: gpt.GPT, other: torch.nn.Module, loss: torch.Tensor) -> None:
    parameters = {hf.renamed(name): one for name, one in model.named_parameters() if one.requires_grad}
    mine = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    found = {name: one.grad for name, one in other.named_parameters()}
    assert mine.keys() == found.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, found[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("padding_free", [False, True])
def test_the_loss_of_packed_answers_and_its_gradients_are_those_of_trl(
    opened: Opened, chats: Path, base: Path, template: str, tmp_path: Path, padding_free: bool
) -> None:
    trl = pytest.importorskip("trl")
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    workload = opened(config.Full(template=template), sequence=LENGTH, batch_tokens=4 * LENGTH)
    assert workload.chats.train is not None
    model, tokenizer = theirs(base)
    rows = of_names(set(workload.chats.train.names), chats, rows_of(chats))
    assert len(rows) == len(workload.chats.train)
    options = arguments(trl.SFTConfig, tmp_path / "trl", assistant_only_loss=True, packing=False)
    trainer = trl.SFTTrainer(model=model, args=options, train_dataset=rows, processing_class=tokenizer)
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=padding_free)
    inputs = collate([dict(row) for row in trainer.train_dataset])
    asked = {key: inputs[key] for key in ("input_ids", "attention_mask", "position_ids", "labels") if key in inputs}
    found = model.eval()(**asked).loss
    found.backward()

    ours = built(workload)
    total, weight = workload.loss(ours, whole(workload))
    assert int(weight) == int((inputs["labels"] != -100).sum())
    loss = total / weight
    assert float(loss) == pytest.approx(float(found), abs=1e-5)
    same_gradients(ours, model, loss)


def test_preferences_losses_and_gradients_are_those_of_trl(
    opened: Opened, pairs: Path, base: Path, template: str, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    workload = opened(config.Dpo(rank=0, beta=0.3, template=template))
    assert workload.chats.train is not None
    ours = stirred(built(workload))
    model, tokenizer = theirs(base)
    before = theirs(base)[0]
    model.load_state_dict({hf.renamed(name): value for name, value in ours.state_dict().items()}, strict=False)
    names = set(workload.chats.train.names)
    rows = of_names(names, pairs, rows_of(pairs)).map(
        lambda row: {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{side: [{"role": "assistant", "content": row[side]}] for side in ("chosen", "rejected")},
        }
    )
    options = arguments(trl.DPOConfig, tmp_path / "trl", beta=0.3, disable_dropout=False)
    trainer = trl.DPOTrainer(
        model=model, ref_model=before, args=options, train_dataset=rows, processing_class=tokenizer
    )
    inputs = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    found = trainer.compute_loss(trainer.model, inputs)
    found.backward()

    total, weight = workload.loss(ours, whole(workload))
    loss = total / weight
    assert 2 * int(weight) == len(inputs["input_ids"])
    assert abs(float(loss) - 0.6931) > 1e-3
    assert float(loss) == pytest.approx(float(found), abs=1e-5)
    same_gradients(ours, model, loss)
