"""A run is itself, and places are sealed: checkpoints of another run are refused by name, and opening a run of somebody
else reaches no server, starts no program and writes nothing outside its folder and this user's own cache."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import tempfile
import tomllib
from pathlib import Path

import pytest
import tomli_w
from programs import MACHINE, forked, scripted

from espalier.cli import eval_watch, export, infer_over_ranks, kubernetes, plan, predict, replay, run_fork  # noqa: F401
from espalier.cli import main as cli
from espalier.evaluate import worker_pool  # noqa: F401  (what forks need is imported once)

RECIPE = """name = "s"
[model]
kind = "gpt"
width = 16
depth = 1
[data]
path = "{home}/t.txt"
tokenizer = "bytes"
[train]
steps = 2
sequence = 16
batch_tokens = 64
validate_tokens = 64
[plan]
trial = false
cluster = "{home}/machine.toml"
[plan.pin]
ranks = 1
threads = 1
"""


def train(home: Path, run: str, *changes: str, recipe: str = "r.toml"):
    return forked(home, "train", recipe, "--run", run, *changes)


def trained(home: Path, run: str, *changes: str) -> None:
    done = train(home, run, *changes)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two seeds, `one` and `two`."""
    home = tmp_path_factory.mktemp("places")
    (home / "r.toml").write_text(RECIPE.format(home=home))
    (home / "machine.toml").write_text(MACHINE)
    (home / "t.txt").write_text("".join(f"line {i}: the number {i * i % 977} and {i % 31}\n" for i in range(400)))
    trained(home, "one")
    trained(home, "two", "train.seed=2")
    return home


@pytest.fixture
def home(begun: Path, tmp_path: Path) -> Path:
    """A copy, whose paths are those of the first."""
    shutil.copytree(begun, tmp_path / "home")
    return tmp_path / "home"


# --- a run is itself -------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_run_in_the_place_of_this_runs_is_refused_by_name(home: Path) -> None:
    place = home / "one" / "checkpoints" / "step-00000002"
    shutil.rmtree(place)
    shutil.copytree(home / "two" / "checkpoints" / "step-00000002", place)
    weights = {file.name: file.read_bytes() for file in place.iterdir()}
    verbs = (["train", "r.toml", "--run", "one", "train.steps=3"], ["eval", "one"], ["predict", "one", "l"],
             ["export", "one"], ["eval", "one", "--workers", "1"])  # fmt: skip
    for verb in verbs:
        done = forked(home, *verb)
        assert done.returncode == 2, (verb, done.stdout)
        assert re.search(r"belongs to run two \(\w+\) of host .*, begun on 2\d+-", done.stdout + done.stderr), verb
    assert {file.name: file.read_bytes() for file in place.iterdir()} == weights


def target_of(home: Path, run: str, target: str) -> Path:
    """The folder of a run below its `checkpoint.target`."""
    return home / target / f"{run}-{json.loads((home / run / 'run.json').read_text())['run']['id']}"


def test_two_runs_with_one_target_have_a_folder_each_and_one_of_another_is_refused_by_name(home: Path) -> None:
    shared = f"checkpoint.target={home / 'shared'}"
    trained(home, "three", shared)
    trained(home, "four", shared, "train.seed=2")
    folders = [target_of(home, run, "shared") for run in ("three", "four")]
    assert sorted(place.parent for place in (home / "shared").glob("*/step-00000002")) == sorted(folders)
    trained(home, "three", shared, "train.steps=3")
    assert (folders[0] / "step-00000003").exists()
    assert forked(home, "eval", "three", "--json").stdout != forked(home, "eval", "four", "--json").stdout
    for name in ("step-00000003", "step-00000002"):  # before its first checkpoint a run has its folder too
        done = train(home, "five", f"checkpoint.target={folders[0]}", "train.seed=3")
        assert done.returncode == 2
        assert re.search(r"(step-0000000.|owner.json) belongs to run three \(\w+\) of host .*, begun on", done.stderr)
        assert "espalier train --from the folder of that run if you mean to continue it" in done.stderr
        assert not (home / "five").exists()
        shutil.rmtree(folders[0] / name)


