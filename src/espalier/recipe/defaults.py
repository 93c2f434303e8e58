"""Fills every option a recipe leaves open, each with its reason, and refuses numbers that do not fit. No torch.

One dial, `model.depth`, sets the rest (after nanochat's `--depth`): width, heads, sequence, batch, rates and steps.
Resolving twice changes nothing, so a run's `run.toml` resolves to itself.
"""

from __future__ import annotations

import math

from espalier import recipe as config
from espalier.recipe import model_kinds
from espalier.recipe.base import VALIDATION_SHARE, Derivation, Draft, between_validations
from espalier.recipe.value_ranges import check


def with_tokenizer(recipe: config.Recipe, spec: str) -> config.Recipe:
    """`recipe` with the tokenizer `spec` where it leaves that open."""
    sources = (data.changed(tokenizer=spec) if data.tokenizer == "auto" else data for data in recipe.data)
    return recipe.changed(data=tuple(sources))


def resolve(recipe: config.Recipe, vocabulary: int | None = None) -> tuple[config.Recipe, list[Derivation]]:
    """The recipe with every open option filled, and what was filled.

    `vocabulary` is the tokenizer's number of tokens; without it only the tokenizer "bytes" (256) is known here. While
    it is not known, what depends on it (`model.vocabulary`, `model.tied`, `train.batch_tokens`, `train.steps` and the
    intervals) stays None; call again with it. Raises UserError naming the option that does not fit.
    """
    check(recipe)
    draft = Draft(with_tokenizer(recipe, "bytes"), vocabulary)
    model_kinds.of(recipe.model).fill(draft)
    if (steps := draft.get("train.steps")) is not None:
        cost_of = model_kinds.of(draft.recipe.model).validation
        given = draft.recipe.train.changed(validate_tokens=recipe.train.validate_tokens)
        cost, dearest = cost_of(draft.recipe), cost_of(draft.recipe.changed(train=given))
        allowed = max(VALIDATION_SHARE * steps, dearest)
        every = max(between_validations(steps), math.ceil(steps * cost / allowed))
        bound = f", for at most {allowed / (steps + allowed):.0%} of the time" if cost else ""
        draft.fill("train.validate_every", every, f"ten times a run or at least every 1000 steps{bound}")
    resolved = draft.recipe
    assert isinstance(resolved, config.Recipe)
    check(resolved)
    return resolved, draft.derivations
