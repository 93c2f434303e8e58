"""A user's day through the command line: plan, train, stop, go on, look, ask, export. Programs are really started."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import environment, forked, launched

from accounts import account
from espalier.cli import main as cli
from espalier.comm import multihost_probe
from espalier.machine import cluster as clusters
from espalier.machine import probe

RECIPE = """
[model]
depth = 1
width = 32
heads = 2

[data]
path = "corpus"
validation = 0.2

[train]
steps = 8
sequence = 32
batch_tokens = 256
validate_tokens = 1024

[plan]
trial = false
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory, machine):
    """A folder with a recipe, a corpus, a machine already measured, and a finished run, whose log is kept as it was."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "corpus").mkdir()
    for number in range(12):
        (folder / "corpus" / f"{number}.txt").write_text(f"The number {number} comes before {number + 1}.\n" * 40)
    (folder / "corpus" / "picture.bin").write_bytes(b"\x00\x01\x02" * 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "probe", lambda **_: clusters.loads(machine["text"]))  # once a session
        probed = forked(folder, "probe", "--json")
    assert probed.returncode == 0, probed.stderr
    done = forked(folder, "train", "recipe.toml", "plan.pin.ranks=2")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "output.txt").write_text(done.stdout)
    shutil.copy(folder / "runs" / "recipe" / "events.jsonl", folder / "finished.jsonl")
    return folder


def read(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def events(folder, run="recipe"):
    return read(folder / "runs" / run / "events.jsonl")


def test_training_leaves_the_whole_run_folder(home):
    run = home / "runs" / "recipe"
    assert {"run.toml", "cluster.toml", "plan.json", "events.jsonl", "report.html", "checkpoints"} <= {
        path.name for path in run.iterdir()
    }
    finished = read(home / "finished.jsonl")
    assert [event["step"] for event in finished if event["event"] == "step"] == list(range(1, 9))
    last = [event for event in finished if event["event"] == "validation"][-1]
    assert last["step"] == 8
    assert 0 < last["bits_per_byte"] < 9
    spent = account(finished).parts
    assert min(spent["computing"], spent["validating"], spent["saving"]) > 0
    assert min(spent.values()) > -0.05, "seconds of the clock, and of perf_counter"
    assert len(json.loads((run / "plan.json").read_text())["ranks"]) == 2


def test_training_prints_derivations_plan_progress_sample_and_what_to_do_next(home):
    output = (home / "output.txt").read_text()
    for words in ("Derived:", "model.feed_forward", "Plan (search): 2 ranks", "predicted step", "step 1/8", "sample"):
        assert words in output
    assert "espalier predict runs/recipe" in output


def test_skipped_files_are_counted_and_named(home):
    assert "1 file was skipped" in (home / "output.txt").read_text()
    assert "picture.bin" in (home / "output.txt").read_text()


def test_a_step_made_again_has_the_same_bits_and_one_that_has_not_is_told(home, tmp_path):
    run, log = tmp_path / "run", tmp_path / "run" / "events.jsonl"
    shutil.copytree(home / "runs" / "recipe", run)
    before = sorted(path.name for path in run.rglob("*"))
    done = forked(home, "replay", str(run), "--step", "7", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same"]
    assert [one["step"] for one in found["steps"]] == list(range(found["from"] + 1, 8))
    assert sorted(path.name for path in run.rglob("*")) == before

    rows = read(log)
    last = [row for row in rows if row["event"] == "step" and row["step"] == 7][-1]
    last["loss"] = math.nextafter(last["loss"], 0.0)
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = forked(home, "replay", str(run), "--step", "7")
    assert done.returncode == 1, done.stderr
    assert "Step 7, made again" in done.stdout
    assert "is not the same" in done.stdout
    assert "nothing else that the run log knows" in done.stdout
    done = forked(home, "replay", str(run), "--step", "99")
    assert done.returncode == 2
    assert "no step 99" in done.stderr
    assert "steps 1 to" in done.stderr
    plan = json.loads((run / "plan.json").read_text())
    plan["ranks"][1]["role"] = "optimizer"
    (run / "plan.json").write_text(json.dumps(plan))
    done = forked(home, "replay", str(run), "--step", "7")
    assert done.returncode == 2
    assert "optimizer nodes keep the state of the last step only" in done.stderr


def test_the_same_command_with_more_steps_goes_on(home):
    done = forked(home, "train", "recipe.toml", "plan.pin.ranks=2", "train.steps=10", "--json")
    assert done.returncode == 0, done.stderr
    steps = [event["step"] for event in events(home) if event["event"] == "step"]
    assert steps == list(range(1, 11))
    assert json.loads(done.stdout)["steps"] == 10


def answer(home, *arguments):
    return json.loads(forked(home, *arguments, "--json").stdout)


def test_eval_and_predict_and_export_answer_in_json(home):
    assert answer(home, "eval", "runs/recipe")["bits_per_byte"] > 0
    text = answer(home, "predict", "runs/recipe", "The number", "--tokens", "9")
    assert text["prompt"] == "The number"
    assert 0 < text["tokens"] <= 9
    exported = answer(home, "export", "runs/recipe", "--to", "hf", "--out", "hf")
    assert (home / exported["folder"] / "model.safetensors").exists()
    # What was exported can be the beginning of another run.
    again = ("model.initial=hf", "name=again", "train.steps=1", "plan.pin.ranks=1", "model.width=32")
    second = forked(home, "train", "recipe.toml", *again, "--json")
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout)["validation_bits_per_byte"] < 7.9


UNHURRIED = """
import sys
from espalier.cli import main as cli
from espalier.evaluate import low_priority
low_priority.step_back = lambda *_: None
if __name__ == "__main__":
    sys.exit(cli.main())
