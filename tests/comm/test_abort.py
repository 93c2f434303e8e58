"""A rank that cuts its connections ends the waits of the others, and cuts those of its groups alone."""

import contextlib
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from espalier.comm import store_client
from espalier.comm.abort import Connections, apart
from espalier.recipe.errors import PeerLost
from many_ranks import forks

LIMIT = timedelta(seconds=20)


@contextlib.contextmanager
def pair(family=socket.AF_INET, host="127.0.0.1"):
    """Both ends of a connection on loopback."""
    with socket.create_server((host, 0), family=family) as server:
        near = socket.create_connection(server.getsockname()[:2])
        far, _ = server.accept()
        with near, far:
            yield near, far


def ended(one):
    one.settimeout(0.2)
    try:
        return one.recv(1) == b""
    except TimeoutError:
        return False


def space(channel, name):
    return PrefixStore(name, channel.get_group_store())


def gloo(store, channel):
    return ProcessGroupGloo(store, channel.rank(), channel.size(), LIMIT)


def answers(group):
    """Whether the ranks of a group still reach each other, found out by all of them."""
    try:
        group.allreduce([torch.ones(1)]).wait(timedelta(seconds=5))
    except RuntimeError:
        return False
    return True


def _others_stay(channel):
    """Connections of the user's to servers on the host of the ranks, opened before, between and after the groups."""
    with contextlib.ExitStack() as opened:
        own = [opened.enter_context(pair())]
        made = Connections(space(channel, "attempt"))
        group = gloo(space(channel, "attempt"), channel)
        own.append(opened.enter_context(pair()))
        made.look()
        own.append(opened.enter_context(pair()))
        later = gloo(PrefixStore("later/0", space(channel, "attempt")), channel)
        own += [opened.enter_context(pair()), opened.enter_context(pair(socket.AF_INET6, "::1"))]
        assert answers(group)
        assert answers(later)
        channel.barrier().wait()
        made.cut()
        assert not answers(group)
        assert not answers(later)
        assert not [one for two in own for one in two if ended(one)]
        assert answers(channel)  # of another key space
        channel.get_group_store().set("the store", "stays")
        return channel.get_group_store().get("the store")


def test_only_groups_of_the_key_space_are_cut_and_every_other_connection_stays():
    torch.set_num_threads(1)
    assert forks(2, _others_stay, timeout=40) == [b"stays"] * 2


def _apart(channel):
    made = Connections(space(channel, "attempt"))
    group, without = (
        gloo(space(channel, "attempt"), channel),
        gloo(PrefixStore("shard0", apart(space(channel, "attempt"))), channel),
    )
    made.cut(whole=False)
    some = answers(group), answers(without)
    channel.barrier().wait()
    made.cut()
    return *some, answers(without)


def test_groups_that_go_on_without_a_member_are_cut_only_with_the_whole():
    torch.set_num_threads(1)
    assert forks(2, _apart, timeout=40) == [(False, True, False)] * 2


def _without_store(channel):
    """The store dies; groups that were known before are cut all the same."""
    made = Connections(space(channel, "attempt"))
    group = gloo(space(channel, "attempt"), channel)
    made.look()
    channel.barrier().wait()
    made._store = _Gone()
    made.cut()
    return answers(group)


def _made_later(channel):
    """As `_without_store`, for a group that was made after the first look."""
    made = Connections(space(channel, "attempt"))
    made.look()
    group = gloo(space(channel, "attempt"), channel)
    made.look()
    made.look()  # once more changes nothing
    channel.barrier().wait()
    made._store = _Gone()
    made.cut()
    return answers(group)


class _Gone:
    def num_keys(self):
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_is_gone_hinders_no_cut():
    torch.set_num_threads(1)
    assert forks(2, _without_store, timeout=40) == [False] * 2
    assert forks(2, _made_later, timeout=40) == [False] * 2


def _waits(channel):
    """Rank 0 waits for rank 1, which waits for rank 2, which gives up; rank 1 follows. Seconds until that was known."""
    made, began = Connections(channel.get_group_store()), time.monotonic()
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
    assert max(forks(3, _waits, timeout=30)) < 20


def _thread_waits(channel):
    """A thread waits in a group; the cut in another one releases it."""
    made, seconds = Connections(channel.get_group_store()), []

    def wait():
        began = time.monotonic()
        with contextlib.suppress(PeerLost, RuntimeError):
            dist.recv(torch.zeros(4), src=1 - channel.rank(), group=channel)
        seconds.append(time.monotonic() - began)

    channel.line.watch.known.set()
    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    made.cut()
    thread.join()
    return seconds[0]


def test_a_thread_that_waits_is_released_too():
    torch.set_num_threads(1)
    assert max(forks(2, _thread_waits, timeout=30)) < 20


def test_a_store_of_no_group_has_nothing_to_cut():
    store = store_client.serve()
    store.set("12/not an address", "x")
    with pair() as (near, far):
        Connections(store).cut()
        assert not ended(near)
        assert not ended(far)


def test_keys_of_a_longer_prefix_are_passed_over_at_once():
    """`attempt1` lists what lies in `attempt10` too, under names that it cannot read."""
    whole = store_client.serve()
    PrefixStore("attempt10", whole).set("groups/0/1", b"another attempt's")
    PrefixStore("attempt1-run", whole).set("groups/0/1", b"another job's")
    PrefixStore("attempt1", whole).set("groups/0/0", b"its own")
    begun = time.monotonic()
    Connections(PrefixStore("attempt1", whole)).look()
    assert time.monotonic() - begun < 30
