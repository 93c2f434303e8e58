"""Long runs, constant faults and narrow surroundings: what `espalier train` promises of them, tried.

    python bench/faults.py [--part PART] [--quick] [--steps N] [--minutes N] [--json FILE]

PART is one of:
    long            N steps of a tiny model on one rank: memory that stays flat, bytes of the log, seconds of the report
    fire            N minutes of random faults (acme_soak.py: Acme's mix), beside as many undisturbed
    kill            seconds from SIGKILL to the end of the next step
    surroundings    a run in a cgroup of 1 GiB, with 64 descriptors, with a home that cannot be written, without
                    /dev/shm, with a clock that jumps: the same bits as in none of these
    disk            a disk that is full at each kind of write: the run ends with one sentence, and the same command,
                    once there is room, ends with the bits of the undisturbed run
Without it, all of them. Mounts and cgroups need root; where they cannot be made, that row is left out and named.
Commands run in forks of this process, which has loaded torch.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "support"))
import acme_soak
import memory_cgroup
from accounts import account
from espalier.cli import main as cli
from espalier.track import report
from espalier.train.trainer import Trainer
from many_ranks.faults import Fault, strike
from table import Row, arguments, publish

PARTS = ("long", "fire", "kill", "surroundings", "disk")
GOALS = {"flat": 0.02, "report": 5.0, "goodput": 0.95, "kill": 0.6}
WARM = 0.1
"""Share of the steps after which memory is to stay as it is."""
MACHINE = """
[[nodes]]
device = "cpu"
cores = 2
memory = "8GiB"
disks = [{ path = "/", read = 1e9, write = 1e9, iops = 1e4 }]
"""
COMMON = '[plan]\ncluster = "machine.toml"\ntrial = false\npin = { ranks = RANKS, threads = 1 }\n'
TEXT = """
[model]
depth = 2
width = 32
heads = 2
feed_forward = 64
[data]
path = "text.txt"
cache = "shards"
[train]
steps = STEPS
sequence = 32
batch_tokens = 256
validate_tokens = 256
validate_every = 10
precision = "fp32"
optimizer = { kind = "adamw" }
[checkpoint]
every = 5
"""
GRAPH = """
[model]
kind = "sage"
width = 8
[data]
path = "planted:nodes=2000,degree=6,features=64,train=0.05"
[graph]
fanout = [5, 5]
[store]
memory = "2MiB"
path = "packed"
[train]
steps = STEPS
batch_tokens = 32
precision = "fp32"
"""
SHORT = 20
"""Steps of the runs in narrow surroundings."""
_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_REMOUNT, _MS_PRIVATE, _MS_REC = 1, 32, 1 << 18, 1 << 14
_LIBC = ctypes.CDLL(None, use_errno=True)

# --- commands ---------------------------------------------------------------------------------------------------------


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    text: str


def home(folder: Path, recipe: str = TEXT, steps: int = SHORT, ranks: int = 2) -> Path:
    """A folder with a recipe and its data."""
    folder.mkdir()
    (folder / "text.txt").write_text("".join(f"{n} comes before {n + 1}.\n" for n in range(3000)))
    (folder / "machine.toml").write_text(MACHINE)
    (folder / "recipe.toml").write_text((recipe + COMMON).replace("STEPS", str(steps)).replace("RANKS", str(ranks)))
    return folder


def forked(task: Callable[[], int]) -> int:
    """The exit code of a fork that runs `task`; minus the signal that ended it."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = task()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def command(folder: Path, *words: str, surround: Callable[[], object] = lambda: None) -> Done:
    """`espalier WORDS` in `folder`."""
    output = folder / "output.txt"

    def task() -> int:
        os.chdir(folder)
        os.environ.setdefault("XDG_CACHE_HOME", str(folder / "cache"))
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for number in (1, 2):
            os.dup2(file, number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        surround()
        return cli.main([*words])

    return Done(forked(task), output.read_text(errors="replace"))


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(folder) if event["event"] == "step"}


def goal(case: str, wanted: float, value: float, unit: str, spread: str, less: bool = False) -> Row:
    """A row beside its goal; `less`: less is better."""
    ratio = (wanted / value if value else wanted + 1) if less else value / wanted
    return Row(case, "goal", wanted, value, ratio, unit, spread)


# --- long, fire, kill -------------------------------------------------------------------------------------------------


