"""The example whose model is on an optimizer node: trained by one command, taken up again, and used."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import programs
import pytest

from espalier.cli import main as cli
from espalier.mechanisms.optimizer_node import role
from espalier.recipe.units import show_seconds, show_size
from espalier.store.generations import Generations

EXAMPLES = Path(__file__).parents[2] / "examples"
DISK = 'disks = [{ path = "/", write = 1e9, read = 1e9, iops = 1e4 }]\n'
SMALL = [
    "train.batch_tokens=1024",
    "train.sequence=128",
    "train.validate_tokens=1024",
    "model.depth=2",
    "model.width=64",
    "plan.cluster=machine.toml",
    "track.sample=def",
]


def losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return {event["step"]: event["loss"] for event in lines if event["event"] == "step"}


def check_what_is_told(run: Path, predicted: dict[str, Any]) -> None:
    """Of a step: bytes pulled and pushed, seconds waited, bytes of the nodes' disks; and the same in the report."""
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    *_, latest = (event for event in lines if event["event"] == "step")
    told = latest["node"]
    assert told["pushed"] == latest["bytes"]["gradients"] == predicted["sent_bytes"]["gradients"]
    assert told["pushed"] < told["pulled"] <= 2 * told["pushed"]
    assert 0 < told["stalled"] < latest["seconds"]
    assert told["written"] >= 3 * told["pushed"]
    assert told["read"] >= 3 * told["pushed"] + 2 * told["pulled"]
    page = (run / "report.html").read_text()
    for words in (
        f"{show_size(told['pulled'])} pulled, {show_size(told['pushed'])} pushed",
        f"a step, which waited {show_seconds(told['stalled'])} for them",
        f"{show_size(told['read'])} read, {show_size(told['written'])} written",
    ):
        assert words in page


def test_one_command_trains_on_a_node_and_goes_on_where_it_stood(tmp_path: Path) -> None:
    recipe = str(EXAMPLES / "luwu.toml")
    data = f"data.path={EXAMPLES.parent / 'src' / 'espalier' / 'mechanisms' / 'optimizer_node'}"
    (tmp_path / "machine.toml").write_text(programs.MACHINE + DISK)
    more = [*SMALL, data]
    for name, steps, kind in (("node", 3, ""), ("node", 6, ""), ("plain", 6, "none")):
        pinned = [f"plan.pin.offload={kind}"] if kind else []
        ended = programs.forked(tmp_path, "train", recipe, *more, *pinned, f"train.steps={steps}", "--run", name)
        assert ended.returncode == 0, ended.stderr
    plan = json.loads((tmp_path / "node" / "plan.json").read_text())
    assert [one["role"] for one in plan["ranks"]] == ["trainer", "trainer", "optimizer"]
    found, expected = losses(tmp_path / "node"), losses(tmp_path / "plain")
    assert sorted(found) == list(range(1, 7))
    assert [found[step] for step in range(1, 4)] == pytest.approx([expected[step] for step in range(1, 4)], rel=1e-5)
    assert (tmp_path / "node" / "logs" / "optimizer-2.log").exists()
    check_what_is_told(tmp_path / "node", plan["predicted"])
    ended = programs.forked(tmp_path, "export", "node", "--to", "hf")
    assert ended.returncode == 0, ended.stderr
    assert "after step 6" in ended.stdout


def test_workers_take_steps_of_their_own_by_one_option(tmp_path: Path) -> None:
    recipe = str(EXAMPLES / "luwu.toml")
    data = f"data.path={EXAMPLES.parent / 'src' / 'espalier' / 'mechanisms' / 'optimizer_node'}"
    (tmp_path / "machine.toml").write_text(programs.MACHINE + DISK)
    rounds = [*SMALL, data, "sync.kind=diloco", "sync.steps=3", "--run", "rounds"]
    for steps in (3, 5):
        ended = programs.forked(tmp_path, "train", recipe, *rounds, f"train.steps={steps}")
        assert ended.returncode == 0, ended.stderr
    plan = json.loads((tmp_path / "rounds" / "plan.json").read_text())
    assert plan["choices"]["local_rounds"]["replicas"] == [[0], [1]]
    lines = map(json.loads, (tmp_path / "rounds" / "events.jsonl").read_text().splitlines())
    sent = {one["step"]: one["bytes"].get("outer_step", 0) for one in lines if one["event"] == "step"}
    assert sorted(sent) == [1, 2, 3, 4, 5]
    assert sent[1] == sent[2] == sent[4] == 0
    assert sent[3] == sent[5] == pytest.approx(3 * plan["predicted"]["sent_bytes"]["outer_step"], rel=1e-3)
    ended = programs.forked(tmp_path, "export", "rounds", "--to", "hf")
    assert ended.returncode == 0, ended.stderr
    assert "after step 5" in ended.stdout


