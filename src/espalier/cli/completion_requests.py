"""OpenAI's requests for completions, and the answers to them: https://platform.openai.com/docs/api-reference/chat

What a request says is honoured, or refused by its name; nothing is left out silently but what changes no answer.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from espalier.recipe.errors import UserError
from espalier.train.workload_row import ROWS, Sampling, TextPiece, TokenScore, Writer

IGNORED = {"metadata", "name", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
"""Fields that change no answer."""
NEUTRAL: Mapping[str, Any] = {
    "best_of": 1,
    "function_call": "none",
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "tool_choice": "none",
}
"""Values that ask for nothing, besides those that are empty, 0 or false."""


class Invalid(Exception):
    """A request that means nothing, or asks for what is not there. `param`: the field."""

    def __init__(self, why: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(why)
        self.status = status
        self.body = {"message": why, "type": "invalid_request_error", "param": param, "code": None}


# --- what is asked -------------------------------------------------------------------------------------------------


class ContentPart(Struct, frozen=True):
    """Of a message's content."""

    type: Literal["text"]
    text: str = ""


class Message(Struct, frozen=True):
    """A turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None

    @property
    def turn(self) -> tuple[str, str]:
        """(role, text)."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return "system" if self.role == "developer" else self.role, text


class StreamOptions(Struct, frozen=True):
    """What a stream has besides."""

    include_usage: bool | None = None


Positive = Annotated[int, Meta(ge=1)]
Likeliest = Annotated[int, Meta(ge=0, le=20)]


class Asked(Struct, frozen=True):
    """What a request may say: of a chat `messages`, of a text `prompt`; null is as left out."""

    messages: list[Message] = []
    prompt: str | list[str | int | list[int]] = []
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=ROWS)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_k: Positive | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    logprobs: bool | Likeliest | None = None
    top_logprobs: Likeliest | None = None

    @classmethod
    def read(cls, body: bytes) -> Asked:
        """The request in `body`. Raises Invalid."""
        try:
            table = msgspec.json.decode(body)
            asked = msgspec.convert(table, cls)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise Invalid(f"the request means nothing: {error}") from None
        messages = [(Message, message) for message in table.get("messages", ())]
        tables: list[tuple[type[Struct], dict[str, Any]]] = [(cls, table), *messages]
        for kind, given in tables:
            for name in given.keys() - {*kind.__struct_fields__, *IGNORED}:
                if given[name] and given[name] != NEUTRAL.get(name):
                    raise Invalid(f"{name} is not there. Try: leave it out", name)
        if asked.messages and asked.prompt:
            raise Invalid("messages are a chat's, and prompt is a text's: one of them is to be left out", "prompt")
        if asked.top_logprobs is not None and not asked.logprobs:
            raise Invalid("top_logprobs goes with logprobs = true", "top_logprobs")
        return asked

    def prompts(self, chat: bool, writer: Writer) -> list[list[int]]:
        """In tokens. Raises Invalid, and UserError."""
        if chat and self.messages:
            return [writer.prompt([message.turn for message in self.messages])]
        kinds = {*map(type, self.prompt)}
        if chat or self.prompt == [] or len(kinds) > 1:
            raise Invalid("messages has to hold turns" if chat else "prompt has to hold texts, or tokens")
        rows: Any = [self.prompt] if isinstance(self.prompt, str) or kinds == {int} else self.prompt
        return [writer.prompt(row) if isinstance(row, str) else row for row in rows]

    def sampling(self, defaults: Sampling, room: int) -> Sampling:
        """For an answer that has `room` for so many tokens."""
        stops, likeliest = [self.stop] if isinstance(self.stop, str) else self.stop or [], self.logprobs
        if isinstance(likeliest, bool):
            likeliest = (self.top_logprobs or 0) if likeliest else None
        return Sampling(
            self.max_completion_tokens or self.max_tokens or min(defaults.tokens, room),
            defaults.temperature if self.temperature is None else self.temperature,
            self.top_k or defaults.top_k,
            defaults.seed if self.seed is None else self.seed,
            self.top_p,
            tuple(stop for stop in stops if stop),
            likeliest,
        )


# --- what is answered ----------------------------------------------------------------------------------------------


