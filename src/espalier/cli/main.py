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

Argument = tuple[str, str, str, dict[str, Any]]
"""The verbs that take it, its name or flag with what stands for its value, its help, and what else
`ArgumentParser.add_argument` is told of it."""

ARGUMENTS: tuple[Argument, ...] = (
    ("plan", "recipe", "a recipe file (TOML)", {"nargs": "?"}),
    ("train", "recipe", "a recipe file (TOML)", {}),
    ("plan train probe", "overrides key=value", "changes, such as train.steps=50", {"nargs": "*"}),
    ("eval predict replay export", "run", "a run folder, such as runs/language", {}),
    (
        "train eval predict replay export explain",
        "--trust",
        (
            "open a run of somebody whose code may run and whose places are used: a module, a pickle, "
            "an older checkpoint, checkpoint.target"
        ),
        {"action": "store_true"},
    ),
    (
        "report",
        "runs",
        "a run folder, such as runs/language; several are compared; none: a list of runs/",
        {"nargs": "*"},
    ),
    ("replay", "--step N", "the step, as the report counts", {"type": int, "required": True}),
    ("init", "paths PATH", "a file or folder, python:stdlib, hf:NAME …", {"nargs": "+"}),
    ("init", "--out", "file to write (default recipe.toml)", {"default": "recipe.toml"}),
    ("probe", "--out", "file to write (default cluster.toml)", {"default": "cluster.toml"}),
    ("probe", "--disk", "folder whose disk is measured (default: here)", {"default": "."}),
    ("train probe", "--hosts", "a,b,user@c:2 (ranks), or @FILE: run on these hosts over ssh (docs/hosts.md)", {}),
    (
        "train",
        "--slurm OPTIONS",
        'submit it as a batch job, with options of sbatch, such as "nodes=2 time=4:00:00"',
        {},
    ),
    (
        "train",
        "--kubernetes FILE",
        ('write a manifest, with its options: "train.yaml image=registry/espalier:1 claim=work" (docs/clusters.md)'),
        {},
    ),
    (
        "train",
        "--ray ADDRESS",
        "ranks as actors of a Ray cluster: this host's (default), HOST:6379, or local",
        {"nargs": "?", "const": "auto"},
    ),
    ("train", "--run", "run folder (default runs/<recipe name>)", {}),
    ("train", "--from RUN", "begin another run with the newest checkpoint of the run in RUN", {"dest": "source"}),
    (
        "eval",
        "--watch",
        "evaluate checkpoints as they come, beside training, until the run is done",
        {"action": "store_true"},
    ),
    (
        "eval",
        "--task NAME=FILE",
        "also multiple-choice questions in a JSONL file, or lm-eval:TASK (docs/evaluate.md)",
        {"action": "append", "default": []},
    ),
    ("eval", "--workers N", "inference processes (default: one for each core)", {"type": int}),
    ("eval", "--data PATH", "evaluate on the held-out part of this data instead of the run's", {}),
    ("predict", "--data PATH", "of a graph: predict for this data instead of the run's", {}),
    ("report", "--trace FILE", "of a cluster's jobs: Acme's columns, sacct -P, or a folder of runs", {}),
    ("report", "--serve", "show the run live on this machine's loopback", {"action": "store_true"}),
    ("report", "--port", "port for --serve (default: any free one)", {"type": int, "default": 0}),
    (
        "export",
        "--to",
        (
            "hf (Llama-format folder; of text the default), gguf (llama.cpp, Ollama), peft, safetensors, "
            "of graphs embeddings, packed (few bits)"
        ),
        {"choices": FORMS},
    ),
    ("export", "--merge", "whole weights, with the adapters in them", {"action": "store_true"}),
    ("export", "--no-bos", "of text: the exported tokenizer puts nothing before a text", {"action": "store_true"}),
    ("export", "--out", "folder to write (default RUN/export-FORMAT)", {}),
    ("explain", "names NAME", "systems, such as amsp (default: all twenty)", {"nargs": "*"}),
    ("explain", "--energy", "of runs: joules of an inference", {"action": "store_true"}),
    ("diagnose", "logs LOG", "logs, or a run's folder", {"nargs": "+"}),
    ("diagnose", "--rules FILE", "rules and incidents of your own", {}),
    ("plan", "--cluster", "a cluster file instead of this machine", {}),
    (
        "plan",
        "--what-if KEY=VALUE",
        ("also plan for a changed cluster (links.between=25Gbit/s, nodes.count=4) or option (model.depth=12)"),
        {"action": "append", "default": []},
    ),
    ("plan", "--html FILE", "write a page with the trade-off of time against memory", {}),
    (
        "plan",
        "--parts FOLDER",
        "of a graph: write the part of each rank (src/espalier/mechanisms/halo_exchange/README.md)",
        {},
    ),
    ("plan", "--calibrate-on FILE", "measured steps, or a run folder, to learn from", {}),
    ("plan", "--score FILE", "compare predictions with the measured steps in FILE (no recipe)", {}),
    ("plan", "--out FILE", "where --score writes its rows (default FILE.scored.…)", {}),
    (
        "predict",
        "input",
        (
            "text to go on from; of a graph: nodes, pairs or graphs (default all); "
            "of a scene: cameras in a file, or a test view's number; @FILE; -: each line of stdin"
        ),
        {"nargs": "?"},
    ),
    ("predict", "--turntable GIF", "of a scene: write an animation of a way round it", {}),
    ("predict", "--chat", "a chat: lines of the terminal, until Ctrl-D", {"action": "store_true"}),
    ("predict", "--serve", "answer OpenAI's protocol on loopback", {"action": "store_true"}),
    ("predict", "--port", "port for --serve (default: any free one)", {"type": int, "default": 0}),
    ("predict", "--tokens", "tokens to generate (default 200)", {"type": int, "default": 200}),
    ("predict", "--temperature", "0 takes the likeliest (default)", {"type": float, "default": 0.0}),
    ("predict", "--top-k", "sample among the k likeliest only; links of a node", {"type": int}),
    ("predict", "--seed", "of the sampling (default 0)", {"type": int, "default": 0}),
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
    for names, usage, text, options in ARGUMENTS:
        flag, _, metavar = usage.partition(" ")
        shown: dict[str, Any] = {"metavar": metavar} if metavar else {}
        for name in names.split():
            made[name].add_argument(flag, help=text, **shown, **options)
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
