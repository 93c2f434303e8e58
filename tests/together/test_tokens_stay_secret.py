"""The token of a run is on no command line, in no output and log, and in no file that others may read."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import programs
import pytest

from espalier.cli import train  # noqa: F401 - loaded once, before programs are forked
from espalier.launch.hosts import message_auth
from espalier.mechanisms.optimizer_node import role

SECRET = "5ec2e7" * 6
RECIPE = """
[model]
kind = "gpt"
width = 16
depth = 1
[data]
path = "t.txt"
tokenizer = "bytes"
[train]
steps = 2
sequence = 16
batch_tokens = 64
validate_tokens = 64
optimizer = { kind = "adamw" }
[plan]
trial = false
cluster = "machine.toml"
[plan.pin]
threads = 1
"""
DISK = 'disks = [{ path = "/", write = 1e9, read = 1e9, iops = 1e4 }]\n'
HOSTS = ["--hosts", "hosta,hostb", "launch.command=sh -c {command}"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "machine.toml").write_text(programs.MACHINE + DISK)
    (tmp_path / "t.txt").write_text("".join(f"line {i}: the number {i * i % 977}\n" for i in range(400)))
    return tmp_path


@contextmanager
def command_lines(file: Path) -> Iterator[None]:
    """Writes the command lines of all processes of this machine to `file`, as long as the block lasts."""
    asked = os.getpid()
    watcher = os.fork()
    if not watcher:
        known = set[bytes]()
        while os.getppid() == asked:
            for place in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    known.add(place.read_bytes())
            file.with_suffix(".new").write_bytes(b"\n".join(known))
            file.with_suffix(".new").rename(file)
        os._exit(1)
    try:
        yield
    finally:
        os.kill(watcher, signal.SIGKILL)
        os.waitpid(watcher, 0)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["plan.pin.ranks=1", "plan.pin.offload=node"], ""),
        pytest.param(HOSTS, "espalier.cli.host_worker", marks=pytest.mark.slow),
    ],
)
def test_the_token_of_a_run_is_where_its_user_alone_may_read_it(
    home: Path, options: list[str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def token(*_: int) -> str:
        (home / "drawn").touch()
        return SECRET

    monkeypatch.setattr(message_auth, "token", token)
    monkeypatch.setattr(role, "secrets", SimpleNamespace(token_hex=token))
    with command_lines(home / "lines"):
        done = programs.forked(home, "train", "recipe.toml", "--run", "run", *options)
    assert done.returncode == 0, done.stderr
    assert (home / "drawn").exists()
    lines = (home / "lines").read_bytes()
    assert shown.encode() in lines
    assert SECRET.encode() not in lines
    written = [path for path in home.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert all(path.stat().st_mode & 0o077 == 0 for path in written), written
    assert [path.name for path in written] == ([role.POSTS] if "--hosts" not in options else [])