def long(folder: Path, steps: int) -> list[Row]:
    """A run of many steps."""
    text = TEXT.replace("validate_every = 10", f"validate_every = {steps // 20}")
    text = text.replace("\nevery = 5", f"\nevery = {steps // 20}")  # both have been in the first tenth
    place = home(folder / "long", text, steps, ranks=1)
    done = command(place, "train", "recipe.toml", "--run", "run")
    if done.code:
        raise SystemExit(done.text[-3000:])
    made = {event["step"]: event["memory"] for event in events(place) if event["event"] == "step"}
    rest = [made[step] for step in made if step > steps * WARM]
    grown = max(rest) / rest[0] - 1
    size = (place / "run" / "events.jsonl").stat().st_size
    begun, spent = time.monotonic(), time.process_time()
    page = report.write(place / "run")
    seconds, spent = time.monotonic() - begun, time.process_time() - spent
    case, words = f"{steps} steps, 1 rank", f"{page.stat().st_size} B; {seconds:.1f} s of the clock"
    return [
        goal(f"{case}: growth of memory after the first tenth", GOALS["flat"], grown, "share", f"{rest[0]} B", True),
        goal(f"{case}: processor time of the report", GOALS["report"], spent, "s", words, True),
        Row(f"{case}: run log", "a step", 1.0, size / len(made), 1.0, "B a step", f"{size} B"),
    ]


def fire(folder: Path, minutes: float) -> list[Row]:
    """Goodput under faults, beside that of as many minutes without."""
    shares = []
    for name, every in (("struck", acme_soak.EVERY), ("undisturbed", math.inf)):
        place = home(folder / name)
        soaked = acme_soak.run(60 * minutes, place, every, str(place / "machine.toml"))
        spent = account(soaked.events)
        shares.append((spent.goodput, len(soaked.struck), sum(cause.steps for cause in spent.causes), soaked.manual))
    (struck, faults, lost, manual), (whole, *_) = shares
    case = f"{minutes:g} min, a fault every {acme_soak.EVERY:g} s: goodput beside undisturbed"
    words = f"{struck:.3f} and {whole:.3f}; {faults} faults, {lost} steps again, {manual} starts by hand"
    return [goal(case, GOALS["goodput"], struck / whole, "share", words)]


def kill(folder: Path, times: int) -> list[Row]:
    """From SIGKILL to the end of the next step, as the run log has it."""
    place, apart = home(folder / "kill", steps=20 * (times + 1)), 20
    faults = [Fault(1, apart * (turn + 1), "kill") for turn in range(times)]
    plain = Trainer.train_step

    def train_step(trainer: Trainer, batches: Sequence[Any]) -> Any:
        strike(faults, trainer.setting.place.rank, trainer.step, place)
        return plain(trainer, batches)

    def armed() -> None:
        Trainer.train_step = train_step  # type: ignore[method-assign]

    done = command(place, "train", "recipe.toml", "--run", "run", surround=armed)
    if done.code:
        raise SystemExit(done.text[-3000:])
    seconds = [event["seconds"] for event in events(place) if event["event"] == "recovered"]
    words = f"{min(seconds):.2f}-{max(seconds):.2f} (n={len(seconds)})"
    return [goal("SIGKILL to the next step, 2 ranks", GOALS["kill"], statistics.median(seconds), "s", words, True)]


# --- narrow surroundings ----------------------------------------------------------------------------------------------


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def private_mounts() -> None:
    """Mounts of this process are its own from here on."""
    _checked(_LIBC.unshare(_CLONE_NEWNS))
    _checked(_LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))


def disk(folder: Path, size: int, again: bool = False, flags: int = 0) -> None:
    """A disk of so many bytes at `folder`, or (`again`) the one that is there, of another size."""
    flags |= _MS_REMOUNT if again else 0
    _checked(_LIBC.mount(b"tmpfs", str(folder).encode(), b"tmpfs", flags, f"size={size}".encode()))


def _jumping_clock() -> None:
    """Every reading of the calendar's clock is up to an hour off, forwards and back."""
    real, calls = time.time, iter(range(1 << 62))
    time.time = lambda: real() + 3600.0 * ((next(calls) * 7919 % 201) / 100 - 1)


def _read_only_home() -> None:
    private_mounts()
    place = Path("home").absolute()
    place.mkdir()
    disk(place, 1 << 20, flags=_MS_RDONLY)
    os.environ.update(HOME=str(place))
    os.environ.pop("XDG_CACHE_HOME", None)


def _no_shared_memory() -> None:
    private_mounts()
    disk(Path("/dev/shm"), 1 << 12, flags=_MS_RDONLY)


SURROUNDINGS: dict[str, Callable[[], object]] = {
    "1 GiB cgroup": lambda: memory_cgroup.join(1 << 30),
    "ulimit -n 64": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    "read-only home": _read_only_home,
    "no /dev/shm": _no_shared_memory,
    "a clock that jumps by up to an hour": _jumping_clock,
}


def surroundings(folder: Path) -> list[Row]:
    """The same run in each."""
    plain = home(folder / "plain")
    done = command(plain, "train", "recipe.toml", "--run", "run")
    if done.code:
        raise SystemExit(done.text[-3000:])
    rows = []
    for name, surround in SURROUNDINGS.items():
        place = home(folder / name.replace("/", " "))
        done = command(place, "train", "recipe.toml", "--run", "run", surround=surround)
        if "Permission" in done.text and "surround()" in done.text:
            print(f"left out: {name}: {done.text.splitlines()[-1]}")
            continue
        for group in memory_cgroup.ROOT.rglob("espalier-bench-*"):  # a fork ends without what would leave it
            with suppress(OSError):  # of others, who are in it
                group.rmdir()
        same = done.code == 0 and losses(place) == losses(plain)
        words = f"{SHORT} steps, 2 ranks" if same else done.text.strip().splitlines()[-1][:120]
        rows.append(goal(f"{name}: the same bits", 1.0, float(same), "runs", words))
    return rows