def test_a_target_that_an_earlier_version_filled_stays_its_runs(home: Path) -> None:
    target = f"checkpoint.target={home / 'saved'}"
    trained(home, "three", target)
    before = target_of(home, "three", "saved")
    for entry in before.iterdir():
        entry.rename(home / "saved" / entry.name)
    before.rmdir()
    trained(home, "three", target, "train.steps=3")
    assert (home / "saved" / "step-00000003").exists()
    done = train(home, "four", target, "train.seed=2")
    assert done.returncode == 2
    assert "saved/step-00000002 belongs to run three" in done.stderr


def test_a_fork_goes_on_from_another_run_and_both_say_it(home: Path) -> None:
    changes = "train.seed=3", "train.steps=3", f"checkpoint.target={home / 'forks'}"
    trained(home, "four", "--from", "one", *changes)
    first, identity = (json.loads((home / run / "run.json").read_text()) for run in ("one", "four"))
    assert identity["forked"] == {"run": first["run"], "step": 2}
    assert identity["run"]["id"] != first["run"]["id"]
    told = json.loads((home / "one" / "events.jsonl").read_text().splitlines()[-1])
    assert (told["event"], told["step"], told["run"]["id"]) == ("fork", 2, identity["run"]["id"])
    events = list(map(json.loads, (home / "four" / "events.jsonl").read_text().splitlines()))
    assert [event["step"] for event in events if event["event"] == "step"] == [3]
    assert events[0]["forked"] == identity["forked"]
    weights = [place / "step-00000002" / "__0_0.distcp" for place in (home / "one" / "checkpoints",
               target_of(home, "four", "forks"))]  # fmt: skip
    assert weights[0].read_bytes() == weights[1].read_bytes()
    again = train(home, "four", "--from", "one", *changes)
    assert (again.returncode, "is finished" in again.stdout) == (0, True)
    for other in (["--from", "two"], ["--from", "nowhere"]):
        assert train(home, "four", *other, *changes).returncode == 2


def test_names_in_the_wrong_order_are_said(home: Path) -> None:
    for words, answer in (
        (["train", "one"], "one is a folder, not a recipe."),
        (["eval", "r.toml"], "r.toml is a file, and this names a run folder."),
        (["predict", "a line", "one"], "espalier predict one 'a line'"),
        (["train", "r.toml", "--from", "r.toml"], "r.toml is a file, and this names a run folder."),
    ):
        done = forked(home, *words)
        assert (done.returncode, answer in done.stderr) == (2, True), done.stderr


