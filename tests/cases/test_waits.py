"""Waits for other ranks end in time, say first who is waited for, and name at last who is missing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import programs
import pytest
import torch.distributed as dist

from espalier import comm
from espalier.cli import ray_job
from espalier.comm import rendezvous_wait, store_client
from espalier.comm.rendezvous_wait import Deadline
from espalier.launch.hosts import hosts, ssh
from espalier.launch.launchers import torchrun
from espalier.launch.ranks import rank_process
from espalier.recipe import Launch
from espalier.recipe.errors import PeerLost, UserError
from espalier.train import rank_spec as launch
from espalier.train.rank_spec import RankSpec

SECONDS = 1.5
LATE = 2.0
"""Seconds after its deadline in which a wait has ended."""


@contextmanager
def port_of(meet: Callable[[socket.socket], Any]) -> Iterator[int]:
    """A port of loopback at which `meet` is done with whoever comes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def live() -> None:
            with ExitStack() as visitors:
                while True:
                    try:
                        visitor = visitors.enter_context(listener.accept()[0])
                    except OSError:
                        return
                    meet(visitor)

        thread = threading.Thread(target=live)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def rank(number: int, world: int, port: int, host: str = "127.0.0.1") -> RankSpec:
    return RankSpec(rank=number, world=world, host=host, port=port, source="MASTER_ADDR")


def failed(place: RankSpec, do: Callable[[RankSpec], Any], seconds: float = SECONDS) -> PeerLost:
    """The error of a wait, which ended in time."""
    begun = time.monotonic()
    with pytest.raises(PeerLost) as error:
        do(place)
    assert seconds - 0.1 < time.monotonic() - begun < seconds + LATE
    return error.value


def reach(place: RankSpec) -> Any:
    return launch.store(place, SECONDS)


def first_line(error: str) -> str:
    line = error.splitlines()[0]
    assert error == line + "\n", error  # torch prints nothing
    return line


