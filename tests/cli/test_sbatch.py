"""Batch jobs, against executables on the path that record how they are called and do what Slurm would: run the script,
pass signals on to tasks, run it again after a requeue. No Slurm was there.
"""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli import job_recipe

from espalier.cli import main as cli
from espalier.cli import sbatch
from espalier.recipe.errors import UserError

SBATCH = """#!/bin/bash
echo "sbatch $*" >> "$FAKE/calls"
cp "${@: -1}" "$FAKE/script"
(
    restarts=0
    while :; do
        rm -f "$FAKE/requeue"
        SLURM_JOB_ID=77 SLURM_RESTART_COUNT=$restarts setsid bash "$FAKE/script" &
        echo $! > "$FAKE/life-$restarts"
        wait $!
        echo $? >> "$FAKE/codes"
        [ -e "$FAKE/requeue" ] || break
        restarts=$((restarts + 1))
    done
    touch "$FAKE/done"
) > "$FAKE/out" 2>&1 &
echo 77
"""
SRUN = """#!/bin/bash
echo "srun $*" >> "$FAKE/calls"
while [[ "$1" == --* ]]; do shift; done
tasks=${FAKE_TASKS:-1}
pids=
trap 'kill -USR1 $pids' USR1
for ((rank = 0; rank < tasks; rank++)); do
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$tasks SLURM_STEP_NUM_NODES=1 SLURM_PROCID=$rank SLURM_LOCALID=$rank \\
        SLURM_STEP_TASKS_PER_NODE=$tasks SLURM_NODEID=0 "$@" &
    pids="$pids $!"
done
worst=0
for pid in $pids; do
    code=127
    while kill -0 "$pid" 2> /dev/null; do wait "$pid"; code=$?; done
    [ "$code" = 127 ] && { wait "$pid"; code=$?; }
    [ "$code" -gt "$worst" ] && worst=$code
done
exit "$worst"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$FAKE/calls"
case "$1" in
    requeue) touch "$FAKE/requeue" ;;
    show) echo "   JobState=$(cat "$FAKE/state" 2> /dev/null || echo RUNNING) Reason=None" ;;
esac
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder with a recipe, and a cluster of one machine: `cluster(tasks=1)` puts it on the path."""
    tools, fake = tmp_path / "tools", tmp_path / "fake"
    tools.mkdir()
    fake.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(stat.S_IRWXU)
    job_recipe.write(tmp_path, monkeypatch, ranks=1)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(fake))
    yield tmp_path
    for life in fake.glob("life-*"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(life.read_text()), signal.SIGKILL)


