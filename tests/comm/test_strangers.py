"""Strangers at the ports of a run: whatever bytes they bring, the ranks meet and compute on."""

import contextlib
import random
import socket

import psutil
import torch
from torch._C._distributed_c10d import PrefixStore

from many_ranks import forks


def _bring(port, data):
    """A connection that brings `data` and stays open; None where it was refused or cut."""
    one = socket.create_connection(("127.0.0.1", port), 5)
    with contextlib.suppress(OSError):
        one.sendall(data)
    return one


def _sum(channel, rounds=5):
    total = torch.ones(1)
    for _ in range(rounds):
        torch.distributed.all_reduce(total, group=channel)
    return float(total)


def _disturbed(channel):
    noise = random.Random(channel.rank())
    store = channel.get_group_store()._underlying_non_prefix_store
    own = {one.laddr.port for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"}
    brought = [b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", *(noise.randbytes(size) for size in (1, 8, 200, 5000))]
    there = [_bring(port, data) for port in (*own, store.port) for data in brought]
    first = _sum(channel)
    later = torch.distributed.new_group()
    channel.barrier().wait()
    second = _sum(later)
    space = PrefixStore("still", store)
    space.set(str(channel.rank()), "here")
    heard = [space.get(str(rank)) for rank in range(channel.size())]
    for one in there:
        one.close()
    return first, second, heard, len(own) > 0


def test_bytes_of_strangers_disturb_neither_groups_nor_the_store():
    torch.set_num_threads(1)
    assert forks(2, _disturbed, timeout=60) == [(32.0, 32.0, [b"here"] * 2, True)] * 2