# --- full disks -------------------------------------------------------------------------------------------------------

FULL: dict[str, tuple[str, str, str, int]] = {
    "run log and checkpoints, in the middle": (TEXT, "", "run", 16 << 20),
    "checkpoints, before the first step": (TEXT, "", "run", 500 << 10),
    "token shards": (TEXT, "", "shards", 16 << 10),
    "an export": (TEXT, "", "out", 16 << 10),
    "optimizer states on disk": (TEXT, "plan.pin.offload=disk", "run/offload", 64 << 10),
    "state of an optimizer node": (TEXT, "plan.pin.offload=node store.path=states", "states", 64 << 10),
    "packed rows of a graph": (GRAPH, "", "packed", 128 << 10),
}
"""What is written there: a recipe, its changes, the folder that is a small disk, and its bytes at first."""


BALLAST = "ballast"
EXPORT = ("export", "run", "--to", "safetensors", "--out", "out/it")


def full(folder: Path) -> list[Row]:
    """Each kind of write meets a full disk, and goes on once there is room."""
    whole: dict[tuple[str, str], dict[int, float]] = {}
    rows = []
    for number, (name, (recipe, changes, small, size)) in enumerate(FULL.items()):
        train = ("train", "recipe.toml", "--run", "run", *changes.split())
        if (recipe, changes) not in whole:
            place = home(folder / f"whole {number}", recipe)
            done = command(place, *train)
            if done.code:
                raise SystemExit(done.text[-3000:])
            whole[recipe, changes] = losses(place)
        place = home(folder / f"full {number}", recipe)
        first = met_by_full_disk(place, train, small, size)
        told = first.code > 0 and "Traceback" not in first.text
        same = (place / "run" / "events.jsonl").exists() and losses(place) == whole[recipe, changes]
        words = [line for line in first.text.splitlines() if "space" in line or "bytes" in line]
        sentence = (words or first.text.splitlines() or [""])[-1].strip()[:90]
        case = f"disk full: {name}"
        rows.append(goal(f"{case}: ends with one sentence", 1.0, float(told), "runs", sentence))
        rows.append(goal(f"{case}: then the same bits", 1.0, float(same), "runs", f"{SHORT} steps"))
        print(*rows[-2:], sep="\n")
    return rows


def fills(folder: Path) -> None:
    """Ranks of this process fill the disk at `folder` before their step 8, if they get there."""
    plain = Trainer.train_step

    def train_step(trainer: Trainer, batches: Sequence[Any]) -> Any:
        if trainer.step == 7 and trainer.setting.place.rank == 0:
            with suppress(OSError), (folder / BALLAST).open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        return plain(trainer, batches)

    Trainer.train_step = train_step  # type: ignore[method-assign]


def met_by_full_disk(place: Path, train: Sequence[str], small: str, size: int) -> Done:
    """What the command that met the full disk ended with. Given again with room, it has ended well, or raises."""

    def task() -> int:
        private_mounts()
        (place / small).mkdir(parents=True)
        disk(place / small, size)
        first = command(place, *train, surround=lambda: fills(place / small))
        if small == "out" and first.code == 0:
            first = command(place, *EXPORT)
        (place / "first.json").write_text(json.dumps(first))
        (place / small / BALLAST).unlink(missing_ok=True)
        disk(place / small, 1 << 28, again=True)
        last = command(place, *(EXPORT if small == "out" else train))
        shutil.copytree(place / "run", place / "copied")  # what was mounted goes with this process
        return last.code

    code = forked(task)
    if (place / "copied").exists() and not (place / "run" / "events.jsonl").exists():
        shutil.copytree(place / "copied", place / "run", dirs_exist_ok=True)
    first = Done(*json.loads((place / "first.json").read_text()))
    return first if code == 0 else Done(0, f"given again, it ended with {code}")


def main() -> None:
    options = arguments(
        __doc__ or "",
        part={"choices": PARTS, "help": "only this"},
        steps={"type": int, "default": 50_000, "help": "of the long run"},
        minutes={"type": float, "default": 30.0, "help": "under fire"},
    )
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    steps, minutes = (2000, 1.0) if options.quick else (options.steps, options.minutes)
    parts: dict[str, Callable[[Path], list[Row]]] = {
        "long": lambda folder: long(folder, steps),
        "fire": lambda folder: fire(folder, minutes),
        "kill": lambda folder: kill(folder, 3 if options.quick else 9),
        "surroundings": surroundings,
        "disk": full,
    }
    rows = []
    for name in [options.part] if options.part else PARTS:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            rows += parts[name](Path(folder))
    publish(rows, options.json)


if __name__ == "__main__":
    main()
