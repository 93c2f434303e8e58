"""A language model names reasons that no rule knows; it never overrules a rule, changes an action, or breaks a
diagnosis, and nobody but the host that was named gets lines."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from espalier.cli import main as cli
from espalier.ops import model_diagnosis
from espalier.ops.diagnosis import Means, diagnose
from espalier.ops.incidents import Incident

STRANGE = "step 7 loss 2.1\nERROR the flux capacitor ran dry, api_key=abcdef123456\nERROR giving up the ghost\n"
INCIDENTS = (Incident("the flux was low and nobody saw it", "Node Failure"),)


class Stub:
    """A server of OpenAI's protocol. Has state: what it was asked."""

    def __init__(self) -> None:
        self.answer: Callable[[BaseHTTPRequestHandler], None] | str = '{"reason": "Node Failure"}'
        self.asked: list[tuple[str, Any]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stub.reply(self, {"data": [{"id": "small"}]})

            def do_POST(self) -> None:
                stub.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                if callable(stub.answer):
                    stub.answer(self)
                else:
                    stub.reply(self, {"choices": [{"message": {"content": stub.answer}}]})

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.host = f"127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def reply(self, handler: BaseHTTPRequestHandler, table: Any, status: int = 200) -> None:
        body = table if isinstance(table, bytes) else json.dumps(table).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    stub.thread.start()
    yield stub
    stub.server.shutdown()
    stub.server.server_close()
    stub.thread.join()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.log"
    path.write_text(STRANGE)
    return path


def means(stub: Stub, path: str = "/v1") -> Means:
    return Means(incidents=INCIDENTS, model=f"http://{stub.host}{path}")


def test_a_model_names_what_no_rule_knows_and_changes_no_action(stub: Stub, log: Path) -> None:
    stub.answer = 'Let me see.</think> {"reason": "Assertion Error"}'
    (plain,), (asked,) = diagnose(log), diagnose(log, means(stub))
    assert plain.reason == "Unknown"
    assert (asked.reason, asked.category, asked.source) == ("Assertion Error", "Framework", "model")
    assert (asked.action, asked.root_line) == (plain.action, plain.root_line)
    assert asked.action != "stop"  # though an assertion stops a run where a rule shows it
    assert asked.evidence[-1].shows == f"a guess of the model at {stub.host}: check it"


def test_it_gets_the_lines_kept_and_near_incidents_without_secrets(
    stub: Stub, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diagnose(log, means(stub))
    ((path, body),) = stub.asked
    task, question = (message["content"] for message in body["messages"])
    assert path == "/v1/chat/completions"
    assert (body["model"], body["temperature"]) == ("small", 0)
    assert "Key Error" in task
    assert "2: ERROR the flux capacitor ran dry, api_key=[hidden]" in question
    assert "Past incident, Node Failure:\nthe flux was low" in question
    assert "abcdef123456" not in question
    assert f"{log}: lines 1, 2, 3 and 1 past incidents go to {stub.host}" in capsys.readouterr().err


def test_rules_win_and_a_log_they_know_is_sent_to_nobody(stub: Stub, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("step 1\n[rank2]: KeyError: 'k'\n")
    (diagnosis,) = diagnose(path, means(stub))
    assert (diagnosis.reason, diagnosis.action, diagnosis.source) == ("Key Error", "stop", "rules")
    assert not stub.asked


def test_past_incidents_win_too(stub: Stub, log: Path) -> None:
    alike = Incident("ERROR the flux capacitor ran dry\nERROR giving up the ghost", "OS Error")
    (diagnosis,) = diagnose(log, Means(incidents=(alike,), model=f"http://{stub.host}/v1"))
    assert (diagnosis.reason, diagnosis.source) == ("OS Error", "incidents")
    assert not stub.asked


def _status(status: int, body: bytes = b"") -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda handler: Stub.reply(None, handler, body, status)  # type: ignore[arg-type]


def _elsewhere(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(307)
    handler.send_header("Location", f"http://{handler.headers['Host']}/other")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


BROKEN = {
    "none": '{"reason": "none"}',
    "unknown name": '{"reason": "Flux Error"}',
    "several": '{"reason": "Key Error"} or {"reason": "Hang"}',
    "prose": "I think that this is a Key Error.",
    "no failure": '{"reason": "No Failure"}',
    "empty": "",
    "no json": _status(200, b"<html>"),
    "deep": _status(200, b"[" * 100_000),
    "other table": _status(200, b'{"choices": []}'),
    "null": _status(200, b"null"),
    "error": _status(500, b"\xff\xfe out of memory"),
    "closed": lambda handler: handler.connection.close(),
    "elsewhere": _elsewhere,
    "large": _status(200, b'{"choices": "' + b"x" * (1 << 21) + b'"}'),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_answer_is_none(name: str, stub: Stub, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub.server.handle_error = lambda *_: None  # type: ignore[method-assign]
    stub.answer = BROKEN[name]
    assert diagnose(log, means(stub)) == diagnose(log)
    assert f"{stub.host} names no reason" in capsys.readouterr().err
    assert len(stub.asked) == 1  # nowhere else


def test_who_sends_byte_by_byte_is_not_waited_for_longer(
    stub: Stub, log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()

    def dribble(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not ended.wait(0.05):
            handler.wfile.write(b" ")

    stub.answer = dribble
    monkeypatch.setattr(model_diagnosis, "SECONDS", 0.4)
    began = time.monotonic()
    assert diagnose(log, means(stub)) == diagnose(log)
    ended.set()
    assert time.monotonic() - began < 3
    assert "nothing whole came" in capsys.readouterr().err


def test_nobody_there_is_said(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", "--json", "--model", "http://127.0.0.1:1/v1", str(log)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["reason"] == "Unknown"
    assert "Connection refused" in err


@pytest.mark.parametrize(
    "word",
    [
        "ftp://host/v1",
        "file:///etc/passwd",
        "http://",
        "http://me:secret@host/v1",
        "http://h/v1?a=b",
        "http://h",
        "no.gguf",
    ],
)
def test_only_an_address_or_a_file_is_taken(word: str, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", "--model", word, str(log)]) == 2
    assert "--model http://127.0.0.1:8080/v1" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/v1", "/v1#large"])
def test_an_address_may_name_one_of_several_models(path: str, stub: Stub, log: Path) -> None:
    (diagnosis,) = diagnose(log, means(stub, path))
    assert diagnosis.reason == "Node Failure"
    ((_, body),) = stub.asked
    assert body["model"] == ("large" if "#" in path else "small")


def test_proxies_of_the_environment_get_nothing(stub: Stub, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert diagnose(log, means(stub))[0].source == "model"


# --- a file ----------------------------------------------------------------------------------------------------------

LLAMA = """\
    import json, os, sys, time
    from http.server import BaseHTTPRequestHandler, HTTPServer
    began = time.time()
    words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    open(words["-m"] + ".pid", "w").write(str(os.getpid()))
    if open(words["-m"]).read() == "broken":
        sys.exit(3)
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            loading = self.path == "/health" and time.time() < began + 0.3
            self.reply({"data": [{"id": words["-m"]}]}, 503 if loading else 200)
        def do_POST(self):
            self.reply({"choices": [{"message": {"content": "Hang"}}]})
        def reply(self, table, status=200):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(table).encode())
    HTTPServer((words["--host"], int(words["--port"])), Handler).serve_forever()
    """


@pytest.mark.parametrize(("content", "reason"), [("weights", "Hang"), ("broken", "Unknown")])
def test_a_file_is_asked_by_the_users_llama_server_which_ends(
    content: str, reason: str, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!{sys.executable}\n{textwrap.dedent(LLAMA)}")
    program.chmod(0o755)
    weights = tmp_path / "tiny.gguf"
    weights.write_text(content)
    monkeypatch.setenv("PATH", str(tmp_path))
    model_diagnosis.check(str(weights))
    (diagnosis,) = diagnose(log, Means(model=str(weights)))
    assert diagnosis.reason == reason
    assert not Path(f"/proc/{Path(f'{weights}.pid').read_text()}").exists()


def test_a_file_without_llama_cpp_is_refused(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "tiny.gguf"
    weights.write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("llama-server") is None
    assert cli.main(["diagnose", "--model", str(weights), str(log)]) == 2
    assert "llama-server loads such files, and is not on PATH" in capsys.readouterr().err


# --- predict --serve -------------------------------------------------------------------------------------------------


def test_espaliers_own_server_is_one(log: Path) -> None:
    uvicorn = pytest.importorskip("uvicorn")
    from espalier.cli import chat_server
    from espalier.train.workload_row import Sampling, TextPiece, Writer

    questions: list[str] = []

    def prompt(turns: Any) -> list[int]:
        questions.append(turns[-1][1])
        return [0] * 100

    def write(prompts: Any, samplings: Any) -> Iterator[TextPiece]:
        yield TextPiece(0, '{"reason": ')
        yield TextPiece(0, '"Hang"}', "stop")

    app = chat_server.private(chat_server.application("mine", Writer(prompt, write, 4096), Sampling(tokens=50)), "/far")
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", http=chat_server.protocol(), lifespan="off"))
    with chat_server.listening(0) as door:
        thread = threading.Thread(target=server.run, args=([door],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        (diagnosis,) = diagnose(log, Means(model=f"http://127.0.0.1:{door.getsockname()[1]}/far/v1"))
        server.should_exit = server.force_exit = True
        thread.join()
    assert (diagnosis.reason, diagnosis.source) == ("Hang", "model")
    assert "ERROR giving up the ghost" in questions[0]
