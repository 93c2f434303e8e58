"""Defaults of language decoders: derives what a recipe leaves open, and refuses what contradicts itself. No torch.

One dial, `model.depth`, sets the rest (after nanochat's `--depth`): width, heads, sequence, batch, rates and steps.
"""

from __future__ import annotations

import math
import re
from typing import Any

from espalier.recipe.base import Draft, ModelKind, RecipeBase, with_optimizer
from espalier.recipe.decoder_shapes import (
    MIXTURES,
    Decoder,
    Gpt,
    Moe,
    active_parameter_count,
    parameter_count,
    published,
)
from espalier.recipe.errors import UserError
from espalier.recipe.sections import VALIDATE_TOKENS, Adapters, Dpo, Lora

DEPTH = 4
"""Layers when neither depth nor shape is given: about 3 M parameters, minutes on a laptop."""

HEAD_SIZE = 64
FINE_TUNING = 0.1
"""Of the learning rates from scratch, for weights that are trained already (Llama 2's chat models: 2e-5 after 3e-4,
arXiv 2307.09288, sections 2.2 and 3.1)."""
TOKENS_PER_PARAMETER = 20  # Chinchilla, arXiv 2203.15556, table 3: compute-optimal tokens are about 20 x parameters
SMALLEST_BATCH, LARGEST_BATCH = 2_048, 4_194_304  # tokens; 4 Mi is Llama 2's (arXiv 2307.09288)


_TUNING_RATES = {
    (Lora, True): (2e-4, "adapters learn at ten times the rate of whole matrices: QLoRA's (arXiv 2305.14314, table 9)"),
    (Dpo, True): (5e-6, "that of TRL's DPO script with adapters"),
    (Dpo, False): (1e-6, "DPO's authors' (arXiv 2305.18290, appendix B)"),
}
"""The learning rate of each kind of tuning, with adapters or without, and where it is from."""


def _fill(draft: Draft) -> None:
    _model(draft)
    width = draft.get("model.width")
    rate = float(f"{3e-3 * 192 / width:.3g}")
    falling = f"3e-3 at width 192, falling as 1/width (GPT-3's table 2.1 falls so): width {width}"
    tune = draft.recipe.tune
    if isinstance(tune, Adapters):
        draft.rates(*_TUNING_RATES[type(tune), tune.rank > 0])
    elif draft.get("model.initial") is None:
        draft.rates(rate, falling)
    else:
        draft.rates(rate, falling, FINE_TUNING, "; a tenth of it, as training goes on from model.initial")
    if draft.get("model.vocabulary") is None:
        return
    assert isinstance(draft.recipe.model, Decoder)
    parameters = active_parameter_count(draft.recipe.model)
    _batch(draft, parameters)
    tokens = TOKENS_PER_PARAMETER * parameters
    steps = math.ceil(tokens / draft.get("train.batch_tokens"))
    draft.fill("train.steps", steps, f"20 tokens for each of {parameters:,} parameters (Chinchilla, arXiv 2203.15556)")


def _validation(recipe: RecipeBase) -> float:
    """Forward only, which costs a third of training on as many tokens."""
    batch = recipe.train.batch_tokens
    return (recipe.train.validate_tokens or VALIDATE_TOKENS) / 3 / batch if batch else 0.0


def _model(draft: Draft) -> None:
    if draft.get("model.shape") is not None:
        _shape(draft, draft.get("model.shape"))
    draft.fill("model.depth", DEPTH, "neither model.depth nor model.shape is given; small enough for a laptop")
    depth = draft.get("model.depth")
    draft.fill("model.width", HEAD_SIZE * depth, "64 x depth: width grows with depth, as in published decoders")
    width = draft.get("model.width")
    heads = _heads(width)
    draft.fill("model.heads", heads, f"heads of {width // heads} columns ({HEAD_SIZE} where it divides the width)")
    draft.fill("model.kv_heads", draft.get("model.heads"), "one key-value head per head: no grouping at this size")
    feed_forward = 64 * math.ceil(8 * width / 3 / 64)
    draft.fill("model.feed_forward", feed_forward, "8/3 x width, up to a multiple of 64: as many as 4 x width ungated")
    _vocabulary(draft)
    bound = draft.get("model.context") or LARGEST_BATCH
    sequence = min(bound, max(256, min(2048, 2 ** math.ceil(math.log2(width)))))
    draft.fill("train.sequence", sequence, "the width as a power of two, between 256 and 2048, within model.context")
    draft.fill("model.context", draft.get("train.sequence"), "as long as the sequences it is trained on")
    if draft.get("model.vocabulary") is None:
        return
    assert isinstance(draft.recipe.model, Decoder)
    untied = draft.recipe.model.changed(tied=False)
    share = draft.get("model.vocabulary") * width / parameter_count(untied)
    if share > 0.1:
        draft.fill("model.tied", True, f"a second table of tokens would be {share:.0%} of all parameters")
    else:
        draft.fill("model.tied", False, f"a head of its own costs only {share:.1%} of all parameters")


