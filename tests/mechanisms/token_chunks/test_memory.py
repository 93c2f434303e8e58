"""What a pass holds at its worst moment is what the plan's formula says, whole and by chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_activation_memory import LiveBytes

from espalier.language import gpt
from espalier.language.decoder_workload import new_model
from espalier.language.operation_counts import DecoderLoad
from espalier.mechanisms.token_chunks.feed_forward import by_chunks
from espalier.plan.axes import token_chunks
from espalier.recipe import Gpt
from espalier.recipe.decoder_shapes import sizes

SEQUENCE = 1024


class MostBytes(LiveBytes):
    """Counts the most that were there at once. Has state."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.total)
        return result


def options(**changes: Any) -> Gpt:
    given: dict[str, Any] = {
        "depth": 3, "width": 32, "heads": 4, "kv_heads": 4, "feed_forward": 96, "vocabulary": 64, "context": SEQUENCE,
        "tied": False, "rope_theta": 1e4, "norm_epsilon": 1e-5, **changes,
    }  # fmt: skip
    return Gpt(**given)


def measured(model_options: Gpt, mode: str, loss: int, feed_forward: int) -> int:
    """Bytes, gradients of parameters aside."""
    model = new_model(model_options, 1, torch.device("cpu"))
    gpt.recompute(model, mode)
    model.loss_chunk = loss
    for block in model.blocks if feed_forward else ():
        block.feed_forward.forward = by_chunks(block.feed_forward, feed_forward)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(model.size.vocabulary, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    with MostBytes() as live:
        model.loss_sum(tokens[:, :-1], tokens[:, 1:]).backward()
    return live.most


def planned(model_options: Gpt, mode: str, loss: int, feed_forward: int) -> float:
    whole = gpt.work(DecoderLoad(sizes(model_options), SEQUENCE, 1, mode, "fp32"))
    layer = token_chunks.by_chunks(whole.layer, feed_forward)
    rest = token_chunks.by_chunks(whole.rest, loss)
    return float(whole.layers * layer.saved + rest.saved + max(layer.transient, rest.transient))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", ["none", "block"])
@pytest.mark.parametrize("chunks", [(0, 0), (64, 0), (256, 0), (64, 128)])
@pytest.mark.parametrize("changes", [{"vocabulary": 2048}, {"feed_forward": 1024}], ids=["words", "columns"])
def test_planned_bytes_are_allocated(mode: str, chunks: tuple[int, int], changes: dict[str, Any]) -> None:
    made = options(**changes)
    assert measured(made, mode, *chunks) == pytest.approx(planned(made, mode, *chunks), rel=0.04)


@pytest.mark.parametrize(("changes", "chunks"), [({"vocabulary": 2048}, (64, 0)), ({"feed_forward": 1024}, (64, 64))])
def test_peaks_are_a_third_at_most(changes: dict[str, Any], chunks: tuple[int, int]) -> None:
    made = options(**changes)
    assert measured(made, "block", *chunks) < measured(made, "block", 0, 0) / 3
