"""Of several errors the one that knows the cause is shown, be they of ranks here, of ranks elsewhere or of hosts."""

from dataclasses import dataclass

import pytest

from espalier.launch.hosts import leader
from espalier.launch.hosts.supervisor_protocol import End
from espalier.launch.ranks import postmortem
from espalier.launch.ranks.rank_process import Child
from espalier.recipe import errors, serialization
from espalier.recipe.errors import EspalierError, HostLost, Interrupted, PeerLost, RunFailed, UserError
from espalier.train.rank_spec import RankSpec

SAVED, CUT, LOST = Interrupted("saved"), RunFailed("connection lost"), PeerLost("someone is missing")


def test_ones_own_error_comes_before_the_loss_of_others() -> None:
    assert postmortem.shown([SAVED, CUT, LOST], interrupted=False) is CUT
    assert postmortem.shown([CUT, SAVED], interrupted=True) is SAVED
    assert postmortem.shown([LOST, SAVED], interrupted=False) is SAVED
    assert postmortem.shown([HostLost("b"), UserError("data.path")], interrupted=False).what == "data.path"


@pytest.mark.parametrize("failed", [[LOST], []])
def test_a_run_that_was_stopped_and_only_lost_ranks_is_said_to_be_stopped(failed: list[EspalierError]) -> None:
    found = postmortem.shown(failed, interrupted=True)
    assert isinstance(found, Interrupted)
    assert found.why == (LOST.what if failed else "")


@dataclass
class Ended:
    """How one rank ended."""

    status: int
    error: EspalierError | None = None
    raised: str = ""

    def here(self, rank: int) -> Child:
        child = Child(RankSpec(rank=rank, world=3), -1, -1, -1, status=self.status)
        if self.error is not None:
            words = errors.words_of(self.error)
            told = ("crashed", words, self.raised) if self.raised else ("raised", words)
            child.received = serialization.dumps(told, "what it says")
        return child

    def there(self, rank: int) -> Child:
        words = None if self.error is None else errors.words_of(self.error)
        told = End(rank, self.status, well=False, error=words, raised=self.raised)
        return leader.Distant(RankSpec(rank=rank, world=3), -1, -1, -1, status=self.status, ending=told)


KILLED, RAISED = Ended(-9), Ended(1, CUT, "RuntimeError")
ALONE, DROPPED = Ended(1, LOST), Ended(1, RunFailed("ConnectionError: reset"), "ConnectionError")


@pytest.mark.parametrize("where", ["here", "there"])
@pytest.mark.parametrize(
    ("ended", "cause", "what"),
    [
        ((ALONE, KILLED, DROPPED), 1, "Rank 1 was killed"),
        ((ALONE, DROPPED, RAISED), 2, "connection lost"),
        ((DROPPED, Ended(2, UserError("data.path")), ALONE), 1, "data.path"),
        ((ALONE, DROPPED), None, "ConnectionError: reset"),
        ((KILLED, RAISED), 0, "connection lost"),  # a launcher kills those that are left
    ],
)
def test_the_cause_is_found_among_ranks_of_any_host(ended, cause, what, where) -> None:
    children = [getattr(one, where)(rank) for rank, one in enumerate(ended)]
    found = postmortem.cause(children[0], children)
    assert (None if found is None else found.place.rank) == cause
    assert postmortem.error(children[0], children, interrupted=False).what.startswith(what)


def test_ranks_that_were_killed_as_the_run_was_stopped_are_nobodys_fault() -> None:
    children = [KILLED.here(rank) for rank in range(2)]
    assert isinstance(postmortem.error(children[0], children, interrupted=True), Interrupted)
