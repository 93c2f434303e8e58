"""An optimizer node and what happens to it, its files and its network within a supervised run: no bit differs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import statistics
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lossy_proxy import LossyProxy
from node_runs import STEPS, STRUCK, OnNode, on_node, recipe
from struck import same, write_corpus

from espalier.mechanisms.optimizer_node import role
from espalier.mechanisms.optimizer_node.node import OptimizerNode
from espalier.plan import base as plans
from espalier.recipe.errors import Interrupted, UserError
from espalier.store.generations import Generations
from espalier.train import rank_spec as launch


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("luwu") / "corpus")


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> OnNode:
    asked = recipe(corpus)
    return OnNode(asked, 3, tmp_path_factory.mktemp("whole") / "run", plan=on_node(asked, 2)).run()


# --- a damaged state -------------------------------------------------------------------------------------------------


def flip(state: Generations, what: str, generations: int = 1) -> None:
    """One bit of the newest generation of what `what` names, or of so many."""
    layout = state._layout
    if what == "header":
        places = [layout.header_at(state._header)]
    elif what == "table":
        places = [64]
    else:
        name = next(one for one in state.sizes if one.endswith(what))
        place = state._committed[name][0]
        places = [layout.at(name, (place + one) % 2) for one in range(generations)]
    with state.path.open("r+b", buffering=0) as file:
        for place in places:
            (byte,) = os.pread(file.fileno(), 1, place + 33)
            os.pwrite(file.fileno(), bytes([byte ^ 4]), place + 33)


@pytest.fixture(scope="module")
def half(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped after some steps."""
    asked, folder = recipe(corpus), tmp_path_factory.mktemp("half") / "run"
    with pytest.raises(Interrupted):
        OnNode(asked, 3, folder, plan=on_node(asked, 2), restarts=0, stop_after=STRUCK).run()
    return folder


