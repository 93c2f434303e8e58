"""Authentication gate in front of the rendezvous store, and the relay that passes it from other hosts. No torch.

A TCPStore asks nobody who he is. So on several hosts it listens on loopback alone, and the port that other hosts know
is a gate's: who comes there has to prove that he knows the random token of the run before one byte of his reaches the
store. On each other host a relay listens on loopback, proves it for whoever connects there, and passes bytes on.

The gate sends a challenge; the visitor answers with one of his own and an HMAC (RFC 2104, SHA-256) under the token over
who he is and both challenges; the gate answers likewise, so that a visitor knows the gate too. All have a fixed length.
What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from typing import NoReturn

from espalier.launch.hosts.message_auth import code

SECONDS = 5.0
"""How long a visitor may take to prove that he knows the token."""
STRANGERS = 256
"""How many may be at it at once; one more, and the one that came first has to go."""
_OPENING = 30.0
"""How long the gate may take to begin: its port listens before its store does (seconds)."""
_SIZE = 32  # of a challenge, and of a SHA-256
_CHUNK = 1 << 16
_BACKLOG = 1024

Receive = Callable[[StreamReader, StreamWriter], Awaitable[None]]
"""What is done with whoever comes."""


def guard(door: socket.socket, store: int, token: str) -> NoReturn:
    """Lets those who know `token` from `door`, which listens, to the port `store` of loopback."""
    strangers: dict[StreamWriter, None] = {}  # those that have not proved anything yet, the oldest first

    async def receive(reader: StreamReader, writer: StreamWriter) -> None:
        strangers[writer] = None
        if len(strangers) > STRANGERS:
            oldest = next(iter(strangers))
            del strangers[oldest]
            oldest.transport.abort()
        try:
            known = await _admits(reader, writer, token)
        finally:
            strangers.pop(writer, None)
        if known:
            await _relay(reader, writer, ("127.0.0.1", store), "")

    _each(door, receive)


def forward(door: socket.socket, gate: tuple[str, int], token: str) -> NoReturn:
    """Passes those who come to `door`, which listens on loopback, through the gate at that address."""
    _each(door, lambda reader, writer: _relay(reader, writer, gate, token))


async def _admits(reader: StreamReader, writer: StreamWriter, token: str) -> bool:
    """Whether the visitor knows the token; then he is shown that this side does."""
    challenge = secrets.token_bytes(_SIZE)
    writer.write(challenge)
    answer = await asyncio.wait_for(reader.readexactly(2 * _SIZE), SECONDS)
    both = challenge + answer[:_SIZE]
    if not hmac.compare_digest(answer[_SIZE:], code(token, "gate: visitor", both)):
        return False
    writer.write(code(token, "gate: gate", both))
    return True


async def _enters(reader: StreamReader, writer: StreamWriter, token: str) -> bool:
    """Proves to the gate at the other end that this side knows the token; whether the gate does."""
    challenge = await asyncio.wait_for(reader.readexactly(_SIZE), _OPENING)
    nonce = secrets.token_bytes(_SIZE)
    writer.write(nonce + code(token, "gate: visitor", challenge + nonce))
    answer = await asyncio.wait_for(reader.readexactly(_SIZE), SECONDS)
    return hmac.compare_digest(answer, code(token, "gate: gate", challenge + nonce))


def _each(door: socket.socket, receive: Receive) -> NoReturn:
    """Does `receive` with whoever comes, all at once, and hangs up after it."""

    async def meet(reader: StreamReader, writer: StreamWriter) -> None:
        try:
            await receive(reader, writer)
        except* (OSError, EOFError):  # he was silent, or went away
            pass
        finally:
            writer.close()

    async def serve() -> None:
        await (await asyncio.start_server(meet, sock=door, backlog=_BACKLOG)).serve_forever()

    asyncio.run(serve())
    raise AssertionError("it serves for ever")


async def _relay(reader: StreamReader, writer: StreamWriter, target: tuple[str, int], token: str) -> None:
    """Passes bytes to `target` and back until both directions have ended. `token`: what the gate there has to be
    shown, if one is."""
    inner, outer = await asyncio.wait_for(asyncio.open_connection(*target), SECONDS)
    try:
        if not token or await _enters(inner, outer, token):
            async with asyncio.TaskGroup() as both:  # where one fails the other ends too
                both.create_task(_pass_on(reader, outer))
                both.create_task(_pass_on(inner, writer))
    finally:
        outer.close()


async def _pass_on(source: StreamReader, sink: StreamWriter) -> None:
    while data := await source.read(_CHUNK):
        sink.write(data)
        await sink.drain()
    sink.write_eof()
