"""What the ranks of several hosts do before they train: their places, their threads, the measurement."""

from __future__ import annotations

from espalier.cli import host_supervisor, resolve_recipe
from espalier.comm import multihost_probe
from espalier.launch.hosts.host_map import HostMap
from espalier.launch.hosts.supervisor_protocol import MeetingPoint
from espalier.machine import cluster as clusters
from espalier.recipe import recipe_file
from espalier.train.rank_spec import RankSpec
from many_ranks import forks

MACHINES = '[[nodes]]\ncount = 2\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n[links]\nbetween = "1Gbit/s"\n'


def test_threads_are_those_of_the_recipe_else_the_hosts_own(tmp_path) -> None:
    recipe = recipe_file.from_table({"model": {"depth": 1}})
    pinned = recipe_file.from_table({"model": {"depth": 1}}, "it", ["plan.pin.threads=3"])
    assert host_supervisor.seated(RankSpec(threads=7), recipe).threads == 7
    assert host_supervisor.seated(RankSpec(threads=7), pinned).threads == 3


def test_hosts_are_measured_once_and_then_known_to_all(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(resolve_recipe, "say_progress", lambda text: None)
    recipe = recipe_file.from_table({"model": {"depth": 1}})

    def task(channel):
        def measure(*_: object) -> clusters.Cluster:
            (tmp_path / f"measured-{channel.rank()}").touch()
            return clusters.loads(MACHINES)

        monkeypatch.setattr(multihost_probe, "probe_ranks", measure)
        place = RankSpec(rank=channel.rank(), world=2)
        first = resolve_recipe.machines_of(channel, place, recipe)
        for left in tmp_path.glob("measured-*"):
            left.unlink(missing_ok=True)
        second = resolve_recipe.machines_of(channel, place, recipe)
        return clusters.dumps(first), clusters.dumps(second), (tmp_path / f"measured-{channel.rank()}").exists()

    found = forks(2, task)
    assert len({text for one in found for text in one[:2]}) == 1
    assert not any(again for *_, again in found)


def test_the_recipes_cluster_file_is_read_by_the_first_and_used_by_all(tmp_path) -> None:
    (tmp_path / "two.toml").write_text(MACHINES)
    recipe = recipe_file.from_table({"model": {"depth": 1}}, "it", [f"plan.cluster={tmp_path}/two.toml"])

    def task(channel):
        return clusters.dumps(resolve_recipe.machines_of(channel, RankSpec(rank=channel.rank(), world=2), recipe))

    assert set(forks(2, task)) == {clusters.dumps(clusters.loads(MACHINES))}


def test_ranks_may_be_numbered_anew_for_training_alone() -> None:
    team = HostMap(MeetingPoint(0, 2, "x", 1, ""), ("a", "b"), (0, 0, 1))
    post = host_supervisor.HostPost(team, None, None)
    training = post.doing("training", 0.5, (0, 1, 0))
    assert (training.hosts, training.own, training.line.topic) == ((0, 1, 0), [0, 2], "training")
    assert [training.place(rank).local_rank for rank in range(3)] == [0, 0, 1]
    assert post.doing("measuring").hosts == (0, 0, 1)
    assert training.place(2).keys != post.doing("measuring").place(2).keys
