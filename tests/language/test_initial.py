"""`model.initial`: models of the hub, and the first layers of a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from espalier import recipe as config
from espalier.cli import resolve_recipe
from espalier.language import gpt, hf
from espalier.language.decoder_workload import new_model
from espalier.language.tokenizer import ByteTokenizer
from espalier.language.tune import lora, peft
from espalier.recipe.errors import UserError

SIZE: dict[str, Any] = {
    "depth": 3, "width": 32, "heads": 4, "kv_heads": 2, "feed_forward": 48, "vocabulary": 256, "context": 64,
    "tied": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "base"
    hf.export(new_model(config.Gpt(**SIZE), 3, torch.device("cpu")), ByteTokenizer(), folder)
    return folder


@pytest.fixture
def hub(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hub with one model, and a cache that is empty at first. `hub.asked`: what the network was asked for."""

    class Hub:
        asked: list[tuple[str, str | None]] = []  # noqa: RUF012
        there = True

        def download(self, name: str, *, revision: str | None, local_files_only: bool, **others: Any) -> str:
            cached = tmp_path / "cache" / name
            assert others["ignore_patterns"] == ["*/*", "consolidated*"]
            if local_files_only:
                if not cached.is_dir():
                    raise LocalEntryNotFoundError("not in the cache")
                return str(cached)
            self.asked.append((name, revision))
            if not self.there or name != "org/base":
                raise OSError("no network")
            shutil.copytree(base, cached, dirs_exist_ok=True)
            return str(cached)

    made = Hub()
    made.asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.download)
    hf._downloaded.cache_clear()
    yield made
    hf._downloaded.cache_clear()


def test_a_model_of_the_hub_is_downloaded_once_and_then_found_in_the_cache(hub: Any, base: Path) -> None:
    options, state = hf.load("hf:org/base@main", torch.float32)
    assert options == hf.options(base)
    assert all(torch.equal(value, state[name]) for name, value in hf.load(base, torch.float32)[1].items())
    assert hub.asked == [("org/base", "main")]
    hub.there = False
    hf._downloaded.cache_clear()  # another process
    model = gpt.GPT(options)  # type: ignore[arg-type]
    hf.load_into(model, Path("hf:org/base"))
    assert len(hub.asked) == 1
    assert hf.tokenizer_of("hf:org/base") == hf.opened("hf:org/base") / "tokenizer.json"


def test_a_cache_with_the_configuration_alone_is_completed(hub: Any, base: Path, tmp_path: Path) -> None:
    cached = tmp_path / "cache" / "org" / "base"
    cached.mkdir(parents=True)
    shutil.copy(base / "config.json", cached)
    assert hf.load("hf:org/base", torch.float32)[0].depth == 3
    assert hub.asked == [("org/base", None)]


def test_what_is_neither_in_the_cache_nor_reached_is_one_sentence(hub: Any) -> None:
    with pytest.raises(UserError, match=r"hf:org/other.* cannot be loaded") as error:
        hf.options("hf:org/other")
    assert "no network" in str(error.value)


def test_a_bare_name_of_the_hub_leads_to_its_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="There is no folder HuggingFaceTB/SmolLM3-3B") as error:
        hf.options("HuggingFaceTB/SmolLM3-3B")
    assert '"hf:HuggingFaceTB/SmolLM3-3B"' in str(error.value)
    with pytest.raises(UserError) as error:
        hf.options("models/mine/deeper")
    assert "hf:" not in str(error.value)


def recipe_of(folder: Path, base: Path, **model: Any) -> tuple[Any, Any]:
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"initial": str(base), **model}.items()]
    (folder / "text.txt").write_text("a few words of text " * 200)
    text = "\n".join(["[model]", *lines, "[data]", f'path = "{folder}/text.txt"', "[train]", "steps = 1"])
    (folder / "recipe.toml").write_text(text + "\n")
    resolved = resolve_recipe.resolve(folder / "recipe.toml", [])
    return resolved.recipe, resolved.derivations


def test_the_first_layers_of_a_model_are_its_own(base: Path, tmp_path: Path) -> None:
    recipe, derivations = recipe_of(tmp_path, base, layers="first 2")
    assert recipe.model.depth == 2
    reasons = {derivation.key: derivation.reason for derivation in derivations}
    assert "the first 2 of 3 layers" in reasons["model.depth"]
    model = new_model(recipe.model, 1, torch.device("cpu"))
    hf.load_into(model, base)
    whole = hf.load(base, torch.float32)[1]
    assert not any(name.startswith("blocks.2.") for name in model.state_dict())
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    weights = hf.weights_of(model, base)
    assert torch.equal(weights("blocks.1.attention.key.weight"), whole["blocks.1.attention.key.weight"])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"layers": "last 2"}, "model.layers = 'last 2' is not possible"),
        ({"layers": "first 0"}, "model.layers = 'first 0' is not possible"),
        ({"layers": "first 4"}, "has 3 layers"),
        ({"layers": "first 2", "depth": 3}, "model.depth = 3, but 2 there"),
        ({"depth": 2}, 'model.layers = "first 12"'),
    ],
)
def test_other_numbers_of_layers_are_refused(base: Path, tmp_path: Path, model: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        recipe_of(tmp_path, base, **model)
    assert words in str(error.value)


def test_layers_without_weights_to_start_from_are_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('[model]\nlayers = "first 2"\n[data]\npath = "python:stdlib"\n')
    with pytest.raises(UserError, match=r"model\.layers = 'first 2' is not possible"):
        resolve_recipe.resolve(tmp_path / "recipe.toml", [])


def test_adapters_that_peft_cannot_hold_are_refused_by_name() -> None:
    model = new_model(config.Gpt(**SIZE, family="phi3"), 1, torch.device("cpu"))
    with pytest.raises(UserError, match="PEFT has no adapters of phi3's matrices"):
        peft.tensors_of(lora.adapt(model, config.Lora(rank=2), 1))


def test_a_hub_name_stays_one_in_peft_and_first_layers_have_no_whole_base() -> None:
    model = config.Gpt(initial="hf:org/base@v2")
    made = SimpleNamespace(initial=model.initial, recipe=SimpleNamespace(model=model, tune=config.Lora(rank=2)))
    table = peft.config_of(made, [])  # type: ignore[arg-type]
    assert (table["base_model_name_or_path"], table["revision"]) == ("org/base", "v2")
    made.recipe.model = config.Gpt(initial="hf:org/base", layers="first 2")
    with pytest.raises(UserError, match="first 2 layers do not fit the whole hf:org/base"):
        peft.config_of(made, [])  # type: ignore[arg-type]
