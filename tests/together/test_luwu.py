"""An optimizer node beside what else a run may be made of: codecs, kills, micro-batches, rounds."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from node_runs import STEPS, STRUCK, OnNode, on_node, recipe
from struck import Struck, plan_of, same, write_corpus

from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.mechanisms.optimizer_node import client, role, session, standby, wire
from espalier.plan import base as plans
from espalier.recipe import Recipe
from espalier.recipe.errors import Interrupted, UserError
from espalier.store.generations import Generations
from espalier.train import rank_spec as launch
from many_ranks.faults import Fault


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("luwu") / "corpus")


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> OnNode:
    asked = recipe(corpus)
    return OnNode(asked, 3, tmp_path_factory.mktemp("whole") / "run", plan=on_node(asked, 2)).run()


@pytest.mark.slow
def test_a_run_on_a_node_is_data_parallel(corpus: Path, tmp_path: Path, whole: OnNode) -> None:
    asked = recipe(corpus)
    plain = plan_of(asked, 2)
    ranks = plans.Plan(ranks=plain.ranks, micro_batch=2, precision="fp32")
    run = Struck(asked, 2, tmp_path / "plain", plan=ranks)
    run.run()
    assert run.losses.keys() == whole.losses.keys()
    assert all(abs(run.losses[step] - loss) < 1e-5 * loss for step, loss in whole.losses.items())
    assert all(torch.allclose(run.parameters[name], one, atol=1e-5) for name, one in whole.parameters.items())


@pytest.mark.slow  # on several hosts it runs every time: test_luwu_hosts.py
@pytest.mark.parametrize("dead", [0, 1])
def test_a_worker_that_always_dies_is_left_out_and_the_others_go_on_from_the_nodes_step(
    corpus: Path, tmp_path: Path, dead: int
) -> None:
    asked = recipe(corpus)
    run = OnNode(asked, 3, tmp_path / "run", plan=on_node(asked, 2), restarts=1, dead=(dead, STRUCK)).run()
    assert f"place {dead}" in run.all("incident")[-1]["action"]
    taken_up = run.all("recovered")[-1]["step"]
    assert taken_up >= STRUCK - 2

    with pytest.raises(Interrupted):
        OnNode(asked, 3, tmp_path / "other", plan=on_node(asked, 2), restarts=0, stop_after=taken_up).run()
    fewer = OnNode(asked, 2, tmp_path / "other", plan=on_node(asked, 1)).run()
    assert same(fewer, run)


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_a_node_killed_as_it_commits_goes_on_from_a_whole_step(
    corpus: Path, tmp_path: Path, whole: OnNode, when: str
) -> None:
    asked = recipe(corpus)
    run = OnNode(asked, 3, tmp_path / "run", plan=on_node(asked, 2), killed=(STRUCK, when)).run()
    assert (tmp_path / "run" / "node-killed").exists()
    assert same(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        pytest.param("VERSION", 7, "speaks version 7 of the protocol, this process version 1", marks=pytest.mark.slow),
        ("release", lambda: "0.0.1", r"This process runs espalier .*, the optimizer node espalier 0\.0\.1"),
    ],
)
def test_a_node_of_another_version_ends_the_run_before_its_first_step(
    corpus: Path, tmp_path: Path, name: str, value: Any, told: str
) -> None:
    asked = recipe(corpus)
    run = OnNode(asked, 3, tmp_path / "run", plan=on_node(asked, 2), arm=lambda place: setattr(wire, name, value))
    with pytest.raises(UserError, match=f"(?s){told}.*try: install the same version"):
        run.run()
    assert not run.all("step")
    assert not run.all("recovered")


def test_a_node_whose_clocks_are_hours_off_changes_no_bit(corpus: Path, tmp_path: Path, whole: OnNode) -> None:
    def shift(place: launch.RankSpec) -> None:
        real, since_boot = time.time, time.monotonic
        time.time = lambda: real() - 5 * 3600.0
        for one in (wire, session, client, standby, role):
            one.time = SimpleNamespace(monotonic=lambda: since_boot() + 7 * 3600.0, sleep=time.sleep)  # type: ignore

    asked = recipe(corpus)
    run = OnNode(asked, 3, tmp_path / "run", plan=on_node(asked, 2), arm=shift).run()
    assert same(run, whole)
    # A loaded machine may make a rank a few times slower; a clock read wrongly, thousands of times.
    assert all(one["kind"] == "slow" and float(one["what"].split()[-3]) < 100 for one in run.all("incident"))


def fails(call: str, number: int, after: int, marker: Path) -> Callable[[launch.RankSpec], None]:
    """In the process of a node: `os.<call>` fails from its `after`-th on, until `marker` is there."""

    def arm(place: launch.RankSpec) -> None:
        plain, seen = getattr(os, call), [0]

        def failing(*arguments: Any) -> Any:
            seen[0] += 1
            if seen[0] > after and not marker.exists():
                raise OSError(number, os.strerror(number))
            return plain(*arguments)

        setattr(os, call, failing)

    return arm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "number", "told"),
    [
        ("pwritev", errno.ENOSPC, r"The disk of .*state is full: [\d,]+ bytes more .* are needed"),
        pytest.param(
            *("preadv", errno.EIO, r"state cannot be read at byte \d+: Input/output error.*try: check the disk"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_disk_that_is_full_or_gone_ends_the_run_in_its_words_and_the_run_goes_on_when_it_is_there(
    corpus: Path, tmp_path: Path, whole: OnNode, call: str, number: int, told: str
) -> None:
    asked, mended = recipe(corpus), tmp_path / "mended"
    arm = fails(call, number, 60, mended)
    run = OnNode(asked, 3, tmp_path / "run", plan=on_node(asked, 2), arm=arm)
    with pytest.raises(UserError, match=f"(?s){told}"):
        run.run()
    made = max(run.losses)
    assert 0 < made < STEPS
    mended.touch()
    assert same(run.run(), whole)
    assert len(run.all("run")) == 2


@pytest.mark.slow
def test_a_state_that_may_not_grow_so_large_is_refused_with_the_bytes_that_it_lacks(
    corpus: Path, tmp_path: Path, whole: OnNode
) -> None:
    limit = [1 << 16]

    def narrow(place: launch.RankSpec) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit[0], resource.RLIM_INFINITY))

    asked = recipe(corpus)
    run = OnNode(asked, 3, tmp_path / "run", plan=on_node(asked, 2), arm=narrow)
    with pytest.raises(UserError, match=r"(?s)may not grow: ([\d,]+) bytes more .*try: raise the limit") as refused:
        run.run()
    found = re.search(r"([\d,]+) bytes more", refused.value.what)
    assert found is not None
    assert not run.all("step")
    limit[0] += int(found[1].replace(",", ""))  # and not a byte more
    assert same(run.run(), whole)


@pytest.mark.slow
def test_a_slow_disk_is_waited_for(corpus: Path, tmp_path: Path, whole: OnNode) -> None:
    def slow(place: launch.RankSpec) -> None:
        plain = os.pwritev
        os.pwritev = lambda *arguments: (time.sleep(0.02), plain(*arguments))[1]  # type: ignore[assignment]

    asked = recipe(corpus)
    run = OnNode(asked, 3, tmp_path / "run", plan=on_node(asked, 2), arm=slow).run()
    assert same(run, whole)
    assert not run.all("incident")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_where_the_files_of_a_node_are_taken_away_the_run_ends_and_goes_on_when_they_are_back(
    corpus: Path, tmp_path: Path, whole: OnNode, killed: bool
) -> None:
    asked, folder, away = recipe(corpus), tmp_path / "run" / "optimizer" / "node-0", tmp_path / "away"

    def take(place: launch.RankSpec) -> None:
        plain = Generations.commit

        def commit(state: Generations, step: int) -> None:
            plain(state, step)
            if step == STRUCK and not away.exists():
                folder.rename(away)
                if killed:
                    os.kill(os.getpid(), signal.SIGKILL)

        Generations.commit = commit  # type: ignore[method-assign]

    run = OnNode(asked, 3, tmp_path / "run", plan=on_node(asked, 2), arm=take)
    with pytest.raises(UserError, match=r"(?s)files of optimizer 0 are gone from .*node-0.*try: put them back"):
        run.run()
    assert not folder.exists()
    shutil.copytree(away, folder)
    assert same(run.run(), whole)


def test_gradients_in_int8_with_error_feedback_train_as_well(corpus: Path, tmp_path: Path, whole: OnNode) -> None:
    asked = recipe(corpus)
    exchanges = (plans.Exchange(traffic="gradients", codec="int8"),)
    run = OnNode(asked, 3, tmp_path / "run", plan=on_node(asked, 2, exchanges=exchanges)).run()
    assert run.losses != whole.losses
    assert abs(run.losses[STEPS] - whole.losses[STEPS]) < 0.02 * whole.losses[STEPS]


def test_a_codec_that_a_node_cannot_add_up_is_refused_by_name(corpus: Path) -> None:
    asked = recipe(corpus)
    exchanges = (plans.Exchange(traffic="gradients", codec="zfp:8"),)
    from espalier.mechanisms.optimizer_node.role import job_of

    with pytest.raises(UserError, match=r"cannot add up gradients in the codec 'zfp:8'"):
        job_of(asked, on_node(asked, 2, exchanges=exchanges), [])


# --- rounds --------------------------------------------------------------------------------------------------------


def by_rounds(recipe: Recipe, method: str = "diloco", steps: int = 3, **more: Any) -> plans.Plan:
    """Ten steps are four rounds, the last a short one."""
    outer = LocalRoundsState(replicas=((0,), (1,)), method=method, steps=steps, adapt=False, **more)
    return on_node(recipe, 2, choices={"local_rounds": outer})


@pytest.fixture(scope="module")
def rounds(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> OnNode:
    asked = recipe(corpus)
    return OnNode(asked, 3, tmp_path_factory.mktemp("rounds") / "run", plan=by_rounds(asked)).run()


def test_rounds_on_a_node_are_those_of_replicas_that_hold_everything(
    corpus: Path, tmp_path: Path, rounds: OnNode
) -> None:
    asked = recipe(corpus)
    how = by_rounds(asked)
    memory = plans.Plan(ranks=how.ranks[:2], micro_batch=2, precision="fp32", choices=how.choices)
    run = Struck(asked, 2, tmp_path / "memory", plan=memory).run()
    assert run.losses.keys() == rounds.losses.keys()
    assert all(abs(run.losses[step] - loss) < 1e-5 * loss for step, loss in rounds.losses.items())
    assert all(torch.allclose(run.parameters[name], one, atol=1e-5) for name, one in rounds.parameters.items())
    assert run.validated.keys() == rounds.validated.keys()
    assert all(abs(run.validated[step] - loss) < 1e-5 * loss for step, loss in rounds.validated.items())


def test_rounds_of_differences_in_int8_train_as_well(corpus: Path, tmp_path: Path, rounds: OnNode) -> None:
    asked = recipe(corpus)
    exchanges = (plans.Exchange(traffic="outer_step", codec="int8"),)
    how = plans.Plan(
        ranks=by_rounds(asked).ranks,
        micro_batch=2,
        precision="fp32",
        choices=by_rounds(asked).choices,
        exchanges=exchanges,
    )
    run = OnNode(asked, 3, tmp_path / "run", plan=how).run()
    assert run.losses != rounds.losses
    assert abs(run.losses[STEPS] - rounds.losses[STEPS]) < 0.02 * rounds.losses[STEPS]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_worker_killed_in_a_round_changes_no_bit(corpus: Path, tmp_path: Path, rounds: OnNode, rank: int) -> None:
    asked = recipe(corpus)
    run = OnNode(asked, 3, tmp_path / "run", (Fault(rank, STRUCK - 1, "kill"),), plan=by_rounds(asked)).run()
    assert same(run, rounds)
    assert run.all("recovered")[0]["step"] == 3


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_a_node_killed_as_a_round_ends_changes_no_bit(corpus: Path, tmp_path: Path, rounds: OnNode, when: str) -> None:
    asked = recipe(corpus)
    run = OnNode(asked, 3, tmp_path / "run", plan=by_rounds(asked), killed=(2, when)).run()
    assert (tmp_path / "run" / "node-killed").exists()
    assert same(run, rounds)


@pytest.mark.slow
def test_a_run_by_rounds_that_was_stopped_goes_on_to_the_last_bit(corpus: Path, tmp_path: Path, rounds: OnNode) -> None:
    asked = recipe(corpus)
    run = OnNode(asked, 3, tmp_path / "run", plan=by_rounds(asked), stop_after=4).run()  # its launcher begins anew
    assert [one["step"] for one in run.all("run")] == [0, 6]
    assert same(run, rounds)


@pytest.mark.parametrize(
    ("outer", "told"),
    [
        ({"method": "co2"}, r"cannot run rounds of the method 'co2'.*try: sync\.kind = \"diloco\""),
        ({"settings": {"penalty": "norm"}}, r"with sync\.penalty = 'norm'.*try: sync\.penalty"),
        ({"replicas": ((0, 1), (2, 3))}, r"a replica of several workers cannot.*try: sync\.replicas=4"),
    ],
)
def test_rounds_that_nodes_cannot_run_are_refused_by_name(corpus: Path, outer: dict[str, Any], told: str) -> None:
    asked = recipe(corpus)
    workers = 2 * len(outer.get("replicas", ((0,),))[0])
    made = LocalRoundsState(**({"replicas": ((0,), (1,)), "method": "diloco", "steps": 4} | outer))
    with pytest.raises(UserError, match=f"(?s){told}"):
        role.job_of(asked, on_node(asked, workers, choices={"local_rounds": made}), [])
