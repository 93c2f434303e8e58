"""The command line: verbs only. Imports no torch; each verb's own file is imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from espalier.comm import store_client
from espalier.recipe import cache_dir, process_environment, terminal
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import DISTRIBUTION, EspalierError, nearest
from espalier.recipe.terminal import say

_TABLES = data_table(__file__)
VERBS: dict[str, str] = _TABLES["verbs"]
"""Each with what it does."""
ARGUMENTS: list[dict[str, Any]] = _TABLES["arguments"]
TYPES = {"int": int, "float": float}


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="espalier",
        description="Trains large models on the hardware you actually have.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="store_true", help="print versions and end")
    verbs = top.add_subparsers(dest="verb", metavar="VERB")
    made = {
        name: verbs.add_parser(name, help=text, description=text, allow_abbrev=False) for name, text in VERBS.items()
    }
    for verb in made.values():
        verb.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    for argument in ARGUMENTS:
        options: dict[str, Any] = {key: TYPES[value] if key == "type" else value for key, value in argument.items()}
        names = options.pop("verbs").split()
        flag, _, metavar = options.pop("name").partition(" ")
        options |= {"metavar": metavar} if metavar else {}
        for name in names:
            made[name].add_argument(flag, **options)
    return top


LAUNCHERS = {"hosts": "multihost", "slurm": "sbatch", "kubernetes": "kubernetes", "ray": "ray_job"}
"""Options that say where ranks are started, and the files of `verbs` that do it."""


def main(argv: Sequence[str] | None = None, begin: Callable[[], None] = lambda: None) -> int:
    """Runs one verb, which is imported before `begin` is called. Returns the exit code: 0 good, 1 found something, 2
    the user's mistake, 130 interrupted."""
    top = parser()
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] not in VERBS and not words[0].startswith("-"):
        _unknown(top, words[0], VERBS)
    arguments, rest = top.parse_known_args(words)
    changes = [word for word in rest if "=" in word and not word.startswith("-")]
    if len(changes) < len(rest) or (rest and not hasattr(arguments, "overrides")):
        word = next((word for word in rest if word not in changes), rest[0])
        _unknown(top, word, [f"--{name.replace('_', '-')}" for name in vars(arguments) if name != "verb"])
    if rest:  # changes may stand behind options as well
        arguments.overrides = [*arguments.overrides, *changes]
    if arguments.version:
        say(_versions())
        return 0
    if arguments.verb is None:
        top.print_help()
        return 2
    process_environment.settle()
    terminal.know_paths(words)
    store_client.own_process()
    try:
        run = _checked(arguments)
        begin()
        return run(arguments)
    except KeyboardInterrupt:
        say("espalier: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) went away; point stdout at nothing so that the interpreter's last flush is quiet.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
        return 0
    except (EspalierError, OSError) as error:
        return _failed(error, arguments.json)


def _failed(error: EspalierError | OSError, as_json: bool) -> int:
    """Says why a verb ended; the exit code. Raises an OSError that is not of a full disk."""
    if isinstance(error, OSError):
        if error.errno not in cache_dir.FULL:
            raise error
        error = cache_dir.unwritable(error.filename or Path.cwd(), error)
    if as_json:
        print(json.dumps(error.table))
    else:
        say(f"espalier: {error}", file=sys.stderr)
    return error.exit_code


def _checked(arguments: argparse.Namespace) -> Callable[[argparse.Namespace], int]:
    """What runs the verb, once its arguments are checked and the run is forked that it begins with."""
    importlib.import_module("espalier.cli.input_check").check(arguments)  # before torch is imported
    if getattr(arguments, "source", None) is not None:
        importlib.import_module("espalier.cli.run_fork").fork(arguments)
    verb = next((name for key, name in LAUNCHERS.items() if getattr(arguments, key, None) is not None), None)
    if (verb or arguments.verb) == "train":
        from espalier.cli import finished_run

        if finished_run.answered(arguments):
            return lambda _: 0
    run: Callable[[argparse.Namespace], int] = importlib.import_module(f"espalier.cli.{verb or arguments.verb}").run
    return run


def _unknown(top: argparse.ArgumentParser, word: str, known: Iterable[str]) -> NoReturn:
    near = nearest(word.partition("=")[0], known)
    top.error(f"unrecognized argument: {word}" + (f" (did you mean {near}?)" if near else ""))


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    options = []
    for name in (DISTRIBUTION, "torch", "numpy"):
        try:
            options.append(f"{name.removesuffix('-train')} {version(name)}")
        except PackageNotFoundError:
            options.append(f"{name} (not installed)")
    return "  ".join(options)
