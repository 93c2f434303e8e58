import os

import pytest

from espalier.launch.launchers import torchrun
from espalier.recipe.errors import UserError

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch, **values):
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_nobody_started_us():
    assert torchrun.place() is None


def test_a_place_is_read_from_the_environment(monkeypatch):
    set_all(monkeypatch, RANK="3", WORLD_SIZE="4", MASTER_ADDR="10.1.2.3", MASTER_PORT="99", LOCAL_RANK="1")
    place = torchrun.place()
    assert (place.rank, place.world, place.local_rank) == (3, 4, 1)
    assert (place.host, place.port, place.threads) == ("10.1.2.3", 99, len(os.sched_getaffinity(0)))


def test_half_an_environment_is_refused_by_name(monkeypatch):
    set_all(monkeypatch, RANK="0", WORLD_SIZE="2")
    with pytest.raises(UserError, match="MASTER_ADDR, MASTER_PORT"):
        torchrun.place()


def test_a_rank_that_is_no_number_is_refused(monkeypatch):
    set_all(monkeypatch, RANK="zero", WORLD_SIZE="2", MASTER_ADDR="h", MASTER_PORT="1")
    with pytest.raises(UserError, match="RANK='zero'"):
        torchrun.place()


def test_a_port_nobody_can_meet_at_is_refused(monkeypatch):
    set_all(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    with pytest.raises(UserError, match="MASTER_PORT=0"):
        torchrun.place()
