"""The plain loop that ours is timed beside trains the same decoder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from espalier.language.gpt import GPT
from espalier.recipe import defaults, recipe_file

NAMES = {
    "attention_norm": "first",
    "feed_forward_norm": "second",
    "attention.query": "q",
    "attention.key": "k",
    "attention.value": "v",
    "attention.out": "out",
    "feed_forward.gate": "gate",
    "feed_forward.up": "up",
    "feed_forward.down": "down",
}


def test_the_plain_loop_has_the_logits_of_our_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "bench"), *sys.path])
    from plain_loop import Decoder as Plain

    table = {"model": {"depth": 2, "width": 64, "heads": 4, "kv_heads": 2}, "data": {"path": "x"}}
    options = defaults.resolve(recipe_file.from_table({**table, "train": {"sequence": 32, "batch_tokens": 64}}))[
        0
    ].model
    ours = GPT(options)  # type: ignore[arg-type]
    torch.manual_seed(0)
    for one in ours.parameters():
        torch.nn.init.normal_(one, 0.0, 0.3)
    names = ("width", "depth", "heads", "kv_heads", "feed_forward", "vocabulary")
    plain = Plain({name: getattr(options, name) for name in names} | {"tied": True, "sequence": 32})
    state = {}
    for name, value in ours.state_dict().items():
        plainly = name
        for long, short in NAMES.items():
            plainly = plainly.replace(long, short)
        state[plainly] = value
    plain.load_state_dict({**state, "head.weight": state["embedding.weight"]})
    tokens = torch.randint(0, 256, (3, 32), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain(tokens), ours(tokens), rtol=1e-4, atol=1e-5)
