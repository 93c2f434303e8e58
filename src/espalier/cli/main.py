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
from espalier.recipe.errors import EspalierError, nearest
from espalier.recipe.terminal import say

VERBS = {
    "init": "write a recipe for your text, graph, module or weights",
    "probe": "measure this machine and write cluster.toml",
    "plan": "say how a recipe would run, what it would cost, and why",
    "train": "train a recipe; the same command again resumes",
    "eval": "evaluate the newest checkpoint of a run on its held-out data",
    "predict": "let a trained run answer an input",
    "report": "write report.html for a run or show it live; list runs, or compare several",
    "replay": "make a step of a run again, and say whether it has the same bits",
    "export": "write a run's model in another program's format",
    "explain": "what each system in Espalier is, when it is chosen, and its state",
    "diagnose": "why a job failed, from the logs of any framework, and whether a restart can help",
}


FORMS = ("hf", "safetensors", "embeddings", "packed", "peft", "gguf", "gguf-q8_0", "gguf-q4_0")
"""What `export --to` writes."""

Argument = tuple[str, str, dict[str, Any]]
"""The verbs that take it, its name or flag, and what `ArgumentParser.add_argument` is told of it."""

ARGUMENTS: tuple[Argument, ...] = (
    ("plan", "recipe", {"nargs": "?", "help": "a recipe file (TOML)"}),
    ("train", "recipe", {"help": "a recipe file (TOML)"}),
    (
        "plan train probe",
        "overrides",
        {"nargs": "*", "metavar": "key=value", "help": "changes, such as train.steps=50"},
    ),
    ("eval predict replay export", "run", {"help": "a run folder, such as runs/language"}),
    (
        "train eval predict replay export explain",
        "--trust",
        {
            "action": "store_true",
            "help": "open a run of somebody whose code may run and whose places are used: a module, a pickle, "
            "an older checkpoint, checkpoint.target",
        },
    ),
    (
        "report",
        "runs",
        {
            "nargs": "*",
            "help": "a run folder, such as runs/language; several are compared; none: a list of runs/",
        },
    ),
    (
        "replay",
        "--step",
        {"type": int, "required": True, "metavar": "N", "help": "the step, as the report counts"},
    ),
    (
        "init",
        "paths",
        {"nargs": "+", "metavar": "PATH", "help": "a file or folder, python:stdlib, hf:NAME …"},
    ),
    ("init", "--out", {"default": "recipe.toml", "help": "file to write (default recipe.toml)"}),
    ("probe", "--out", {"default": "cluster.toml", "help": "file to write (default cluster.toml)"}),
    ("probe", "--disk", {"default": ".", "help": "folder whose disk is measured (default: here)"}),
    (
        "train probe",
        "--hosts",
        {"help": "a,b,user@c:2 (ranks), or @FILE: run on these hosts over ssh (docs/hosts.md)"},
    ),
    (
        "train",
        "--slurm",
        {
            "metavar": "OPTIONS",
            "help": 'submit it as a batch job, with options of sbatch, such as "nodes=2 time=4:00:00"',
        },
    ),
    (
        "train",
        "--kubernetes",
        {
            "metavar": "FILE",
            "help": "write a manifest, with its options: "
            '"train.yaml image=registry/espalier:1 claim=work" (docs/clusters.md)',
        },
    ),
    (
        "train",
        "--ray",
        {
            "nargs": "?",
            "const": "auto",
            "metavar": "ADDRESS",
            "help": "ranks as actors of a Ray cluster: this host's (default), HOST:6379, or local",
        },
    ),
    ("train", "--run", {"help": "run folder (default runs/<recipe name>)"}),
    (
        "train",
        "--from",
        {
            "dest": "source",
            "metavar": "RUN",
            "help": "begin another run with the newest checkpoint of the run in RUN",
        },
    ),
    (
        "eval",
        "--watch",
        {
            "action": "store_true",
            "help": "evaluate checkpoints as they come, beside training, until the run is done",
        },
    ),
    (
        "eval",
        "--task",
        {
            "action": "append",
            "default": [],
            "metavar": "NAME=FILE",
            "help": "also multiple-choice questions in a JSONL file, or lm-eval:TASK (docs/evaluate.md)",
        },
    ),
    (
        "eval",
        "--workers",
        {"type": int, "metavar": "N", "help": "inference processes (default: one for each core)"},
    ),
    (
        "eval",
        "--data",
        {
            "metavar": "PATH",
            "help": "evaluate on the held-out part of this data instead of the run's",
        },
    ),
    (
        "predict",
        "--data",
        {"metavar": "PATH", "help": "of a graph: predict for this data instead of the run's"},
    ),
    (
        "report",
        "--trace",
        {
            "metavar": "FILE",
            "help": "of a cluster's jobs: Acme's columns, sacct -P, or a folder of runs",
        },
    ),
    (
        "report",
        "--serve",
        {"action": "store_true", "help": "show the run live on this machine's loopback"},
    ),
    (
        "report",
        "--port",
        {"type": int, "default": 0, "help": "port for --serve (default: any free one)"},
    ),
    (
        "export",
        "--to",
        {
            "choices": FORMS,
            "help": "hf (Llama-format folder; of text the default), gguf (llama.cpp, Ollama), peft, safetensors, "
            "of graphs embeddings, packed (few bits)",
        },
    ),
    (
        "export",
        "--merge",
        {"action": "store_true", "help": "whole weights, with the adapters in them"},
    ),
    (
        "export",
        "--no-bos",
        {
            "action": "store_true",
            "help": "of text: the exported tokenizer puts nothing before a text",
        },
    ),
    ("export", "--out", {"help": "folder to write (default RUN/export-FORMAT)"}),
    (
        "explain",
        "names",
        {"nargs": "*", "metavar": "NAME", "help": "systems, such as amsp (default: all twenty)"},
    ),
    ("explain", "--energy", {"action": "store_true", "help": "of runs: joules of an inference"}),
    ("diagnose", "logs", {"nargs": "+", "metavar": "LOG", "help": "logs, or a run's folder"}),
    ("diagnose", "--rules", {"metavar": "FILE", "help": "rules and incidents of your own"}),
    ("plan", "--cluster", {"help": "a cluster file instead of this machine"}),
    (
        "plan",
        "--what-if",
        {
            "action": "append",
            "default": [],
            "metavar": "KEY=VALUE",
            "help": "also plan for a changed cluster (links.between=25Gbit/s, nodes.count=4) "
            "or option (model.depth=12)",
        },
    ),
    (
        "plan",
        "--html",
        {"metavar": "FILE", "help": "write a page with the trade-off of time against memory"},
    ),
    (
        "plan",
        "--parts",
        {
            "metavar": "FOLDER",
            "help": "of a graph: write the part of each rank (src/espalier/mechanisms/halo_exchange/README.md)",
        },
    ),
    (
        "plan",
        "--calibrate-on",
        {"metavar": "FILE", "help": "measured steps, or a run folder, to learn from"},
    ),
    (
        "plan",
        "--score",
        {
            "metavar": "FILE",
            "help": "compare predictions with the measured steps in FILE (no recipe)",
        },
    ),
    (
        "plan",
        "--out",
        {"metavar": "FILE", "help": "where --score writes its rows (default FILE.scored.…)"},
    ),
    (
        "predict",
        "input",
        {
            "nargs": "?",
            "help": "text to go on from; of a graph: nodes, pairs or graphs (default all); "
            "of a scene: cameras in a file, or a test view's number; @FILE; -: each line of stdin",
        },
    ),
    (
        "predict",
        "--turntable",
        {"metavar": "GIF", "help": "of a scene: write an animation of a way round it"},
    ),
    (
        "predict",
        "--chat",
        {"action": "store_true", "help": "a chat: lines of the terminal, until Ctrl-D"},
    ),
    (
        "predict",
        "--serve",
        {"action": "store_true", "help": "answer OpenAI's protocol on loopback"},
    ),
    (
        "predict",
        "--port",
        {"type": int, "default": 0, "help": "port for --serve (default: any free one)"},
    ),
    (
        "predict",
        "--tokens",
        {"type": int, "default": 200, "help": "tokens to generate (default 200)"},
    ),
    (
        "predict",
        "--temperature",
        {"type": float, "default": 0.0, "help": "0 takes the likeliest (default)"},
    ),
    (
        "predict",
        "--top-k",
        {"type": int, "help": "sample among the k likeliest only; links of a node"},
    ),
    ("predict", "--seed", {"type": int, "default": 0, "help": "of the sampling (default 0)"}),
)


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
    for names, flag, options in ARGUMENTS:
        for name in names.split():
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
        print(json.dumps({"error": error.what, "why": error.why, "try": error.do}))
    else:
        say(f"espalier: {error}", file=sys.stderr)
    return error.exit_code


def _checked(arguments: argparse.Namespace) -> Callable[[argparse.Namespace], int]:
    """What runs the verb, once its arguments are checked and the run is forked that it begins with."""
    importlib.import_module("espalier.cli.input_check").check(arguments)  # before torch is imported
    if getattr(arguments, "source", None) is not None:
        importlib.import_module("espalier.cli.run_fork").fork(arguments)
    verb = next((name for key, name in LAUNCHERS.items() if getattr(arguments, key, None) is not None), None)
    run: Callable[[argparse.Namespace], int] = importlib.import_module(f"espalier.cli.{verb or arguments.verb}").run
    return run


def _unknown(top: argparse.ArgumentParser, word: str, known: Iterable[str]) -> NoReturn:
    near = nearest(word.partition("=")[0], known)
    top.error(f"unrecognized argument: {word}" + (f" (did you mean {near}?)" if near else ""))


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    options = []
    for name in ("espalier", "torch", "numpy"):
        try:
            options.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            options.append(f"{name} (not installed)")
    return "  ".join(options)
