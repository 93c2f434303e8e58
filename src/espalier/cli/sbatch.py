"""`espalier train --slurm OPTIONS`: the same verb as a Slurm batch job, which saves, queues itself again when its time
is up or it is preempted, and goes on from the newest checkpoint. Loads no torch: the work is done in the job.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from espalier.cli import text_template
from espalier.cli.input_check import train_command
from espalier.recipe import cache_dir, recipe_file, value_ranges
from espalier.recipe.errors import RunFailed, UserError
from espalier.recipe.terminal import say
from espalier.train.run_folder import path_of

SIGNAL = "B:USR1@120"
"""To the batch script, so long (seconds) before the time is up."""
_SUBMITTING = 120.0
"""Seconds that sbatch may take."""
EXAMPLE = "nodes=2 ntasks-per-node=8 time=4:00:00"
_OURS = ("wrap", "open-mode", "no-requeue", "array", "chdir", "parsable")
_SEVERAL = "nodes|ntasks|ntasks-per-node|ntasks-per-gpu"


def run(arguments: argparse.Namespace) -> int:
    """Writes the script into the run's folder and submits it."""
    recipe = recipe_file.load(arguments.recipe, arguments.overrides)
    value_ranges.check(recipe)
    folder = path_of(recipe, arguments.run).absolute()
    text = script(options(arguments.slurm), train_command(arguments, arguments.run), recipe.name, folder)
    with cache_dir.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / "slurm.sh"
    cache_dir.replace(path, text)
    job = _submitted(path)
    if arguments.json:
        print(json.dumps({"script": str(path), "job": job}))
    else:
        say(f"Submitted as job {job}; what it says is in {folder}/slurm-{job}.log, its script is {path}.")
    return 0


def options(text: str) -> list[str]:
    """The options of sbatch in `text` by their long names: `nodes=2 exclusive` is `--nodes=2`, `--exclusive`.

    Raises UserError for those that the script would not be right with.
    """
    try:
        words = [word.removeprefix("--") for word in shlex.split(text)]
    except ValueError as error:
        raise UserError(f"--slurm {text!r} cannot be read: {error}.", do=f"--slurm {EXAMPLE!r}") from None
    for word in words:
        name = word.partition("=")[0]
        if not re.fullmatch(r"[a-z][a-z-]+", name):
            raise UserError(
                f"--slurm {text!r}: {word!r} is no long name of an option.",
                why="options are written name=value, or name alone",
                do=f"--slurm {EXAMPLE!r}",
            )
        if name in _OURS:
            raise UserError(
                f"--slurm {text!r}: {name} cannot be chosen.", why="the script depends on it", do=f"leave {name} out"
            )
        if name == "signal" and not re.fullmatch(r"signal=B:(SIG)?USR1@\d+", word):
            raise UserError(
                f"--slurm {text!r}: {word} would not reach the script.", do=f"signal={SIGNAL}, or other seconds"
            )
    return [f"--{word}" for word in words]


def script(options: Sequence[str], command: Sequence[str], name: str, folder: Path) -> str:
    """The batch script that runs `command` with its run in `folder`.

    Several nodes or tasks: one task for each rank. Else one task, which supervises the ranks of its node.
    """
    given = {option.partition("=")[0] for option in options}
    defaults = {
        "--job-name": f"={name}",
        "--output": f"={str(folder).replace('%', '%%')}/slurm-%j.log",
        "--open-mode": "=append",
        "--signal": f"={SIGNAL}",
        "--requeue": "",
    }
    head = [f"{option}{value}" for option, value in defaults.items() if option not in given]
    _refuse_control(*head, *options, os.getcwd())
    several = any(re.fullmatch(rf"--({_SEVERAL})=(?!1$).*", option) for option in options)
    srun = ["srun", "--kill-on-bad-exit=1"] if several else ["srun", "--ntasks=1"]
    return text_template.render(
        "slurm.sh.j2",
        {},
        options="\n".join(f"#SBATCH {_quoted(option)}" for option in (*head, *options)),
        folder=shlex.quote(os.getcwd()),
        events=shlex.quote(str(folder / "events.jsonl")),
        command=shlex.join([*srun, *command]),
    )


def _refuse_control(*texts: str) -> None:
    for text in texts:
        if not text.isprintable():
            raise UserError(
                f"--slurm: {text!r} cannot stand in a batch script.",
                why="it holds a line end or another control character",
                do="a folder or an option without it",
            )


def _quoted(option: str) -> str:
    """An option as sbatch reads it from a script, where it takes quotes as a shell does."""
    name, equals, value = option.partition("=")
    return f"{name}{equals}{shlex.quote(value)}" if equals else name


def _submitted(path: Path) -> str:
    """The number of the job that sbatch makes of the script."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "There is no sbatch on this machine.",
            why=f"the script is written: {path}",
            do=f"on a login node of the cluster, where that folder is: sbatch {path}",
        )
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(path)], capture_output=True, text=True, timeout=_SUBMITTING, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunFailed(f"sbatch could not be run: {error}", do=f"by hand: sbatch {path}") from None
    if done.returncode:
        raise UserError(
            f"sbatch refused the job (exit code {done.returncode}).",
            why=done.stderr.strip(),
            do=f"other options with --slurm, or by hand: sbatch {path}",
        )
    return done.stdout.strip().partition(";")[0]
