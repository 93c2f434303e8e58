"""A chat model answers OpenAI's protocol; requests that mean nothing and ports in use are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from espalier.cli import chat_server
from espalier.recipe.errors import UserError
from espalier.train.workload_row import Sampling

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def reply(turns: Sequence[tuple[str, str]], sampling: Sampling) -> Iterator[str]:
    if sampling.temperature < 0:
        raise UserError("temperature = -1 is not possible.")
    yield from (f"{len(turns)}:{turns[-1][1]}", f" {sampling.tokens}", f" {sampling.temperature:g}")


@pytest.fixture
def client() -> Any:
    pytest.importorskip("starlette")
    pytest.importorskip("httpx")
    from starlette.testclient import TestClient

    return TestClient(chat_server.application("mine", reply, Sampling(tokens=7)))


def test_answers_are_those_of_the_model_whole_and_in_pieces(client: Any) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == "mine"
    found = client.post("/v1/chat/completions", json=HELLO).json()
    assert found["choices"][0]["message"] == {"role": "assistant", "content": "1:hello 7 0"}
    assert found["choices"][0]["finish_reason"] == "stop"
    asked = {**HELLO, "max_tokens": 3, "temperature": 0.5, "stream": True}
    lines = [line for line in client.post("/v1/chat/completions", json=asked).text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in events) == "1:hello 3 0.5"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(one["object"] == "chat.completion.chunk" for one in events)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{", "Expecting"),
        ("[]", "messages has to be"),
        ('{"messages": []}', "messages has to be"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "is no message"),
        ('{"messages": [{"role": "user"}]}', "is no message"),
        (json.dumps({**HELLO, "temperature": "hot"}), "have to be numbers"),
        (json.dumps({**HELLO, "temperature": -1}), "is not possible"),
    ],
)
def test_a_request_that_means_nothing_is_refused(client: Any, body: str, words: str) -> None:
    found = client.post("/v1/chat/completions", content=body)
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]


def test_a_port_in_use_is_refused_and_only_loopback_is_bound() -> None:
    with chat_server.listening(0) as where:
        where.listen()
        host, port = where.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(UserError, match=f"--port {port} cannot be used"):
            chat_server.listening(port)
    with pytest.raises(UserError, match="--port 99999999 cannot be used"):
        chat_server.listening(99_999_999)
    chat_server.listening(0).close()


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    with pytest.raises(UserError) as told:
        chat_server.serve("mine", reply, Sampling(), 0)
    assert "espalier-train[serve]" in str(told.value)
