"""`espalier predict RUN --serve`: a chat model on loopback, for programs that speak OpenAI's protocol.

For trying a model out: one answer at a time, in the order of the requests. Served are `GET /v1/models` and `POST
/v1/chat/completions` (whole, or as a stream), by Starlette and uvicorn (extra `serve`), below a random path that other
users of this machine do not know.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from espalier.recipe.errors import UserError, missing_extra
from espalier.recipe.terminal import say
from espalier.train.workload_row import Sampling

HOST = "127.0.0.1"
LARGEST = 16 << 20
"""Bytes of a request."""
VISITORS = 64
"""Connections at once that have not asked anything; one more closes the oldest."""
Reply = Callable[[Sequence[tuple[str, str]], Sampling], Iterator[str]]
"""(turns of (role, text), how it is drawn) -> the answer in pieces."""


class Invalid(Exception):
    """A request that means nothing."""


def serve(name: str, reply: Reply, defaults: Sampling, port: int) -> None:
    """Answers until Ctrl-C. `name`: of the model; `defaults`: what a request does not say. Port 0 takes a free one.

    Raises UserError where the extra is missing, or the port is in use.
    """
    try:
        import uvicorn

        path = f"/{secrets.token_urlsafe(16)}"
        app = private(application(name, reply, defaults), path)
        config = uvicorn.Config(app, log_level="warning", http=protocol())
    except ImportError:
        raise missing_extra("starlette", "serve", "espalier predict --serve") from None
    with listening(port) as where:
        say(f"{name} answers at http://{HOST}:{where.getsockname()[1]}{path}/v1 (Ctrl-C ends it)", flush=True)
        uvicorn.Server(config).run(sockets=[where])


def private(app: Any, path: str) -> Any:
    """`app` below `path`, for requests to this machine by its own name: a page elsewhere could point a name at it."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.routing import Mount

    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    return Starlette(routes=[Mount(path, app)], middleware=[hosts])


def protocol() -> Any:
    """uvicorn's HTTP, of which silent connections keep nobody out."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    silent: dict[Any, None] = {}  # the oldest first

    class Bounded(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            silent[self] = None
            if len(silent) > VISITORS:
                oldest = next(iter(silent))
                del silent[oldest]
                oldest.transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None:
                silent.pop(self, None)

        def connection_lost(self, exc: Exception | None) -> None:
            silent.pop(self, None)
            super().connection_lost(exc)

    return Bounded


def listening(port: int) -> socket.socket:
    """A socket bound to `port` of this machine's loopback. Raises UserError where it is in use."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--port {port} cannot be used: {reason}.", do="another one, or leave it out") from None
    return listener


def application(name: str, reply: Reply, defaults: Sampling) -> Any:
    """The ASGI application."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    turn = threading.Lock()

    def answer(table: Mapping[str, Any]) -> Iterator[str]:
        turns = _turns(table)
        sampling = _sampling(table, defaults)

        def pieces() -> Iterator[str]:
            with turn:
                yield from reply(turns, sampling)

        return pieces()

    async def models(request: Any) -> Any:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model", "owned_by": "espalier"}]})

    async def chat(request: Any) -> Any:
        try:
            table = json.loads(await _body(request))
            pieces = answer(table)
            if table.get("stream"):
                return StreamingResponse(_events(name, pieces), media_type="text/event-stream")
            text = await run_in_threadpool("".join, pieces)
        except (Invalid, ValueError, RecursionError, UserError) as error:
            body = {"message": str(error), "type": "invalid_request_error"}
            return JSONResponse({"error": body}, status_code=400)
        return JSONResponse(_said(name, "chat.completion", {"message": {"role": "assistant", "content": text}}, "stop"))

    return Starlette(routes=[Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])])


async def _body(request: Any) -> bytes:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > LARGEST:
            raise Invalid(f"a request has at most {LARGEST >> 20} MiB")
    return body


def _turns(table: Any) -> list[tuple[str, str]]:
    messages = table.get("messages") if isinstance(table, dict) else None
    if not isinstance(messages, list) or not messages:
        raise Invalid("messages has to be a list of {role, content}")
    turns = []
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        if role not in ("system", "user", "assistant", "tool") or not isinstance(content, str):
            raise Invalid(f"{message!r} is no message: it needs a role (system, user, assistant) and text as content")
        turns.append((role, content))
    return turns


def _sampling(table: Mapping[str, Any], defaults: Sampling) -> Sampling:
    tokens = table.get("max_completion_tokens") or table.get("max_tokens") or defaults.tokens
    temperature = table.get("temperature")
    seed = table.get("seed")
    numbers = [value for value in (tokens, temperature, seed) if value is not None]
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in numbers):
        raise Invalid("max_tokens, temperature and seed have to be numbers")
    return Sampling(
        int(tokens),
        defaults.temperature if temperature is None else float(temperature),
        defaults.top_k,
        defaults.seed if seed is None else int(seed),
    )


def _events(name: str, pieces: Iterator[str]) -> Iterator[str]:
    """Server-sent events of an answer."""
    kind = "chat.completion.chunk"
    yield _event(_said(name, kind, {"delta": {"role": "assistant", "content": ""}}, None))
    for piece in pieces:
        yield _event(_said(name, kind, {"delta": {"content": piece}}, None))
    yield _event(_said(name, kind, {"delta": {}}, "stop"))
    yield "data: [DONE]\n\n"


def _event(table: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(table)}\n\n"


def _said(name: str, kind: str, choice: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
    made = int(time.time())
    choices = [{"index": 0, "finish_reason": reason, **choice}]
    return {"id": f"chatcmpl-{made}", "object": kind, "created": made, "model": name, "choices": choices}
