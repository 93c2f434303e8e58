"""A graph over four hosts on slow links, end to end: planned, cut, trained with few bits and late rows, gone on with by
fewer hosts, and answered by one machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.story.test_hosts import command_line, environment, espalier, events, lab, none_left, pytestmark

from espalier import recipe as config
from espalier.cli.run_plan import batches_of
from espalier.graph.networks.gnn import Gnn
from espalier.graph.parts import partition_folder
from espalier.mechanisms.halo_exchange.options import HaloOptions
from espalier.mechanisms.halo_exchange.quantized_exchange import step_bytes
from espalier.plan import base as plans

__all__ = ["lab", "pytestmark"]
STEPS = 24
RECIPE = f"""
[model]
kind = "sage"
depth = 3
width = 64

[data]
path = "planted:nodes=3000,degree=20,features=32,classes=6"

[graph.halo]

[train]
steps = {STEPS}
validate_every = {STEPS}

[plan]
cluster = "four.toml"
trial = false

[plan.pin]
ranks = 4
threads = 1

[launch]
command = "ip netns exec {{host}} sh -c {{command}}"
"""
HOST = '[[nodes]]\nname = "{name}"\ndevice = "cpu"\ncores = 1\nmemory = "4GiB"\n'
LINKS = '[links]\nbetween = { bandwidth = "50Mbit/s", latency = "5ms", launch = "1ms" }\n'


PACKET = 66
"""Bytes of Ethernet, IP and TCP headers with timestamps, which an interface counts once for what is handed to it."""


def on_the_wire(lab: str) -> np.ndarray:
    """int64 [2, hosts]: bytes that the interface of each host has sent, and packets."""
    found = []
    for host in lab.split(","):
        files = [f"/sys/class/net/eth0/statistics/tx_{name}" for name in ("bytes", "packets")]
        command = ["ip", "netns", "exec", host, "cat", *files]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    return np.array(found, np.int64).T


def parts_in_the_cache(home: Path) -> Path:
    """The folder of the four parts."""
    return next(
        one.parent
        for one in sorted((home / "cache").rglob("part-3.safetensors"))
        if not (one.parent / "part-4.safetensors").exists()
    )


def planned(home: Path, **options: int) -> np.ndarray:
    """float [hosts]: bytes of rows that leave each in a step, by the formula."""
    network = Gnn(config.Sage(depth=3, width=64, dropout=0.0), 32, 6)
    rows = partition_folder.rows_of(parts_in_the_cache(home))
    return step_bytes(network, rows, HaloOptions(**options)).sum(1)


@pytest.fixture(scope="module")
def home(lab: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    (folder / "recipe.toml").write_text(RECIPE)
    for number, hosts in (("four", lab.split(",")), ("two", lab.split(",")[:2]), ("one", ["here"])):
        (folder / f"{number}.toml").write_text("".join(HOST.format(name=one) for one in hosts) + LINKS)
    return folder


@pytest.fixture(scope="module")
def four(lab: str, home: Path) -> np.ndarray:
    """What `on_the_wire` counted of the run `four`, on all hosts."""
    before = on_the_wire(lab)
    done = espalier(home, "train", "recipe.toml", "--hosts", lab, "name=four", "model.dropout=0")
    assert done.returncode == 0, done.stdout + done.stderr
    return on_the_wire(lab) - before


@pytest.mark.usefixtures("four")
def test_four_hosts_train_on_their_parts_as_one_rank_does_and_send_what_the_plan_says(lab: str, home: Path) -> None:
    plan = plans.read(home / "runs" / "four" / "plan.json")
    assert sorted(rank.node for rank in plan.ranks) == [0, 1, 2, 3]
    assert any("the graph is cut into 4 parts" in one for one in plan.why)
    assert any("over 50 Mbit/s between machines" in one for one in plan.why)
    steps = events(home, "four", "step")
    assert plan.predicted is not None
    each = planned(home)
    assert plan.predicted.sent_bytes["halo"] == each.max()
    assert [step["bytes"]["halo"] for step in steps[1:]] == [each[0]] * (STEPS - 1)
    assert steps[0]["bytes"]["halo"] >= each[0] > 0
    near = espalier(
        home, "train", "recipe.toml", "plan.pin.ranks=1", "plan.cluster=one.toml", "name=near", "model.dropout=0"
    )
    assert near.returncode == 0, near.stdout + near.stderr
    expected = [event["loss"] for event in events(home, "near", "step")]
    assert [event["loss"] for event in steps] == pytest.approx(expected, rel=1e-4)
    assert none_left(lab)


def test_few_bits_and_late_rows_send_less_and_two_hosts_go_on_where_four_stopped(
    lab: str, home: Path, four: np.ndarray
) -> None:
    """What else the hosts say is the same in both runs, so that the difference at their interfaces is that of rows:
    the formula's, in payload, and with headers at most a tenth more."""
    low, before = (
        ("graph.halo.bits=1", "graph.halo.synchronize=4", "graph.halo.late=true", "name=low"),
        on_the_wire(lab),
    )
    done = espalier(home, "train", "recipe.toml", "--hosts", lab, *low)
    assert done.returncode == 0, done.stdout + done.stderr
    less = four - (on_the_wire(lab) - before)
    whole, few = planned(home), planned(home, bits=1, synchronize=4)
    ledger = [event["bytes"]["halo"] for event in events(home, "low", "step")]
    assert ledger[1:] == [few[0]] * (STEPS - 1)
    assert 4 * few.max() < whole.min()
    expected = STEPS * (whole - few)
    assert less[0] - PACKET * less[1] == pytest.approx(expected, rel=0.02)
    assert (less[0] > expected).all()
    assert (less[0] < 1.1 * expected).all()
    losses = [event["loss"] for event in events(home, "low", "step")]
    assert losses[-1] < losses[0]
    two = ",".join(lab.split(",")[:2])
    more = (*low, f"train.steps={STEPS + 4}", "plan.cluster=two.toml", "plan.pin.ranks=2")
    done = espalier(home, "train", "recipe.toml", "--hosts", two, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [event["step"] for event in events(home, "low", "step")][-4:] == [*range(STEPS + 1, STEPS + 5)]
    told = espalier(home, "predict", "runs/low", "0,1,2")
    assert told.returncode == 0, told.stderr
    assert len(told.stdout.strip().splitlines()) == 3
    assert none_left(lab)


def test_hosts_share_drawn_batches_where_the_plan_finds_a_pass_over_few_nodes_faster_so(lab: str, home: Path) -> None:
    few = ("data.path=planted:nodes=3000,degree=20,features=32,classes=6,train=0.01", "graph.fanout=auto")
    done = espalier(home, "train", "recipe.toml", "--hosts", lab, *few, "train.steps=3", "name=drawn")
    assert done.returncode == 0, done.stdout + done.stderr
    plan = plans.read(home / "runs" / "drawn" / "plan.json")
    assert batches_of(plan) is not None
    assert batches_of(plan).fanout
    assert sorted(rank.node for rank in plan.ranks) == [0, 1, 2, 3]
    sent = {name for event in events(home, "drawn", "step") for name, size in event["bytes"].items() if size}
    assert sent
    assert "halo" not in sent
    assert none_left(lab)


def apart(lab: str, home: Path, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """The command on every host as torchrun starts it, where each host sees its own part alone."""
    running, address = [], sys.modules["netlab"]._address(0)
    for rank, host in enumerate(lab.split(",")):
        place = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        meeting = {"MASTER_ADDR": address, "MASTER_PORT": 29411, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": 1}
        known = {**environment(home), **{key: str(value) for key, value in {**place, **meeting}.items()}}
        first = f'hostname {host} && mount --bind {home}/own-{host} {home}/parts && exec "$@"'
        command = ["ip", "netns", "exec", host, "unshare", "-mu", "sh", "-c", first, "sh", *command_line(*arguments)]
        running.append(
            subprocess.Popen(command, cwd=home, env=known, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    return [subprocess.CompletedProcess(one.args, one.wait(), *one.communicate(timeout=300)) for one in running]


@pytest.mark.usefixtures("four")
def test_each_host_that_has_its_own_part_alone_trains_as_hosts_that_have_the_graph(lab: str, home: Path) -> None:
    """The machine that plans has no part; each host sees a folder of its own where the recipe names `parts`."""
    cut = parts_in_the_cache(home)
    hosts = lab.split(",")
    for place, name in ((home / "parts", None), *((home / f"own-{host}", at) for at, host in enumerate(hosts))):
        place.mkdir()
        for file in ("manifest.json", "nodes.safetensors", *([] if name is None else [f"part-{name}.safetensors"])):
            shutil.copy(cut / file, place)
    mount = f"mount --bind {home}/own-{{host}} {home}/parts"
    command = f"launch.command=ip netns exec {{host}} unshare -m sh -c '{mount} && exec sh -c \"$0\"' {{command}}"
    data = (f"data.path={home}/parts", command, "name=apart", "model.dropout=0")
    done = espalier(home, "train", "recipe.toml", "--hosts", lab, *data)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [event["loss"] for event in events(home, "apart", "step")]
    assert losses == [event["loss"] for event in events(home, "four", "step")]
    for verb, more in (("predict", ("0,1,2",)), ("eval", ())):
        here = espalier(home, verb, "runs/four", *more, "--json")
        first, *others = apart(lab, home, verb, "runs/apart", *more, "--json")
        assert [one.returncode for one in (here, first, *others)] == [0] * 5, [one.stderr for one in (first, *others)]
        assert all(not one.stdout for one in others)
        expected, found = json.loads(here.stdout), json.loads(first.stdout)
        assert found.pop("run", "apart") != expected.pop("run", "four")
        assert found == expected or (verb == "eval" and found == pytest.approx(expected, rel=1e-5))
    assert none_left(lab)
