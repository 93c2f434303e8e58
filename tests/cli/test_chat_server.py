"""A decoder answers OpenAI's protocol; requests that mean nothing and ports in use are refused; who leaves ends the
computing."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from espalier.cli import chat_server, completion_requests
from espalier.recipe.errors import UserError
from espalier.train.workload_row import Sampling, TextPiece, TokenScore, Writer

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
CONTEXT = 40


def prompt(asked: str | Sequence[tuple[str, str]]) -> list[int]:
    if isinstance(asked, str):
        return [0, *asked.encode()]
    return [0, *" ".join(f"{role}:{text}" for role, text in asked).encode()]


def write(prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> Iterator[TextPiece]:
    """The prompt letter by letter, in capitals; `?` ends it."""
    if any(sampling.temperature > 9 for sampling in samplings):
        raise UserError("temperature = 10 is not possible.")
    return pieces(prompts, samplings)


def pieces(prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> Iterator[TextPiece]:
    yield TextPiece(0)
    for row, (ids, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        text = bytes(ids[1:]).decode().upper() + "?"
        for number, letter in enumerate(text, 1):
            score = None if sampling.logprobs is None else TokenScore(letter, -0.5, [("x", -0.1)][: sampling.logprobs])
            end = "stop" if letter == "?" else "length" if number == sampling.tokens else None
            yield TextPiece(row, "" if letter == "?" else letter, end, 1, score)
            if end:
                break


WRITER = Writer(prompt, write, CONTEXT)


@pytest.fixture
def client() -> Any:
    pytest.importorskip("starlette")
    from starlette.testclient import TestClient

    return TestClient(chat_server.application("mine", WRITER, Sampling(tokens=30)))


def chat(client: Any, **more: Any) -> Any:
    return client.post("/v1/chat/completions", json={**HELLO, **more})


def text(client: Any, **more: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": "ab", **more})


def events(response: Any) -> list[dict[str, Any]]:
    lines = [line for line in response.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_models_are_listed_and_named(client: Any) -> None:
    assert client.get("/v1/models").json()["data"] == [client.get("/v1/models/mine").json()]
    assert client.get("/v1/models/mine").json()["id"] == "mine"
    assert client.get("/v1/models/other").json()["error"]["param"] == "model"
    assert client.get("/v1/nothing").status_code == 404


def test_chats_are_answered_whole_and_in_pieces(client: Any) -> None:
    whole = chat(client).json()
    assert whole["choices"] == [
        {
            "index": 0,
            "finish_reason": "stop",
            "logprobs": None,
            "message": {"role": "assistant", "content": "USER:HELLO"},
        }
    ]
    assert whole["usage"] == {"prompt_tokens": 11, "completion_tokens": 11, "total_tokens": 22}
    made = events(chat(client, stream=True, max_tokens=3, stream_options={"include_usage": True}))
    assert made[0]["choices"][0]["delta"] == {"role": "assistant", "content": "U"}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in made[:-1]) == "USE"
    assert made[-2]["choices"][0]["finish_reason"] == "length"
    assert made[-1]["usage"]["completion_tokens"] == 3
    assert all(event["object"] == "chat.completion.chunk" for event in made)


def test_texts_are_continued_whole_and_in_pieces(client: Any) -> None:
    whole = text(client).json()
    assert whole["object"] == "text_completion"
    assert whole["choices"] == [{"index": 0, "finish_reason": "stop", "logprobs": None, "text": "AB"}]
    made = events(text(client, stream=True))
    assert "".join(event["choices"][0]["text"] for event in made) == "AB"


@pytest.mark.parametrize("prompts", [["ab", "c"], [[0, 97, 98], [0, 99]]])
def test_several_prompts_have_several_copies_of_an_answer(client: Any, prompts: Any) -> None:
    found = text(client, prompt=prompts, n=2).json()
    assert [choice["text"] for choice in found["choices"]] == ["AB", "AB", "C", "C"]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert text(client, prompt=[0, 97]).json()["choices"][0]["text"] == "A"
    assert text(client, prompt=["a"] * 9).status_code == 400


def test_what_is_asked_reaches_the_model(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sampling] = []
    writer = WRITER._replace(write=lambda prompts, samplings: asked.extend(samplings) or pieces(prompts, samplings))  # type: ignore[func-returns-value]
    body = {**HELLO, "n": 2, "seed": 6, "top_p": 0.5, "top_k": 3, "temperature": 1, "stop": "x", "max_tokens": 4}
    completion_requests.Completion(json.dumps(body).encode(), True, writer, {"id": "mine"}, Sampling())
    assert asked == [Sampling(4, 1.0, 3, seed, 0.5, ("x",)) for seed in (6, 7)]


def test_log_probabilities_are_those_of_the_tokens(client: Any) -> None:
    content = chat(client, logprobs=True, top_logprobs=1, max_tokens=1).json()["choices"][0]["logprobs"]["content"]
    likeliest = [{"token": "x", "logprob": -0.1, "bytes": [120]}]
    assert content == [{"token": "U", "logprob": -0.5, "bytes": [85], "top_logprobs": likeliest}]
    scores = text(client, logprobs=1, max_tokens=2).json()["choices"][0]["logprobs"]
    assert scores["tokens"] == ["A", "B"]
    assert scores["text_offset"] == [0, 1]
    assert scores["top_logprobs"] == [{"x": -0.1}] * 2
    assert chat(client).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"role": "developer", "content": "a"}, "SYSTEM:A"),
        ({"role": "assistant", "content": None}, "ASSISTANT:"),
        ({"role": "assistant"}, "ASSISTANT:"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "USER:AB"),
    ],
)
def test_messages_of_all_kinds_are_read(client: Any, message: Any, shown: str) -> None:
    assert chat(client, messages=[message]).json()["choices"][0]["message"]["content"] == shown


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
REFUSED = {
    "{": "means nothing",
    "[]": "means nothing",
    "\xff": "means nothing",
    '{"messages": "' + "\\ud800" + '"}': "means nothing",
    '{"messages": ' + "[" * 100_000: "means nothing",
    '{"messages": []}': "has to hold turns",
    '{"messages": [{"role": "robot", "content": "x"}]}': "robot",
    json.dumps({**HELLO, "temperature": "hot"}): "temperature",
    json.dumps({**HELLO, "temperature": -1}): "temperature",
    json.dumps({**HELLO, "temperature": 10}): "is not possible",
    '{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}': "means nothing",
    '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e999}': "means nothing",
    json.dumps({**HELLO, "max_tokens": 10**30}): "maximum context length",
    json.dumps({**HELLO, "max_tokens": 30}): "maximum context length is 40",
    json.dumps({"messages": [{"role": "user", "content": "long" * 10}]}): "maximum context length is 40",
    json.dumps({**HELLO, "n": 9}): "n`",
    json.dumps({**HELLO, "seed": 2**70}): "seed",
    json.dumps({**HELLO, "model": "other"}): "other is not here",
    json.dumps({**HELLO, "tools": [{"type": "function"}]}): "tools is not there",
    json.dumps({**HELLO, "response_format": {"type": "json_object"}}): "response_format is not there",
    json.dumps({"messages": [IMAGE]}): "'image_url' - at `$.messages[0].content[0].type`",
    json.dumps({**HELLO, "prompt": "a"}): "messages are a chat's",
    json.dumps({**HELLO, "top_logprobs": 2}): "top_logprobs goes with logprobs",
    json.dumps({**HELLO, "content": "a"}): "content is not there",
    json.dumps({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}): "tool_calls is not there",
    json.dumps({**HELLO, "frequency_penalty": 0.5}): "frequency_penalty is not there",
}


@pytest.mark.parametrize("body", REFUSED, ids=range(len(REFUSED)))
def test_a_request_that_means_nothing_is_refused(client: Any, body: str) -> None:
    found = client.post("/v1/chat/completions", content=body.encode("latin-1"))
    assert found.status_code == (404 if "other" in body else 400)
    assert REFUSED[body] in found.json()["error"]["message"]
    assert "-" not in found.json()["error"]["message"].partition("tokens, and ")[2], "tokens that are to follow"


@pytest.mark.parametrize("prompt", [[], [1, "a"], [[1], 2], 5, None, {}, "long" * 10])
def test_a_prompt_that_means_nothing_is_refused(client: Any, prompt: Any) -> None:
    assert text(client, prompt=prompt).status_code == 400


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 9, 21, 10**30, -(10**30), 2**63, 0.5, -0.0, 1e308, "", "a", "\ud800", "\0", [], {},
    [None], [1], [-1], [2.5], [True], [[]], [[1], [2]], ["a", 1], ["", ""], [{}], {"a": [1]}, {"include_usage": 3},
    [{"role": "user"}], [{"role": "user", "content": [{"type": "text", "text": None}]}], [{"role": "tool", "name": {}}],
]  # fmt: skip
"""What a field may be given."""


def test_of_three_hundred_broken_requests_none_breaks_the_server(client: Any) -> None:
    """Some are only odd: they are answered."""
    draw = random.Random(0)
    names = [*completion_requests.Asked.__struct_fields__, "tools", "response_format", "echo", "user", "modalities"]
    codes = []
    for number in range(300):
        chats = bool(number % 2)
        table: dict[str, Any] = {**HELLO} if chats else {"prompt": "ab"}
        table |= {name: draw.choice(VALUES) for name in draw.sample(names, draw.choice((0, 1, 1, 2)))}
        body = json.dumps(table).encode()
        if number % 5 == 0:
            place = draw.randrange(len(body))
            body = body[:place] + bytes([draw.randrange(256)]) + body[place + draw.randrange(2) :]
        answer = client.post(f"/v1/{'chat/' * chats}completions", content=body)
        codes.append(answer.status_code)
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert events(answer)[-1]["choices"][0]["finish_reason"], body
        elif answer.status_code == 200:
            assert all(choice["finish_reason"] for choice in answer.json()["choices"]), body
        else:
            assert answer.json()["error"]["message"], body
    assert {200, 400} <= set(codes) <= {200, 400, 404}
    assert codes.count(200) > 20


def test_what_asks_for_nothing_is_taken(client: Any) -> None:
    nothing = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "frequency_penalty": 0}
    assert chat(client, **nothing, user="me", n=None, stop=None, stream=None, logit_bias={}).status_code == 200


# --- programs that ask ---------------------------------------------------------------------------------------------


class Endless:
    """Writes until nobody reads; says how often it was asked."""

    def __init__(self) -> None:
        self.steps = 0

    def write(self, prompts: Any, samplings: Any) -> Iterator[TextPiece]:
        while True:
            self.steps += 1
            time.sleep(0.005)
            yield TextPiece(0, "x" * 4096, None, 1)


@pytest.fixture
def served() -> Iterator[Any]:
    """(address, what writes): `Endless` for chats, else the letters of the prompt."""
    uvicorn = pytest.importorskip("uvicorn")
    endless = Endless()
    writer = Writer(prompt, lambda ids, how: (endless.write if len(ids[0]) > 20 else write)(ids, how), CONTEXT)
    app = chat_server.application("mine", writer, Sampling(tokens=5))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", http=chat_server.protocol()))
    with chat_server.listening(0) as door:
        thread = threading.Thread(target=server.run, args=([door],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{door.getsockname()[1]}/v1", endless
        server.should_exit = server.force_exit = True
        thread.join()


LONG = "endless" * 4


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_ends_the_computing_and_gives_the_turn_back(served: Any, stream: bool) -> None:
    import socket

    address, endless = served
    host, port = address.removeprefix("http://").removesuffix("/v1").split(":")
    body = json.dumps({"prompt": LONG, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port)), 20) as line:
        line.sendall(head + body)
        while endless.steps < 3:
            time.sleep(0.01)
    assert _asked(address, "ab") == "AB"
    before = endless.steps
    time.sleep(0.1)
    assert endless.steps == before


def test_who_reads_nothing_gives_the_turn_back_after_a_while(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(chat_server, "SECONDS", 0.5)
    address, endless = served
    host, port = address.removeprefix("http://").removesuffix("/v1").split(":")
    body = json.dumps({"prompt": LONG, "stream": True}).encode()
    with socket.create_connection((host, int(port)), 20) as line:
        line.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        line.sendall(body)
        while not endless.steps:
            time.sleep(0.01)
        assert _asked(address, "ab") == "AB"


def _asked(address: str, prompt: str) -> str:
    import urllib.request

    body = json.dumps({"prompt": prompt}).encode()
    with urllib.request.urlopen(f"{address}/completions", body, timeout=20) as response:
        return str(json.load(response)["choices"][0]["text"])


def test_openais_own_client_is_answered(served: Any) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=served[0], api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["mine"]
        assert client.models.retrieve("mine").id == "mine"
        asked = {"model": "mine", "messages": [{"role": "user", "content": "a"}]}
        whole = client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=1)
        assert [choice.message.content for choice in whole.choices] == ["USER:"] * 2
        assert whole.choices[0].finish_reason == "length"
        assert whole.choices[0].logprobs.content[0].top_logprobs[0].logprob == -0.1
        assert whole.usage.completion_tokens == 10
        with client.chat.completions.create(**asked, stream=True) as stream:
            assert "".join(event.choices[0].delta.content or "" for event in stream) == "USER:"
        assert client.completions.create(model="mine", prompt="ab", logprobs=0).choices[0].text == "AB"
        with pytest.raises(openai.BadRequestError, match="tools is not there"):
            client.chat.completions.create(**asked, tools=[{"type": "function", "function": {"name": "f"}}])
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")


PROGRAM = """
import itertools, time
from espalier.cli import chat_server
from espalier.train.workload_row import TextPiece, Sampling, Writer
def write(prompts, samplings):
    for _ in itertools.count():
        time.sleep(0.01)
        yield TextPiece(0, "x", None, 1)
chat_server.serve("mine", Writer(lambda asked: [1], write, 99), Sampling(), 0)
"""


def test_two_interrupts_end_it_while_it_answers() -> None:
    pytest.importorskip("uvicorn")
    import urllib.request

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], **pipes, text=True) as program:
        try:
            assert program.stdout is not None
            address = program.stdout.readline().split(" at ")[1].split()[0]
            body = json.dumps({"prompt": "a", "stream": True}).encode()
            with urllib.request.urlopen(f"{address}/completions", body, timeout=20) as response:
                assert response.readline()
                program.send_signal(signal.SIGINT)
                time.sleep(0.5)
                assert program.poll() is None
                program.send_signal(signal.SIGINT)
                _, errors = program.communicate(timeout=20)
                assert errors.count("Traceback") == 1, "Python's own of the interrupt"
                assert "CancelledError" not in errors
        finally:
            program.kill()


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
        chat_server.serve("mine", WRITER, Sampling(), 0)
    assert "espalier-train[serve]" in str(told.value)
