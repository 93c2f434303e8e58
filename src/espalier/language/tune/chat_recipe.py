"""What a recipe with a `[tune]` table leaves open and its conversations decide, and how its workload is opened."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from espalier.language.tokenizer import Tokenizer, open_tokenizer
from espalier.language.tune import chat_rows, peft
from espalier.language.tune import workload as tuning
from espalier.language.tune.workload import ReadChats, TuneWorkload
from espalier.recipe import Adapters, Decoder, Dpo, Lora, Recipe
from espalier.recipe.base import Derivation, Draft
from espalier.recipe.decoder_defaults import no_initial
from espalier.recipe.decoder_shapes import published
from espalier.recipe.errors import UserError
from espalier.train.workload_row import Opening, Prepared

LONGEST, SHORTEST = 2048, 64
"""Tokens of a derived `train.sequence`, at most and at least."""
ROWS = 16
"""Rows of a derived batch, at most."""
STEPS = 1000
"""Of a recipe without conversations."""


def prepare(recipe: Recipe, opening: Opening, derived: Sequence[Derivation], tokenizer: Tokenizer | None) -> Prepared:
    """Reads the conversations; sequence, batch and steps that are open follow from them. Raises UserError."""
    recipe = _with_adapter(recipe, opening)
    assert isinstance(recipe.model, Decoder)
    if not recipe.data:
        if opening.frozen is None and recipe.model.shape is not None:
            return _without_data(recipe)
        raise no_data()
    if opening.frozen is not None and recipe.train.steps is not None and not opening.reads:
        tokenizer = tokenizer or open_tokenizer(recipe.data[0].tokenizer)
        return Prepared(recipe, tokenizer.vocabulary, None, derived)
    chats = tuning.read(recipe, tokenizer, opening.frozen, opening.progress)
    draft = Draft(recipe)
    bound = min(LONGEST, recipe.model.context or LONGEST)
    longest = max(int(tokens.lengths.max(initial=1)) for tokens in chats.chats)
    sequence = min(bound, max(SHORTEST, math.ceil(longest / 64) * 64))
    draft.fill("train.sequence", sequence, f"the longest conversation has {longest:,} tokens; at most {bound:,}")
    _fill_batch_and_steps(draft, chats)
    assert isinstance(draft.recipe, Recipe)
    return Prepared(draft.recipe, chats.tokenizer.vocabulary, chats, [*derived, *draft.derivations])


def no_data() -> UserError:
    """The error where conversations are to be read."""
    return UserError("The recipe has no [data].", do='[data] path = "chats.jsonl", or "python:docstrings"')


def _without_data(recipe: Recipe) -> Prepared:
    """A recipe that is only planned, from a shape: rows as long as they are at most, and as many."""
    draft = Draft(recipe)
    reason = "a recipe without [data] is only planned"
    context = published(recipe.model.shape).context  # type: ignore[attr-defined]
    draft.fill("train.sequence", min(LONGEST, context), f"{reason}: the most that conversations make it")
    rows = ROWS * (2 if isinstance(recipe.tune, Dpo) else 1)
    draft.fill("train.batch_tokens", rows * draft.get("train.sequence"), f"{reason}: {rows} rows")
    draft.fill("train.steps", STEPS, reason)
    assert isinstance(draft.recipe, Recipe)
    return Prepared(draft.recipe, derivations=draft.derivations)


def _with_adapter(recipe: Recipe, opening: Opening) -> Recipe:
    """What adapters to go on from say of themselves; those of a run that has begun are with it."""
    if not isinstance(recipe.tune, Lora) or recipe.tune.adapter is None:
        return recipe
    folder = _kept(opening, tuning.ADAPTER) or Path(recipe.tune.adapter)
    return recipe.changed(tune=peft.with_options(recipe.tune, folder))


def _fill_batch_and_steps(draft: Draft, chats: ReadChats) -> None:
    if draft.get("train.batch_tokens") is not None and draft.get("train.steps") is not None:
        return
    assert isinstance(draft.recipe, Recipe)
    train = tuning.chats_of(draft.recipe, chats).train
    assert train is not None
    pairs = isinstance(draft.recipe.tune, Dpo)
    sequence = draft.get("train.sequence")
    rows = len(train) // 2 if pairs else len(chat_rows.packed(train.lengths, sequence))
    what = "pairs" if pairs else f"rows of {sequence} tokens"
    batch = max(1, min(ROWS, rows // 4))
    draft.fill("train.batch_tokens", batch * sequence * (2 if pairs else 1), f"{batch} of the {rows} {what}")
    steps = math.ceil(tuning.EPOCHS * rows / tuning.batch_of(draft.recipe))
    draft.fill("train.steps", steps, f"{tuning.EPOCHS} passes over {rows} {what}")


def open_tuning(recipe: Recipe, opening: Opening, tokenizer: Tokenizer | None) -> TuneWorkload:
    """The workload; of a run that has frozen its preprocessing, without the data where that is not read."""
    base = base_of(opening)
    named = recipe.model.initial  # type: ignore[attr-defined]
    if opening.frozen is None and isinstance(recipe.tune, Adapters) and named is None:
        raise no_initial(recipe.tune)
    if not recipe.data:
        raise no_data()
    if opening.frozen is not None:
        # A checkpoint has taken the place of weights that are trained; frozen ones are with the run.
        initial = str(base) if base is not None else named if opening.reads else None
        recipe = recipe.changed(model=recipe.model.changed(initial=initial))
        if isinstance(recipe.tune, Lora) and recipe.tune.adapter is not None:
            adapter = str(opening.frozen / tuning.ADAPTER)
            recipe = recipe.changed(tune=recipe.tune.changed(adapter=adapter))
        if not opening.reads:
            return TuneWorkload(recipe, tuning.thaw(recipe, opening.frozen), named)
    chats = opening.data
    if not isinstance(chats, ReadChats):
        chats = tuning.read(recipe, tokenizer, opening.frozen, opening.progress)
    return TuneWorkload(recipe, tuning.chats_of(recipe, chats), named)


def base_of(opening: Opening) -> Path | None:
    """The frozen weights that a run keeps; None: it keeps none."""
    return _kept(opening, tuning.BASE)


def _kept(opening: Opening, name: str) -> Path | None:
    folder = None if opening.frozen is None else opening.frozen / name
    return folder if folder is not None and folder.is_dir() else None
