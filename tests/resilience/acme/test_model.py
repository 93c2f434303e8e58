"""A language model is believed in nothing: scripted endpoints that lie, babble, disagree, dawdle or are dead."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from espalier.errors import UserError
from espalier.resilience import restart_helps
from espalier.resilience.acme import model
from espalier.resilience.acme.diagnose import Means, diagnose
from espalier.resilience.acme.model import Endpoint, Unanswered

LINES = {1: "step 1", 2: "step 2", 3: "ERROR flux capacitor 7 is out of plutonium"}
GOOD = {"reason": "OS Error", "line": 3, "pattern": "flux capacitor .* out of plutonium", "filter": "^step "}


def reply(answer):
    content = answer if isinstance(answer, str) else f"Sure! {json.dumps(answer)}"
    return json.dumps({"choices": [{"message": {"content": content}}]}).encode()


@contextmanager
def served(*replies, status=200, wait=0.0) -> Iterator[tuple[Endpoint, list[dict]]]:
    """An endpoint that gives `replies` in turn, the last one for ever, and what it was asked."""
    asked: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(
                json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                | {"key": self.headers["Authorization"], "path": self.path}
            )
            body = replies[min(len(asked), len(replies)) - 1]
            try:
                self.send_response(status)
                self.end_headers()
                part = 50 if wait else len(body) or 1
                for at in range(0, len(body), part):
                    self.wfile.write(body[at : at + part])
                    self.wfile.flush()
                    time.sleep(wait)
            except OSError:
                pass

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield model.endpoint(f"http://127.0.0.1:{server.server_port}/v1#small"), asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_answers_that_agree_and_pass_are_proposed():
    with served(reply(GOOD)) as (where, asked):
        found = model.ask(where, LINES)
    assert (found.reason, found.line, found.votes, found.asked) == ("OS Error", 3, 5, 5)
    assert (found.pattern, found.filter) == (GOOD["pattern"], GOOD["filter"])
    assert asked[0]["path"] == "/v1/chat/completions"
    assert asked[0]["model"] == "small"
    assert "flux capacitor" in asked[0]["messages"][0]["content"]


def test_the_majority_decides_and_a_minority_does_not():
    other, third = GOOD | {"reason": "Key Error"}, GOOD | {"reason": "ECC Error"}
    with served(*map(reply, (other, GOOD, other, GOOD, GOOD))) as (where, _):
        found = model.ask(where, LINES)
    assert (found.reason, found.votes) == ("OS Error", 3)
    answers = map(reply, (GOOD, other, GOOD, other, third))
    with served(*answers) as (where, _), pytest.raises(Unanswered, match="2 of 5"):
        model.ask(where, LINES)


@pytest.mark.parametrize(
    "lie",
    [
        "no JSON here", "{", "[]", "{}",
        GOOD | {"reason": "Gremlins"}, GOOD | {"reason": "No Failure"}, GOOD | {"reason": ["OS Error"]},
        GOOD | {"line": 99}, GOOD | {"line": "three"}, GOOD | {"line": True}, "{" * 5000 + "}" * 5000,
    ],
)  # fmt: skip
def test_a_malformed_answer_counts_for_nothing(lie):
    with served(reply(lie)) as (where, _), pytest.raises(Unanswered, match="not what was asked for"):
        model.ask(where, LINES)


@pytest.mark.parametrize(
    "body",
    [b"", b"hello", b"{}", b'{"choices": []}', b"[1]", b"\xff\xfe", b"[" * 100_000, b"x" * (model.LARGEST + 100)],
)
def test_a_server_that_speaks_otherwise_counts_for_nothing(body):
    with served(body) as (where, _), pytest.raises(Unanswered):
        model.ask(where, LINES)


def test_an_error_of_the_server_is_told():
    with served(b"no such model", status=404) as (where, _), pytest.raises(Unanswered, match="404"):
        model.ask(where, LINES)


def test_a_dead_server_is_told_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unanswered, match="cannot be reached"):
        model.ask(model.endpoint(f"http://127.0.0.1:{port}"), LINES)


def test_a_server_that_dribbles_is_not_waited_for():
    with served(reply("x" * 5000), wait=0.05) as (where, _):
        begin = time.monotonic()
        with pytest.raises(Unanswered):
            model.ask(where, LINES, patience=0.5)
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "(",
        "flux[",
        ".*",
        "r",
        "loss",
        r"(a+)+b",
        r"(.*)*flux",
        r"(f(l|u)*)+",
        "nothing like it",
        "x" * 300,
        r"(flux).*\1",
        "|flux",
    ],
)
def test_a_pattern_that_could_do_harm_is_dropped(pattern):
    assert not model.sound_rule(pattern, LINES[3])


def test_a_pattern_that_holds_is_kept():
    assert model.sound_rule("flux capacitor", LINES[3])


@pytest.mark.parametrize("routine", ["", "(", ".*", "ERROR", "Error", "flux", "plutonium", "no such line", "CUDA"])
def test_a_filter_that_would_drop_what_matters_is_dropped(routine):
    assert not model.sound_filter(routine, LINES, 3)


def test_a_filter_of_routine_lines_is_kept():
    assert model.sound_filter("^step ", LINES, 3)


@pytest.mark.parametrize("reason", ["Syntax Error", "Import Error", "Argument Error", "OS Error"])
def test_a_restart_is_never_made_a_stop(tmp_path, reason):
    log = tmp_path / "a.log"
    log.write_text("\n".join(LINES.values()) + "\n")
    before = diagnose(log)[0]
    assert restart_helps(before)
    with served(reply(GOOD | {"reason": reason, "action": "stop"})) as (where, _):
        after = diagnose(log, Means(model=where))[0]
    assert (after.reason, after.action, after.source, after.root_line) == (reason, "retry", "model", 3)
    assert restart_helps(after)
    assert "[[rule]]" in after.proposal


def test_a_proposed_rule_is_one_that_can_be_used(tmp_path):
    from espalier.resilience.acme import rules

    found = model.Proposal("OS Error", 3, r"flux \"capacitor\" \d+\b", "", 5, 5)
    path = tmp_path / "mine.toml"
    path.write_text(found.rule() + "\n")
    assert rules.read(path)[0].patterns[0] == found.pattern
    assert model.Proposal("OS Error", 3, "", "", 5, 5).rule() == ""


def test_the_model_is_not_asked_where_a_rule_knows(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("KeyError: 'k'\n")
    with served(reply(GOOD)) as (where, asked):
        assert diagnose(log, Means(model=where))[0].reason == "Key Error"
    assert asked == []


def test_without_its_help_the_diagnosis_stands_and_says_so(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("\n".join(LINES.values()) + "\n")
    with served(b"hello") as (where, _):
        found = diagnose(log, Means(model=where))[0]
    assert (found.reason, found.action) == ("Unknown", "retry")
    assert "the model was no help" in found.advice


@pytest.mark.parametrize(
    ("text", "url", "name", "key"),
    [
        ("http://h:1/v1#m", "http://h:1/v1/chat/completions", "m", ""),
        ("http://h", "http://h/v1/chat/completions", "default", ""),
        ("https://:k@h/api/chat/completions", "https://h/api/chat/completions", "default", "k"),
    ],
)
def test_the_url_names_model_and_key(text, url, name, key):
    assert model.endpoint(text) == Endpoint(url, name, key)


@pytest.mark.parametrize("text", ["h:1", "file:///etc/passwd", "http://", "ftp://h"])
def test_what_is_no_server_is_refused(text):
    with pytest.raises(UserError, match="--model"):
        model.endpoint(text)
