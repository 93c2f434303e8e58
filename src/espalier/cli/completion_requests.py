"""OpenAI's requests for completions, and the answers to them: https://platform.openai.com/docs/api-reference/chat

What a request says is honoured, or refused by its name; nothing is left out silently but what changes no answer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from espalier.recipe.errors import UserError
from espalier.train.workload_row import ROWS, Piece, Sampling, TokenScore

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
Turns = Sequence[tuple[str, str]]


class Writer(NamedTuple):
    """A model that continues prompts of tokens, as `train.workload_row.Writes`."""

    prompt: Callable[[str | Turns], list[int]]
    write: Callable[[Sequence[Sequence[int]], Sequence[Sampling]], Iterator[Piece]]
    context: int


class Invalid(Exception):
    """A request that means nothing, or asks for what is not there."""

    def __init__(self, why: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(why)
        self.param, self.code, self.status = param, code, status

    @classmethod
    def model(cls, asked: str, name: str) -> Invalid:
        """For another model than the one that is served."""
        return cls(f"The model {asked!r} is not here, but {name!r} is.", "model", "model_not_found", 404)


# --- what is asked -------------------------------------------------------------------------------------------------


class Part(Struct, frozen=True):
    """Of a message's content."""

    type: str
    text: str = ""


class Message(Struct, frozen=True):
    """A turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None

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


class Asked(Struct, frozen=True):
    """What both kinds of request may say; null is as left out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=ROWS)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_k: Positive | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)


class AskedChat(Asked, frozen=True, kw_only=True):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    def prompts(self, writer: Writer) -> list[list[int]]:
        """One."""
        return [writer.prompt([message.turn for message in self.messages])]

    @property
    def tokens(self) -> int | None:
        """That an answer has at most; None: nothing is said of it."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """Tokens that are named with each."""
        return (self.top_logprobs or 0) if self.logprobs else None


class AskedText(Asked, frozen=True, kw_only=True):
    """`/v1/completions`."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    def prompts(self, writer: Writer) -> list[list[int]]:
        """Of texts, or of tokens."""
        parts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        numbers = [part for part in parts if isinstance(part, int)]
        if len(numbers) == len(parts):
            return [numbers]
        if numbers:
            raise Invalid("prompt holds tokens, and texts beside them", "prompt")
        return [writer.prompt(part) if isinstance(part, str) else part for part in parts if not isinstance(part, int)]

    @property
    def tokens(self) -> int | None:
        """That an answer has at most."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """Tokens that are named with each."""
        return self.logprobs


def read(body: bytes, chat: bool) -> AskedChat | AskedText:
    """The request in `body`. Raises Invalid."""
    kind: type[AskedChat | AskedText] = AskedChat if chat else AskedText
    try:
        table = msgspec.json.decode(body)
        asked = msgspec.convert(table, kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise Invalid(f"the request means nothing: {error}") from None
    _refuse_others(table, kind, "")
    for message in table.get("messages") or []:
        _refuse_others(message, Message, "messages.")
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if part["type"] != "text":
                raise Invalid(f"{part['type']} is not there: content is text", f"messages.content.{part['type']}")
    return asked


def _refuse_others(table: Mapping[str, Any], kind: type[Struct], where: str) -> None:
    known = {*kind.__struct_fields__, *IGNORED}
    for name in sorted(table.keys() - known):
        if table[name] and table[name] != NEUTRAL.get(name):
            raise Invalid(f"{where}{name} is not there. Try: leave it out", f"{where}{name}", "unsupported_parameter")


# --- what is answered ----------------------------------------------------------------------------------------------


class Answer:
    """The answer to a request, in one piece for each prompt and copy. Has state: how many tokens it took."""

    def __init__(self, asked: AskedChat | AskedText, name: str, writer: Writer, defaults: Sampling) -> None:
        if asked.model not in (None, name):
            raise Invalid.model(str(asked.model), name)
        self.asked, self.chat = asked, isinstance(asked, AskedChat)
        self.kind = "chat.completion" if self.chat else "text_completion"
        self.head = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
        }
        copies, prompts = asked.n or 1, asked.prompts(writer)
        self.rows, self.written = len(prompts) * copies, 0
        self.read = sum(map(len, prompts))
        if self.rows > ROWS:
            raise Invalid(f"{self.rows} answers are asked for, and at most {ROWS} are given", "n")
        longest = max(map(len, prompts))
        room = writer.context - longest
        if room < (asked.tokens or 1):
            why = f"the prompt has {longest} tokens, and {asked.tokens or 1} or more are to follow"
            limit = f"This model's maximum context length is {writer.context} tokens: {why}."
            raise Invalid(limit, "messages" if self.chat else "prompt", "context_length_exceeded")
        samplings = [_sampling(asked, defaults, room, copy) for copy in range(copies)]
        self.pieces = writer.write([prompt for prompt in prompts for _ in samplings], samplings * len(prompts))

    @property
    def usage(self) -> dict[str, int]:
        """Tokens that were read and written."""
        total = self.read + self.written
        return {"prompt_tokens": self.read, "completion_tokens": self.written, "total_tokens": total}

    async def whole(self, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        """The answer in one table."""
        rows: list[list[Piece]] = [[] for _ in range(self.rows)]
        async for piece in self._counted(pieces):
            rows[piece.row].append(piece)
        return {**self.head, "object": self.kind, "choices": list(map(self._choice, rows)), "usage": self.usage}

    async def events(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        head = {**self.head, "object": f"{self.kind}.chunk" if self.chat else self.kind}
        for row in range(self.rows if self.chat else 0):
            yield _event({**head, "choices": [self._choice([Piece(row)], {"role": "assistant", "content": ""})]})
        async for piece in self._counted(pieces):
            if piece.text or piece.finish or piece.score:
                delta = {"content": piece.text} if piece.text else {}
                yield _event({**head, "choices": [self._choice([piece], delta)]})
        if self.asked.stream_options is not None and self.asked.stream_options.include_usage:
            yield _event({**head, "choices": [], "usage": self.usage})
        yield "data: [DONE]\n\n"

    async def _counted(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
        """`pieces`, and an end of the rows that have none."""
        going_on = set(range(self.rows))
        async for piece in pieces:
            self.written += piece.tokens
            going_on -= {piece.row} if piece.finish else set()
            yield piece
        for row in sorted(going_on):
            yield Piece(row, finish="length")

    def _choice(self, pieces: Sequence[Piece], delta: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Of the pieces of one row; `delta`: of a chat in a stream."""
        text = "".join(piece.text for piece in pieces)
        scores = [piece.score for piece in pieces if piece.score is not None]
        logprobs = None
        if self.asked.likeliest is not None:
            logprobs = {"content": [_chat_score(score) for score in scores]} if self.chat else _text_scores(scores)
        choice = {"index": pieces[0].row, "finish_reason": pieces[-1].finish, "logprobs": logprobs}
        if not self.chat:
            return {**choice, "text": text}
        return {
            **choice,
            **({"message": {"role": "assistant", "content": text}} if delta is None else {"delta": delta}),
        }


