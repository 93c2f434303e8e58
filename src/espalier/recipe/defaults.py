"""Fills every option a recipe leaves open, each with its reason, and refuses numbers that do not fit. No torch.

One dial, `model.depth`, sets the rest (after nanochat's `--depth`): width, heads, sequence, batch, rates and steps.
Resolving twice changes nothing, so a run's `run.toml` resolves to itself.
"""

from __future__ import annotations

import math

from espalier import recipe as config
from espalier.recipe import model_kinds
from espalier.recipe.base import Derivation, Draft
from espalier.recipe.sections import VALIDATE_TOKENS
from espalier.recipe.value_ranges import check

VALIDATION_SHARE = 0.05
"""Most of a run's time that derived validations may take; of a short run as much as one of VALIDATE_TOKENS."""


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
        cost = model_kinds.of(draft.recipe.model).validation
        dearest = cost(draft.recipe)
        every = max(1, min(1000, steps // 10))
        sequence = draft.get("train.sequence") or VALIDATE_TOKENS
        shortest = min(1.0, math.ceil(steps / every) * sequence / VALIDATE_TOKENS)  # one sequence each time
        allowed = max(VALIDATION_SHARE * steps, shortest * dearest)
        bound = f", for at most {allowed / (steps + allowed):.0%} of the time" if dearest else ""
        if draft.get("train.sequence") and dearest:  # rather fewer tokens than seldom
            tokens = VALIDATE_TOKENS * min(1, allowed / dearest / math.ceil(steps / every))
            tokens = max(1, math.floor(tokens / sequence)) * sequence
            draft.fill("train.validate_tokens", tokens, f"few enough for a validation every {every:,} steps{bound}")
        every = max(every, math.ceil(steps * cost(draft.recipe) / allowed))
        draft.fill("train.validate_every", every, f"ten times a run or at least every 1000 steps{bound}")
    resolved = draft.recipe
    assert isinstance(resolved, config.Recipe)
    check(resolved)
    return resolved, draft.derivations
