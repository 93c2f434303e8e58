"""The live report: on loopback only, renewed as the run goes on."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import made
import pytest

from espalier.recipe.errors import UserError
from espalier.track.events import Log
from espalier.track.live_report import Live


@contextmanager
def running(server: Live) -> Iterator[Live]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def get(server: Live, path: str = "", host: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5)
    try:
        connection.request("GET", path or server.path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_a_running_run_is_shown_as_it_goes_on(tmp_path: Path) -> None:
    folder = made.make(tmp_path, 5, end="")
    with running(Live(folder)) as server:
        status, page = get(server)
        assert status == 200
        assert "data-live" in page
        assert "connect-src 'self'" in page
        assert "def read_lines" not in page
        with Log(folder / "events.jsonl") as log:
            log.write("sample", step=5, text="def read_lines")
        assert "def read_lines" in get(server)[1]
        (folder / "plan.json").write_text("{")
        with Log(folder / "events.jsonl") as log:
            log.write("rule", step=5)
        assert get(server)[0] == 503


def test_only_this_machine_and_only_the_page(tmp_path: Path) -> None:
    with running(Live(made.make(tmp_path, 2))) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert get(server, host="elsewhere.example:80")[0] == 403
        assert get(server, f"{server.path}../events.jsonl")[0] == 404


def test_who_was_not_told_the_address_sees_nothing(tmp_path: Path) -> None:
    folder = made.make(tmp_path, 2)
    with running(Live(folder)) as server, running(Live(folder)) as other:
        assert server.url.endswith(server.path)
        assert len(server.path) > 20
        assert [get(server, path)[0] for path in ("/", "/x", other.path, server.path[:-1])] == [404] * 4


def test_an_error_of_several_lines_is_no_header(tmp_path: Path) -> None:
    folder = made.make(tmp_path, 2)
    with running(Live(folder)) as server:
        (folder / "plan.json").write_text("{")
        (folder / "run.toml").write_text('name = "a\r\nSet-Cookie: x=\u4e2d"\n=')
        status, page = get(server)
        assert status == 503
        assert "Set-Cookie" not in page.partition("<")[0]


def test_a_port_in_use_is_named_with_a_free_one(tmp_path: Path) -> None:
    folder = made.make(tmp_path, 2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"Port {port}") as caught:
            Live(folder, port)
    free = int(caught.value.do.split()[1].strip(","))
    with running(Live(folder, free)) as server:
        assert get(server)[0] == 200


def test_a_folder_without_a_run_is_refused_before_listening(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        Live(tmp_path)