def test_a_name_without_an_address_is_named_with_its_variable(capfd):
    error = failed(rank(1, 2, 29511, "nohost.invalid"), reach)
    assert error.what == "nohost.invalid:29511 is not reached (MASTER_ADDR)."
    assert "Rank 1 waited 1.5 s for rank 0: the name has no address" in error.why
    line = first_line(capfd.readouterr().err)
    assert line.startswith("Rank 1 waits for rank 0 at nohost.invalid:29511 (MASTER_ADDR) until ")
    assert line.endswith(", 1.5 s in all.")


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch, capfd):
    silent = threading.Event()
    plain = socket.getaddrinfo

    def hang(host: Any, *rest: Any, **options: Any) -> Any:
        if host == "nohost.invalid":
            silent.wait(60.0)
        return plain(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    error = failed(rank(1, 2, 29511, "nohost.invalid"), reach)
    silent.set()
    assert error.why.endswith("no name server answers, or not that host")
    assert "nohost.invalid:29511" in first_line(capfd.readouterr().err)


def test_a_closed_port_is_named(capfd):
    port = closed_port()
    error = failed(rank(3, 4, port), reach)
    assert error.what == f"127.0.0.1:{port} is not reached (MASTER_ADDR)."
    assert error.why.endswith("connections are refused, nobody listens there")
    assert "Rank 3 waits for rank 0" in first_line(capfd.readouterr().err)


@pytest.mark.parametrize(
    ("meet", "why"),
    [
        (lambda visitor: None, "what listens there says nothing"),
        (lambda visitor: visitor.close(), "what listens there is no PyTorch store"),
        (
            lambda visitor: visitor.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
            "what listens there is no PyTorch store",
        ),
    ],
    ids=["silent", "closes", "http"],
)
def test_a_port_of_another_program_is_named(meet, why, capfd):
    with port_of(meet) as port:
        assert failed(rank(1, 2, port), reach).why.endswith(why)
    first_line(capfd.readouterr().err)


def test_a_store_that_comes_late_is_reached():
    port = closed_port()
    stores: list[Any] = []
    serving = RankSpec(rank=0, world=2, host="localhost", port=port, serves=True)
    threading.Timer(0.6, lambda: stores.append(launch.store(serving, 5.0))).start()
    launch.store(rank(1, 2, port), 10.0).set("key", "value")
    assert stores[0].get("key") == b"value"


def test_the_rank_that_serves_needs_no_name_of_its_own():
    """Others may know this host by a name that it does not know itself."""
    place = RankSpec(rank=0, world=2, host="nohost.invalid", port=closed_port(), serves=True)
    launch.store(place, SECONDS).set("key", "value")
    assert launch.store(rank(1, 2, place.port), SECONDS).get("key") == b"value"


def test_a_taken_port_is_named_at_once():
    with socket.create_server(("", 0)) as other:
        place = RankSpec(world=2, host="127.0.0.1", port=other.getsockname()[1], source="MASTER_ADDR", serves=True)
        with pytest.raises(UserError, match=f"cannot listen at port {place.port}, .*: Address already in use"):
            launch.store(place, SECONDS)


def test_the_greeting_is_that_of_this_pytorch():
    """A PyTorch that greets otherwise would be met by nobody."""
    server = store_client.serve()
    rendezvous_wait.greet("127.0.0.1", server.port, 5.0)
    rendezvous_wait.greet("localhost", server.port, 5.0)


@pytest.fixture
def server():
    return store_client.serve()


def test_ranks_that_do_not_come_are_named_to_all_that_did(server, capfd):
    def come(number: int) -> PeerLost:
        place = rank(number, 4, server.port)
        store = store_client.connect(place.host, place.port, SECONDS)
        keys = [f"host/{other}" for other in range(4)]
        store.set(keys[number], "a")
        with pytest.raises(PeerLost) as error:
            rendezvous_wait.present(store, keys, place.where, Deadline(SECONDS, f"Rank {number}"))
        return error.value

    begun = time.monotonic()
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(come, (0, 2))
    assert time.monotonic() - begun < SECONDS + LATE
    assert first.what == second.what == "Ranks 1 and 3 did not come."
    assert first.why == f"Rank 0 waited 1.5 s for all 4 ranks at 127.0.0.1:{server.port} (MASTER_ADDR)"
    lines = sorted(capfd.readouterr().err.splitlines())
    assert [line.partition(" until ")[0] for line in lines] == [
        f"Rank {number} waits for ranks 1 and 3 of 4 at 127.0.0.1:{server.port} (MASTER_ADDR)" for number in (0, 2)
    ]


def test_all_ranks_hear_what_each_said(server):
    with ThreadPoolExecutor() as pool:
        places = [rank(number, 3, server.port) for number in range(3)]
        values = list(pool.map(lambda place: launch.gathered(place, "host", f"host {place.rank}", 10.0), places))
    assert values == [["host 0", "host 1", "host 2"]] * 3


def test_a_group_names_the_ranks_that_do_not_come(server, capfd):
    error = failed(rank(0, 3, server.port), lambda place: comm.connect(server, 0, 3, timeout=SECONDS))
    assert error.what == "Ranks 1 and 2 did not come."
    assert f"at 127.0.0.1:{server.port}" in first_line(capfd.readouterr().err)


def test_a_store_that_is_lost_meanwhile_is_named():
    class Lost:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer\nException raised from recvBytes")

    with pytest.raises(
        PeerLost, match="Rank 1 waited for ranks 0 and 1 of 2 at b:29500, and the store was lost"
    ) as error:
        rendezvous_wait.present(Lost(), ["a", "b"], "b:29500", Deadline(SECONDS, "Rank 1"))
    assert "Exception raised" not in str(error.value)


def test_a_store_that_hangs_is_not_waited_for():
    class Silent:
        def check(self, keys: list[str]) -> bool:
            time.sleep(5.0)
            return False

    def wait(place: RankSpec) -> None:
        rendezvous_wait.present(Silent(), ["a", "b"], place.where, Deadline(SECONDS, "Rank 0"))

    assert failed(rank(0, 2, 1), wait).what == "Ranks 0 and 1 did not come."


def test_a_head_of_ray_that_is_not_there_is_named_with_its_option(capfd):
    address = f"127.0.0.1:{closed_port()}"
    error = failed(rank(0, 1, 0), lambda place: ray_job._reach(address, SECONDS))
    assert error.what == f"{address} is not reached (--ray)."
    assert f"waits for Ray's head at {address} (--ray) until" in first_line(capfd.readouterr().err)
    for nowhere in ("auto", "local"):
        ray_job._reach(nowhere, SECONDS)


def test_a_name_that_no_server_knows_is_no_address_of_a_host(monkeypatch):
    def hang(*_: Any, **__: Any) -> Any:
        time.sleep(5.0)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(rendezvous_wait, "LOOKUP_SECONDS", 0.3)
    begun = time.monotonic()
    assert hosts.resolve(hosts.Host("b")) == []
    assert time.monotonic() - begun < LATE


def test_silent_hosts_are_all_named(capfd):
    options = Launch(command="sh -c 'cat > /dev/null'")
    begun = time.monotonic()
    with ssh.Crowd(options, "x", lambda *_: None, SECONDS) as crowd, pytest.raises(UserError) as error:
        crowd.gather([hosts.Host("b.invalid"), hosts.Host("c.invalid")])
    assert time.monotonic() - begun < SECONDS + ssh.END_SECONDS + LATE
    assert error.value.what == "Host b.invalid did not answer within 2 s. Nor did c.invalid."
    line = first_line(capfd.readouterr().err)
    assert line.startswith("This machine waits for b.invalid, c.invalid to answer until ")


RECIPE = """
[model]
depth = 1
[data]
path = "text.jsonl"
[train]
steps = 2
sequence = 32
batch_tokens = 64
[plan]
trial = false
"""


@pytest.mark.parametrize(
    ("number", "host", "what"),
    [
        (1, "nohost.invalid", "nohost.invalid:{port} is not reached (MASTER_ADDR)."),
        (2, "127.0.0.1", "127.0.0.1:{port} is not reached (MASTER_ADDR)."),
        (0, "127.0.0.1", "Ranks 1 and 2 did not come."),
    ],
)
def test_a_rank_started_by_hand_says_who_is_missing(number, host, what, tmp_path, monkeypatch):
    (tmp_path / "r.toml").write_text(RECIPE)
    (tmp_path / "text.jsonl").write_text('{"text": "the fox"}\n' * 50)
    port = str(closed_port())
    variables = {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": str(number), "WORLD_SIZE": "3"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    program = programs.forked(tmp_path, "train", "r.toml", "--run", "run", "comm.timeout=1s")
    first, second, *rest = program.stderr.splitlines()
    assert f" at {host}:{port} (MASTER_ADDR) until " in first
    assert second == f"espalier: {what.format(port=port)}"
    assert [line[:6] for line in rest] == ["  why:", "  try:"]
    assert program.returncode == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([3], "rank 3"), ([1, 3], "ranks 1 and 3"), ([0, 1, 2], "ranks 0, 1 and 2")],
)
def test_ranks_in_words(ranks, words):
    assert rendezvous_wait.named(ranks) == words


def test_of_many_ranks_some_are_named():
    assert rendezvous_wait.named(range(100)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 others"


def test_the_address_knows_its_variable(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    place = torchrun.place()
    assert place is not None
    assert (place.where, place.server) == ("a:29500 (MASTER_ADDR)", "rank 0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    again = torchrun.place()
    assert again is not None
    assert again.server == "torchrun's agent"


def test_a_store_that_is_lost_while_groups_are_made_is_said_in_one_line_each():
    error = dist.DistNetworkError("Broken pipe\nException raised from sendBytes at Utils.hpp:758\nframe #0: c10::Error")
    told = str(rank_process.explained(error, RankSpec(rank=1, world=2)))
    assert told.splitlines()[0] == "Rank 1 failed: DistNetworkError: Broken pipe"
    assert "frame #0" not in told
    assert "look at the log of the rank that ended first" in told
