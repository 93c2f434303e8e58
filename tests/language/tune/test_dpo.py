"""DPO's losses are those of its equation, and its reference is the model before training."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from espalier import recipe as config
from espalier.language import gpt
from espalier.language.tune import dpo
from espalier.language.tune.workload import TuneWorkload
from espalier.parallel.workload import Shard

KINDS = [config.Dpo(rank=4, beta=0.3), config.Dpo(rank=0, beta=0.3)]


def made(workload: TuneWorkload) -> gpt.GPT:
    model = workload.build(torch.device("cpu"), torch.float32)
    assert isinstance(model, gpt.GPT)
    return model.double()


def stirred(model: gpt.GPT) -> gpt.GPT:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.mark.parametrize("tune", KINDS)
def test_an_untrained_model_is_its_own_reference(opened: Callable[..., TuneWorkload], tune: config.Dpo) -> None:
    workload = opened(tune)
    (batch,) = workload.batches(0, Shard(0, workload.global_batch, workload.global_batch))
    total, weight = workload.loss(made(workload), batch)
    assert float(total.detach()) == pytest.approx(math.log(2) * float(weight), abs=1e-9)


@pytest.mark.parametrize("tune", KINDS)
def test_losses_and_gradients_are_those_of_the_equation(opened: Callable[..., TuneWorkload], tune: config.Dpo) -> None:
    workload = opened(tune)
    before, model = made(workload), stirred(made(workload))
    (batch,) = workload.batches(1, Shard(0, workload.global_batch, workload.global_batch))

    def of(one: gpt.GPT, row: int) -> torch.Tensor:
        """log p(answer), token by token, of one conversation alone."""
        length = int((batch.targets[row] != gpt.IGNORED).nonzero()[-1]) + 1
        chances = F.log_softmax(one(batch.tokens[row : row + 1, :length]), -1)[0]
        targets = batch.targets[row, :length]
        return sum(chances[at, targets[at]] for at in (targets != gpt.IGNORED).nonzero().flatten().tolist())  # type: ignore[return-value]

    total = torch.zeros((), dtype=torch.float64)
    for pair in range(workload.global_batch):
        with torch.no_grad():
            reference = of(before, 2 * pair) - of(before, 2 * pair + 1)
        gain = of(model, 2 * pair) - of(model, 2 * pair + 1) - reference
        total = total - torch.log(1 / (1 + torch.exp(-tune.beta * gain)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(total, trained)
    loss, weight = workload.loss(model, batch)
    found = torch.autograd.grad(loss, trained)
    assert float(weight) == workload.global_batch
    torch.testing.assert_close(loss, total, rtol=1e-9, atol=1e-9)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_a_whole_model_keeps_a_frozen_copy_that_is_not_saved(opened: Callable[..., TuneWorkload]) -> None:
    model = made(opened(KINDS[1]))
    kept = model._modules[dpo.REFERENCE]
    assert isinstance(kept, gpt.GPT)
    assert not any(parameter.requires_grad for parameter in kept.parameters())
    assert not any(dpo.REFERENCE in name for name in model.state_dict())
    model.load_state_dict(stirred(model).state_dict())


def test_evaluation_says_how_often_the_chosen_answer_is_preferred(opened: Callable[..., TuneWorkload]) -> None:
    workload = opened(KINDS[0])
    samples = workload.validation_samples()
    with torch.no_grad():
        found = workload.evaluate(stirred(made(workload)), Shard(0, samples, 1))
    assert set(found) == {"loss", "margin", "preferred"}
    assert all(weight == samples for _, weight in found.values())
