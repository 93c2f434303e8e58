"""Fills every option a recipe leaves open, each with its reason, and refuses numbers that do not fit. No torch.

One dial, `model.depth`, sets the rest (after nanochat's `--depth`): width, heads, sequence, batch, rates and steps.
Resolving twice changes nothing, so a run's `run.toml` resolves to itself.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec import Struct

from espalier import config
from espalier.config import graphs, shapes
from espalier.config.limits import check
from espalier.errors import UserError

DEPTH = 4
"""Layers when neither depth nor shape is given: about 3 M parameters, minutes on a laptop."""

HEAD_SIZE = 64
TOKENS_PER_PARAMETER = 20  # Chinchilla, arXiv 2203.15556, table 3: compute-optimal tokens are about 20 x parameters
SMALLEST_BATCH, LARGEST_BATCH = 2_048, 4_194_304  # tokens; 4 Mi is Llama 2's (arXiv 2307.09288)


VALIDATION_SHARE = 0.05
"""Most of a run's time that derived validation may take."""


class Derivation(Struct, frozen=True):
    """One option the recipe left open: its dotted key, the value it got, and why."""

    key: str
    value: bool | int | float | str
    reason: str


def resolve(recipe: config.Recipe, vocabulary: int | None = None) -> tuple[config.Recipe, list[Derivation]]:
    """The recipe with every open option filled, and what was filled.

    `vocabulary` is the tokenizer's number of tokens; without it only the tokenizer "bytes" (256) is known here. While
    it is not known, what depends on it (`model.vocabulary`, `model.tied`, `train.batch_tokens`, `train.steps` and the
    intervals) stays None; call again with it. Raises UserError naming the option that does not fit.
    """
    draft = _Draft(recipe)
    check(recipe)
    if isinstance(recipe.model, config.Module):
        _module(draft)
    elif isinstance(recipe.model, config.GRAPH):
        graphs.fill(draft)
    else:
        _model(draft, vocabulary)
        _language(draft)
    _common(draft)
    resolved = draft.recipe
    check(resolved)
    return resolved, draft.found


def parameter_count(model: config.Gpt | config.Moe) -> int:
    """Parameters of a resolved decoder (tied embeddings counted once)."""
    return _count(shapes.sizes(model), every_expert=True)


def active_parameter_count(model: config.Gpt | config.Moe) -> int:
    """Parameters one token passes through: `active` of the experts, everything else."""
    return _count(shapes.sizes(model), every_expert=False)


def _count(size: shapes.Sizes, every_expert: bool) -> int:
    attention = size.width * (2 * size.width + 2 * size.kv_width)
    experts = size.experts if every_expert else size.active
    router = size.experts * size.width if size.experts > 1 else 0
    feed_forward = experts * 3 * size.width * size.feed_forward + router
    embeddings = size.vocabulary * size.width * (1 if size.tied else 2)
    return size.layers * (attention + feed_forward + 2 * size.width) + embeddings + size.width


class _Draft:
    """A recipe being filled. Has state: the recipe so far and what was derived."""

    def __init__(self, recipe: config.Recipe) -> None:
        self.recipe = recipe
        self.found: list[Derivation] = []

    @property
    def decoder(self) -> config.Gpt | config.Moe:
        """The model so far; only asked for where it is a decoder."""
        assert isinstance(self.recipe.model, config.Gpt | config.Moe)
        return self.recipe.model

    def get(self, key: str) -> Any:
        value: Any = self.recipe
        for name in key.split("."):
            value = getattr(value, name)
        return value

    def fill(self, key: str, value: bool | int | float | str, reason: str) -> None:
        """Sets `key` where it is None, and notes why."""
        if self.get(key) is None:
            self.recipe = _replaced(self.recipe, key.split("."), value)
            self.found.append(Derivation(key, value, reason))


