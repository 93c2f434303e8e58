"""All-reduces in two levels: exact inside machines, encoded between them, the same bits on all ranks."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.comm import Channel, Hierarchy, Traffic, compressed_collectives
from espalier.comm.codecs import codec
from espalier.comm.hierarchical_all_reduce import level
from espalier.recipe.errors import UserError
from many_ranks import forks, ranks, same

SHAPES = ["aabb", "abab", "aabbb", "abbbcc", "abc", "aaa", "abbb", "a"]
"""The machine of each rank."""


def mine(rank: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank + 1)).to(dtype)


def _reduced(channel: Channel, nodes: str, length: int, name: str) -> Any:
    through = Hierarchy(channel, nodes, name)
    before = dict(channel.ledger.bytes)
    x = mine(channel.rank(), length)
    through.all_reduce(x)
    booked = {key: value - before.get(key, 0) for key, value in channel.ledger.bytes.items()}
    return x, booked


def whole(nodes: str, length: int) -> torch.Tensor:
    return sum(mine(rank, length).double() for rank in range(len(nodes)))  # type: ignore[return-value]


@pytest.mark.parametrize("nodes", SHAPES)
def test_all_ranks_end_with_the_same_bits(nodes: str) -> None:
    (first, _), *others = ranks(len(nodes), _reduced, nodes, 70_001, "int4")
    same([x for x, _ in others], [first] * len(others), bitwise=True)


@pytest.mark.parametrize("nodes", SHAPES)
def test_a_lossless_codec_gives_the_plain_sum(nodes: str) -> None:
    for length in (0, 1, 5, 30_000):
        for name in ("exact", "split"):
            found = ranks(len(nodes), _reduced, nodes, length, name)[0][0]
            torch.testing.assert_close(found.double(), whole(nodes, length), rtol=1e-5, atol=1e-5)


def test_on_one_machine_nothing_is_lost() -> None:
    found = ranks(3, _reduced, "aaa", 70_001, "int1")[0][0]
    plain = mine(0, 70_001) + mine(1, 70_001) + mine(2, 70_001)
    same(found, plain, bitwise=True)


def _machines_sum(channel: Channel, nodes: str, length: int, name: str) -> torch.Tensor:
    """A flat all-reduce of what each machine's ranks have together."""
    channel.use(Traffic.ACTIVATIONS, codec(name))
    here = sorted(set(nodes))[channel.rank()]
    x = sum(mine(rank, length) for rank, one in enumerate(nodes) if one == here)
    assert isinstance(x, torch.Tensor)
    dist.all_reduce(x)
    return x


@pytest.mark.parametrize("nodes", ["aabb", "aaaabbbb", "abbbcc"])
def test_only_what_crosses_machines_is_rounded(nodes: str) -> None:
    """The error is that of a flat encoded all-reduce of the machines' sums, whatever the number of ranks in each."""
    for name in ("int8", "int4"):
        found = ranks(len(nodes), _reduced, nodes, 70_001, name)[0][0].double()
        flat = ranks(len(set(nodes)), _machines_sum, nodes, 70_001, name)[0].double()
        error, allowed = ((one - whole(nodes, 70_001)).norm() for one in (found, flat))
        assert error <= 1.1 * allowed


@pytest.mark.parametrize("nodes", SHAPES)
def test_the_ledger_has_the_formulas_bytes(nodes: str) -> None:
    """Inside, what the others' parts take and one's own part for each of them; between, an encoded all-reduce of it."""
    length, count = 200_001, Counter(nodes)
    carriers, machines = min(count.values()), sorted(count)
    sizes = [b - a for a, b in pairwise(compressed_collectives.parts(length, carriers))]
    for rank, (_, booked) in enumerate(ranks(len(nodes), _reduced, nodes, length, "int8")):
        seat, members = nodes[:rank].count(nodes[rank]), count[nodes[rank]]
        own = sizes[seat] if seat < carriers else 0
        inside = 4 * (length - own + (members - 1) * own) if members > 1 else 0
        assert booked.get(("gradients", "all_to_all"), 0) == inside
        between = 0
        if own and len(machines) > 1:
            place = list(dict.fromkeys(nodes)).index(nodes[rank])
            between = compressed_collectives.sent_bytes(codec("int8"), "all_reduce", own, (place, len(machines)))
        assert booked.get(("gradients", "all_reduce"), 0) == between


