"""A decoder of 256 bytes to start from, and conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier import recipe as config
from espalier.language import gpt, hf
from espalier.language.tokenizer import ByteTokenizer
from espalier.language.tune import workload as tuning
from espalier.language.tune.workload import TuneWorkload
from espalier.recipe import defaults

SIZE = {"depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "feed_forward": 48, "vocabulary": 256, "context": 512}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder."""
    options = defaults.resolve(config.Recipe(model=config.Gpt(**SIZE)))[0].model  # type: ignore[arg-type]
    model = gpt.GPT(options)  # type: ignore[arg-type]
    gpt.initialise(model, 1)
    folder = tmp_path_factory.mktemp("base") / "model"
    hf.export(model, ByteTokenizer(), folder)
    return folder


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Of 1 to 3 questions."""
    rows = []
    for number in range(24):
        turns = [{"role": "system", "content": "short"}] if number % 5 == 0 else []
        for turn in range(1 + number % 3):
            turns += [
                {"role": "user", "content": f"{number}+{turn}?"},
                {"role": "assistant", "content": "i" * turn + "."},
            ]
        rows.append(json.dumps({"messages": turns}))
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(rows) + "\n")
    return file


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{n}?", "chosen": f"yes {n % 3}", "rejected": f"no, {n % 4}, never"} for n in range(16)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file


def recipe_of(base: Path, data: Path, tune: Any, **train: Any) -> config.Recipe:
    """Of a few rows of 128 tokens."""
    options = {"sequence": 128, "batch_tokens": 1024, "steps": 4, "validate_tokens": 256, **train}
    options.setdefault("optimizer", config.Adamw(learning_rate=1e-3, weight_decay=0.0))
    return config.Recipe(
        model=config.Gpt(**SIZE, tied=True, initial=str(base)),  # type: ignore[arg-type]
        data=(config.Data(path=str(data), tokenizer="bytes", validation=0.2),),
        tune=tune,
        train=config.Train(**options),
    )


@pytest.fixture
def opened(
    base: Path, chats: Path, pairs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., TuneWorkload]:
    """Makes the workload of a `[tune]` table."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(tune: Any, **train: Any) -> TuneWorkload:
        recipe = recipe_of(base, pairs if isinstance(tune, config.Dpo) else chats, tune, **train)
        recipe = defaults.resolve(recipe)[0]
        read = tuning.read(recipe, ByteTokenizer(), None, None)
        return TuneWorkload(recipe, tuning.chats_of(recipe, read))

    return make
