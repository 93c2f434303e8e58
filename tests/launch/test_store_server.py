"""A store in a process of its own: it answers whoever asks, and ends with who asked for it."""

import os
import signal
import socket
import time

import pytest

from espalier.launch.hosts import supervisor_protocol
from espalier.launch.ranks.store_server import relay, serve
from store_process import end, served


def answers(port):
    """One attempt takes two seconds at most, which a busy machine may need for itself."""
    for _ in range(5):
        try:
            supervisor_protocol.opened("127.0.0.1", port).set("a", "b")
        except RuntimeError:
            continue
        return True
    return False


def listens(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_it_is_there_inside_and_gone_outside():
    with served() as port:
        store = supervisor_protocol.opened("127.0.0.1", port)
        store.set("key", "value")
        assert supervisor_protocol.opened("127.0.0.1", port).get("key") == b"value"
    assert not listens(port)


def test_it_takes_a_socket_that_listens_already():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    one = serve(listener.detach(), "token")
    assert one.port != port
    assert answers(one.port)
    way = relay("127.0.0.1", port, "token")
    assert answers(way.port)
    end(way)
    assert not listens(way.port)
    end(one)
    end(one)  # which does no harm
    assert not listens(port)
    assert not listens(one.port)


def test_an_interrupt_of_the_terminal_is_not_for_it():
    one = serve()
    assert answers(one.port)
    assert os.getpgid(one.pid) == one.pid
    end(one)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_who_asked_for_it(number):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, f"{serve().port}\n".encode())
        time.sleep(60)
        os._exit(0)
    port = int(os.read(reader, 16))
    assert answers(port)
    os.kill(pid, number)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 5
    while listens(port) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not listens(port)
    os.close(reader)
    os.close(writer)