@pytest.fixture
def stopped(corpus: Path, tmp_path: Path, half: Path) -> tuple[OnNode, Path]:
    """A copy of that run, and the file of its node."""
    asked, folder = recipe(corpus), tmp_path / "run"
    shutil.copytree(half, folder)
    return OnNode(asked, 3, folder, plan=on_node(asked, 2)), folder / "optimizer" / "node-0" / "state"


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["parameters", *(pytest.param(one, marks=pytest.mark.slow) for one in ("moments", "totals")), "header"]
)
def test_a_flipped_bit_in_the_nodes_files_is_named_and_costs_one_step_made_again(
    stopped: tuple[OnNode, Path], whole: OnNode, what: str
) -> None:
    run, file = stopped
    with Generations(file) as state:
        assert state.step == STRUCK
        flip(state, what)
    assert same(run.run(), whole)
    (incident,) = (one for one in run.all("incident") if one["kind"] == "damaged")
    assert incident["step"] == STRUCK - 1
    assert ("header" if what == "header" else f"{what}'") in incident["what"]
    assert str(file) in incident["what"]


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "moments",
            r"(?s)Extent '0/0/moments' of .*state is damaged.*step 6, and .*step 5; no step is whole.*try: put",
        ),
        pytest.param(
            *("table", r"(?s)The table at the beginning of .*state is damaged.*try: restore"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_state_of_which_no_step_is_whole_is_refused_by_name(
    stopped: tuple[OnNode, Path], what: str, told: str
) -> None:
    run, file = stopped
    with Generations(file) as state:
        flip(state, what, generations=2)
    with pytest.raises(UserError, match=told):
        run.run()
    assert max(run.losses) == STRUCK


@pytest.mark.slow
def test_a_bit_flipped_while_the_run_goes_on_ends_it_by_name_and_the_same_command_goes_on(
    corpus: Path, tmp_path: Path, whole: OnNode
) -> None:
    marker = tmp_path / "flipped"

    def arm(place: launch.RankSpec) -> None:
        plain = Generations.commit

        def commit(state: Generations, step: int) -> None:
            plain(state, step)
            if step == STRUCK and not marker.exists():
                marker.touch()
                flip(state, "parameters")

        Generations.commit = commit  # type: ignore[method-assign]

    asked = recipe(corpus)
    run = OnNode(asked, 3, tmp_path / "run", plan=on_node(asked, 2), arm=arm)
    with pytest.raises(UserError, match=r"(?s)'0/0/parameters' of .* is damaged.*in step 6.*try: run the same command"):
        run.run()
    assert max(run.losses) == STRUCK
    assert same(run.run(), whole)
    assert [one["step"] for one in run.all("incident") if one["kind"] == "damaged"] == [STRUCK - 1]


# --- a node that stops, a network that loses, a worker that is killed ----------------------------------------------


def once(step: int, action: Callable[[], None], marker: Path) -> Callable[[launch.RankSpec], None]:
    """In the process of a node: `action` when it has committed `step` for the first time."""

    def arm(place: launch.RankSpec) -> None:
        plain = Generations.commit

        def commit(state: Generations, committed: int) -> None:
            plain(state, committed)
            if place.role == "optimizer" and committed == step and not marker.exists():
                marker.touch()
                action()

        Generations.commit = commit  # type: ignore[method-assign]

    return arm


@pytest.mark.slow
@pytest.mark.parametrize("standby", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_stopped_node_is_named_and_all_go_on_and_no_bit_changes(
    corpus: Path, tmp_path: Path, whole: OnNode, standby: bool
) -> None:
    asked = recipe(corpus)
    arm = once(STRUCK, lambda: os.kill(os.getpid(), signal.SIGSTOP), tmp_path / "stopped")
    ranks = (*on_node(asked, 2).ranks, *(plans.Rank(role="standby"),) * standby)
    how = plans.Plan(ranks=ranks, micro_batch=2, precision="fp32")
    run = OnNode(asked, len(ranks), tmp_path / "run", plan=how, arm=arm, heartbeat=0.2).run()
    assert same(run, whole)
    incident = next(one for one in run.all("incident") if one["kind"] == "stopped")
    assert incident["what"] == "Rank 2 was stopped (SIGSTOP)."
    (recovered,) = run.all("recovered")
    assert recovered["step"] == STRUCK


class Behind(socket.socket):
    """The door of a node whose workers come through a proxy."""

    proxy: LossyProxy

    def getsockname(self) -> Any:
        return self.proxy.address


def through(proxies: list[LossyProxy], **network: float) -> Callable[[launch.RankSpec], None]:
    """In the process of a node: workers reach it through a network that loses so many frames."""

    def arm(place: launch.RankSpec) -> None:
        plain = role._door

        def door(own: role.NodePlace) -> socket.socket:
            made = plain(own)
            proxies.append(LossyProxy(made.getsockname(), **network))
            behind = Behind(fileno=made.detach())
            behind.proxy = proxies[-1]
            return behind

        role._door = door

    return arm


@pytest.mark.slow
def test_frames_lost_and_damaged_change_no_bit_of_a_run(
    corpus: Path, tmp_path: Path, whole: OnNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role, "TIMES", replace(role.TIMES, heartbeat=0.02, resend=0.1))
    proxies: list[LossyProxy] = []
    network, told, plain = through(proxies, loss=0.01, damage=0.01), tmp_path / "lost", role._until_left

    def until_left(*arguments: Any) -> None:
        plain(*arguments)
        told.write_text(f"{proxies[0].lost} {proxies[0].damaged}")

    monkeypatch.setattr(role, "_until_left", until_left)
    asked = recipe(corpus)
    run = OnNode(asked, 3, tmp_path / "run", plan=on_node(asked, 2), arm=network).run()
    assert same(run, whole)
    lost, damaged = map(int, told.read_text().split())
    assert lost > 2
    assert damaged > 0
    assert not run.all("incident")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2.0, pytest.param(30.0, marks=pytest.mark.slow)])
def test_links_that_are_cut_for_a_while_change_no_bit_of_a_run(
    corpus: Path, tmp_path: Path, whole: OnNode, seconds: float
) -> None:
    proxies: list[LossyProxy] = []

    def cut() -> None:
        proxies[0].cut()
        threading.Timer(seconds, proxies[0].mend).start()

    network, struck = through(proxies), once(STRUCK, cut, tmp_path / "cut")
    asked = recipe(corpus)
    run = OnNode(
        asked, 3, tmp_path / "run", plan=on_node(asked, 2), arm=lambda place: (network(place), struck(place))[0]
    ).run()
    assert (tmp_path / "cut").exists()
    assert same(run, whole)
    assert not run.all("incident")


# --- workers -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_come_and_go_between_starts_and_have_unequal_shares(
    corpus: Path, tmp_path: Path, whole: OnNode
) -> None:
    asked, folder = recipe(corpus), tmp_path / "run"
    for cuts, until in (((0, 8), 3), ((0, 1, 6, 8), 7), ((0, 3, 8), None)):
        trainers = tuple(plans.Rank(share=share) for share in pairwise(cuts))
        how = plans.Plan(ranks=(*trainers, plans.Rank(role="optimizer")), micro_batch=2, precision="fp32")
        run = OnNode(asked, len(how.ranks), folder, plan=how, restarts=0, stop_after=until)
        with pytest.raises(Interrupted) if until else nullcontext():
            run.run()
    assert [one["step"] for one in run.all("run")] == [0, 3, 7]
    assert run.losses.keys() == whole.losses.keys()
    assert all(abs(run.losses[step] - loss) < 1e-5 * loss for step, loss in whole.losses.items())


# --- what the disk reads and writes ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_events_have_the_bytes_that_the_kernel_counts_at_the_nodes_disk_and_the_formula_says(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step reads and writes 12 bytes of state for each parameter, reads 4 for each that a worker pulls, and writes 4
    of gradients in case that it has to be done again (without clipping it never is)."""
    counted, plain = tmp_path / "counted", OptimizerNode._totals

    def totals(node: OptimizerNode, step: Any) -> bool:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        with counted.open("a") as file:
            file.write(f"{lines['read_bytes']} {lines['write_bytes']}\n")
        return plain(node, step)

    monkeypatch.setattr(OptimizerNode, "_totals", totals)
    asked = recipe(
        corpus, model={"depth": 2, "width": 128, "feed_forward": 512}, train={"validate_every": 1000, "clip": 0.0}
    )
    run = OnNode(asked, 3, tmp_path / "run", plan=on_node(asked, 2)).run()
    kernel = [tuple(map(int, line.split())) for line in counted.read_text().splitlines()]
    assert len(kernel) == STEPS
    if kernel[-1][1] == 0:
        pytest.skip("the kernel counts no bytes on this file system")
    told = [(one["node"]["read"], one["node"]["written"]) for one in run.all("step")]
    numel = sum(one.numel() for one in run.parameters.values())
    for way, each in ((0, 12 * numel + 2 * run.all("step")[-1]["node"]["pulled"]), (1, 16 * numel)):
        seen = kernel[-1][way] - kernel[2][way]
        assert sum(one[way] for one in told[3:]) == pytest.approx(seen, rel=0.02)
        usual = statistics.median(one[way] for one in told)  # after some steps the model is validated
        assert usual == pytest.approx(each, rel=0.02)
