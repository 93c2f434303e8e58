"""Continues a prompt token by token, with a key-value cache.

When the context is full, the older half of it is forgotten and the rest is read again from position 0. (Dropping one
token at a time from the cache would keep what the dropped ones had already told the layers above: no plain model
computes that.) So the cache changes speed, never a token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from espalier.language.gpt import GPT
from espalier.language.kv_cache import Cache
from espalier.language.tokenizer import Tokenizer
from espalier.recipe.errors import UserError

COLDEST = 1e-6
"""Temperatures below are 0: logits divided by them would overflow, and the likeliest token is all that is left."""


class SamplingOptions(TypedDict, total=False):
    """How `generate` picks tokens; every key may be left out."""

    temperature: float
    """0 (the default) takes the likeliest token; above, tokens are drawn from softmax(logits / temperature)."""
    top_k: int | None
    """Draws among this many likeliest tokens only."""
    seed: int | None
    """Makes the draw repeatable."""
    stop: int | Collection[int] | None
    """Ends before this token, or any of these."""


def generate(
    model: GPT, prompt: Sequence[int] | Tensor, *, tokens: int, **sampling: Unpack[SamplingOptions]
) -> Iterator[int]:
    """Yields up to `tokens` token ids that follow `prompt` (ids, not empty; its last `context` count).

    Raises UserError before the first token for values that mean nothing.
    """
    ids = [int(token) for token in prompt]
    temperature, top_k = sampling.get("temperature", 0.0), sampling.get("top_k")
    _check_prompt(model, ids)
    _check(tokens, sampling)
    generator, seed = torch.Generator(), sampling.get("seed")
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    stop = sampling.get("stop")
    stops = frozenset(() if stop is None else (stop,) if isinstance(stop, int) else stop)
    return _tokens(model, ids, tokens, _Choice(temperature, top_k, generator), stops)


class _Choice:
    """Picks a token from logits. Has state: the random generator (on the CPU, so that devices draw alike)."""

    def __init__(self, temperature: float, top_k: int | None, generator: torch.Generator) -> None:
        self.temperature, self.top_k, self.generator = temperature, top_k, generator

    def __call__(self, logits: Tensor) -> int:
        """The next token of `logits` `[vocabulary]`."""
        if self.temperature < COLDEST:
            return int(logits.argmax())
        logits = logits.cpu().double() / self.temperature
        if self.top_k is not None and self.top_k < len(logits):
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[-1], -torch.inf)
        return int(torch.multinomial(logits.softmax(-1), 1, generator=self.generator))


def text_of(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of `tokens` in pieces, each as soon as its last character is complete."""
    decoded: list[int] = []
    shown = ""
    for token in tokens:
        decoded.append(token)
        text = tokenizer.decode(decoded)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character is still incomplete
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(decoded)[len(shown) :]


def before(tokens: Iterable[int], ending: Sequence[int]) -> Iterator[int]:
    """`tokens` up to the sequence `ending`, each as soon as it is known to be no part of it."""
    waiting: list[int] = []
    for token in tokens:
        waiting.append(token)
        while waiting and waiting != list(ending[: len(waiting)]):
            yield waiting.pop(0)
        if len(waiting) == len(ending):
            return
    yield from waiting


@torch.no_grad()
def _tokens(model: GPT, ids: list[int], tokens: int, choose: _Choice, stops: frozenset[int]) -> Iterator[int]:
    context, device = model.size.context, next(model.parameters()).device
    window = ids[-context:]
    cache, fresh = Cache(model.size.layers, context), window
    for _ in range(tokens):
        logits = model(torch.tensor([fresh], device=device), cache)
        token = choose(logits[0, -1])
        if token in stops:
            return
        yield token
        window, fresh = [*window, token], [token]
        if len(window) > context:
            window = after_forgetting(window, context)
            cache, fresh = Cache(model.size.layers, context), window


def after_forgetting(window: list[int], context: int) -> list[int]:
    """What is still read of a window that has outgrown the context: its newer half."""
    return window[-max(1, context // 2) :]


def _check_prompt(model: GPT, ids: list[int]) -> None:
    if not ids:
        raise UserError("The prompt is empty.", do="give at least one token")
    outside = [token for token in ids if not 0 <= token < model.size.vocabulary]
    if outside:
        why = f"the model's vocabulary has {model.size.vocabulary} tokens"
        raise UserError(
            f"The prompt holds the token {outside[0]}.", why=why, do="use the tokenizer it was trained with"
        )


def _check(tokens: int, sampling: SamplingOptions) -> None:
    temperature, top_k, seed = sampling.get("temperature", 0.0), sampling.get("top_k"), sampling.get("seed")
    if tokens < 1:
        raise UserError(f"tokens = {tokens} is not possible.", do="1 or more")
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise UserError(f"seed = {seed} is not possible.", why="it has to fit into 64 bits", do="a smaller number")
    if not 0.0 <= temperature < float("inf"):
        raise UserError(
            f"temperature = {temperature} is not possible.", do="0 for the likeliest token, about 0.8 to sample"
        )
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k = {top_k} is not possible.", do="1 or more, or leave it out")
