"""No interleaving of messages and tiles loses a tile, runs one early, mixes two passes or stops."""

from __future__ import annotations

import random

import pytest
from tests.mechanisms.expert_parallel.explorer import Cell, Rules, Wrong, explore, walk

from espalier.mechanisms.expert_parallel.flashmoe.protocol import TilePass

NONE, ONE, TWO = Cell(), Cell((True,)), Cell((True, True))
REFERRING = Cell((True, False), references=True)
CASES = {
    "a tile each way": ((ONE, ONE), (ONE, ONE)),
    "two tiles one way, nothing back": ((NONE, TWO), (NONE, NONE)),
    "no token at all": ((NONE, NONE), (NONE, NONE)),
    "a tile of references alone": ((NONE, REFERRING), (ONE, NONE)),
    "three ranks in a ring": ((NONE, ONE, NONE), (NONE, NONE, ONE), (ONE, NONE, NONE)),
}


@pytest.mark.parametrize("cells", CASES.values(), ids=CASES)
def test_every_interleaving_of_three_passes_is_right(cells):
    assert explore(cells) > 1


def test_random_interleavings_of_larger_layers_are_right():
    chance = random.Random(0)
    for seed in range(150):
        ranks = chance.randint(2, 5)

        def cell():
            fresh = tuple(chance.random() < 0.8 for _ in range(chance.randint(0, 4)))
            fresh = fresh and (True, *fresh[1:])
            return Cell(fresh, references=not all(fresh))

        walk([[cell() for _ in range(ranks)] for _ in range(ranks)], 5, seed)


class EarlyRows(TilePass):
    """A signal before its data: tiles run as soon as they are announced."""

    def heard(self, source, fresh, references):
        super().heard(source, [False] * len(fresh), references)


class EarlyReferences(TilePass):
    """References are not waited for."""

    def heard(self, source, fresh, references):
        super().heard(source, fresh, False)

    def referred(self, source):
        pass


class AnyOrder(TilePass):
    """A tile does not wait for those before it, to whose rows it may refer."""

    def arrived(self, task):
        coming = self._coming[task.source]
        if task.source not in self._referring and (task, True) in coming:
            coming.remove((task, True))
            self._ready.append(task)
        while coming and not coming[0][1]:
            self._ready.append(coming.popleft()[0])


class Overlapping(TilePass):
    """The next pass begins while answers of this one are under way."""

    @property
    def done(self):
        return not (self.unheard or self._running)


class Losing(TilePass):
    """A pass ends once this rank has its own answers, whether others wait for theirs or not."""

    @property
    def done(self):
        return not (self.unheard or self.unanswered)


class Deaf(TilePass):
    """A pass ends without having heard of every source."""

    @property
    def done(self):
        return not (self.unanswered or self._running)


class Counting(TilePass):
    """A tile that was run is not counted off."""

    def ran(self):
        if self._running > 1:
            super().ran()


WITH_REFERENCES = ((NONE, Cell((True, True, False), references=True)), (ONE, NONE))
MUTANTS = {
    "no word of nothing": (Rules(says_nothing=False), CASES["two tiles one way, nothing back"], "no rank can go on"),
    "rows after their signal": (Rules(EarlyRows), CASES["a tile each way"], "before"),
    "references not awaited": (Rules(EarlyReferences), CASES["a tile of references alone"], "before"),
    "tiles in any order": (Rules(AnyOrder), WITH_REFERENCES, "before|no rank can go on"),
    "passes that overlap": (Rules(Overlapping), CASES["a tile each way"], "has not taken"),
    "tiles of others forgotten": (Rules(Losing), CASES["a tile each way"], "of 2 tiles run"),
    "a source not heard": (Rules(Deaf), CASES["two tiles one way, nothing back"], "tiles run|has not taken"),
    "a count too many": (Rules(Counting), CASES["a tile each way"], "no rank can go on"),
    "messages that overtake": (Rules(keeps_order=False), CASES["no token at all"], "takes the"),
}


@pytest.mark.parametrize(("rules", "cells", "said"), MUTANTS.values(), ids=MUTANTS)
def test_the_explorer_catches_every_mutant(rules, cells, said):
    with pytest.raises(Wrong, match=said):
        explore(cells, 3, rules)