def until(condition, seconds=150.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def calls(folder):
    return (folder / "fake" / "calls").read_text().splitlines()


def ended(folder):
    """The exit codes of the job's lives, once it is over."""
    until((folder / "fake" / "done").exists)
    return [int(code) for code in (folder / "fake" / "codes").read_text().split()]


def steps(folder, run="job"):
    lines = (folder / "runs" / run / "events.jsonl").read_text().splitlines()
    return {event["step"]: event["loss"] for event in map(json.loads, lines) if event["event"] == "step"}


def files(folder, run):
    """The bytes of the last checkpoint."""
    last = max(path for path in (folder / "runs" / run / "checkpoints").iterdir() if path.is_dir())
    return {path.name: path.read_bytes() for path in last.iterdir() if path.suffix not in (".json", "")}


def reaches(folder, step, run="job"):
    log = folder / "runs" / run / "events.jsonl"
    until(lambda: log.exists() and f'"step":{step},' in log.read_text())


def signalled_and_requeued(folder, options, *changes, saving=False):
    """A job that is asked to stop at step 10 or so, or in the middle of a save, beside the run that nobody disturbs."""
    assert cli.main(["train", "recipe.toml", "--slurm", options, *changes]) == 0
    reaches(folder, 10)
    if saving:
        until(lambda: any((folder / "runs" / "job" / "checkpoints").glob("step-*.tmp")))
    os.kill(int((folder / "fake" / "life-0").read_text()), signal.SIGUSR1)
    assert ended(folder) == [130, 0], (folder / "fake" / "out").read_text()
    assert cli.main(["train", "recipe.toml", "--run", "runs/whole"]) == 0
    assert steps(folder) == steps(folder, "whole")
    assert set(steps(folder)) == set(range(1, 301))
    assert files(folder, "job") == files(folder, "whole") != {}
    lines = (folder / "runs" / "job" / "events.jsonl").read_text().splitlines()
    begun = [event["step"] for event in map(json.loads, lines) if event["event"] == "run"]
    assert begun[0] == 0 < begun[1] < 300


@pytest.mark.slow
def test_usr1_saves_and_requeues_and_the_second_life_ends_with_the_unbroken_runs_bits(cluster, capsys):
    signalled_and_requeued(cluster, "time=0:10:00 partition=short")
    assert "Submitted as job 77" in capsys.readouterr().out
    script = cluster / "runs" / "job" / "slurm.sh"
    task = f"srun --ntasks=1 {sys.executable} -m espalier train recipe.toml"
    assert calls(cluster) == [f"sbatch --parsable {script}", task, "scontrol requeue 77", task]
    head = script.read_text()
    for line in ("--signal=B:USR1@120", "--open-mode=append", "--requeue", "--time=0:10:00", "--partition=short"):
        assert f"#SBATCH {line}\n" in head


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_preemption_in_the_middle_of_a_save_loses_no_step(cluster):
    """A save takes seconds here; the checkpoint that it was to be is whole, or none."""
    signalled_and_requeued(cluster, "time=0:10:00", "checkpoint.every=20", "checkpoint.rate=100kB/s", saving=True)
    assert not list((cluster / "runs" / "job" / "checkpoints").glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_a_task_for_each_rank_it_is_the_same(cluster, monkeypatch):
    monkeypatch.setenv("FAKE_TASKS", "2")
    recipe = (cluster / "recipe.toml").read_text().replace("ranks = 1", "ranks = 2")
    (cluster / "recipe.toml").write_text(recipe)
    signalled_and_requeued(cluster, "ntasks=2")
    assert calls(cluster)[1].startswith("srun --kill-on-bad-exit=1 ")


# --- the script, around a command that is no training ----------------------------------------------------------------


def submitted(folder, command, options=()):
    """A job whose tasks run `command` (bash)."""
    run = folder / "runs" / "job"
    run.mkdir(parents=True)
    (run / "slurm.sh").write_text(sbatch.script(options, ["bash", "-c", command], "job", run))
    subprocess.run(["sbatch", str(run / "slurm.sh")], check=True, capture_output=True)
    until((folder / "up").exists)
    return int((folder / "fake" / "life-0").read_text())


SLEEPS = "trap 'exit 130' USR1; touch up; while :; do sleep 0.05; done"


def test_what_ends_by_itself_is_not_requeued(cluster):
    submitted(cluster, "touch up; exit 3")
    assert ended(cluster) == [3]
    assert not [call for call in calls(cluster) if call.startswith("scontrol")]


@pytest.mark.parametrize(("state", "lives"), [("PREEMPTED", 2), ("CANCELLED", 1)])
def test_after_sigterm_a_preempted_job_is_requeued_and_a_cancelled_one_is_not(cluster, state, lives):
    (cluster / "fake" / "state").write_text(state)
    pid = submitted(cluster, f"[ $SLURM_RESTART_COUNT = 1 ] && exit 0; {SLEEPS}")
    os.kill(pid, signal.SIGTERM)
    assert ended(cluster) == [130, 0][:lives]


def test_only_the_first_signal_reaches_the_run(cluster):
    count = "n=0; trap 'n=$((n+1))' USR1; touch up; for i in {1..20}; do sleep 0.05; done; echo $n > heard; exit 1"
    pid = submitted(cluster, f"[ $SLURM_RESTART_COUNT = 1 ] && exit 0; {count}")
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        os.kill(pid, number)
        time.sleep(0.1)
    assert ended(cluster) == [1, 0]
    assert (cluster / "heard").read_text() == "1\n"


def test_a_run_that_finishes_as_it_is_asked_to_stop_is_not_requeued(cluster):
    pid = submitted(cluster, "trap 'exit 0' USR1; touch up; while :; do sleep 0.05; done")
    os.kill(pid, signal.SIGUSR1)
    assert ended(cluster) == [0]


def test_lives_in_which_nothing_is_saved_come_to_an_end(cluster):
    submitted(cluster, SLEEPS)
    for life in range(4):
        until(lambda life=life: (cluster / "fake" / f"life-{life}").exists())
        until((cluster / "up").exists)
        (cluster / "up").unlink()
        time.sleep(0.1)
        os.kill(int((cluster / "fake" / f"life-{life}").read_text()), signal.SIGUSR1)
    assert ended(cluster) == [130] * 4
    assert "nothing was saved" in (cluster / "fake" / "out").read_text()


# --- what cannot be submitted ----------------------------------------------------------------------------------------


def test_without_sbatch_the_script_is_written_and_the_way_on_is_said(cluster, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["train", "recipe.toml", "--slurm", "time=1:00:00"]) == 2
    said = capsys.readouterr().err
    assert "There is no sbatch on this machine." in said
    assert f"sbatch {cluster}/runs/job/slurm.sh" in said
    assert (cluster / "runs" / "job" / "slurm.sh").exists()


def test_what_sbatch_refuses_is_told_in_its_words(cluster, capsys):
    (cluster / "tools" / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    assert cli.main(["train", "recipe.toml", "--slurm", "partition=none"]) == 2
    assert "invalid partition" in capsys.readouterr().err


def test_a_mistake_in_the_recipe_is_told_before_anything_is_submitted(cluster):
    assert cli.main(["train", "recipe.toml", "train.stepz=3", "--slurm", ""]) == 2
    assert not (cluster / "fake" / "calls").exists()


def test_hosts_and_slurm_together_are_refused(cluster, capsys):
    assert cli.main(["train", "recipe.toml", "--hosts", "a,b", "--slurm", ""]) == 2
    assert "--hosts and --slurm" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["signal=TERM@60", "--signal=USR1@60", "wrap=ls", "array=1-3", "no-requeue", "-p x", "'"]
)
def test_options_that_the_script_cannot_keep_its_promise_with_are_refused(text):
    with pytest.raises(UserError, match="--slurm"):
        sbatch.options(text)


def test_options_are_written_by_their_long_names():
    found = sbatch.options("nodes=2 --partition=long exclusive 'comment=a b'")
    assert found == ["--nodes=2", "--partition=long", "--exclusive", "--comment=a b"]


def test_what_the_user_names_is_not_named_twice():
    script = sbatch.script(["--job-name=mine", "--signal=B:USR1@300"], ["x"], "job", Path("/r"))
    assert script.count("--job-name=") == script.count("--signal=") == 1


@pytest.mark.parametrize(
    ("options", "tasks"), [("", False), ("nodes=1 ntasks=1", False), ("nodes=2", True), ("ntasks-per-node=12", True)]
)
def test_several_tasks_are_ranks_and_one_supervises_them(options, tasks):
    script = sbatch.script(sbatch.options(options), ["x"], "job", Path("/r"))
    assert ("srun --kill-on-bad-exit=1 x &" in script) == tasks
    assert ("srun --ntasks=1 x &" in script) != tasks


def test_what_is_filled_in_is_neither_filled_in_again_nor_run(tmp_path, monkeypatch):
    """The shell text stands in a folder and in an override; what is run is what was meant, word for word."""
    home = tmp_path / "@COMMAND@ @EVENTS@; touch struck; '"
    home.mkdir()
    monkeypatch.chdir(home)
    words = ["train", "data.path=@FOLDER@$(touch struck)`touch struck`", "@OPTIONS@"]
    text = sbatch.script(["--comment=a b; touch struck"], ["printf", "%s|", *words], "a b", home)
    (tmp_path / "srun").write_text('#!/bin/bash\nshift\n"$@"\n')
    (tmp_path / "srun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "".join(f"{word}|" for word in words)
    assert not [*tmp_path.rglob("struck")]
    assert "#SBATCH --job-name='a b'\n" in text
    assert "#SBATCH --comment='a b; touch struck'\n" in text


def test_a_line_end_in_a_folder_is_refused_and_a_percent_sign_stands_for_itself():
    with pytest.raises(UserError, match="batch script"):
        sbatch.script([], ["x"], "job", Path("/r\ntouch struck"))
    assert "--output=/100%%j/slurm-%j.log" in sbatch.script([], ["x"], "job", Path("/100%j"))
