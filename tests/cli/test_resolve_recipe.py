"""What the planner is asked: the model counted without being built."""

from __future__ import annotations

import time
from collections import Counter

import msgspec
import pytest
import torch

from espalier import recipe as config
from espalier.cli import resolve_recipe
from espalier.language import decoder_workload as language
from espalier.optim.base import names_of
from espalier.recipe import decoder_shapes, defaults
from espalier.train.workload_registry import Resolved


def resolved(model: config.Gpt | config.Moe) -> config.Recipe:
    return defaults.resolve(config.Recipe(model=model))[0]


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [config.Gpt, config.Moe])
def test_counting_blocks_equals_building_them(kind: type[config.Gpt], tied: bool, depth: int) -> None:
    recipe = resolved(kind(depth=depth, width=64, heads=2, kv_heads=1, vocabulary=100, tied=tied))
    assert isinstance(recipe.model, config.Gpt | config.Moe)
    request = resolve_recipe.request(Resolved(recipe))
    model = language.new_model(recipe.model, 0, torch.device("meta"))
    trainable = names_of(model)
    outside = set(language.embeddings(model))
    hidden = [p for p in trainable if p.ndim == 2 and p not in outside]
    assert request.profile.parameters == request.profile.trainable == sum(p.numel() for p in model.parameters())
    assert request.profile.parameters == decoder_shapes.parameter_count(recipe.model)
    assert request.profile.tensors == len(trainable)
    assert request.profile.layers == depth
    assert request.profile.matrices == Counter(tuple(p.shape) for p in hidden)
    assert request.muon
    assert request.profile.hidden == sum(p.numel() for p in hidden)


@pytest.mark.parametrize("model", [config.Gpt(shape="gpt3-175b"), config.Gpt(depth=10_000, width=64)])
def test_deep_models_are_asked_about_at_once(model: config.Gpt) -> None:
    recipe = resolved(msgspec.structs.replace(model, vocabulary=50257))
    assert isinstance(recipe.model, config.Gpt)
    resolve_recipe.request(Resolved(resolved(config.Gpt(depth=1, vocabulary=64))))  # imports what it takes
    begun = time.process_time()
    request = resolve_recipe.request(Resolved(recipe))
    assert time.process_time() - begun < 1
    assert request.profile.parameters == decoder_shapes.parameter_count(recipe.model)
