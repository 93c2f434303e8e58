"""What a started rank does before it trains: its folder, its place, its threads."""

from __future__ import annotations

import pytest

from espalier import cluster as clusters
from espalier.config import load
from espalier.errors import UserError
from espalier.hardware import hosts
from espalier.launch.base import Place
from espalier.testing import forks
from espalier.verbs import hosted, ready

MACHINES = '[[nodes]]\ncount = 2\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n[links]\nbetween = "1Gbit/s"\n'


def test_a_host_that_lacks_the_launchers_folder_says_so(tmp_path) -> None:
    asked = {"folder": str(tmp_path / "none")}
    with pytest.raises(UserError, match="corpus") as caught, hosted._naming_the_folder(asked):
        raise UserError("There is nothing at corpus.", why="it is not there")
    assert f"no folder {tmp_path}/none" in caught.value.why
    with pytest.raises(UserError) as caught, hosted._naming_the_folder({"folder": str(tmp_path)}):
        raise UserError("There is nothing at corpus.", why="it is not there")
    assert caught.value.why == "it is not there"


def test_the_first_host_needs_the_folder_unless_the_run_has_a_place_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    away = {"folder": str(tmp_path / "none"), "absolute": False}
    with pytest.raises(UserError, match="no folder"):
        hosted._enter(Place(), away)
    hosted._enter(Place(), {**away, "absolute": True})
    hosted._enter(Place(rank=1), away)


def test_threads_are_those_of_the_recipe_else_the_hosts_own(tmp_path) -> None:
    recipe = load.from_table({"model": {"depth": 1}})
    pinned = load.from_table({"model": {"depth": 1}}, "it", ["plan.pin.threads=3"])
    assert hosted._seated(Place(threads=7), recipe).threads == 7
    assert hosted._seated(Place(threads=7), pinned).threads == 3


def test_hosts_are_measured_once_and_then_known_to_all(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ready, "say", lambda text: None)
    recipe = load.from_table({"model": {"depth": 1}})

    def task(channel):
        def measure(*_: object) -> clusters.Cluster:
            (tmp_path / f"measured-{channel.rank()}").touch()
            return clusters.loads(MACHINES)

        monkeypatch.setattr(hosts, "probe_ranks", measure)
        place = Place(rank=channel.rank(), world=2)
        first = hosted._machines(channel, place, recipe)
        for left in tmp_path.glob("measured-*"):
            left.unlink(missing_ok=True)
        second = hosted._machines(channel, place, recipe)
        return clusters.dumps(first), clusters.dumps(second), (tmp_path / f"measured-{channel.rank()}").exists()

    found = forks(2, task)
    assert len({text for one in found for text in one[:2]}) == 1
    assert not any(again for *_, again in found)


def test_the_recipes_cluster_file_is_read_by_the_first_and_used_by_all(tmp_path) -> None:
    (tmp_path / "two.toml").write_text(MACHINES)
    recipe = load.from_table({"model": {"depth": 1}}, "it", [f"plan.cluster={tmp_path}/two.toml"])

    def task(channel):
        return clusters.dumps(hosted._machines(channel, Place(rank=channel.rank(), world=2), recipe))

    assert set(forks(2, task)) == {clusters.dumps(clusters.loads(MACHINES))}
