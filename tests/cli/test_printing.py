"""Plans and results as people read them: whole lines in a pipe, hanging lines on a terminal, nothing that is not so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from espalier.cli import main as cli
from espalier.cli import printing
from espalier.plan.base import Plan, Predicted, Rank, RunnerUp
from espalier.recipe.base import Derivation
from espalier.track.goodput import Account, FailureCost
from espalier.track.run_tables import RunTables

TERMS = {"launch": 1e-3, "other": 4e-3, "optimizer": 2e-3, "backward": 0.02, "forward": 0.01, "all_reduce": 0.003}
PREDICTED = Predicted(
    step_seconds=0.061, tokens_per_second=1e5, tokens_per_second_per_device=1e5, mfu=0.4, terms=TERMS,
    memory_bytes={"params": 2**30, "grads": 2**30, "optimizer": 2**31, "activations": 2**32, "peak": 2**33},
    memory_limit=2**34, sent_bytes={"gradients": 2**30},
    sources={"forward": "a long account of where a number comes from, " * 4},
)  # fmt: skip
CPU = Plan(
    ranks=(Rank(share=(0, 4)), Rank(share=(4, 8))), predicted=PREDICTED, why=("because of this, " * 12 + "end.",)
)
SHAPED = [
    Derivation("model.depth", 96, "one long account of a published shape and of where its numbers were taken from"),
    Derivation("train.steps", 1000, "twenty tokens for each parameter, which is a rule"),
    Derivation("model.width", 12288, "one long account of a published shape and of where its numbers were taken from"),
]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier.recipe.terminal.columns", lambda: 80)


def told(capsys: pytest.CaptureFixture[str], plan: Plan = CPU, steps: int | None = None) -> list[str]:
    printing.plan(plan, SHAPED, steps)
    return capsys.readouterr().out.split("\n")


def test_a_pipe_gets_whole_lines_without_trailing_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys)
    assert all(line == line.rstrip() for line in lines)
    assert f"  - {CPU.why[0]}" in lines
    assert "Plan (search): 2 ranks x 1 thread on cpu, dp 2, micro-batch 1" in "\n".join(lines)


def test_a_terminal_gets_hanging_lines_no_wider_than_itself(terminal: None, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys)
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
    first = next(i for i, line in enumerate(lines) if line.startswith("  - because"))
    assert lines[first + 1].startswith("    ")
    assert " ".join(" ".join(lines).split()).count(" ".join(CPU.why[0].split())) == 1


@pytest.mark.parametrize("width", [None, 40, 80, 120])
def test_keys_of_one_reason_stand_together_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int | None
) -> None:
    monkeypatch.setattr("espalier.recipe.terminal.columns", lambda: width)
    lines = told(capsys)
    keys = [line.split()[0] for line in lines if line.startswith(("  model.", "  train."))]
    assert keys == ["model.depth", "model.width", "train.steps"]
    assert sum("published" in line for line in lines) == 1


def test_the_parts_of_a_step_come_in_one_order_with_the_time_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(told(capsys, steps=1000))
    places = [text.index(f"{name} ") for name in ("forward", "backward", "optimizer", "all_reduce", "launch", "other")]
    assert places == sorted(places)
    assert "predicted step 61 ms" in text
    assert "1,000 steps, about 1 min 01 s" in text


def test_mfu_is_left_out_where_nothing_counts_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "MFU 40%" in "\n".join(told(capsys))
    none = msgspec.structs.replace(CPU, predicted=msgspec.structs.replace(PREDICTED, mfu=0.0))
    assert "MFU" not in "\n".join(told(capsys, none))


def test_gpus_and_machines_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = tuple(Rank(device=f"cuda:{i % 8}", node=i // 8, threads=3, share=(i, i + 1)) for i in range(16))
    fewer = RunnerUp(layout=CPU.layout, ranks=8, threads=3, step_seconds=1.0, peak_bytes=1.0, loses="2x slower")
    text = "\n".join(told(capsys, Plan(ranks=ranks, runners_up=(fewer,))))
    assert "Plan (search): 16 GPUs on 2 machines, dp 16, micro-batch" in text
    assert "not taken: 8 GPUs, dp 2, micro-batch 1: 2x slower" in text
    assert "thread" not in text


def run_folder(path: Path, kind: str, *events: dict[str, object]) -> Path:
    path.mkdir()
    (path / "run.toml").write_text(f'[model]\nkind = "{kind}"\n')
    step = {"event": "step", "time": 1.0, "step": 1, "loss": 0.5}
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (step, *events)))
    return path


def test_a_run_without_samples_ends_well_and_is_offered_only_what_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printing.finished(RunTables.read(run_folder(tmp_path / "run", "module")), tmp_path / "report.html", 3.0)
    text = capsys.readouterr().out
    assert "Done in 3.0 s: steps 1, loss 0.5." in text
    assert "espalier eval" in text
    assert "predict" not in text
    assert "export" not in text


def test_a_language_run_shows_its_sample_whole_and_what_comes_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = {"event": "sample", "time": 2.0, "step": 1, "text": "word " * 40 + "end"}
    folder = run_folder(tmp_path / "a-rather-long-name-of-a-run-that-does-not-fit-on-a-line", "gpt", sample)
    printing.finished(RunTables.read(folder), tmp_path / "report.html", 3.0)
    lines = capsys.readouterr().out.split("\n")
    assert sample["text"] in lines
    assert f"  go on     espalier predict {folder} 'def '" in lines
    assert f"  export    espalier export {folder} --to hf" in lines
    assert all(line == line.rstrip() for line in lines)


def test_each_system_has_one_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == 1 + 20 + 3
    assert all(line == line.rstrip() for line in lines)
    assert any(
        line.startswith("amsp") and "AMSP: parameters" in line and line.endswith("mechanisms/sharding/")
        for line in lines
    )
    monkeypatch.setattr("espalier.recipe.terminal.columns", lambda: 80)
    assert cli.main(["explain"]) == 0
    narrow = capsys.readouterr().out.split("\n")
    assert len(narrow) == len(lines)
    assert all(len(line) <= 80 for line in narrow)


@pytest.fixture
def too_large(tmp_path: Path) -> list[str]:
    (tmp_path / "recipe.toml").write_text('[model]\nshape = "llama-70b"\n')
    (tmp_path / "cluster.toml").write_text('[[nodes]]\ndevice = "A100-80GB"\ndevices = 2\n')
    return ["plan", str(tmp_path / "recipe.toml"), "--cluster", str(tmp_path / "cluster.toml")]


def test_a_plan_that_does_not_fit_is_still_shown(too_large: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(too_large) == 2
    said = capsys.readouterr()
    for words in ("predicted step", "forward", "(does not fit)", "params", "It does not fit: ", "It lacks the fewest"):
        assert words in said.out
    (heading,) = (line for line in said.out.splitlines() if "accumulate" in line)
    assert re.match(r"No plan fits\. The closest lacks \d+ GiB of memory per rank: 2 GPUs", heading)
    for words in ("Plan (", "is the best", "predicted run", "A checkpoint every", "copies of"):
        assert words not in said.out, "as of a plan that can be run"
    first, *rest = said.out.splitlines()
    assert first.startswith("The model does not fit")
    assert rest[1].startswith("  try: ")


def test_a_plan_that_does_not_fit_is_one_json_object(too_large: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*too_large, "--json"]) == 2
    said = capsys.readouterr()
    plan = json.loads(said.out)
    assert plan["executable"] is False
    assert "of memory per rank" in plan["missing"]
    assert "The model does not fit" in said.err


def test_what_failures_cost_is_a_table_by_cause(capsys: pytest.CaptureFixture[str]) -> None:
    causes = (
        FailureCost("killed", 3, 3, 4.5, 2.0, 7, "Infrastructure", "ECC Error"),
        FailureCost("hang", 1, 0, 0.0, 0.0, 0),
    )
    printing.account(Account(wall=100.0, useful=80.0, again=2.0, failures=4, causes=causes))
    out = capsys.readouterr().out
    assert "80.0% of" in out
    assert re.search(r"killed +ECC Error \(Infrastructure\) +3 +3 +4\.5 s +7 +2", out)
    assert re.search(r"hang +- +1 +0", out), "nobody diagnosed it"
    printing.account(Account())
    assert capsys.readouterr().out == "", "no step was made"


def test_where_the_time_went_is_told_without_what_took_none_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    printing.account(Account(wall=100.0, useful=80.0, exposed=30.0, waited=0.1, saving=5.0))
    out = " ".join(capsys.readouterr().out.split())
    assert out.endswith(": 49.9% computing, 30.0% waiting for communication, 5.0% saving, 15.0% starting and other.")