def _replaced(struct: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    return msgspec.structs.replace(struct, **{name: _replaced(getattr(struct, name), rest, value) if rest else value})


def _model(draft: _Draft, vocabulary: int | None) -> None:
    if draft.get("model.shape") is not None:
        _shape(draft, draft.get("model.shape"), draft.get("model.depth"))
    draft.fill("model.depth", DEPTH, "neither model.depth nor model.shape is given; small enough for a laptop")
    depth = draft.get("model.depth")
    draft.fill("model.width", HEAD_SIZE * depth, "64 x depth: width grows with depth, as in published decoders")
    width = draft.get("model.width")
    heads = _heads(width)
    draft.fill("model.heads", heads, f"heads of {width // heads} columns ({HEAD_SIZE} where it divides the width)")
    draft.fill("model.kv_heads", draft.get("model.heads"), "one key-value head per head: no grouping at this size")
    feed_forward = 64 * math.ceil(8 * width / 3 / 64)
    draft.fill("model.feed_forward", feed_forward, "8/3 x width, up to a multiple of 64: as many as 4 x width ungated")
    _vocabulary(draft, vocabulary)
    bound = draft.get("model.context") or LARGEST_BATCH
    sequence = min(bound, max(256, min(2048, 2 ** math.ceil(math.log2(width)))))
    draft.fill("train.sequence", sequence, "the width as a power of two, between 256 and 2048, within model.context")
    draft.fill("model.context", draft.get("train.sequence"), "as long as the sequences it is trained on")
    if draft.get("model.vocabulary") is not None:
        _tied(draft)


def _shape(draft: _Draft, name: str, depth: int | None) -> None:
    shape = shapes.shape(name)
    if depth not in (None, shape.depth):
        raise UserError(
            f'model.depth = {depth} and model.shape = "{name}" contradict each other.',
            why=f"{name} has {shape.depth} layers",
            do="give one of the two",
        )
    for field in ("depth", "width", "heads", "kv_heads", "feed_forward", "vocabulary", "context", "tied"):
        draft.fill(f"model.{field}", getattr(shape, field), f"{name}: {shape.source}")


def _heads(width: int) -> int:
    """The number of heads whose size is even and nearest to 64."""
    fitting = [size for size in range(2, min(width, 1024) + 1, 2) if width % size == 0]
    if not fitting:
        why = "rotary positions turn pairs of columns"
        raise UserError(f"model.width = {width} is odd.", why=why, do="a multiple of 64")
    return width // min(fitting, key=lambda size: abs(math.log(size / HEAD_SIZE)))


def _vocabulary(draft: _Draft, vocabulary: int | None) -> None:
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


def _tied(draft: _Draft) -> None:
    untied = msgspec.structs.replace(draft.decoder, tied=False)
    share = draft.get("model.vocabulary") * draft.get("model.width") / parameter_count(untied)
    if share > 0.1:
        draft.fill("model.tied", True, f"a second table of tokens would be {share:.0%} of all parameters")
    else:
        draft.fill("model.tied", False, f"a head of its own costs only {share:.1%} of all parameters")


def _language(draft: _Draft) -> None:
    width = draft.get("model.width")
    _rates(
        draft, 3e-3 * 192 / width, f"3e-3 at width 192, falling as 1/width (GPT-3's table 2.1 falls so): width {width}"
    )
    if draft.get("model.vocabulary") is None:
        return
    parameters = active_parameter_count(draft.decoder)
    _batch(draft, parameters)
    tokens = TOKENS_PER_PARAMETER * parameters
    steps = math.ceil(tokens / draft.get("train.batch_tokens"))
    draft.fill("train.steps", steps, f"20 tokens for each of {parameters:,} parameters (Chinchilla, arXiv 2203.15556)")


def _batch(draft: _Draft, parameters: int) -> None:
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


def _module(draft: _Draft) -> None:
    draft.fill("train.sequence", 1, "a module's samples have no length known here: one sample counts as one token")
    draft.fill("train.batch_tokens", 64 * draft.get("train.sequence"), "64 samples")
    draft.fill("train.steps", 1000, "nothing is known of the module: a thousand steps")
    _rates(draft, 1e-3, "nothing is known of the module: a usual rate")


def _rates(draft: _Draft, adamw: float, reason: str) -> None:
    adamw = float(f"{adamw:.3g}")
    if isinstance(draft.recipe.train.optimizer, config.Adamw):
        draft.fill("train.optimizer.learning_rate", adamw, reason)
        return
    draft.fill(
        "train.optimizer.learning_rate", 0.02, "Muon's steps have the same size at every width: 0.02 (its author's)"
    )
    draft.fill("train.optimizer.adamw.learning_rate", adamw, reason)


def _common(draft: _Draft) -> None:
    steps = draft.get("train.steps")
    if steps is None:
        return
    _validation(draft, steps)


def _validation(draft: _Draft, steps: int) -> None:
    """A validation reads forward only, which costs a third of training on as many tokens."""
    cost = 0.0
    if isinstance(draft.recipe.model, config.GRAPH):
        cost = graphs.VALIDATION_COST
    elif not isinstance(draft.recipe.model, config.Module) and draft.get("train.batch_tokens"):
        cost = draft.get("train.validate_tokens") / 3 / draft.get("train.batch_tokens")
    seldom = math.ceil(cost / VALIDATION_SHARE)
    every = max(1, min(1000, steps // 10), min(seldom, steps))
    reason = f"ten times a run or at least every 1000 steps, for at most {VALIDATION_SHARE:.0%} of the time"
    draft.fill("train.validate_every", every, reason)
