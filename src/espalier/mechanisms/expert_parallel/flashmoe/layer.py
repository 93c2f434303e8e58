"""A layer of experts over ranks: dispatch, the experts' tiles and combine as one task graph on each rank.

After FlashMoE (arXiv 2506.04667), which is forward only. A rank tells every other how many rows come, sends them in
tiles, and runs whatever tile has come, the others' before its own, whose tokens never leave it; each answer goes back
as soon as it is there. There is no barrier and no collective. Backward is the same machine with the roles turned:
gradients of outputs go to the experts, those of inputs come back. Deviations: no capacity, so that no token is dropped;
a token for two experts of one rank is sent once; answers are kept by choice and added up in the order of the choices,
where the original adds atomically, so that the result has the same bits in whatever order messages come. Where all
ranks share memory there is little to overlap with: an expert then works on the tiles of all sources in one product, and
rows cross in one message for each peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from espalier.mechanisms.expert_parallel.flashmoe.cells import Outgoing, Tile, outgoing, tile_rows, tiles_of
from espalier.mechanisms.expert_parallel.flashmoe.protocol import TilePass, TileTask
from espalier.mechanisms.expert_parallel.flashmoe.shared_memory import links
from espalier.mechanisms.expert_parallel.flashmoe.transport import PeerMessages, row_codec
from espalier.mechanisms.expert_parallel.flashmoe.weight_gradients import FixedOrderSum, PutOff
from espalier.parallel.expert_map import ExpertsOverRanks, RoutedTokens

_WHOLE = 2**62  # rows of a tile where each source's rows for an expert are one
HEADER, REFS, WEIGHTS, ROWS = 0, 2, 4, 16
"""Tags: what goes ahead of rows, and the first tag of rows; answers have odd numbers from there, rows even ones."""


@dataclass
class FlashMoE(ExpertsOverRanks):
    """See `parallel.expert_map.OverRanks`. Has state.

    Attributes:
        transport: of messages among the ranks; None: shared memory on one machine, else the group's point-to-point.
        codec: of rows on their way to experts, tokens as well as gradients: `exact` or `int8` (`transport.Int8Rows`).
        at_once: whether an expert works on the rows of all sources at once, as soon as all have come, instead of tile
            by tile as they come; None: where all ranks share memory.
        load: rows that each expert here has got so far.

    Raises:
        UserError: another codec.
    """

    transport: PeerMessages | None = None
    codec: str = "exact"
    at_once: bool | None = None
    load: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.links: PeerMessages = self.transport or links(self.group)
        self.rows = row_codec(self.codec)
        self.joins = len(self.links.near) == self.group.size() - 1 if self.at_once is None else self.at_once
        self.load = [0] * len(self.expert_map.ranks[self.group.rank()])

    def _routed(self, tokens: RoutedTokens, experts: Sequence[nn.Module]) -> Tensor:
        x, chosen, weights, anchor = tokens
        parameters = list(dict.fromkeys(p for expert in experts for p in expert.parameters() if p.requires_grad))
        layer = FlashMoeCall(self, experts, parameters, torch.is_grad_enabled())
        return _Route.apply(x, weights.to(x.dtype), anchor, chosen, layer, *parameters)


Batch = tuple[TileTask, ...]
"""Tiles of one expert that run in one product, by source."""


class Done(NamedTuple):
    """Tiles that were run: what went in and came out, with its graph."""

    rows: Tensor
    answer: Tensor


class FlashMoeCall:
    """One call of a layer on this rank. Has state: its tables, and from forward to backward what its tiles keep.

    Attributes:
        out: what this rank sends to each; tiles: those of each source for this rank's experts.
    """

    def __init__(
        self, route: FlashMoE, experts: Sequence[nn.Module], parameters: Sequence[nn.Parameter], keeps: bool
    ) -> None:
        self.links, self.me, self.experts, self.parameters = route.links, route.group.rank(), experts, parameters
        self.expert_map, self.keeps, self.load, self.codec = route.expert_map, keeps, route.load, route.rows
        self.others = [(self.me + turn) % len(route.expert_map.ranks) for turn in range(1, len(route.expert_map.ranks))]
        self.joins = route.joins
        self.waiting = dict[int, list[TileTask]]()
        self.ready: dict[int, dict[int, Tensor]] = {}
        self.out: list[Outgoing] = []
        self.sent: list[list[Tile]] = []
        self.tiles: dict[int, list[Tile]] = {}
        self.rows: dict[int, Tensor] = {}
        self.refs: dict[int, Tensor] = {}
        self.done: dict[Batch, Done] = {}
        self.late = PutOff()
        self.active = 1

    # --- forward -----------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """[tokens x active, width] the answer to every choice."""
        self.active = chosen.shape[1]
        rows = _WHOLE if self.joins else tile_rows(x.shape[1], x.element_size())
        self.out = [message.on(x.device) for message in outgoing(chosen, self.expert_map)]
        self.sent = [tiles_of(message.counts, rows) for message in self.out]
        self.tiles[self.me] = self.sent[self.me]
        answers = x.new_empty(chosen.numel(), x.shape[1])
        local_count = len(self.experts)
        headers = {peer: torch.empty(2 * local_count, dtype=torch.int32) for peer in self.others}
        for peer in self.others:
            self.links.expect(headers[peer], peer, HEADER, ("heard", peer))
        for peer in self.others:
            self.links.send(self.out[peer].header, peer, HEADER)
        self._send_rows(x, refs=True)
        now = self._tile_pass()

        def heard(peer: int) -> None:
            numbers = headers[peer].tolist()
            counts = list(zip(numbers[::2], numbers[1::2], strict=True))
            tiles = self.tiles[peer] = tiles_of(counts, rows)
            self.rows[peer] = self.codec.room(sum(new for new, _ in counts), x)
            self.refs[peer] = torch.empty(sum(again for _, again in counts), dtype=torch.int32)
            if len(self.refs[peer]):
                self.links.expect(self.refs[peer], peer, REFS, ("referred", peer))
            self._expect_rows(peer, self.rows[peer])
            now.heard(peer, [tile.until > tile.fresh for tile in tiles], len(self.refs[peer]) > 0)
            run(None)

        def run(task: TileTask | None) -> None:
            for batch in self._batches(task):
                tiles = self._tiles(batch)
                self.load[tiles[0].expert] += sum(_sizes(tiles))
                for tile_task, answer in zip(batch, self._forward(batch, tiles, x).split(_sizes(tiles)), strict=True):
                    self._answer(tile_task, answer, answers)

        self._expect_answers(answers)
        self._through(now, heard, run, answers)
        return answers

    def _tile_pass(self) -> TilePass:
        return TilePass(self.me, {peer: len(self.sent[peer]) for peer in self.others}, len(self.tiles[self.me]))

    def _forward(self, batch: Batch, tiles: Sequence[Tile], x: Tensor) -> Tensor:
        taken = [self._taken(task, tile, x, self.rows) for task, tile in zip(batch, tiles, strict=True)]
        rows = taken[0] if len(taken) == 1 else torch.cat(taken)
        # A graph of its own: recomputation of the layers around must not see in which order tiles ran.
        with torch.autograd.graph.saved_tensors_hooks(_same, _same), torch.set_grad_enabled(self.keeps), self.late:
            # With a version of its own: what comes into its source's other tiles is no change of this one.
            rows = rows.data.requires_grad_(self.keeps)
            answer = self.experts[tiles[0].expert](rows).to(rows.dtype)
        if self.keeps:
            self.done[batch] = Done(rows, answer)
        return answer.detach()

    # --- backward ----------------------------------------------------------------------------------------------------

    def backward(self, pull: Tensor, weights: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The gradients of every choice's row [tokens x active, width], and of the experts' parameters here.

        Args:
            pull: [tokens, width] the gradient of the output; weights: [tokens, active].
        """
        of_choices = pull.new_empty(weights.numel(), pull.shape[1])
        flat, factors, pulls = weights.flatten(), dict[int, Tensor](), dict[int, Tensor]()
        factors[self.me] = flat[self.out[self.me].choices]
        for peer in self.others:
            if self.sent[peer]:
                self.links.send(flat[self.out[peer].choices], peer, WEIGHTS)
        self._send_rows(pull, refs=False)
        now = self._tile_pass()
        for peer in self.others:
            tiles, pulls[peer] = self.tiles[peer], torch.empty_like(self.rows[peer])
            factors[peer] = pull.new_empty(tiles[-1].stop if tiles else 0)
            if tiles:
                self.links.expect(factors[peer], peer, WEIGHTS, ("referred", peer))
            self._expect_rows(peer, pulls[peer])
            now.heard(peer, [tile.until > tile.fresh for tile in tiles], bool(tiles))
        sums = FixedOrderSum(self._order(), self.parameters)

        def run(task: TileTask | None) -> None:
            for batch in self._batches(task):
                tiles = self._tiles(batch)
                pairs = list(zip(batch, tiles, strict=True))
                scales = [factors[pair.source][tile.start : tile.stop] for pair, tile in pairs]
                parts = [self._taken(*pair, pull, pulls) for pair in pairs]
                scale = torch.cat(scales).unsqueeze(1)
                gradient = parts[0] * scale if len(parts) == 1 else torch.cat(parts).mul_(scale)
                done = self.done.pop(batch)
                self.late.late = []
                wanted = [done.rows, *self.parameters]
                mine, *others = torch.autograd.grad(done.answer, wanted, gradient, allow_unused=True)
                sums.add(batch[0], others, self.late.late)
                back = torch.zeros_like(done.rows) if mine is None else mine
                for tile_task, answer in zip(batch, back.split(_sizes(tiles)), strict=True):
                    self._answer(tile_task, answer, of_choices)

        self._expect_answers(of_choices)
        self._through(now, None, run, of_choices, sums.spare)
        while sums.spare():
            pass
        return of_choices, sums.total()

    def _order(self) -> dict[TileTask, int]:
        """The expert of each tile, in the order in which gradients of weights are summed; of tiles that run at once the
        first."""
        order: dict[TileTask, int] = {}
        for source in sorted(self.tiles):
            for number, tile in enumerate(self.tiles[source]):
                if not (self.joins and tile.expert in order.values()):
                    order[TileTask(source, number)] = tile.expert
        return order

    # --- both --------------------------------------------------------------------------------------------------------

    def _batches(self, task: TileTask | None) -> list[Batch]:
        """The tiles to run now that `task` is ready (None: now that another source was heard)."""
        if not self.joins:
            return [] if task is None else [(task,)]
        if task is not None:
            self.waiting.setdefault(self.tiles[task.source][task.number].expert, []).append(task)
        if len(self.tiles) <= len(self.others):
            return []
        there = Counter(tile.expert for tiles in self.tiles.values() for tile in tiles)
        whole = [expert for expert, tasks in self.waiting.items() if len(tasks) == there[expert]]
        return [tuple(sorted(self.waiting.pop(expert))) for expert in whole]

    def _tiles(self, batch: Batch) -> list[Tile]:
        return [self.tiles[task.source][task.number] for task in batch]

    def _send_rows(self, x: Tensor, refs: bool) -> None:
        """The fresh rows of all tiles, in turns: every link has work from the beginning. With `refs`, these first."""
        for peer in self.others if refs else ():
            if len(self.out[peer].refs):
                self.links.send(self.out[peer].refs, peer, REFS)
        for number, peer, tiles in self._in_turns():
            fresh = self.out[peer].tokens[tiles[0].fresh : tiles[-1].until]
            if len(fresh):
                self.links.send(self.codec.pack(x.index_select(0, fresh)), peer, ROWS + 2 * number)

    def _messages(self, tiles: Sequence[Tile]) -> list[Sequence[Tile]]:
        """Those that cross together: where all run at once, all of them; nobody could begin earlier with fewer."""
        return [tiles] if self.joins and tiles else [[tile] for tile in tiles]

    def _in_turns(self) -> Iterator[tuple[int, int, Sequence[Tile]]]:
        """(number, peer, tiles) of each message with rows of this rank: the first to every peer, then the second."""
        messages = {peer: self._messages(self.sent[peer]) for peer in self.others}
        for number in range(max(map(len, messages.values()), default=0)):
            for peer in self.others:
                if number < len(messages[peer]):
                    yield number, peer, messages[peer][number]

    def _expect_rows(self, peer: int, room: Tensor) -> None:
        first = 0
        for number, tiles in enumerate(self._messages(self.tiles[peer])):
            if tiles[-1].until > tiles[0].fresh:
                event = ("arrived", [TileTask(peer, first + k) for k in range(len(tiles))])
                self.links.expect(room[tiles[0].fresh : tiles[-1].until], peer, ROWS + 2 * number, event)
            first += len(tiles)

    def _expect_answers(self, like: Tensor) -> None:
        self._rooms: dict[tuple[int, int], Tensor] = {}
        for number, peer, tiles in self._in_turns():
            room = like.new_empty(tiles[-1].stop - tiles[0].start, like.shape[1])
            self._rooms[peer, number] = room
            self.links.expect(room, peer, ROWS + 2 * number + 1, ("answered", (peer, number)))

    def _answer(self, task: TileTask, answer: Tensor, rows: Tensor) -> None:
        """Sends what tiles gave to their source, those of a message together; here it is put where it belongs."""
        if task.source == self.me:
            self._put(task.source, [self.sent[self.me][task.number]], answer, rows)
            return
        number, ready = (0, self.ready.setdefault(task.source, {})) if self.joins else (task.number, {})
        ready[task.number] = answer
        if len(ready) == (len(self.tiles[task.source]) if self.joins else 1):
            self.ready.pop(task.source, None)
            parts = [ready[task] for task in sorted(ready)]
            whole = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
            self.links.send(whole, task.source, ROWS + 2 * number + 1)

    def _answered(self, now: TilePass, message: tuple[int, int], rows: Tensor) -> None:
        peer, number = message
        tiles = self._messages(self.sent[peer])[number]
        self._put(peer, tiles, self._rooms.pop(message), rows)
        for k in range(len(tiles)):
            now.answered(TileTask(peer, number + k))

    def _put(self, source: int, tiles: Sequence[Tile], answer: Tensor, rows: Tensor) -> None:
        rows.index_copy_(0, self.out[source].choices[tiles[0].start : tiles[-1].stop], answer)

    def _taken(self, task: TileTask, tile: Tile, like: Tensor, others: Mapping[int, Tensor]) -> Tensor:
        """The rows of a tile, out of a source's fresh rows as they came, or for this rank's own out of all tokens."""
        if task.source == self.me:
            return like.index_select(0, self._tokens[tile.start : tile.stop])
        source = others[task.source]
        packed = source[tile.fresh : tile.until]
        if tile.refs < tile.refs_until:
            again = self.refs[task.source][tile.refs : tile.refs_until].to(source.device)
            packed = torch.cat([packed, source.index_select(0, again)])
        return self.codec.unpack(packed, like)

    @property
    def _tokens(self) -> Tensor:
        """int64 [entries] of this rank's own tokens for its own experts."""
        local = self.out[self.me]
        return torch.div(local.choices, self.active, rounding_mode="floor")

    def _through(
        self,
        now: TilePass,
        heard: Callable[[int], None] | None,
        run: Callable[[TileTask], None],
        rows: Tensor,
        spare: Callable[[], bool] = bool,
    ) -> None:
        """Runs what is ready and takes what comes, until the pass has ended. `spare`: work for a time when nothing is
        ready; False: there is none."""
        while not now.done:
            task = now.take()
            while (event := self._event(task is None, spare)) is not None:
                kind, what = event
                if kind == "heard":
                    assert heard is not None
                    heard(what)
                elif kind == "referred":
                    now.referred(what)
                elif kind == "arrived":
                    for arrival in what:
                        now.arrived(arrival)
                else:
                    self._answered(now, what, rows)
                if task is None:
                    break
            if task is not None:
                run(task)
                now.ran()
        self.links.ended()

    def _event(self, idle: bool, spare: Callable[[], bool]) -> Any:
        """The next event. None: none has come, and there is a task, or what was spare has been done instead."""
        event = self.links.next(wait=False)
        if event is not None or not idle:
            return event
        self.links.announce()
        return None if spare() else self.links.next(wait=True)


