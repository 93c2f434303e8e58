"""What is known of a process on a host: what it answered, how it ended, that nothing of it is left."""

from __future__ import annotations

import subprocess

from espalier.launch.hosts.hosts import Host
from espalier.launch.hosts.remote_process import Far
from espalier.recipe.errors import RunFailed


def started(program: str) -> Far:
    argv = ["sh", "-c", program]
    pipe = subprocess.PIPE
    return Far(Host("a"), argv, subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0))


def test_it_hears_what_it_is_told_and_what_has_ended_is_not_missed() -> None:
    far = started("read line; echo $line")
    assert far.process.stdout is not None
    far.tell({"is": "stop"})
    assert far.process.stdout.readline() == b'{"is": "stop"}\n'
    far.process.wait()
    far.tell({"is": "end"})
    far.close()


def test_closing_ends_the_command_and_what_it_has_started() -> None:
    far = started("sleep 60 & sleep 60")
    far.close()
    assert far.process.returncode == -9
    far.close()


def test_its_end_is_good_told_or_silent() -> None:
    far = started("true")
    far.close()
    assert not far.silent, "its end was not looked at yet"
    far.messages = [{"is": "hello"}]
    assert far.answered(("hello", "lost"))
    assert not far.answered(("ready",))
    far.code, far.error = 0, RunFailed("it")
    assert far.silent
    assert not far.answered(("hello",))
    far.reported = True
    assert not far.silent
    far.messages = [{"is": "done", "code": 0}]
    assert far.done == {"is": "done", "code": 0}


def test_its_name_is_its_label_or_its_host() -> None:
    far = started("true")
    far.close()
    assert far.named == "a"
    far.label = "a 2,3"
    assert far.named == "a 2,3"