class Completion:
    """The answer to a request: a row for each prompt and copy. Has state: how many tokens it took so far."""

    def __init__(self, body: bytes, chat: bool, writer: Writer, model: Mapping[str, Any], defaults: Sampling) -> None:
        """To the request in `body`. `defaults`: what it does not say. Raises Invalid."""
        self.chat, self.asked = chat, Asked.read(body)
        if self.asked.model not in (None, model["id"]):
            raise Invalid(f"{self.asked.model} is not here, but {model['id']} is", "model", 404)
        try:
            prompts = self.asked.prompts(chat, writer)
            longest, copies = max(map(len, prompts)), range(self.asked.n or 1)
            sampling = self.asked.sampling(defaults, writer.context - longest)
            if longest + (tokens := max(1, sampling.tokens)) > writer.context:
                why = f"the prompt has {longest} tokens, and {tokens} are to follow"
                raise Invalid(f"This model's maximum context length is {writer.context} tokens: {why}.")
            rows = [(prompt, replace(sampling, seed=sampling.seed ^ copy)) for prompt in prompts for copy in copies]
            if len(rows) > ROWS:
                raise Invalid(f"at most {ROWS} answers are given to a request", "n")
            self.pieces = writer.write(*zip(*rows, strict=True))
        except UserError as error:
            raise Invalid(str(error)) from None
        self.scored, self.rows = sampling.logprobs is not None, len(rows)
        self.read, self.written = sum(map(len, prompts)), 0
        self.head = {"id": secrets.token_hex(12), "created": int(time.time()), "model": model["id"]}
        self.kind = "chat.completion" if chat else "text_completion"

    @property
    def usage(self) -> dict[str, int]:
        """Tokens that were read and written."""
        total = self.read + self.written
        return {"prompt_tokens": self.read, "completion_tokens": self.written, "total_tokens": total}

    async def whole(self, pieces: AsyncIterator[TextPiece]) -> dict[str, Any]:
        """The answer in one table."""
        rows: list[list[TextPiece]] = [[] for _ in range(self.rows)]
        async for piece in self._counted(pieces):
            rows[piece.row].append(piece)
        choices = [self._choice(row, "message") for row in rows]
        return {**self.head, "object": self.kind, "choices": choices, "usage": self.usage}

    async def events(self, pieces: AsyncIterator[TextPiece]) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        head = {**self.head, "object": self.kind + ".chunk" * self.chat}
        async for piece in self._counted(pieces):
            if piece.text or piece.finish or piece.score:
                yield _event({**head, "choices": [self._choice([piece], "delta")]})
        if self.asked.stream_options is not None and self.asked.stream_options.include_usage:
            yield _event({**head, "choices": [], "usage": self.usage})
        yield "data: [DONE]\n\n"

    async def _counted(self, pieces: AsyncIterator[TextPiece]) -> AsyncIterator[TextPiece]:
        """`pieces`, and an end of the rows that have none."""
        going_on = set(range(self.rows))
        async for piece in pieces:
            self.written += piece.tokens
            going_on -= {piece.row} if piece.finish else set()
            yield piece
        for row in sorted(going_on):
            yield TextPiece(row, finish="length")

    def _choice(self, pieces: Sequence[TextPiece], name: str) -> dict[str, Any]:
        """Of the pieces of one row; of a chat under `name`."""
        text = "".join(piece.text for piece in pieces)
        scores = [piece.score for piece in pieces if piece.score is not None]
        answer = {name: {"role": "assistant", "content": text}} if self.chat else {"text": text}
        logprobs = None
        if self.scored:
            logprobs = {"content": list(map(_score, scores))} if self.chat else _scores(scores)
        return {"index": pieces[0].row, "finish_reason": pieces[-1].finish, "logprobs": logprobs, **answer}


def _score(score: TokenScore) -> dict[str, Any]:
    (token, *others) = (
        {"token": text, "logprob": chance, "bytes": list(text.encode())}
        for text, chance in [score[:2], *score.likeliest]
    )
    return {**token, "top_logprobs": others}


def _scores(scores: Sequence[TokenScore]) -> dict[str, Any]:
    return {
        "tokens": [score.text for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [dict(score.likeliest) for score in scores],
        "text_offset": list(itertools.accumulate((len(score.text) for score in scores[:-1]), initial=0)),
    }


def _event(table: Mapping[str, Any]) -> str:
    return f"data: {msgspec.json.encode(table).decode()}\n\n"