def _shape(draft: Draft, name: str) -> None:
    shape = published(name)
    for field in ("depth", "width", "heads", "kv_heads", "feed_forward"):
        given, preset = draft.get(f"model.{field}"), getattr(shape, field)
        if given not in (None, preset):
            raise UserError(
                f'model.{field} = {given} and model.shape = "{name}" contradict each other.',
                why=f"{name} has {preset}",
                do="give one of the two",
            )
    sequence = draft.get("train.sequence") or 0
    if sequence > shape.context and draft.get("model.initial") is None:
        reason = f"as long as the sequences it is trained on: rotary positions reach beyond {name}'s {shape.context}"
        draft.fill("model.context", sequence, reason)
    for field in ("depth", "width", "heads", "kv_heads", "feed_forward", "vocabulary", "context", "tied"):
        draft.fill(f"model.{field}", getattr(shape, field), f"{name}: {shape.source}")


def _heads(width: int) -> int:
    """The number of heads whose size is even and nearest to 64."""
    fitting = [size for size in range(2, min(width, 1024) + 1, 2) if width % size == 0]
    if not fitting:
        why = "rotary positions turn pairs of columns"
        raise UserError(f"model.width = {width} is odd.", why=why, do="a multiple of 64")
    return width // min(fitting, key=lambda size: abs(math.log(size / HEAD_SIZE)))


def _vocabulary(draft: Draft) -> None:
    vocabulary = draft.vocabulary
    tokenizers = {data.tokenizer for data in draft.recipe.data}
    if vocabulary is None and tokenizers == {"bytes"}:
        vocabulary = 256
    if vocabulary is None:
        if not tokenizers:
            draft.fill("model.vocabulary", 256, "bytes, as nothing is said of the data")
        return
    draft.fill("model.vocabulary", vocabulary, "the tokenizer's tokens")
    if draft.get("model.vocabulary") < vocabulary:
        raise UserError(
            f"model.vocabulary = {draft.get('model.vocabulary')} is smaller than the tokenizer's {vocabulary} tokens.",
            do="leave model.vocabulary out, or give data.tokenizer a smaller one",
        )


def _batch(draft: Draft, parameters: int) -> None:
    """The best batch in tokens is 0.292 x FLOPs^0.3271 (DeepSeek LLM, arXiv 2401.02954, equation 1), FLOPs = 6 x
    parameters x tokens; with the steps given, tokens = steps x batch and the equation is solved for the batch."""
    steps, sequence = draft.get("train.steps"), draft.get("train.sequence")
    if steps is None:
        best = 0.2920 * (6 * parameters * TOKENS_PER_PARAMETER * parameters) ** 0.3271
    else:
        best = (0.2920 * (6 * parameters * steps) ** 0.3271) ** (1 / (1 - 0.3271))
    power = 2 ** round(math.log2(min(LARGEST_BATCH, max(SMALLEST_BATCH, best))))
    tokens = max(1, round(power / sequence)) * sequence
    reason = f"0.292 x FLOPs^0.3271 = {best:,.0f} (arXiv 2401.02954), to a power of two in whole sequences"
    draft.fill("train.batch_tokens", tokens, reason)


# --- what cannot be -------------------------------------------------------------------------------------------------