@pytest.mark.slow
def test_a_folder_for_the_node_that_holds_another_runs_state_or_cannot_be_written_is_refused_by_name(
    tmp_path: Path,
) -> None:
    data = f"data.path={EXAMPLES.parent / 'src' / 'espalier' / 'mechanisms' / 'optimizer_node'}"
    (tmp_path / "machine.toml").write_text(programs.MACHINE + DISK)
    command = ["train", str(EXAMPLES / "luwu.toml"), *SMALL, data, "train.steps=1"]
    ended = programs.forked(tmp_path, *command, "--run", "first")
    assert ended.returncode == 0, ended.stderr
    for folder, told in (
        (tmp_path / "first" / "optimizer", "node-0 is of step 1, and the run is new."),
        (Path("/proc/none"), "Cannot write /proc/none/node-0."),
    ):
        ended = programs.forked(tmp_path, *command, f"store.path={folder}", "--run", "second")
        assert ended.returncode == 2, ended.stderr
        assert told in ended.stderr
        assert "store.path" in ended.stderr.partition("try:")[2]
        assert not (tmp_path / "second" / "checkpoints").exists() or not any(
            (tmp_path / "second" / "checkpoints").iterdir()
        )


def kill_node(monkeypatch: pytest.MonkeyPatch, step: int, marker: Path) -> None:
    """The first optimizer node of runs from now on kills itself before it commits `step`, once."""
    serve, commit = role.serve, Generations.commit

    def armed(place: role.NodePlace, *others: Any) -> int:
        def dies(state: Generations, committed: int) -> None:
            if place.spec.role == "optimizer" and committed == step and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            commit(state, committed)

        monkeypatch.setattr(Generations, "commit", dies)
        return serve(place, *others)

    monkeypatch.setattr(role, "serve", armed)
    monkeypatch.setattr(role, "TIMES", replace(role.TIMES, heartbeat=0.02, silence=2.0))


@pytest.mark.slow
def test_where_a_node_is_killed_it_or_its_standby_goes_on_within_the_run_and_no_bit_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, marker = str(EXAMPLES / "luwu.toml"), tmp_path / "killed"
    data = f"data.path={EXAMPLES.parent / 'src' / 'espalier' / 'mechanisms' / 'optimizer_node'}"
    (tmp_path / "machine.toml").write_text(programs.MACHINE + DISK)
    more = [*SMALL, data, "train.steps=6", "faults.heartbeat=0.2s"]
    marker.touch()
    kill_node(monkeypatch, 4, marker)
    for name, roles in (
        ("whole", "[]"),
        ("again", "[]"),
        ("struck", '["standby", "aggregator"]'),
    ):
        if name != "whole":
            marker.unlink()
        ended = programs.forked(tmp_path, "train", recipe, *more, f"plan.pin.roles={roles}", "--run", name)
        assert ended.returncode == 0, ended.stderr
    plan = json.loads((tmp_path / "struck" / "plan.json").read_text())
    assert [one["role"] for one in plan["ranks"][2:]] == ["optimizer", "standby", "aggregator"]
    for name, action in (("again", "start it again, the others stay"), ("struck", "its standby serves")):
        lines = [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]
        (incident,) = [one for one in lines if one["event"] == "incident"]
        assert (incident["rank"], action in incident["action"]) == (2, True)
        assert len([one for one in lines if one["event"] == "run"]) == 1
        assert losses(tmp_path / name) == losses(tmp_path / "whole")
    ended = programs.forked(tmp_path, "export", "struck", "--to", "hf")
    assert "after step 6" in ended.stdout, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.slow), 5])
def test_where_a_node_is_killed_and_started_again_its_workers_stay_and_no_bit_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    recipe, marker = str(EXAMPLES / "luwu.toml"), tmp_path / "killed"
    data = f"data.path={EXAMPLES.parent / 'src' / 'espalier' / 'mechanisms' / 'optimizer_node'}"
    (tmp_path / "machine.toml").write_text(programs.MACHINE + DISK)
    kill_node(monkeypatch, step, marker)
    for name in ("struck", "whole"):  # it is killed once
        ended = programs.forked(tmp_path, "train", recipe, *SMALL, data, "train.steps=6", "--run", name)
        assert ended.returncode == 0, ended.stderr
        assert marker.exists()
    lines = [json.loads(line) for line in (tmp_path / "struck" / "events.jsonl").read_text().splitlines()]
    assert [one["rank"] for one in lines if one["event"] == "incident"][:1] == [2]
    assert len([one for one in lines if one["event"] == "run"]) == 1, "the workers were started again"
    assert losses(tmp_path / "struck") == losses(tmp_path / "whole")


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_ranks_that_another_launcher_started_are_told_that_no_node_serves_them(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "machine.toml").write_text(programs.MACHINE + DISK)
    data = f"data.path={EXAMPLES.parent / 'src' / 'espalier' / 'mechanisms' / 'optimizer_node'}"

    def run() -> int:
        if launcher == "srun":
            own = {"STEP_ID": "0", "STEP_NUM_TASKS": "2", "PROCID": os.environ.pop("RANK"), "LOCALID": "0"}
            os.environ.update({f"SLURM_{name}": value for name, value in own.items()})
            del os.environ["WORLD_SIZE"]
        return cli.main(["train", str(EXAMPLES / "luwu.toml"), *SMALL, data, "--run", "run"])

    first, second = programs.launched(tmp_path, run)
    assert (first.returncode, second.returncode > 0) == (2, True), first.stderr
    assert "processes with the role optimizer, and another launcher has started the ranks" in first.stderr
    assert "try: espalier train without a launcher (--hosts a,b,c over several machines)" in first.stderr
    assert not (tmp_path / "run").exists()
