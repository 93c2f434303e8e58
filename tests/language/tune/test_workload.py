"""Packed conversations have the losses that each has alone; an epoch takes all of them once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from espalier import recipe as config
from espalier.language import gpt, hf
from espalier.language.tokenizer import ByteTokenizer
from espalier.language.tune import workload as tuning
from espalier.language.tune.workload import TuneWorkload
from espalier.parallel.workload import Shard
from espalier.recipe import defaults
from espalier.recipe.errors import UserError
from espalier.train import workload_registry

FULL = config.Full()


def built(workload: TuneWorkload) -> gpt.GPT:
    model = workload.build(torch.device("cpu"), torch.float32)
    assert isinstance(model, gpt.GPT)
    return model


def test_packed_losses_and_gradients_are_the_sums_of_single_ones(opened: Callable[..., TuneWorkload]) -> None:
    workload = opened(FULL, sequence=512, batch_tokens=1024)
    model = built(workload).double()
    found = workload.chats.train
    assert found is not None
    assert len(workload.train_rows) < len(found)
    total = count = torch.zeros((), dtype=torch.float64)
    for one in range(len(found)):
        start, stop = found.starts[one], found.starts[one + 1]
        ids = torch.from_numpy(found.tokens[start:stop].astype("int64"))
        answers = torch.from_numpy(found.answers[start + 1 : stop])
        chances = F.log_softmax(model(ids[None, :-1])[0], -1)
        total = total - chances[answers, ids[1:][answers]].sum()
        count = count + answers.sum()
    alone = torch.autograd.grad(total, list(model.parameters()))
    batch = workload._batch(found, workload.train_rows, Shard(0, len(workload.train_rows), len(workload.train_rows)))
    loss, weight = workload.loss(model, batch)
    torch.testing.assert_close(loss, total, rtol=1e-10, atol=1e-10)
    assert float(weight) == float(count)
    for one, other in zip(torch.autograd.grad(loss, list(model.parameters())), alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_the_loss_is_transformers_on_the_same_labels(opened: Callable[..., TuneWorkload], base: Path) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        transformers = pytest.importorskip("transformers")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    workload = opened(FULL)
    held = workload.chats.held_out
    total = count = 0.0
    for one in range(len(held)):
        ids = torch.from_numpy(held.tokens[held.starts[one] : held.starts[one + 1]].astype("int64"))[None]
        labels = torch.where(torch.from_numpy(held.answers[held.starts[one] : held.starts[one + 1]])[None], ids, -100)
        with torch.no_grad():
            weight = int((labels[:, 1:] != -100).sum())
            total += float(theirs(ids, labels=labels).loss) * weight
            count += weight
    with torch.no_grad():
        found = workload.evaluate(built(workload), Shard(0, len(workload.held_rows), 2))["loss"]
    assert found[1] == count
    assert found[0] == pytest.approx(total, rel=1e-5)


def test_an_epoch_takes_every_row_once_in_an_order_of_its_own(opened: Callable[..., TuneWorkload]) -> None:
    workload = opened(FULL, batch_tokens=256)
    rows = len(workload.train_rows)
    assert rows % workload.global_batch or rows > workload.global_batch
    taken = [tuple(row) for step in range(rows) for row in workload._chosen(step, Shard(0, workload.global_batch, 1))]
    epochs = [taken[at : at + rows] for at in range(0, len(taken), rows)]
    assert all(sorted(one) == sorted(map(tuple, workload.train_rows)) for one in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("tune", [FULL, config.Lora(rank=2), config.Dpo(rank=2)])
def test_batches_do_not_depend_on_how_they_are_shared(opened: Callable[..., TuneWorkload], tune: config.Tuning) -> None:
    workload = opened(tune)
    model, whole = built(workload), workload.global_batch
    both = [workload.loss(model, one) for one in workload.batches(2, Shard(0, whole, whole))]
    apart = [
        workload.loss(model, one)
        for start, stop in ((0, 1), (1, whole))
        for one in workload.batches(2, Shard(start, stop, 2))
    ]
    for at in (0, 1):
        one, other = (float(sum(pair[at].detach() for pair in each)) for each in (both, apart))
        assert one == pytest.approx(other, rel=1e-5)
    names = workload.documents(2, Shard(0, 1, 1))
    assert names
    assert all(".jsonl:" in name for name in names)


def test_notes_show_one_conversation_with_its_answers_marked(opened: Callable[..., TuneWorkload]) -> None:
    note = opened(FULL).notes()[-1]
    assert "⟦" in note
    assert "<|im_start|>assistant\\n⟦" in note
    assert "between ⟦ and ⟧" in note


def test_a_run_keeps_what_its_adapters_stand_on(
    opened: Callable[..., TuneWorkload], base: Path, tmp_path: Path
) -> None:
    workload = opened(config.Lora(rank=2))
    (tmp_path / "kept").mkdir()
    workload.freeze(tmp_path / "kept")
    thawed = tuning.thaw(workload.recipe, tmp_path / "kept")
    assert thawed.held_out.fingerprint == workload.chats.held_out.fingerprint
    assert thawed.template.text == workload.chats.template.text
    state = hf.load(tmp_path / "kept" / tuning.BASE, torch.float32)[1]
    assert all(torch.equal(value, state[name]) for name, value in hf.load(base, torch.float32)[1].items())


def test_a_vocabulary_larger_than_the_tokenizer_s_gives_text_and_a_smaller_one_is_refused(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published weights have rows without a token, so that matrices divide well."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    size = {"depth": 1, "width": 32, "heads": 2, "feed_forward": 48, "context": 512}
    for vocabulary in (300, 128):
        options = defaults.resolve(config.Recipe(model=config.Gpt(**size, vocabulary=vocabulary)))[0].model
        model = gpt.GPT(options)  # type: ignore[arg-type]
        gpt.initialise(model, 1)
        folder = tmp_path / str(vocabulary)
        hf.export(model, ByteTokenizer(), folder)
        train = config.Train(sequence=128, batch_tokens=256, steps=2, validate_tokens=128)
        data = (config.Data(path=str(chats), validation=0.2),)
        recipe = config.Recipe(model=config.Gpt(initial=str(folder)), data=data, tune=FULL, train=train)
        if vocabulary < 256:
            with pytest.raises(UserError, match="is smaller than the tokenizer's 256 tokens"):
                workload_registry.settle(recipe, tmp_path)
            continue
        resolved = workload_registry.settle(recipe, tmp_path)
        workload = workload_registry.open_workload(resolved)
        assert resolved.recipe.model.vocabulary == 300  # type: ignore[union-attr]
        ready = workload.build(torch.device("cpu"), torch.float32)
        total, weight = workload.loss(ready, workload.batches(0, Shard(0, 1, 1))[0])
        assert torch.isfinite(total)
        assert weight > 0
        assert workload.sample(ready.eval())
        assert ByteTokenizer().decode([104, 299, 105]) == "hi"