"""


def unhurried(folder, *arguments):
    """The command line, at the priority of the tests: beside busy ones the lowest there is would wait for ever."""
    (folder / "unhurried.py").write_text(UNHURRIED)  # a file, so that its workers import it too
    command = [sys.executable, "unhurried.py", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=150, check=False
    )


@pytest.mark.slow
def test_a_watch_evaluates_what_a_finished_run_left_once_and_ends(home):
    (home / "facts.jsonl").write_text(
        '{"question": "The number 3 comes", "choices": ["before", "after"], "answer": 0}\n'
    )
    command = ("eval", "runs/recipe", "--watch", "--task", "facts=facts.jsonl", "--workers", "1", "--json")
    first, again = unhurried(home, *command), unhurried(home, *command)
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    rows = [json.loads(line) for line in first.stdout.splitlines()]
    kept = sorted(int(path.name[5:]) for path in (home / "runs" / "recipe" / "checkpoints").glob("step-*"))
    assert sorted((row["step"], row["task"]) for row in rows) == sorted(
        (step, task) for step in kept for task in ("facts", "held-out")
    )
    assert again.stdout == ""
    newest = answer(home, "eval", "runs/recipe")
    held_out = next(row for row in rows if row["task"] == "held-out" and row["step"] == newest["step"])
    assert held_out["bits_per_byte"] == pytest.approx(newest["bits_per_byte"], rel=1e-9)


@pytest.mark.slow
def test_interrupting_saves_and_the_same_command_resumes(home):
    command = [sys.executable, "-m", "espalier", "train", "recipe.toml", "name=long", "train.steps=100000"]
    command += ["train.validate_every=100000", "checkpoint.every=100000"]
    process = subprocess.Popen(
        command, cwd=home, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    log = home / "runs" / "long" / "events.jsonl"
    deadline = time.monotonic() + 90
    while not (log.exists() and '"step":3,' in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "run the same command again to go on" in output
    reached = [event["step"] for event in events(home, "long") if event["event"] == "step"][-1]
    process = subprocess.Popen(command, cwd=home, env=environment(home), stdout=subprocess.DEVNULL)
    while f'"step":{reached + 2},' not in log.read_text() and time.monotonic() < deadline + 40:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    steps = [event["step"] for event in events(home, "long") if event["event"] == "step"]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("by_its_agent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torchrun_gives_the_same_curve_as_local_ranks(home, by_its_agent):
    common = ("train", "recipe.toml", "name=elastic", "train.steps=8")  # torchrun takes --run for an option of its own
    if by_its_agent:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            "espalier",
        ]
        done = [
            subprocess.run(
                [*command, *common],
                cwd=home,
                env=environment(home),
                capture_output=True,
                text=True,
                timeout=150,
                check=False,
            )
        ]
    else:
        done = launched(home, lambda: cli.main(common))
    assert not any(one.returncode for one in done), [one.stderr for one in done]
    expected = {event["step"]: event["loss"] for event in events(home) if event["event"] == "step"}
    found = {event["step"]: event["loss"] for event in events(home, "elastic") if event["event"] == "step"}
    assert set(found) == set(range(1, 9))
    assert [found[step] for step in sorted(found)] == [expected[step] for step in sorted(found)]
    shutil.rmtree(home / "runs" / "elastic")


def test_ranks_that_torchrun_starts_on_two_hosts_measure_the_links_and_are_planned_for(home):
    def run():
        multihost_probe.host = lambda: f"host{os.environ['RANK']}|boot|1"  # each rank on a host of its own
        probe.probe = probe.cached  # measured before, as all machines of this story
        return cli.main(["train", "recipe.toml", "name=two", "train.steps=2"])

    first, second = launched(home, run)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    cluster = clusters.read(home / "runs" / "two" / "cluster.toml")
    assert cluster.machines == 2
    assert cluster.between is not None
    assert cluster.between.measured
    plan = json.loads((home / "runs" / "two" / "plan.json").read_text())
    assert [one["node"] for one in plan["ranks"]] == [0, 1]
    assert "Measuring the hosts" in first.stderr
    assert [one["step"] for one in events(home, "two") if one["event"] == "step"] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_starts_a_killed_rank_again_and_the_curve_is_the_same(home, rank):
    run = f"killed-{rank}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    options = (f"name={run}", "train.steps=8", "checkpoint.every=2")
    kill = "import os\nfrom pathlib import Path\nfrom espalier.cli import main as cli\n"
    kill += "from espalier.train import trainer\nPLAIN = trainer.Trainer.train_step\n"
    kill += f"def struck(self, batches):\n    mark = Path('mark-{rank}')\n"
    kill += f"    if self.step == 5 and self.setting.place.rank == {rank} and not mark.exists():\n"
    kill += "        mark.touch()\n        os.kill(os.getpid(), 9)\n    return PLAIN(self, batches)\n"
    kill += f"trainer.Trainer.train_step = struck\nraise SystemExit(cli.main(['train', 'recipe.toml', *{options!r}]))\n"
    (home / f"kill-{rank}.py").write_text(kill)
    done = subprocess.run(
        [*command, f"kill-{rank}.py"],
        cwd=home,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    expected = {event["step"]: event["loss"] for event in events(home) if event["event"] == "step"}
    found = {event["step"]: event["loss"] for event in events(home, run) if event["event"] == "step"}
    assert [found[step] for step in range(1, 9)] == [expected[step] for step in range(1, 9)]
    assert [event["kind"] for event in events(home, run) if event["event"] == "incident"][-1] == "lost"


@pytest.mark.slow
def test_mpiexec_gives_the_same_curve_as_local_ranks(home, mpiexec):
    command = [mpiexec, "-n", "2", sys.executable, "-m", "espalier", "train", "recipe.toml", "--run", "runs/mpi"]
    done = subprocess.run(
        command, cwd=home, env=environment(home), capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    expected, found = (
        [one["loss"] for one in events(home, run) if one["event"] == "step"] for run in ("recipe", "mpi")
    )
    assert found == expected[:8]


@pytest.mark.slow
def test_a_foreign_module_trains_and_resumes(home):
    Path(home / "mine.py").write_text(
        """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def build(classes):
    torch.manual_seed(0)
    images = torch.randn(64, 3, 8, 8)
    labels = images.mean(dim=(1, 2, 3)).argsort().argsort() * classes // 64
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, classes))

    def loss(model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), torch.tensor(len(y))

    return model, TensorDataset(images, labels), loss, TensorDataset(images[:8], labels[:8])
"""
    )
    (home / "module.toml").write_text(
        '[model]\nbuild = "mine:build"\narguments = { classes = 2 }\n'
        "[train]\nsteps = 20\nbatch_tokens = 16\n[plan]\ntrial = false\n[plan.pin]\nranks = 2\n"
    )
    first = forked(home, "train", "module.toml", "--json")
    assert first.returncode == 0, first.stderr
    losses = [event["loss"] for event in events(home, "module") if event["event"] == "step"]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    more = forked(home, "train", "module.toml", "train.steps=22", "--json")
    assert json.loads(more.stdout)["steps"] == 22
