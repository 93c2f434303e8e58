"""Every mistake gets one clear error: what, where, what to try; exit code 2; nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import sys

import msgspec
import pytest
from programs import forked

from espalier import comm
from espalier.cli import main as cli
from espalier.machine import probe
from espalier.plan import base as plans
from espalier.recipe import cache_dir, recipe_file
from espalier.recipe.errors import UserError
from espalier.track.events import read
from espalier.train import run_folder as run
from espalier.train import version_check
from many_ranks import forks

RECIPE = {
    "name": "small",
    "model": {"depth": 1, "width": 32, "heads": 2},
    "data": {"path": "corpus", "validation": 0.2, "cache": "cache"},
    "train": {"steps": 2, "sequence": 32, "batch_tokens": 64, "validate_tokens": 64},
    "plan": {"trial": False, "cluster": "machine.toml", "pin": {"ranks": 1}},
}

MACHINE = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n'


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a good recipe, a machine file and a corpus; the current folder."""
    (tmp_path / "corpus").mkdir()
    for number in range(9):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"{number} and {number}\n" * 30)
    (tmp_path / "machine.toml").write_text(MACHINE)
    (tmp_path / "recipe.toml").write_text(recipe_file.dump(recipe_file.from_table(RECIPE)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path


def refused(capsys, *arguments):
    """What a refused command prints; it must end with exit code 2 and say something to try or why."""
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert code == 2, captured
    assert "\nespalier: " in "\n" + captured.err  # stages that took long may stand before it
    assert "Traceback" not in captured.err
    return captured.err


MISTAKES = {
    "unknown key": (["model.dept=3"], "model.dept", "model.depth"),
    "misplaced key": (["model.steps=3"], "model.steps", "train.steps"),
    "a path for a name": (["name=../../elsewhere"], "name = '../../elsewhere'", "--run FOLDER"),
    "unknown choice": (["model.kind=gtp"], "model.kind = 'gtp'", "gpt"),
    "wrong type": (["train.steps=many"], "train.steps", "int"),
    "not an override": (["train.steps"], "train.steps", "key=value"),
    "missing path": (["data.path=nowhere"], "nowhere", "data.path"),
    "empty path": (["data.path="], "data.path is empty", "a file or folder"),
    "unknown source": (["data.path=pyhton:stdlib"], "pyhton", "python:stdlib"),
    "sequence longer than the model": (["model.context=16"], "train.sequence = 32", "16"),
    "heads that do not divide": (["model.heads=5"], "model.heads = 5", "32"),
    "sequence longer than the corpus": (["train.sequence=100000", "train.batch_tokens=100000"], "100000", "tokens"),
    "more ranks than samples": (["plan.pin.ranks=64"], "64", "ranks"),
    "unknown shape": (["model.shape=lama-7b", "model.depth=32"], "lama-7b", "llama-7b"),
    "missing cluster": (["plan.cluster=none.toml"], "none.toml", ""),
    "bad time": (["comm.timeout=5parsecs"], "comm.timeout", "ms"),
    "no time": (["comm.timeout=0s"], "comm.timeout = '0s'", "60s"),
    "hardly any time": (["comm.timeout=1e-400s"], "comm.timeout", "60s"),
    "module without a function": (['model={build="nothing"}'], "nothing", "package.module:function"),
    "misspelt function": (['model={build="json:laods"}'], "no 'laods'", "did you mean loads?"),
    "module that is not there": (['model={build="not_there:build"}'], "not_there", "install"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_recipe_is_named_and_leaves_no_run(home, capsys, name):
    overrides, named, tried = MISTAKES[name]
    text = refused(capsys, "train", "recipe.toml", *overrides)
    assert named in text
    assert tried in text
    assert not (home / "runs" / "small" / "run.toml").exists()


def test_a_missing_recipe_is_named(home, capsys):
    assert "none.toml" in refused(capsys, "train", "none.toml")


def test_a_run_folder_for_a_recipe_names_the_recipe_of_that_run(home, capsys):
    (home / "runs" / "old").mkdir(parents=True)
    assert "runs/old is a folder" in refused(capsys, "train", "runs/old")
    (home / "runs" / "old" / "run.toml").write_text((home / "recipe.toml").read_text())
    assert "runs/old/run.toml" in refused(capsys, "train", "runs/old")


@pytest.mark.parametrize(("words", "near"), [(["trian", "x"], "train"), (["train", "x", "--rnu", "y"], "--run")])
def test_a_misspelt_verb_or_flag_names_the_nearest(capsys, words, near):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert f"did you mean {near}?" in capsys.readouterr().err


def test_an_empty_corpus_is_named(home, capsys):
    (home / "empty").mkdir()
    assert "empty" in refused(capsys, "train", "recipe.toml", "data.path=empty")


def test_a_corpus_of_binary_files_only_is_refused(home, capsys):
    (home / "binary").mkdir()
    (home / "binary" / "a").write_bytes(b"\0\1\2")
    assert "binary" in refused(capsys, "train", "recipe.toml", "data.path=binary")


def test_a_run_of_another_meaning_is_refused_by_key_and_another_folder_suggested(home, capsys):
    assert cli.main(["train", "recipe.toml", "--json"]) == 0
    before = (home / "runs/small/run.toml").read_bytes()
    capsys.readouterr()
    text = refused(capsys, "train", "recipe.toml", "train.seed=7")
    assert "train.seed = 1, not 7" in text
    assert "--run" in text
    assert "train.steps = 2, not 1" in refused(capsys, "train", "recipe.toml", "train.steps=1")
    assert (home / "runs/small/run.toml").read_bytes() == before


def test_a_run_folder_in_use_names_the_process(home, capsys):
    held = run.lock_folder("runs/small")
    text = refused(capsys, "train", "recipe.toml")
    held.release()
    assert f"in use by another process (pid {os.getpid()})" in text


def test_a_folder_that_cannot_be_written_is_named(home, capsys):
    (home / "file").write_text("in the way")
    text = refused(capsys, "train", "recipe.toml", "--run", "file/run")
    assert "file/run" in text
    assert "--run" in text


def test_a_full_disk_is_named_and_nothing_half_written_stays(home):
    path = home / "plan.json"
    path.write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails with an error, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(UserError, match=r"plan.json"):
            cache_dir.replace(path, "x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_text() == "before"
    assert [found.name for found in home.glob(".plan*")] == []


def test_a_port_in_use_is_named(home, capsys):
    assert cli.main(["train", "recipe.toml", "--json"]) == 0
    capsys.readouterr()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refused(capsys, "report", "runs/small", "--serve", "--port", port)


def test_ranks_whose_data_differ_name_the_odd_one():
    def task(channel):
        data = "other" if channel.rank() == 2 else "usual"
        with comm.phase("handshake"):
            try:
                version_check.compare(version_check.identity(data=data), channel)
            except UserError as error:
                return str(error)
        return ""

    messages = forks(3, task)
    assert len(set(messages)) == 1
    assert "rank 2 on" in messages[0]
    assert "has other" in messages[0]


@pytest.mark.parametrize(
    ("library", "overrides", "extra"),
    [
        ("datasets", ["data.path=hf:some/name"], "hub"),
        ("tensorboard", ["track.tensorboard=true"], "track"),
    ],
)
def test_a_missing_library_names_its_extra(home, capsys, monkeypatch, library, overrides, extra):
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    text = refused(capsys, "train", "recipe.toml", *overrides)
    assert f"espalier-train[{extra}]" in text


def test_no_run_and_no_checkpoint_are_told_apart(home, capsys):
    assert "There is no run in runs/none" in refused(capsys, "eval", "runs/none")
    assert cli.main(["train", "recipe.toml", "--json"]) == 0
    capsys.readouterr()
    for found in (home / "runs/small/checkpoints").iterdir():
        for file in found.iterdir():
            file.unlink()
        found.rmdir()
    done = forked(home, "eval", "runs/small")
    assert done.returncode == 2
    assert "no checkpoint" in done.stderr


def test_errors_come_as_json_when_asked(home, capsys):
    assert cli.main(["plan", "recipe.toml", "model.dept=3", "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert "model.dept" in answer["error"]
    assert "model.depth" in answer["try"]


def test_a_corrupt_cache_of_the_probe_is_said_and_measured_anew(home):
    probe.cache_file().parent.mkdir(parents=True, exist_ok=True)
    probe.cache_file().write_text("not = [toml")
    said: list[str] = []
    assert probe.cached(say=said.append) is None
    assert said


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("{}", "[]", '{"ranks": [{"share": [0, 1]}]}')),
    ],
)
def test_a_spoilt_plan_is_refused_and_a_deleted_one_made_anew(home, capsys, text):
    assert cli.main(["train", "recipe.toml", "--json"]) == 0
    capsys.readouterr()
    plan = home / "runs/small/plan.json"
    plan.write_text(text)
    assert "delete" in refused(capsys, "train", "recipe.toml", "train.steps=3")
    plan.unlink()
    assert cli.main(["train", "recipe.toml", "train.steps=3", "--json"]) == 0
    assert plan.exists()


def edited(home, **changes):
    """Changes the plan of the run by hand."""
    path = home / "runs/small/plan.json"
    path.write_text(plans.dumps(msgspec.structs.replace(plans.read(path), **changes)))


@pytest.mark.slow
def test_a_plan_edited_to_cut_more_heads_than_there_are_is_refused_before_the_first_step(home, capsys):
    """And so is a pin of as many when the run is taken up again."""
    assert cli.main(["train", "recipe.toml", "--json"]) == 0
    capsys.readouterr()
    stage = plans.Stage(ranks=(0, 1, 2, 3), layers=(0, 1), heads=4)
    edited(home, ranks=(plans.Rank(share=(0, 2)),) * 4, stages=(stage,))
    text = refused(capsys, "train", "recipe.toml", "train.steps=3")
    assert "hp = 4 is too much for 2 heads" in text
    assert "hp = 2" in text
    text = refused(capsys, "train", "recipe.toml", "train.steps=3", "plan.pin.ranks=4", "plan.pin.hp=4")
    assert "plan.pin.hp = 4 does not divide heads = 2" in text
    assert "plan.pin.hp=2" in text


@pytest.mark.slow
def test_a_plan_edited_so_that_ranks_wait_without_end_names_the_first_and_its_action(home, capsys):
    more = ["model.depth=4", "train.batch_tokens=256"]
    assert cli.main(["train", "recipe.toml", *more, "--json"]) == 0
    capsys.readouterr()
    stages = tuple(plans.Stage(ranks=(rank,), layers=(at, at + 1)) for at, rank in enumerate((0, 1, 1, 0)))
    edited(home, ranks=(plans.Rank(share=(0, 8)),) * 2, stages=stages, interleave=2, micro_batch=1)
    text = refused(capsys, "train", "recipe.toml", *more, "train.steps=3")
    assert "The schedule cannot be run." in text
    assert "rank 0 cannot do its action" in text


def test_a_plan_for_other_machines_is_not_begun_here(home, capsys):
    (home / "gpus.toml").write_text(
        '[[nodes]]\ncount = 2\ndevice = "A100-80GB"\ndevices = 8\n[links]\nbetween = "400Gbit/s"\n'
    )
    text = refused(capsys, "train", "recipe.toml", "plan.cluster=gpus.toml", "train.batch_tokens=2048")
    assert "other machines" in text
    assert not (home / "runs").exists() or not list((home / "runs").iterdir())


def test_a_disk_that_fills_in_any_verb_is_one_sentence(home, capsys, monkeypatch):
    def full(arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some/file")

    monkeypatch.setattr("espalier.cli.probe.run", full)
    assert "The disk is full: could not write some/file." in refused(capsys, "probe")
    monkeypatch.setattr("espalier.cli.probe.run", lambda arguments: os.stat("nowhere"))
    with pytest.raises(FileNotFoundError):
        cli.main(["probe"])


def test_a_finished_run_is_left_as_it_is(home, capsys):
    assert cli.main(["train", "recipe.toml", "--json"]) == 0
    before = {path: path.read_bytes() for path in (home / "runs/small").glob("*.*")}
    capsys.readouterr()
    assert cli.main(["train", "recipe.toml"]) == 0
    assert "is finished (2 of 2 steps)" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in (home / "runs/small").glob("*.*")} == before


def test_a_run_whose_last_figures_were_not_written_is_ended_by_the_same_command(home, capsys):
    assert cli.main(["train", "recipe.toml", "--json"]) == 0
    log = home / "runs/small/events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    whole = [event["event"] for event in events]
    at = whole.index("checkpoint")
    log.write_text("".join(f"{json.dumps(event)}\n" for event in events[: at + 1]))  # the disk was full then
    capsys.readouterr()
    assert cli.main(["train", "recipe.toml"]) == 0
    assert "Done in" in capsys.readouterr().out
    again = [event["event"] for event in read(log)][at + 1 :]
    assert "step" not in again
    assert set(whole[at + 1 :]) <= set(again)
    assert cli.main(["train", "recipe.toml"]) == 0
    assert "is finished (2 of 2 steps)" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_named_on_the_terminal_with_the_steps_that_are_lost(home, capfd):
    given = ["train", "recipe.toml", "checkpoint.every=1"]
    assert cli.main([*given, "train.steps=3"]) == 0
    newest = max((home / "runs/small/checkpoints").glob("step-*/*.distcp"))
    newest.write_bytes(newest.read_bytes()[:-1])
    capfd.readouterr()
    assert cli.main([*given, "train.steps=4"]) == 0
    said = capfd.readouterr().out
    assert "checkpoint step-00000003 is unusable" in said
    assert "took step-00000002; 1 step is lost and made again" in said


def test_no_sample_is_made_where_none_is_wanted(home):
    assert cli.main(["train", "recipe.toml", "track.sample=false"]) == 0
    events = [event["event"] for event in read(home / "runs/small/events.jsonl")]
    assert "sample" not in events
    assert events[-1] == "end"


def test_an_unknown_checkpoint_target_leaves_no_run(home, capsys):
    assert "foo" in refused(capsys, "train", "recipe.toml", "checkpoint.target=foo://x")
    assert not (home / "runs").exists() or not list((home / "runs").iterdir())