def _check(recipe: RecipeBase) -> None:
    model = recipe.model
    assert isinstance(model, Decoder)
    if model.layers is not None:
        layers_taken(model)
    if model.width and model.heads and model.width % model.heads:
        why = f"model.width = {model.width} is not a multiple of it"
        raise UserError(f"model.heads = {model.heads} does not divide the width.", why=why, do=_divisors(model.width))
    if model.heads and model.kv_heads and model.heads % model.kv_heads:
        why = f"model.heads = {model.heads} is not a multiple of it"
        raise UserError(
            f"model.kv_heads = {model.kv_heads} does not divide the heads.",
            why=why,
            do=f"model.kv_heads = {model.heads}",
        )
    if model.width and model.heads and model.width // model.heads % 2:
        size = model.width // model.heads
        why = f"rotary positions turn pairs of columns, and {model.width} / {model.heads} = {size} is odd"
        raise UserError(f"model.heads = {model.heads} gives heads of odd size.", why=why, do=_divisors(model.width))
    if isinstance(model, Moe) and model.family not in MIXTURES:
        do = f"model.family = one of {', '.join(MIXTURES)}"
        raise UserError(f'model.family = "{model.family}" has no mixture of experts.', do=do)
    if isinstance(model, Moe) and model.experts == 1:
        raise UserError("model.experts = 1 leaves nothing to choose.", do='model.kind = "gpt", or two experts or more')
    if isinstance(model, Moe) and model.active > model.experts:
        why = f"there are only model.experts = {model.experts}"
        raise UserError(
            f"model.active = {model.active} is not possible.", why=why, do=f"model.active = {model.experts}"
        )
    if isinstance(recipe.tune, Adapters):
        _adapters(recipe.tune, model)
    context, sequence = model.context, recipe.train.sequence
    if context and sequence and sequence > context:
        raise UserError(
            f"train.sequence = {sequence} is longer than the context of the model.",
            why=f"model.context = {context}",
            do=f"train.sequence = {context}, or model.context = {sequence}, as rotary positions reach further",
        )


def layers_taken(model: Decoder) -> int:
    """How many layers of `model.initial` the recipe takes. Raises UserError for other words."""
    match = re.fullmatch(r"first ([1-9]\d{0,4})", model.layers or "")
    if match is None or model.initial is None:
        raise UserError(
            f"model.layers = {model.layers!r} is not possible.",
            why="it says which layers of model.initial are taken: the first of them",
            do='model.layers = "first 12" and model.initial, or model.depth for a model of your own',
        )
    return int(match[1])


def no_initial(tune: Adapters) -> UserError:
    """The error where training would begin from no weights."""
    return UserError(
        f'tune.kind = "{type(tune).__struct_config__.tag}" has no model to start from.',
        why="frozen weights, and a reference, are those of a trained model",
        do="model.initial = FOLDER (Hugging Face format); model.shape alone is enough for espalier plan",
    )


def _adapters(tune: Adapters, model: Decoder) -> None:
    kind = type(tune).__struct_config__.tag
    if isinstance(model, Moe):
        raise UserError(f'tune.kind = "{kind}" is not possible with experts.', do='tune.kind = "full"')
    if model.initial is None and model.shape is None:
        raise no_initial(tune)
    if tune.rank < (1 if isinstance(tune, Lora) else 0):
        raise UserError(f"tune.rank = {tune.rank} is not possible.", do="tune.rank = 16")
    if model.width and tune.rank > model.width:
        raise UserError(f"tune.rank = {tune.rank} is more than model.width = {model.width}.", do="tune.rank = 16")
    if tune.dora and tune.frozen != "fp32":
        raise UserError(
            f'tune.dora is not possible with tune.frozen = "{tune.frozen}".',
            why="the lengths of the rows of whole matrices are trained",
            do='tune.frozen = "fp32", or tune.dora = false',
        )


def _usual(table: dict[str, Any]) -> dict[str, Any]:
    """Fine-tuning uses AdamW without decay where no optimizer is named, as TRL and PEFT do."""
    return with_optimizer(table, {"kind": "adamw", "weight_decay": 0.0}) if "tune" in table else table


def _divisors(width: int) -> str:
    fitting = [str(heads) for heads in range(1, min(width, 1024) + 1) if width % heads == 0 and width // heads % 2 == 0]
    if not fitting:
        return "an even model.width"
    return f"model.heads = one of {', '.join(fitting[:12])}"


KIND = ModelKind(
    name="a language model",
    options=(Gpt, Moe),
    row="espalier.language.workload_row",
    fill=_fill,
    check=_check,
    sections=("tune",),
    usual=_usual,
    validation=_validation,
    unit="tokens",
    data="python:stdlib",
)
