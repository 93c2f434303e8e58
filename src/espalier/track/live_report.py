"""Live report of a running run, for browsers on this machine only."""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from espalier.recipe.errors import EspalierError, UserError
from espalier.recipe.terminal import say
from espalier.track import events
from espalier.track.report import render
from espalier.track.run_tables import RunTables

_HOST = "127.0.0.1"
QUICK, SELDOM = 1.0, 20
"""A page that takes more than so many seconds of a processor is made anew after so many times as many, at the most."""
VISITORS = 64
"""Connections at once; one more closes the oldest."""


class Live(ThreadingHTTPServer):
    """Serves the report of one run folder on loopback, to whoever was told its address: other users of this machine
    do not know its token. Has state: the last page, kept while the log is the same."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(self, folder: str | Path, port: int = 0) -> None:
        self.folder = Path(folder)
        RunTables.read(self.folder)
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._due = 0.0
        self._page = b""
        self._visitors: dict[Any, None] = {}  # the oldest first
        self._door = threading.Lock()
        self.path = f"/{secrets.token_urlsafe(16)}/"
        try:
            super().__init__((_HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"Port {port} cannot be used: {error}.",
                why="another program may be listening on it",
                do=f"--port {_free_port()}, which is free",
            ) from None

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.server_port}{self.path}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread of its own."""
        with self._door:
            self._visitors[request] = None
            if len(self._visitors) > VISITORS:
                oldest = next(iter(self._visitors))
                del self._visitors[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._door:
            self._visitors.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A visitor that went away is nothing anybody reads."""

    def page(self) -> bytes:
        """The report as it is now."""
        with self._lock:
            log = self.folder / events.NAME
            stat = log.stat() if log.is_file() else None
            seen = (stat.st_size, stat.st_mtime_ns) if stat else (0, 0)
            if not self._page or (seen != self._seen and time.monotonic() > self._due):
                began = time.thread_time()
                self._page = render(RunTables.read(self.folder), live=True).encode()
                self._seen, took = seen, time.thread_time() - began
                self._due = time.monotonic() + (SELDOM * took if took > QUICK else 0.0)
            return self._page


class _Handler(BaseHTTPRequestHandler):
    server: Live
    timeout = 5.0

    def do_GET(self) -> None:
        # A page elsewhere could point a name of its own at 127.0.0.1; only our own names are answered.
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host not in (_HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN, "only for this machine")
        elif not hmac.compare_digest(self.path.encode(), self.server.path.encode()):
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._answer()

    def _answer(self) -> None:
        try:
            body = self.server.page()
        except EspalierError as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=error.what)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """One line per request is nothing anybody reads."""


def serve(folder: str | Path, port: int = 0) -> None:
    """Serves the run in `folder` until Ctrl-C. Port 0 takes a free one.

    Raises UserError when there is no run in `folder`, or the port is in use (naming a free one).
    """
    with Live(folder, port) as server:
        say(f"{server.folder} is live at {server.url} (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
