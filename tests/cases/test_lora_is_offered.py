"""Where a model does not fit, the refusal offers adapters beside frozen weights, with the memory they take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import espalier
from espalier.cli import resolve_recipe
from espalier.machine import cluster as clusters
from espalier.plan import refusals
from espalier.plan.request import Request
from espalier.recipe import Lora, Recipe
from espalier.recipe.cost import WHOLE
from espalier.recipe.errors import UserError
from espalier.train import request_from_recipe

RECIPE = """
[model]
{model}
[data]
path = "text.jsonl"
[train]
steps = 1000
sequence = 8192
batch_tokens = 65536
precision = "bf16"
"""
LLAMA = 'shape = "llama3-8b"'
CARD = '[[nodes]]\ndevice = "A100-80GB"\n'


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refusal(folder: Path, model: str, device: str) -> list[str]:
    """What the planner says that would help, line by line."""
    (folder / "recipe.toml").write_text(RECIPE.format(model=model))
    (folder / "cluster.toml").write_text(f"[[nodes]]\ndevice = {device}\n")
    (folder / "text.jsonl").write_text('{"text": "the fox"}\n')
    with pytest.raises(UserError) as error:
        espalier.make_plan(folder / "recipe.toml", folder / "cluster.toml")
    return error.value.do.splitlines()


def resolved(folder: Path, model: str) -> Recipe:
    (folder / "recipe.toml").write_text(RECIPE.format(model=model))
    (folder / "text.jsonl").write_text('{"text": "the fox"}\n')
    recipe: Recipe = resolve_recipe.resolve(str(folder / "recipe.toml"), []).recipe
    return recipe


def test_a_card_for_adapters_is_told_so_with_its_memory(tmp_path):
    told = refusal(tmp_path, LLAMA, '"A100-80GB"')
    (lora,) = [line for line in told if "lora" in line]
    match = re.search(r'^ *tune\.kind="lora": .* ([\d.]+) GiB of ([\d.]+) GiB\)$', lora)
    assert match is not None, lora
    assert 29.9 < float(match[1]) < float(match[2])  # frozen weights alone are 29.9 GiB
    assert told[-1].strip() == "not in Espalier: optimizer states in 8 bits"


def test_a_smaller_card_is_told_to_store_frozen_weights_in_fewer_bits(tmp_path):
    (lora,) = [line for line in refusal(tmp_path, LLAMA, '"RTX 4090"') if "lora" in line]
    assert re.search(r'tune\.kind="lora", tune\.frozen="(bf16|int8|int4)": .* [\d.]+ GiB of 22\.4 GiB', lora)


def test_a_card_too_small_for_adapters_is_told_what_they_take(tmp_path):
    machine = '"cpu"\ncores = 2\nmemory = "8GiB"'
    (lora,) = [line for line in refusal(tmp_path, LLAMA, machine) if "lora" in line]
    match = re.search(r'not enough: tune\.kind="lora", tune\.frozen="int4", which takes ([\d.]+) GiB of ', lora)
    assert match is not None, lora
    assert float(match[1]) > 8


@pytest.mark.parametrize("frozen", ["fp32", "bf16", "int8", "int4"])
def test_what_is_offered_is_what_a_recipe_with_adapters_is_planned_with(tmp_path, frozen):
    recipe = resolved(tmp_path, LLAMA)
    full = request_from_recipe.of_recipe(recipe)
    assert full.request_of is not None
    offered = full.request_of(msgspec.structs.replace(full.recipe, tune=Lora(frozen=frozen)))
    planned = request_from_recipe.of_recipe(msgspec.structs.replace(recipe, tune=Lora(frozen=frozen)))
    for name in ("parameters", "trainable", "frozen", "sizes", "tokens_per_sample", "global_batch", "layers"):
        assert getattr(offered.profile, name) == getattr(planned.profile, name)
    assert offered.profile.trainable < full.profile.trainable / 100
    fewer = [line for line in refusals._adapters(planned, clusters.loads(CARD)) if "tune" in line]
    assert fewer == [] if frozen == "int4" else all("tune.kind" not in line for line in fewer)


def work(request: Request, mode: str) -> Any:
    return request.profile.anatomy(2, mode, "bf16", WHOLE)


@pytest.mark.parametrize("mode", ["none", "selective", "block"])
def test_adapters_keep_the_activations_of_all_layers(tmp_path, mode):
    recipe = resolved(tmp_path, 'kind = "gpt"\nwidth = 64\nheads = 2\ndepth = 5\nvocabulary = 256')
    full = work(request_from_recipe.of_recipe(recipe), mode)
    adapters = work(request_from_recipe.of_recipe(msgspec.structs.replace(recipe, tune=Lora(rank=1))), mode)
    assert (full.layers, adapters.layers) == (5, 5)
    assert adapters.layer.saved == pytest.approx(full.layer.saved, rel=0.02)
    assert full.layer.transient <= adapters.layer.transient <= 1.02 * full.layer.transient
    assert 1 <= adapters.layer.forward_flops / full.layer.forward_flops < 1.05
    assert adapters.layer.model_flops < full.layer.model_flops
    assert np.isclose(adapters.layer.again, full.layer.again)


def test_models_that_take_no_adapters_are_offered_none(tmp_path):
    recipe = resolved(tmp_path, 'kind = "moe"\nwidth = 64\nheads = 2\ndepth = 2\nexperts = 4\nvocabulary = 256')
    request = request_from_recipe.of_recipe(recipe)
    assert not list(refusals._adapters(request, clusters.loads(CARD)))
