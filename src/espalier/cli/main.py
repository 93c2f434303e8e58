"""The command line: verbs only. Imports no torch; each verb's own file is imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from espalier.comm import store_client
from espalier.recipe import cache_dir, process_environment, terminal
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import DISTRIBUTION, EspalierError, nearest
from espalier.recipe.terminal import say
from espalier.track.startup import STARTUP, process_began

_TABLES = data_table(__file__)
VERBS: dict[str, str] = _TABLES["verbs"]
"""Each with what it does."""
ARGUMENTS: list[dict[str, Any]] = _TABLES["arguments"]
TYPES = {"int": int, "float": float}


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """That of the whole command line, which knows verbs only, and those of the verbs."""
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
    return top, made


_RAY = re.compile(r"auto|local|ray://.+|[^=/]+:[0-9]+")
"""What is an address where it follows `--ray`; any is, as `--ray=ADDRESS`."""


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """What a command line says; options may stand anywhere, also before the verb. Without a verb `verb` is None. Ends
    the program where it asks for help or cannot be understood."""
    top, verbs = parsers()
    words = [*words[1:], "-h"] if words[:1] == ["help"] else words
    pairs = itertools.zip_longest(words, words[1:], fillvalue="")
    words = ["--ray=auto" if word == "--ray" and not _RAY.fullmatch(after) else word for word, after in pairs]
    at = next((place for place, word in enumerate(words) if word in VERBS), None)
    if words and not words[0].startswith("-") and at != 0:
        _unknown(top, words[0], VERBS)
    if at is None:
        return top.parse_args(words)
    verb = verbs[words[at]]
    parse = verb.parse_known_args if "--" in words else verb.parse_known_intermixed_args
    arguments, rest = parse([*words[:at], *words[at + 1 :]])
    if rest:
        _unknown(verb, rest[0], [f"--{name.replace('_', '-')}" for name in vars(arguments)])
    if getattr(arguments, "recipe", None) is not None:  # the word that is no change
        ordered = sorted((arguments.recipe, *arguments.overrides), key=lambda word: "=" in word)
        arguments.recipe, *arguments.overrides = ordered
    return argparse.Namespace(version=False, verb=words[at], **vars(arguments))


LAUNCHERS = {"hosts": "multihost", "slurm": "sbatch", "kubernetes": "kubernetes", "ray": "ray_job"}
"""Options that say where ranks are started, and the files of `verbs` that do it."""


def main(argv: Sequence[str] | None = None, begin: Callable[[], None] = lambda: None) -> int:
    """Runs one verb, which is imported before `begin` is called. Returns the exit code: 0 good, 1 found something, 2
    the user's mistake, 130 interrupted."""
    STARTUP.entered = STARTUP.since = process_began() if argv is None else time.time()
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parsed(words)
    if arguments.version:
        say(_versions())
        return 0
    if arguments.verb is None:
        parsers()[0].print_help()
        return 2
    process_environment.settle()
    terminal.know_paths(words)
    store_client.own_process()
    try:
        importlib.import_module("espalier.cli.input_check").check(arguments)  # before torch is imported
        if getattr(arguments, "source", None) is not None:
            importlib.import_module("espalier.cli.run_fork").fork(arguments)
        launcher = (name for key, name in LAUNCHERS.items() if getattr(arguments, key, None) is not None)
        verb = next(launcher, arguments.verb)
        if verb == "train":
            from espalier.cli import finished_run

            if finished_run.answered(arguments):
                return 0
        run: Callable[[argparse.Namespace], int] = importlib.import_module(f"espalier.cli.{verb}").run
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


def _unknown(parser: argparse.ArgumentParser, word: str, known: Iterable[str]) -> NoReturn:
    """Ends the program, saying what may be meant by a `word` of the command line."""
    from espalier.recipe import recipe_errors

    name = word.partition("=")[0]
    meant, note = recipe_errors.lead(name, "lead" if name.startswith("-") else "verb")
    meant = meant or (not note and nearest(name, known)) or ""
    words = (f"unrecognized argument: {word}", meant and f"(did you mean {meant}{'=VALUE' * ('.' in meant)}?)", note)
    parser.error(" ".join(filter(None, words)))


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    options = []
    for name in (DISTRIBUTION, "torch", "numpy"):
        try:
            options.append(f"{name.removesuffix('-train')} {version(name)}")
        except PackageNotFoundError:
            options.append(f"{name} (not installed)")
    return "  ".join(options)