def test_a_run_whose_folder_was_lost_goes_on_from_its_target(home: Path) -> None:
    target = f"checkpoint.target={home / 'saved'}"
    trained(home, "three", target)
    lost = json.loads((home / "three" / "run.json").read_text())
    shutil.rmtree(home / "three")
    done = train(home, "three", target, "train.steps=3")
    assert done.returncode == 0, done.stderr
    assert "with the same recipe, seed and data: the run goes on as that one" in done.stdout
    assert json.loads((home / "three" / "run.json").read_text())["run"]["id"] == lost["run"]["id"]
    steps = [json.loads(line) for line in (home / "three" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in steps if event["event"] == "step"] == [3]


def test_two_copies_of_a_run_do_not_write_to_one_target_at_once(home: Path) -> None:
    target = home / "saved"
    trained(home, "three", f"checkpoint.target={target}")
    shutil.copytree(home / "three", home / "copy")
    place = target_of(home, "three", "saved")
    with (place / ".lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as a process does that trains `three`
        done = train(home, "copy", f"checkpoint.target={target}", "train.steps=3")
    assert done.returncode == 2
    assert f"checkpoint.target {place} is in use by another process" in done.stderr
    assert [saved.name for saved in place.glob("step-*")] == ["step-00000002"]
    trained(home, "copy", f"checkpoint.target={target}", "train.steps=3")


def test_a_target_that_is_the_run_folder_is_locked_once(home: Path) -> None:
    trained(home, "five", f"checkpoint.target={home / 'five'}")


def test_the_lock_of_a_target_is_no_link(home: Path) -> None:
    target, other = f"checkpoint.target={home / 'saved'}", home / "other"
    trained(home, "three", target)
    other.write_text("text")
    lock = target_of(home, "three", "saved") / ".lock"
    lock.unlink()
    lock.symlink_to(other)
    assert train(home, "three", target, "train.steps=3").returncode == 2
    assert other.read_text() == "text"


def test_a_copied_run_goes_on_and_says_in_every_place_which_run_it_is(home: Path) -> None:
    shutil.copytree(home / "one", home / "copy")
    trained(home, "copy", "train.steps=3")
    run = json.loads((home / "one" / "run.json").read_text())["run"]
    assert json.loads((home / "copy" / "run.json").read_text())["run"] == run
    manifest = json.loads((home / "copy" / "checkpoints" / "step-00000003" / "manifest.json").read_text())
    events = map(json.loads, (home / "copy" / "events.jsonl").read_text().splitlines())
    assert manifest["run"] == run
    assert {event["run"]["id"] for event in events if event["event"] == "run"} == {run["id"]}
    assert forked(home, "export", "copy").returncode == 0
    assert json.loads((home / "copy" / "export-hf" / "export.json").read_text()) == {**run, "step": 3}


def test_equal_recipes_have_equal_weights_and_other_ids(home: Path) -> None:
    trained(home, "same")
    folders = [home / run for run in ("one", "same")]
    for name in ("checkpoints/step-00000002/__0_0.distcp", "export-hf/model.safetensors"):
        for folder in folders:
            assert "export" not in name or forked(home, "export", folder.name).returncode == 0
        first, second = ((folder / name).read_bytes() for folder in folders)
        assert first == second, name
    ids = {json.loads((folder / "run.json").read_text())["run"]["id"] for folder in folders}
    assert len(ids) == 2


def test_weights_are_exported_as_the_same_bytes(home: Path) -> None:
    for number in "1234":
        assert forked(home, "export", "one", "--to", "safetensors", "--out", number).returncode == 0
    for file in (home / "1").rglob("*.*"):
        name = file.relative_to(home / "1")
        assert len({(home / number / name).read_bytes() for number in "1234"}) == 1, name


def test_a_run_without_an_identity_is_read_with_one_line(home: Path) -> None:
    (home / "one" / "run.json").unlink()
    hashes = json.loads((home / "one" / "data.json").read_text())["hashes"]
    done = forked(home, "eval", "one")
    assert done.returncode == 0, done.stderr
    assert "note: the run folder has no run.json" in done.stderr
    trained(home, "one", "train.steps=3")
    record = json.loads((home / "one" / "data.json").read_text())
    assert record["hashes"] == hashes
    assert isinstance(record["notes"], list)


# --- places are sealed -----------------------------------------------------------------------------------------------

WATCHED = """
import json, os, sys

sys.dont_write_bytecode = True  # a new clone has none

INSIDE = [os.path.realpath(path) for path in {inside!r}]
log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # ranks are forked from here
watching = [""]

ELSEWHERE = (
    "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request", "ftplib.connect", "smtplib.connect",
    "subprocess.Popen", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.startfile", "pty.spawn",
)

def place(path, folder):
    path = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0 and not os.path.isabs(path):
        path = os.path.join(os.readlink(f"/proc/self/fd/{{folder}}"), path)
    return os.path.realpath(path)

def note(event, what):
    os.write(log, json.dumps([watching[0], event, what]).encode() + b"\\n")

def inside(path):
    return any(path == one or path.startswith(one + "/") for one in INSIDE)

def watch(event, given):
    path = None
    if event == "open" and not isinstance(given[0], int) and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        path = place(given[0], -1)
    elif event in ("os.remove", "os.rmdir", "os.mkdir"):
        path = place(given[0], given[-1])
    elif event in ("os.truncate", "os.chmod", "os.chown", "os.utime", "os.setxattr", "sqlite3.connect"):
        path = place(given[0], -1) if not isinstance(given[0], int) else None
    elif event in ("os.rename", "os.link", "os.symlink"):
        path = place(given[1], given[-1])
        if event == "os.rename" and not inside(place(given[0], given[2])):
            note(event, place(given[0], given[2]))
    elif event in ("socket.connect", "socket.sendto", "socket.sendmsg") and isinstance(given[1], tuple):
        note(event, repr(given[1]))
    elif event in ELSEWHERE:
        note(event, repr(given))
    if path is not None and not inside(path):
        note(event, path)

from espalier.cli import main as cli
sys.addaudithook(watch)
for name, words in {verbs!r}.items():
    watching[0] = name
    for stream in (sys.stdout, sys.stderr):
        print("---", name, file=stream, flush=True)
    print("code", cli.main(words), file=sys.stderr, flush=True)
"""

VERBS = {
    "init": ["init", "run", "--out", "cache/init.toml"],
    "predict": ["predict", "run", "line"],
    "eval": ["eval", "run"],
    "other data": ["eval", "run", "--data", "t.txt"],
    "watch": ["eval", "run", "--watch", "--workers", "1"],
    "export": ["export", "run"],
    "safetensors": ["export", "run", "--to", "safetensors"],
    "explain": ["explain", "--energy", "run"],
    "replay": ["replay", "run", "--step", "2"],
    "report": ["report", "run"],
    "diagnose": ["diagnose", "run"],
    "plan": ["plan", "run/run.toml"],
    "kubernetes": ["train", "run/run.toml", "--kubernetes", "cache/job.yaml image=i claim=c"],
    "fork": ["train", "r.toml", "--from", "run", "--run", "cache/fork", "train.steps=3"],
    "train": ["train", "run/run.toml", "--run", "run", "train.steps=3"],
}
SILENT = ("init", "report", "diagnose")
"""Those that use no place."""
ENDS = {"init": 2, "explain": 2}
"""Exit codes other than 0: `init` makes no recipe of a run, and the energy of text is not known."""
NOT_OPENED = {
    "probe": "measures this machine, and opens no run",
    "--trust": "test_trust_or_ones_own_option_uses_a_place_and_says_so",
    "--hosts --slurm --ray": "reach what the user names; the run is opened there as by train",
    "--sources": "says what a plan's figures rest on",
    "--json --port --chat --turntable --tokens --temperature --top-k --seed": "say how an opened run answers",
    "--merge --no-bos --out": "say how an opened run is written",
    "--serve": "opens the run as predict and report do, and then waits for questions",
    "--task": "reads a file that the user names",
    "--include": "reads a folder that the user names",
    "--model": "asks a program that the user names about a log, and opens no run",
    "--data --trace --rules --score --cluster --what-if --html --parts": "name files of the user",
    "--calibrate-on": "reads the log of a run, and nothing else of it",
    "--help": "",
}
"""What needs no hostile run, and why."""


def watched(home: Path, verbs: dict[str, list[str]]) -> tuple[dict[str, str], list[list[str]]]:
    """What each verb wrote to standard error, with its exit code, and what was done outside the run folder, the cache
    and temporary files: (verb, event, what)."""
    temporary = Path(tempfile.gettempdir())
    inside = [home / "run", home / "cache", Path("/dev"), Path("/proc")]
    script, log = home / "watched.py", home / "log.jsonl"
    script.write_text(WATCHED.format(inside=[str(place) for place in inside], verbs=verbs, log=str(log)))
    done = scripted(home, script)
    said = dict(part.split("\n", 1) for part in done.stderr.split("--- ")[1:])
    events = [json.loads(line) for line in log.read_text().splitlines()]
    workers = f"{temporary}/pymp-"  # their sockets, in a folder that their user alone can open
    events = [event for event in events if not event[2].startswith(workers)]
    return said, [event for event in events if Path(event[2]).parent != temporary or home.name in event[2]]


def foreign(home: Path, target: str, data: str = "") -> None:
    """Makes `run` of `one`, with the places of somebody else in its recipe, and with `data`, where that is given."""
    shutil.copytree(home / "one", home / "run")
    file, outside = home / "run" / "run.toml", str(home / "outside")
    recipe = tomllib.loads(file.read_text())
    recipe["checkpoint"]["target"] = target
    recipe["data"][0] |= {"cache": outside, **({"path": data} if data else {})}
    recipe["track"]["to"] = ["mlflow", "wandb"]
    recipe["launch"] |= {"python": f"{outside}/python", "command": "touch outside {host} {command}"}
    file.write_text(tomli_w.dumps(recipe))


ANY = [("predict", "safetensors", "report"), pytest.param(tuple(VERBS), marks=pytest.mark.slow, id="all")]


@pytest.mark.timeout(900)  # of all verbs, some train
@pytest.mark.parametrize("names", ANY)
def test_opening_a_run_of_somebody_else_with_any_verb_stays_in_its_folder(home: Path, names: tuple[str, ...]) -> None:
    foreign(home, "s3://127.0.0.1/ck")
    said, left = watched(home, {name: VERBS[name] for name in names})
    assert left == []
    assert not (home / "outside").exists()
    assert "kubernetes" not in names or "outside" not in (home / "cache" / "job.yaml").read_text()
    for verb, text in said.items():
        assert "Traceback" not in text, text
        assert f"code {ENDS.get(verb, 0)}" in text, (verb, text)
        assert ("note: not used without --trust" in text) == (verb not in SILENT), (verb, text)
    assert said.keys() == {*names}


def test_no_verb_and_no_option_is_forgotten_of_those_that_may_open_a_run() -> None:
    (verbs,) = (action.choices for action in cli.parsers()[0]._actions if isinstance(action.choices, dict))
    excused = " ".join(NOT_OPENED).split()
    for verb, parser in verbs.items():
        tried = {word for words in VERBS.values() if words[0] == verb for word in words}
        options = {max(action.option_strings, key=len, default=verb) for action in parser._actions}
        assert verb in excused or not options - tried - {*excused}, verb


def test_data_that_a_server_has_is_not_fetched_for_a_run_of_somebody_else(home: Path) -> None:
    foreign(home, str(home / "ck"), "hf:somebody/data")
    said, left = watched(home, {verb: VERBS[verb] for verb in ("plan", "replay", "kubernetes", "train")})
    assert left == []
    for text in said.values():
        assert "is hf:somebody/data, and is not fetched" in text
        assert "code 2" in text


def test_a_run_that_cannot_be_sealed_says_so_when_it_begins(home: Path) -> None:
    (home / "cache" / "espalier" / "key").unlink(missing_ok=True)
    (home / "cache" / "espalier" / "key").mkdir()
    done = train(home, "three", f"checkpoint.target={home / 'saved'}")
    assert done.returncode == 0, done.stderr
    assert "cannot be kept: opening this run will ask for --trust" in done.stderr
    assert "--trust" in forked(home, "train", "three/run.toml", "--run", "three", "train.steps=3").stderr
    assert "--trust" not in train(home, "plain").stderr  # it names no places


def test_trust_or_ones_own_option_uses_a_place_and_says_so(home: Path) -> None:
    foreign(home, "ftp://127.0.0.1:9/ck")
    named = [f"checkpoint.target={home}/run/named", f"data.cache={home}/run/tokens", "track.to=[]"]
    verbs = {
        "trusted": ["eval", "run", "--data", "t.txt", "--trust"],
        "named": ["train", "run/run.toml", "--run", "run", "train.steps=3", *named],
    }
    said, left = watched(home, verbs)
    assert {verb for verb, *_ in left} == {"trusted"}  # the cache that the recipe names
    assert re.search(r"note: used, as --trust says.*checkpoint.target = 'ftp:.*data.cache", said["trusted"])
    assert "ftp is none of file, s3" in said["trusted"]
    (note,) = [line for line in said["named"].splitlines() if line.startswith("note: not used")]
    assert "launch.command" in note
    assert not any(option.partition("=")[0] in note for option in named)
    assert (target_of(home, "one", "run/named") / "step-00000003").exists()


def test_checkpoints_at_a_place_of_somebody_else_are_refused_by_name(home: Path) -> None:
    foreign(home, "s3://127.0.0.1/ck")
    shutil.rmtree(home / "run" / "checkpoints")
    verbs = {verb: VERBS[verb] for verb in ("predict", "watch", "train")}
    said, left = watched(home, verbs)
    assert left == []
    for text in said.values():
        assert "The checkpoints of run are at s3://127.0.0.1/ck, where nothing is read or written." in text
        assert "--trust" in text
        assert "code 2" in text
