"""The store of a rank that somebody else has started."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from espalier.launch.launchers import detect_launcher
from espalier.train.rank_spec import RankSpec, store


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def test_a_rank_that_serves_may_ask_twice_and_with_other_deadlines(free_port: int) -> None:
    """`train` asks with ten minutes for the plan, then with the recipe's deadline."""
    place = RankSpec(world=2, port=free_port, serves=True)
    store(place, 10.0).set("plan", b"here")
    assert store(replace(place, device="cpu", threads=3), 20.0).get("plan") == b"here"
    assert store(replace(place, rank=1, serves=False), 10.0).get("plan") == b"here"


def test_nobodys_variables_are_nobodys_place(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert detect_launcher.place() is None
