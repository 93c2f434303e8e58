import contextlib

import pytest
import torch
from torch import nn

from espalier.train.whole_model import WholeSchedule


def loss(model, batch):
    values = model(batch).square().sum(dim=1)
    return values.sum(), torch.tensor(float(len(values)))


@pytest.mark.parametrize("cuts", [1, 2, 3, 7])
def test_micro_batches_give_the_gradient_of_the_whole_batch(cuts):
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    batch = torch.randn(7, 5, dtype=torch.float64)
    expected = torch.autograd.grad(loss(model, batch)[0] / 7, list(model.parameters()))
    seen = []

    @contextlib.contextmanager
    def accumulate(last):
        seen.append(last)
        yield

    outcome = WholeSchedule(7.0, accumulate, contextlib.nullcontext).run(model, batch.chunk(cuts), loss)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)
    assert float(outcome.weight) == 7
    assert float(outcome.loss) == pytest.approx(loss(model, batch)[0].item(), rel=1e-12)
    assert seen == [False] * (len(seen) - 1) + [True]
