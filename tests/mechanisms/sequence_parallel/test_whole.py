"""What a decoder is told of its tokens: positions and documents, equal to running each document by itself."""

from __future__ import annotations

import pytest
import torch

from espalier import recipe as config
from espalier.language.decoder_workload import new_model
from espalier.parallel.attend import Where


@pytest.fixture(params=[config.Gpt, config.Moe])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    options = request.param(
        depth=2, width=32, heads=4, kv_heads=2, feed_forward=48, vocabulary=64, context=32, tied=True
    )
    return new_model(options, 3, torch.device("cpu")).double().eval()


def test_documents_in_one_row_equal_each_document_by_itself(model: torch.nn.Module) -> None:
    tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(0))
    lengths = [7, 1, 16]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(2, 24)
    positions = torch.cat([torch.arange(length) for length in lengths])
    together = model(tokens, where=Where(positions, documents))
    apart = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-12)


def test_positions_may_differ_from_row_to_row(model: torch.nn.Module) -> None:
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))
    starts = torch.tensor([[0], [20]])
    positions = torch.arange(8) + starts
    torch.testing.assert_close(model(tokens, where=Where(positions)), model(tokens), rtol=0, atol=1e-9)
    shared = model(tokens, where=Where(torch.arange(8)))
    assert torch.equal(shared, model(tokens))


def test_what_is_given_is_what_a_model_would_say_itself(model: torch.nn.Module) -> None:
    tokens = torch.randint(64, (3, 12), generator=torch.Generator().manual_seed(2))
    one = torch.zeros(3, 12, dtype=torch.long)
    torch.testing.assert_close(model(tokens, where=Where(torch.arange(12), one)), model(tokens), rtol=0, atol=1e-12)