class _Route(torch.autograd.Function):
    """The layer in autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, anchor: Tensor, chosen: Tensor, layer: FlashMoeCall, *_: Any
    ) -> Tensor:
        """[tokens, width] to the same."""
        answers = layer.forward(x, chosen)
        # What tiles keep hangs on a tensor that autograd saves: with recomputation it goes and comes with it.
        handle: Any = torch.empty(0)
        handle.layer = layer
        ctx.save_for_backward(handle, weights, answers)
        return _combined(answers, weights)

    @staticmethod
    def backward(ctx: Any, *pulls: Tensor) -> Any:
        """Gradients of the tokens, the weights and the experts' parameters."""
        (handle, weights, answers), pull = ctx.saved_tensors, pulls[0].contiguous()
        rows, sums = handle.layer.backward(pull, weights)
        shape = (*weights.shape, pull.shape[1])
        of_rows = _wide(rows).view(shape).sum(1).to(pull.dtype)
        scores = torch.bmm(_wide(answers).view(shape), _wide(pull).unsqueeze(2)).squeeze(2).to(weights.dtype)
        return of_rows, scores, None, None, None, *sums


def _combined(answers: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each token's answers, in the order of its choices and in fp32 at least."""
    by_choice = _wide(answers).view(*weights.shape, answers.shape[1])
    return torch.bmm(_wide(weights).unsqueeze(1), by_choice).squeeze(1).to(answers.dtype)


def _sizes(tiles: Sequence[Tile]) -> list[int]:
    """Rows of each."""
    return [tile.stop - tile.start for tile in tiles]


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _same(tensor: Tensor) -> Tensor:
    return tensor
