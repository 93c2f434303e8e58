"""A rank that cuts its connections ends the waits of the others, and only those of its groups."""

import contextlib
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from espalier.comm.hangup import Connections
from espalier.errors import PeerLost
from espalier.testing import forks


@contextlib.contextmanager
def pair():
    """Both ends of a connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            yield near, far


def ended(one):
    one.settimeout(0.2)
    try:
        return one.recv(1) == b""
    except TimeoutError:
        return False


def test_what_was_made_since_is_cut_and_nothing_else():
    with pair() as before:
        made = Connections(port=1)
        with pair() as group:
            made.met()
            with pair() as later:  # of a group that is made later, to the same host
                made.cut()
                assert ended(group[1])
                assert ended(later[0])
                assert not ended(before[0])


def test_the_store_stays_at_both_ends():
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = Connections(server.getsockname()[1])
        with socket.create_connection(server.getsockname()) as near, server.accept()[0] as far:
            made.met()
            made.cut()
            assert not ended(near)
            assert not ended(far)


def test_another_host_than_those_met_stays():
    made = Connections(port=1)
    made.met()  # nobody
    with pair() as other:
        made.cut()
        assert not ended(other[0])


def _waits(channel):
    """Rank 0 waits for rank 1, which waits for rank 2, which gives up; rank 1 follows. Seconds until that was known."""
    made, began = Connections(port=0), time.monotonic()
    made._before.clear()  # the ranks have met already
    made.met()
    channel.line.watch.known.set()
    if channel.rank() == 2:
        time.sleep(0.3)
    else:
        with pytest.raises(PeerLost):
            dist.recv(torch.zeros(4), src=channel.rank() + 1, group=channel)
    made.cut()
    return time.monotonic() - began


def test_a_chain_of_waits_ends_at_once():
    torch.set_num_threads(1)
    assert max(forks(3, _waits, timeout=30)) < 3


def test_a_thread_that_waits_is_released_too():
    made = Connections(port=1)
    with pair() as (near, far):
        made.met()
        woken = threading.Event()

        def wait():
            near.recv(1)
            woken.set()

        thread = threading.Thread(target=wait)
        thread.start()
        made.cut()
        assert woken.wait(5)
        thread.join()
        assert far.recv(1) == b""
