"""Continues prompts token by token, several together, with a key-value cache.

When the context is full, the older half of it is forgotten and the rest is read again from position 0. (Dropping one
token at a time from the cache would keep what the dropped ones had already told the layers above: no plain model
computes that.) So the cache changes speed, never a token. Nor do the prompts that are continued together: shorter ones
stand behind padding that nothing sees, and each row has a random generator of its own.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import Any

import torch
from torch import Tensor

from espalier.language.gpt import GPT
from espalier.language.kv_cache import Cache
from espalier.language.tokenizer import Tokenizer
from espalier.recipe.errors import UserError
from espalier.train.workload_row import ROWS, Sampling, TextPiece, TokenScore

COLDEST = 1e-6
"""Temperatures below are 0: logits divided by them would overflow, and the likeliest token is all that is left."""
READ = 512
"""Tokens of each prompt that pass through the model at a time."""


def generate(
    model: GPT, prompt: Sequence[int] | Tensor, *, stop: int | Collection[int] = (), **sampling: Any
) -> Iterator[int]:
    """Yields the token ids that follow `prompt` (ids, not empty; its last `context` count), and ends before the token
    `stop`, or any of these. `sampling`: fields of a `Sampling`; without `seed` each draw is another.

    Raises UserError before the first token for values that mean nothing.
    """
    how = Sampling(**{"seed": secrets.randbits(63), **sampling})
    decoding = Decoding(model, [[int(token) for token in prompt]], [how])
    steps = chain.from_iterable(decoding.step().values() for _ in iter(int, 1))
    stops = {stop} if isinstance(stop, int) else stop
    return islice(takewhile(lambda token: token not in stops, (token for token, _ in steps)), how.tokens)


class Decoding:
    """Prompts that are continued together, each with a `Sampling` of its own. Has state: the rows that go on, by the
    number of their prompt.

    Raises UserError for prompts and samplings that mean nothing.
    """

    def __init__(self, model: GPT, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> None:
        self.model = model
        self.rows: dict[int, list[int]] = {}
        """What is still read of each: its last `context` tokens at most."""
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            _check_prompt(model, prompt)
            _check(sampling)
            self.rows[number] = list(prompt)[-model.size.context :]
        self.draws = [_Draw(sampling) for sampling in samplings]
        self._cache: Cache | None = None
        self._unread = torch.empty(0, 0)
        """Tokens that the model has not seen, int64 [rows, tokens]."""

    @torch.no_grad()
    def step(self) -> dict[int, tuple[int, Tensor]]:
        """The next token of each row, and the logits [vocabulary] that it was drawn by; nothing while prompts are
        read."""
        device = next(self.model.parameters()).device
        if self._cache is None:
            self._unread, padding = padded(list(self.rows.values()), device)
            self._cache = Cache(self.model.size.layers, padding)
        fresh = self._unread[:, :READ]
        self._unread = self._unread[:, READ:]
        logits = self.model(fresh, self._cache, last=1)[:, -1]
        if self._unread.numel():
            return {}
        tokens = {number: (self.draws[number](row), row) for number, row in zip(self.rows, logits, strict=True)}
        context = self.model.size.context
        for number, (token, _) in tokens.items():
            self.rows[number].append(token)
            if len(self.rows[number]) > context:
                self.rows[number] = self.rows[number][-max(1, context // 2) :]  # its newer half
                self._cache = None
        self._unread = torch.tensor([[token] for token, _ in tokens.values()], device=device)
        return tokens

    def end(self, numbers: Collection[int]) -> None:
        """Those rows do not go on."""
        going_on = [place for place, number in enumerate(self.rows) if number not in numbers]
        self.rows = {number: row for number, row in self.rows.items() if number not in numbers}
        if self.rows and self._cache is not None:
            places = torch.tensor(going_on, device=self._unread.device)
            self._unread = self._unread[places]
            self._cache.keep(places)


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """`rows` one above the other with equal ends, int64 [rows, tokens], and how much padding there is before each,
    int64 [rows]; None: none."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return tokens, None if min(map(len, rows)) == longest else longest - lengths


def groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of prompts of these lengths, those of similar length together."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for start in range(0, len(order), ROWS):
        yield order[start : start + ROWS]