def answer(body: bytes, name: str, writer: Writer, defaults: Sampling, *, chat: bool) -> Answer:
    """To the request in `body`. `name`: of the model; `defaults`: what a request does not say. Raises Invalid."""
    try:
        return Answer(read(body, chat), name, writer, defaults)
    except UserError as error:
        raise Invalid(str(error)) from None


def _sampling(asked: AskedChat | AskedText, defaults: Sampling, room: int, copy: int) -> Sampling:
    seed = defaults.seed if asked.seed is None else asked.seed
    return Sampling(
        tokens=asked.tokens or min(defaults.tokens, room),
        temperature=defaults.temperature if asked.temperature is None else asked.temperature,
        top_k=asked.top_k or defaults.top_k,
        seed=None if seed is None else seed ^ copy,
        top_p=asked.top_p,
        stop=asked.stops,
        logprobs=asked.likeliest,
    )


def _chat_score(score: TokenScore) -> dict[str, Any]:
    rows = [{"token": text, "logprob": chance, "bytes": list(text.encode())} for text, chance in score.likeliest]
    return {"token": score.text, "logprob": score.logprob, "bytes": list(score.text.encode()), "top_logprobs": rows}


def _text_scores(scores: Sequence[TokenScore]) -> dict[str, Any]:
    return {
        "tokens": [score.text for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [dict(score.likeliest) for score in scores],
        "text_offset": list(accumulate((len(score.text) for score in scores[:-1]), initial=0)) if scores else [],
    }


def _event(table: Mapping[str, Any]) -> str:
    return f"data: {msgspec.json.encode(table).decode()}\n\n"
