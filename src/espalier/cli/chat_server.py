"""`espalier predict RUN --serve`: a decoder on loopback, for programs that speak OpenAI's protocol.

For trying a model out: one request at a time, in their order. Served are `/v1/models`, `/v1/chat/completions` and
`/v1/completions` (whole, or as a stream), by Starlette and uvicorn (extra `serve`), below a random path that other
users of this machine do not know. `completion_requests` has the protocol's own records.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from espalier.cli.completion_requests import Completion, Invalid
from espalier.recipe.errors import UserError, missing_extra
from espalier.recipe.terminal import say
from espalier.train.workload_row import Sampling, TextPiece, Writer

HOST = "127.0.0.1"
PORTS = 65535
"""The last port."""
LARGEST = 16 << 20
"""Bytes of a request."""
VISITORS = 64
"""Connections at once that have not asked anything; one more closes the oldest."""
SECONDS = 600.0
"""Of computing an answer; it then ends as if it had its tokens."""


def serve(name: str, writer: Writer, defaults: Sampling, port: int) -> None:
    """Answers until Ctrl-C. `name`: of the model; `defaults`: what a request does not say. Port 0 takes a free one.

    Raises UserError where the extra is missing, or the port is in use.
    """
    try:
        import uvicorn

        path = f"/{secrets.token_urlsafe(16)}"
        app = private(application(name, writer, defaults), path)
        config = uvicorn.Config(app, log_level="warning", http=protocol(), lifespan="off")
    except ImportError:
        raise missing_extra("starlette", "serve", "espalier predict --serve") from None
    interrupts = logging.getLogger("uvicorn.error")  # the second ends what is being answered
    interrupts.addFilter(lambda record: not (record.exc_info and record.exc_info[0] is asyncio.CancelledError))
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
    """A socket that listens at `port` of this machine's loopback. Raises UserError where it is in use."""
    try:
        if not 0 <= port <= PORTS:  # create_server would leave its socket open
            raise OSError(errno.EINVAL, f"ports are 0 to {PORTS}")
        return socket.create_server((HOST, port))
    except OSError as error:
        raise UserError(f"--port {port} cannot be used: {error.strerror}.", do="another one, or leave it out") from None


def application(name: str, writer: Writer, defaults: Sampling) -> Any:
    """The ASGI application."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    turn = asyncio.Lock()
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "espalier"}

    def refused(error: Invalid) -> Any:
        return JSONResponse({"error": error.body}, status_code=error.status)

    async def models(request: Any) -> Any:
        return JSONResponse({"object": "list", "data": [card]})

    async def model(request: Any) -> Any:
        asked = request.path_params["model"]
        return JSONResponse(card) if asked == name else refused(Invalid(f"{asked} is not here", "model", status=404))

    async def complete(request: Any) -> Any:
        chat = request.url.path.endswith("/chat/completions")
        try:
            answer = Completion(await _body(request), chat, writer, card, defaults)
        except Invalid as error:
            return refused(error)
        pieces = _taken(turn, answer.pieces, request.is_disconnected)
        if answer.asked.stream:
            return StreamingResponse(answer.events(pieces), media_type="text/event-stream")
        return JSONResponse(await answer.whole(pieces))

    posts = [Route(f"/v1/{path}", complete, methods=["POST"]) for path in ("chat/completions", "completions")]
    gets = [Route("/v1/models", models), Route("/v1/models/{model:path}", model)]
    return Starlette(routes=[*gets, *posts])


async def _taken(turn: asyncio.Lock, pieces: Iterator[TextPiece], gone: Callable[[], Any]) -> AsyncIterator[TextPiece]:
    """`pieces`, computed in a turn that ends with them: for a reader that is slow they wait, and for one that is gone,
    or after `SECONDS`, there are no more."""
    waiting: asyncio.Queue[TextPiece | None] = asyncio.Queue()
    computing = asyncio.create_task(_computed(turn, pieces, gone, waiting))
    while (piece := await waiting.get()) is not None:
        yield piece
    await computing


async def _computed(
    turn: asyncio.Lock, pieces: Iterator[TextPiece], gone: Callable[[], Any], waiting: asyncio.Queue[TextPiece | None]
) -> None:
    from starlette.concurrency import run_in_threadpool

    try:
        async with turn:
            end = time.monotonic() + SECONDS
            while time.monotonic() < end and not await gone():
                piece = await run_in_threadpool(next, pieces, None)
                if piece is None:
                    break
                waiting.put_nowait(piece)
    finally:
        waiting.put_nowait(None)


async def _body(request: Any) -> bytes:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > LARGEST:
            raise Invalid(f"a request has at most {LARGEST >> 20} MiB", status=413)
    return body
