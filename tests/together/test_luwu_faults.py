"""An optimizer node and what happens to it, its files and its network within a supervised run: no bit differs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from node_runs import STRUCK, OnNode, on_node, recipe
from struck import same, write_corpus

from espalier.errors import Interrupted, UserError
from espalier.launch import base as launch
from espalier.store.generations import Generations


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


@pytest.mark.parametrize("what", ["parameters", "moments", "header"])
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
    assert ("header" if what == "header" else f"/{what}'") in incident["what"]
    assert str(file) in incident["what"]


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "moments",
            r"(?s)Extent '0/0/moments' of .*state is damaged.*step 6, and .*step 5; no step is whole.*try: put",
        ),
        ("table", r"(?s)The table at the beginning of .*state is damaged.*try: restore"),
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
