"""Where ranks only know that they lost others, a test of the hosts says which one, or which two, it is."""

import pytest
import torch
from abroad import Abroad
from struck import recipe_of, same

from espalier.launch.hosts import host_check
from espalier.ops import faulty_host_search
from espalier.ops.faulty_host_search import Located
from espalier.train import rejoin_signal

PATIENCE = 1.0
NAMES = ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("found", "words", "hosts"),
    [
        (None, "", []),
        (Located((), (), 1), "", []),
        (Located((2,), (), 2), "Host c failed when", [2]),
        (Located((1, 3), (), 2), "Hosts b and d failed when", [1, 3]),
        (Located((), ((0, 1), (2, 3)), 2), "Hosts a and b; c and d failed together", []),
        (Located((0, 1, 2, 3), (), 2), "No host passed", []),
    ],
)
def test_what_a_test_says(found, words, hosts):
    said, concerned = host_check.said(found, NAMES)
    assert said.startswith(words)
    assert bool(said) == bool(words)
    assert concerned == hosts


class Lost(Abroad):
    """At step 5 a rank of the second host finds its connection to the first one gone, once."""

    def _arm(self, workload, place):
        super()._arm(workload, place)
        plain = workload.loss

        def loss(model, batch):
            marker = self.folder / "lost"
            if model.training and place.rank == 1 and self.trainer.step == 4 and not marker.exists():
                marker.touch()
                raise ConnectionResetError("the peer is gone")
            return plain(model, batch)

        workload.loss = loss


def run(corpus, unbroken, folder):
    run = Lost(
        recipe_of(corpus), 3, folder / "run", memory=1 << 26, stays="alike", hosts=(0, 1, 1), heartbeat=2.0
    ).run()
    assert same(run, unbroken(3)), run.said()
    (recovered,) = run.all("recovered")
    assert (recovered["kind"], recovered["lost_steps"]) == ("lost", 0)
    assert recovered["seconds"] > PATIENCE, "from when the connection was lost: ranks wait to be called first"
    (incident,) = run.all("incident")
    return incident


@pytest.fixture
def _quick(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(host_check, "SECONDS", 1.0)
    monkeypatch.setattr(host_check, "_TOLD", 1.0)
    monkeypatch.setattr(rejoin_signal.Recall.answer, "__defaults__", (PATIENCE,))


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
def test_hosts_that_pass_are_not_blamed(corpus, unbroken, tmp_path):
    incident = run(corpus, unbroken, tmp_path)
    assert incident["what"].startswith("On host there: Rank 1 failed: ConnectionResetError")


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
def test_a_host_that_fails_alone_is_named(corpus, unbroken, tmp_path, monkeypatch):
    plain = faulty_host_search.gathers

    def gathers(store, key, rank, world, seconds):
        first = int(key.rpartition("of")[2])  # of the world, which are hosts in order
        return first + rank != 1 and plain(store, key, rank, world, seconds)

    monkeypatch.setattr(faulty_host_search, "gathers", gathers)
    incident = run(corpus, unbroken, tmp_path)
    assert incident["what"] == "Host there failed when hosts were tested two by two."
    assert "ConnectionResetError" in incident["why"]
    assert (incident["rank"], incident["suspect"], incident["reason"]) == (1, "there", "Node Failure")


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
def test_two_hosts_that_only_fail_together_are_both_named(corpus, unbroken, tmp_path, monkeypatch):
    plain = faulty_host_search.gathers

    def gathers(store, key, rank, world, seconds):
        return world == 1 and plain(store, key, rank, world, seconds)

    monkeypatch.setattr(faulty_host_search, "gathers", gathers)
    incident = run(corpus, unbroken, tmp_path)
    assert incident["what"].startswith("Hosts here and there failed together")
    assert (incident["rank"], incident["suspect"], incident["reason"]) == (-1, "", "Network Error")