def _fed_back(channel: Channel, nodes: str) -> Any:
    through = Hierarchy(channel, nodes, "int4")
    residual = torch.zeros(40_000)
    wanted, arrived = torch.zeros(40_000, dtype=torch.float64), torch.zeros(40_000, dtype=torch.float64)
    for step in range(8):
        x = torch.randn(40_000, generator=torch.Generator().manual_seed(100 * step + channel.rank()))
        wanted += x
        through.all_reduce(x, residual)
        arrived += x
    return wanted, arrived, residual.double()


def test_with_feedback_what_arrives_is_what_was_sent_less_the_residuals() -> None:
    found = ranks(5, _fed_back, "aabbb")
    wanted, left = (sum(one[index] for one in found) for index in (0, 2))
    torch.testing.assert_close(found[0][1], wanted - left, rtol=0, atol=2e-4)


def _other_tensors(channel: Channel) -> None:
    through = Hierarchy(channel, "aab", "int1")
    integers = torch.arange(30_000) + channel.rank()
    through.all_reduce(integers)
    same(integers, 3 * torch.arange(30_000) + 3)
    turned = torch.ones(300, 200, dtype=torch.bfloat16).T * channel.rank()
    through.all_reduce(turned, average=True)
    same(turned.float(), torch.ones(200, 300))
    assert turned.stride() == (1, 200)
    for dtype in (torch.float64, torch.float16):
        found = torch.full((9000,), 0.5, dtype=dtype)
        Hierarchy(channel, "aab", "int8").all_reduce(found)
        same(found, torch.full((9000,), 1.5, dtype=dtype), relative=0.01)
    with pytest.raises(UserError, match=r"mean of torch.int64"):
        through.all_reduce(integers, average=True)
    with pytest.raises(UserError, match=r"residual has 3 values for a tensor of 9000"):
        through.all_reduce(found, torch.zeros(3))


def test_integers_and_tensors_in_any_layout_are_summed_in_place() -> None:
    ranks(3, _other_tensors)


def _on_this_machine(channel: Channel) -> Any:
    """Real groups, and machines found by their names: there is one."""
    through = Hierarchy(channel, codec="int1")
    x = mine(channel.rank(), 9000)
    through.all_reduce(x)
    assert len(set(through.nodes)) == 1
    two = Hierarchy(channel, [0, 0, 1])
    y = mine(channel.rank(), 9000)
    two.all_reduce(y, average=True)
    return x, y


def test_machines_are_found_by_their_names() -> None:
    found = forks(3, _on_this_machine)
    same(list(found[1:]), [found[0]] * 2, bitwise=True)
    torch.testing.assert_close(found[0][0].double(), whole("aaa", 9000), rtol=1e-5, atol=1e-5)
    assert (found[0][1].double() - whole("aaa", 9000) / 3).norm() < 0.02 * whole("aaa", 9000).norm() / 3


def _disagreeing(channel: Channel, nodes: tuple[str | None, str | None], names: tuple[str, str]) -> str:
    rank = channel.rank()
    with pytest.raises(UserError) as error:
        Hierarchy(channel, nodes[rank], names[rank])
    return error.value.what


@pytest.mark.parametrize(
    ("nodes", "names", "message"),
    [
        (("ab", "aa"), ("int8", "int8"), r"disagree about nodes: rank 0 has ['a', 'b'], rank 1 has ['a', 'a']"),
        (("ab", None), ("int8", "int8"), r"disagree about nodes"),
        (("ab", "ab"), ("int8", "int4"), r"disagree about codec: rank 0 has int8, rank 1 has int4"),
        (("ab", "abc"), ("int8", "int8"), r"disagree about nodes"),
        (("abc", "abc"), ("int8", "int8"), r"nodes has 3 entries for 2 ranks"),
        (("ab", "ab"), ("int9", "int9"), r"No codec is called 'int9'"),
        (("ab", "ab"), ("int8", "int9"), r"disagree about codec"),
    ],
)
def test_what_does_not_fit_is_told_on_all_ranks_at_once(nodes: Any, names: Any, message: str) -> None:
    assert all(message in said for said in ranks(2, _disagreeing, nodes, names, timeout=5.0))


@settings(max_examples=15)
@given(st.text("abc", min_size=1, max_size=5), st.integers(0, 20_000))
def test_any_machines_and_any_length(nodes: str, length: int) -> None:
    found = ranks(len(nodes), _reduced, nodes, length, "int8")
    same([x for x, _ in found], [found[0][0]] * len(nodes), bitwise=True)
    expected = whole(nodes, length)
    assert (found[0][0].double() - expected).norm() <= 0.02 * expected.norm() + 1e-5


def test_a_level_is_between_as_soon_as_two_machines_take_part() -> None:
    assert level("aab", (0, 1)) == level("aab", ()) == "inside"
    assert level("aab", (1, 2)) == "between"