class _Draw:
    """Picks a token from logits. Has state: the random generator (on the CPU, so that devices draw alike)."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> int:
        """The next token of `logits` `[vocabulary]`."""
        if self.sampling.temperature < COLDEST:
            return int(logits.argmax())
        logits = logits.cpu().double()
        top_k = self.sampling.top_k
        top_p = self.sampling.top_p
        logits /= self.sampling.temperature
        if top_k is not None and top_k < len(logits):
            logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
        chances = logits.softmax(-1)
        if top_p is not None and top_p < 1:
            likeliest, order = chances.sort(descending=True)
            chances[order[likeliest.cumsum(0) - likeliest >= top_p]] = 0.0
        return int(torch.multinomial(chances, 1, generator=self.generator))


# --- text ----------------------------------------------------------------------------------------------------------


def write(decoding: Decoding, tokenizer: Tokenizer, endings: Sequence[Sequence[int]]) -> Iterator[TextPiece]:
    """The text that follows the prompts, in pieces, each as soon as nothing can change it; at least one for each token.
    A row ends before any of the `endings` (of tokens) and of its `Sampling.stop`, and after `Sampling.tokens`."""
    texts = {number: WrittenText(tokenizer, decoding.draws[number].sampling, endings) for number in decoding.rows}
    while decoding.rows:
        pieces = [texts[number].add(number, *drawn) for number, drawn in decoding.step().items()]
        yield from pieces or [TextPiece(0)]
        decoding.end([piece.row for piece in pieces if piece.finish])


def by_row(pieces: Iterator[TextPiece], rows: int) -> list[Iterator[TextPiece]]:
    """The pieces of each row by themselves; those of the others wait."""
    waiting: list[deque[TextPiece]] = [deque() for _ in range(rows)]

    def of_row(row: int) -> Iterator[TextPiece]:
        finish = None
        while finish is None:
            while not waiting[row]:
                piece = next(pieces)
                waiting[piece.row].append(piece)
            piece = waiting[row].popleft()
            finish = piece.finish
            yield piece

    return [of_row(row) for row in range(rows)]


class WrittenText:
    """What one row has written. Has state."""

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling, endings: Sequence[Sequence[int]]) -> None:
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.endings = [list(ending) for ending in endings]
        self.tokens: list[int] = []
        self.shown = 0

    def add(self, row: int, token: int, logits: Tensor) -> TextPiece:
        """What `token` adds."""
        tokens = self.tokens
        stops = self.sampling.stop
        tokens.append(token)
        ended = max((len(ending) for ending in self.endings if tokens[-len(ending) :] == ending), default=0)
        finish = "stop" if ended else "length" if len(tokens) == self.sampling.tokens else None
        hidden = ended if finish else _begun(tokens, self.endings)
        text = self.tokenizer.decode(tokens[: len(tokens) - hidden])
        places = [text.index(stop) for stop in stops if stop in text]
        if places:
            text = text[: min(places)]
            finish = "stop"
        elif not finish:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # of a character that is still incomplete
            text = text[: len(text) - _begun(text, stops)]
        fresh = text[self.shown :]
        self.shown = max(self.shown, len(text))
        wanted = self.sampling.logprobs
        score = None if wanted is None or ended else _score(self.tokenizer, token, logits, wanted)
        return TextPiece(row, fresh, finish, 1, score)


def _begun(sequence: Sequence[int] | str, endings: Iterable[Sequence[int] | str]) -> int:
    """How much of the end of `sequence` may be the beginning of one of `endings`."""
    return max(
        (
            length
            for ending in endings
            for length in range(1, min(len(ending), len(sequence) + 1))
            if sequence[-length:] == ending[:length]
        ),
        default=0,
    )


def _score(tokenizer: Tokenizer, token: int, logits: Tensor, likeliest: int) -> TokenScore:
    chances = logits.float().log_softmax(-1)
    best = chances.topk(likeliest)
    pairs = [(token, float(chances[token])), *zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    (text, chance), *others = ((tokenizer.decode([number]), chance) for number, chance in pairs)
    return TokenScore(text, chance, others)


# --- what cannot be generated -----------------------------------------------------------------------------------


def _check_prompt(model: GPT, ids: Sequence[int]) -> None:
    if not ids:
        raise UserError("The prompt is empty.", do="give at least one token")
    outside = [token for token in ids if not 0 <= token < model.size.vocabulary]
    if outside:
        why = f"the model's vocabulary has {model.size.vocabulary} tokens"
        raise UserError(
            f"The prompt holds the token {outside[0]}.", why=why, do="use the tokenizer it was trained with"
        )


def _check(sampling: Sampling) -> None:
    why = ""
    if sampling.tokens < 1:
        name, do = "tokens", "1 or more"
    elif not -(2**63) <= sampling.seed < 2**63:
        name, why, do = "seed", "it has to fit into 64 bits", "a smaller number"
    elif not 0.0 <= sampling.temperature < float("inf"):
        name, do = "temperature", "0 for the likeliest token, about 0.8 to sample"
    elif sampling.top_k is not None and sampling.top_k < 1:
        name, do = "top_k", "1 or more, or leave it out"
    else:
        return
    raise UserError(f"{name} = {getattr(sampling, name)} is not possible.", why=why, do=do)
