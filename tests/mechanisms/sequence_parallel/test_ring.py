"""What travels round the rings: every block of keys comes to every rank once, bytes follow the formula, no rank waits
without end, and bf16 is as good as on one device."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import many_ranks
from espalier.mechanisms.sequence_parallel import SequenceSlots, attend, ring
from espalier.mechanisms.sequence_parallel.ring import Rings, schedule
from espalier.parallel.ulysses import HeadSplit
from espalier.plan.axes.sequence import SequenceGrid, SequenceLoad, cost
from espalier.recipe.errors import PeerLost, UserError

BATCH, HEADS, KV_HEADS, SIZE = 2, 8, 2, 4


def tensors(slots: SequenceSlots, rank: int, dtype: torch.dtype = torch.float32, size: int = SIZE) -> list[Tensor]:
    """Query, key and value of a rank's tokens, and the gradient of its output."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(BATCH, heads, slots.length, size) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [slots.take(torch.randn(one, generator=generator, dtype=torch.float64).to(dtype), rank, 2) for one in shapes]


# --- the schedule ----------------------------------------------------------------------------------------------------


def of_all(slots: SequenceSlots, bounds: Any, window: int) -> list[tuple[Rings, ring.RingSchedule]]:
    shapes = [Rings(window, slots.context // window, c % window, c // window) for c in range(slots.context)]
    return [(one, schedule(slots, bounds, one)) for one in shapes]


@pytest.mark.parametrize(("context", "window"), [(1, 1), (4, 2), (6, 3), (6, 2), (6, 1), (8, 8)])
def test_every_block_of_keys_comes_to_every_rank_once(context: int, window: int) -> None:
    for _, found in of_all(SequenceSlots(8 * context, context), ((0, 8 * context),), window):
        assert sorted(one.owner for step in found.steps for one in step.visits) == list(range(context))


def sizes(ranges: Any) -> int:
    return sum(stop - start for start, stop in ranges)


class Room:
    """Ranks whose messages block both ends until they meet: the strictest transport there is. Has state."""

    def __init__(self) -> None:
        self.programs: list[list[tuple[str, str, int, int]]] = []

    def run(self) -> None:
        at = [0] * len(self.programs)
        while any(at[rank] < len(program) for rank, program in enumerate(self.programs)):
            moved = False
            for rank, program in enumerate(self.programs):
                if at[rank] == len(program):
                    continue
                kind, name, peer, size = program[at[rank]]
                other = self.programs[peer][at[peer]] if at[peer] < len(self.programs[peer]) else None
                if kind == "send" and other == ("receive", name, rank, size):
                    at[rank], at[peer], moved = at[rank] + 1, at[peer] + 1, True
            assert moved, [program[at[rank] :][:1] for rank, program in enumerate(self.programs)]


def program(slots: SequenceSlots, bounds: Any, window: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The messages of one rank's forward and backward, as its rings ask for them."""
    found: list[Any] = []
    rings, _ = of_all(slots, bounds, window)[rank]

    def note(kind: str, group: str, peer: int, values: Tensor) -> None:
        axis = group.split()[1]
        outer, inner = (peer, rings.inner) if axis == "outer" else (rings.outer, peer)
        found.append((kind, group, outer * window + inner, values.shape[3]))

    monkeypatch.setattr(ring.dist, "isend", lambda values, group, group_dst: note("send", group, group_dst, values))
    monkeypatch.setattr(ring.dist, "irecv", lambda values, group, group_src: note("receive", group, group_src, values))
    both = [
        (
            ring.RingRanks(f"{name} inner", rings.inner, window),
            ring.RingRanks(f"{name} outer", rings.outer, rings.windows),
        )
        for name in ("keys", "gradients")
    ]
    one = ring.DoubleRing(slots, rings, bounds, both[0], both[1])
    query, key, value, gradient = (part[:, :2] for part in tensors(slots, rank))
    out, lse = one.forward(query, key, value)
    one.backward(gradient, ring.Saved(query, key, value, out, lse))
    return found


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([(2, 1), (3, 3), (4, 2), (6, 2), (6, 3)]), st.booleans(), st.sets(st.integers(1, 47), max_size=5)
)
@example((6, 3), False, {32})  # of the second window only its first slot sees keys of the first window
def test_messages_fit_and_nobody_waits_without_end(cut: tuple[int, int], causal: bool, inside: set[int]) -> None:
    slots, bounds = SequenceSlots(48, cut[0], causal=causal), ((0, *sorted(inside), 48), (0, 48))
    bounds = bounds[:1] * 2 if len(inside) % 2 else bounds
    room = Room()
    with pytest.MonkeyPatch.context() as patch:
        room.programs = [program(slots, bounds, cut[1], rank, patch) for rank in range(cut[0])]
    room.run()


# --- bytes -----------------------------------------------------------------------------------------------------------


def booked(channel: Any, slots: SequenceSlots, window: int, documents: Tensor | None = None) -> dict[str, float]:
    """What a rank sends, by class, in one forward and backward."""
    *leaves, gradient = tensors(slots, channel.rank())
    for one in leaves:
        one.requires_grad_()
    before = channel.ledger.by_class()
    attend(*leaves, causal=slots.causal, slots=slots, window=window, documents=documents).backward(gradient)
    return {kind: count - before.get(kind, 0.0) for kind, count in channel.ledger.by_class().items()}


MORE = ((1, 4, 4), (1, 4, 1), (2, 2, 2), (1, 2, 2))


@pytest.mark.parametrize(
    ("heads", "context", "window"),
    [(1, 4, 2), (2, 2, 1), (4, 1, 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)],
)
def test_the_ledger_has_the_formulas_bytes(heads: int, context: int, window: int) -> None:
    slots = SequenceSlots(64, context, heads)
    wanted = cost(SequenceLoad(BATCH * 64, HEADS, KV_HEADS, SIZE), SequenceGrid(heads, context, window)).sent
    for sent in many_ranks.forks(heads * context, booked, slots, window):
        assert sent.get("keys_values", 0) == wanted["keys_values"]
        assert sent.get("activations", 0) == wanted["activations"]


def test_documents_inside_slots_send_nothing_and_short_ones_little() -> None:
    def sent(lengths: list[int]) -> float:
        labels = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(BATCH, -1)
        slots = SequenceSlots(64, 4, causal=False)
        return sum(one.get("keys_values", 0) for one in many_ranks.forks(4, booked, slots, 2, labels))

    assert sent([16, 16, 16, 16]) == 0
    assert 0 < sent([20, 44]) < sent([64])


# --- precision, recomputation, codecs --------------------------------------------------------------------------------


def rounded(channel: Any, slots: SequenceSlots, dtype: torch.dtype) -> list[Tensor]:
    *leaves, gradient = tensors(slots, channel.rank() if channel else 0, dtype, 16)
    leaves = [one.requires_grad_() for one in leaves]
    out = attend(*leaves, causal=True, slots=slots, window=slots.context)
    return [out.detach().double(), *(one.double() for one in torch.autograd.grad(out, leaves, gradient))]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("context", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_the_error_of_bf16_does_not_grow_with_the_ring(context: int) -> None:
    length = 512
    right, alone = (rounded(None, SequenceSlots(length), dtype) for dtype in (torch.float64, torch.bfloat16))
    slots = SequenceSlots(length, context)
    found = many_ranks.forks(context, rounded, slots, torch.bfloat16)
    for index, name in enumerate(("out", "query", "key", "value")):
        joined = slots.join([one[index] for one in found], 2)
        ours, theirs = (float((one - right[index]).norm()) for one in (joined, alone[index]))
        assert ours <= 1.5 * theirs, f"{name}: {ours / theirs:.2f} times the error of one device"


def recomputed(channel: Any, slots: SequenceSlots, keep: bool) -> tuple[int, list[Tensor]]:
    """How often attention ran forward, and the gradients."""
    *leaves, gradient = tensors(slots, channel.rank(), torch.float64)
    leaves = [one.requires_grad_() for one in leaves]
    calls: list[int] = []
    plain = ring.DoubleRing.forward

    def counted(self: Any, *args: Tensor) -> Any:
        calls.append(1)
        return plain(self, *args)

    def layer(*parts: Tensor) -> Tensor:
        return attend(*(part * 1.5 for part in parts), causal=True, slots=slots).sin()

    ring.DoubleRing.forward = counted  # type: ignore[method-assign]
    chosen = {"context_fn": lambda: create_selective_checkpoint_contexts([ring.CORE])} if keep else {}
    out = checkpoint(layer, *leaves, use_reentrant=False, **chosen)
    out.backward(gradient)
    return len(calls), [one.grad for one in leaves if one.grad is not None]


def test_attention_runs_once_where_its_output_is_kept() -> None:
    slots = SequenceSlots(32, 2, 2)
    kept, again = many_ranks.forks(4, recomputed, slots, True), many_ranks.forks(4, recomputed, slots, False)
    assert {calls for calls, _ in kept} == {1}
    assert {calls for calls, _ in again} == {2}
    for (_, some), (_, others) in zip(kept, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


# --- bad input and faults --------------------------------------------------------------------------------------------


def struck(channel: Any, slots: SequenceSlots) -> None:
    """Rank 1 is killed when it has sent its second block."""
    plain = ring.RingRanks.exchange
    sends: list[int] = []

    def counted(self: Any, *args: Any) -> Any:
        found = plain(self, *args)
        sends.append(1)
        if channel.rank() == 1 and len(sends) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    ring.RingRanks.exchange = counted  # type: ignore[method-assign]
    booked(channel, slots, 2)


def test_a_rank_killed_in_a_ring_step_is_missed_by_the_others() -> None:
    found = many_ranks.outcomes(4, struck, SequenceSlots(64, 4), timeout=15.0)
    assert found[1] == many_ranks.Died(signal=signal.SIGKILL)
    assert all(isinstance(one, PeerLost) for rank, one in enumerate(found) if rank != 1), found


def refused(channel: Any, how: dict[str, Any]) -> str:
    query, key = torch.randn(1, 4, 8, 4), torch.randn(1, 2, 8, 4)
    with pytest.raises(UserError) as error:
        attend(query, key, key, **how)
    return f"{error.value} {error.value.do}"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"window": 3}, "window = 3 does not divide cp = 4"),
        ({"slots": SequenceSlots(32, 2), "causal": True}, "2 x 1 slots are not for a group of 4 ranks"),
        ({"slots": SequenceSlots(32, 4)}, "the slots are for causal = True"),
        ({"slots": SequenceSlots(40, 4), "causal": True}, "holds 10 of 40 tokens, and the queries are 8"),
        ({"documents": torch.zeros(1, 8, dtype=torch.long)}, "the sequences have 32 tokens"),
    ],
)
def test_what_cannot_be_cut_so_is_refused_with_the_nearest(how: dict[str, Any], words: str) -> None:
    assert all(words in one for one in many_ranks.forks(4, refused, how))


def test_heads_that_do_not_suffice_or_divide_are_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="hp = 8 is too much for 6 heads") as error:
        HeadSplit(6, 2, 8)
    assert error.value.do.startswith("hp = 4")
    with pytest.raises(UserError, match="4 key-value heads do not divide 6 query heads") as error:
        HeadSplit(6, 4, 2)
    assert error.value.do == "kv_heads = 3"


def test_head_shares_follow_speeds() -> None:
    split = HeadSplit(8, 8, 3, (2.0, 1.0, 1.0))
    assert [stop - start for start, stop in split.queries] == [4, 2, 2]
    assert HeadSplit(6, 3, 4).repeated(1) is None
    assert HeadSplit(10, 2, 3).repeated(1) == [0, 0, 1]
