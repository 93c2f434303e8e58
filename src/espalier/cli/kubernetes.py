"""`espalier train --kubernetes "FILE image=… claim=…"`: writes a Kubernetes manifest, a JobSet or a Kubeflow TrainJob,
with as many pods, processors, GPUs and bytes of memory as the recipe's plan needs. Starts nothing.

Schemas: jobset.x-k8s.io/v1alpha2 (github.com/kubernetes-sigs/jobset) and trainer.kubeflow.org/v1alpha1
(github.com/kubeflow/trainer).
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from espalier.cli import plan as planning
from espalier.cli import resolve_recipe, run_trust, text_template
from espalier.machine import cluster as clusters
from espalier.plan.base import Plan, Rank
from espalier.recipe import cache_dir
from espalier.recipe.errors import UserError
from espalier.recipe.terminal import say

EXAMPLE = "train.yaml image=registry.example.org/espalier:1 claim=work"
PORT = 29400
FOLDER = "/work"
"""Where the claim is mounted; the run folder and relative paths of data are in it."""
_FILES = "/etc/espalier"
_GRACE = 120
"""Seconds between SIGTERM and SIGKILL, in which the run is saved."""
_MARGIN = 1.25
"""Memory asked for, over the predicted peak."""
_HOST = 8 << 30
"""Bytes of host memory of a rank that computes on a GPU (CUDA's own and the data's; not predicted)."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")


@dataclass(frozen=True)
class Wanted:
    """What stands in the option: see `EXAMPLE`."""

    file: Path
    image: str
    claim: str
    kind: str = "jobset"
    namespace: str = ""
    runtime: str = "torch-distributed"
    restarts: int = 3


@dataclass(frozen=True)
class Pods:
    """What the plan needs: pods, ranks in each, and of each pod whole processors, bytes and GPUs."""

    count: int
    ranks: int
    processors: int
    memory: int
    gpus: int


def run(arguments: argparse.Namespace) -> int:
    """Plans the run, and writes the manifest."""
    torch.set_num_threads(1)
    wanted = options(arguments.kubernetes)
    resolved = resolve_recipe.resolve(arguments.recipe, arguments.overrides, arguments.trust, arguments.run)
    cluster = resolve_recipe.machines(resolved.recipe)
    decision = planning.decided(resolved, cluster, None)
    if not decision.fits:
        raise decision.refusal()
    asked = pods(decision.plan)
    text = run_trust.text(arguments.recipe, arguments.trust)
    files = {"recipe.toml": text, "cluster.toml": clusters.dumps(cluster)}
    name = _name(resolved.recipe.name)
    cache_dir.replace(
        wanted.file, manifest(wanted, asked, _words(arguments, name), files), do="--kubernetes with another file"
    )
    if arguments.json:
        print(json.dumps({"manifest": str(wanted.file), "pods": asked.count, "ranks": asked.count * asked.ranks}))
    else:
        count = f"{asked.count} pods of {asked.ranks} ranks" if asked.count > 1 else f"one pod of {asked.ranks} ranks"
        say(f"Wrote {wanted.file}: {count}. Start it with: kubectl apply -f {wanted.file}")
    return 0


def options(text: str) -> Wanted:
    """What `text` asks for. Raises UserError for what it lacks, or what cannot be chosen."""
    try:
        file, *words = shlex.split(text)
        given = dict(word.split("=", 1) for word in words)
    except ValueError:
        raise UserError(f"--kubernetes {text!r} is not FILE name=value …", do=f"--kubernetes {EXAMPLE!r}") from None
    known = {"image", "claim", "kind", "namespace", "runtime", "restarts"}
    for name in given:
        if name not in known:
            raise UserError(f"--kubernetes: there is no option {name!r}.", do=f"one of {', '.join(sorted(known))}")
    why = {
        "image": "pods need an image with Espalier (the repository's Dockerfile makes one)",
        "claim": "all pods keep the run in one volume, a PersistentVolumeClaim that several of them may write",
    }
    for name, reason in why.items():
        if not given.get(name):
            raise UserError(f"--kubernetes: {name}= is missing.", why=reason, do=f"--kubernetes {EXAMPLE!r}")
    if given.get("kind", "jobset") not in ("jobset", "trainjob"):
        raise UserError(f"--kubernetes: kind={given['kind']} is not known.", do="kind=jobset or kind=trainjob")
    for name in ("claim", "namespace", "runtime"):
        if name in given and not _NAME.fullmatch(given[name]):
            raise UserError(f"--kubernetes: {name}={given[name]} is no name of Kubernetes.", do="a-z, 0-9 and -")
    restarts = given.pop("restarts", "3")
    if not restarts.isdecimal():
        raise UserError(f"--kubernetes: restarts={restarts} is no whole number.", do="restarts=3")
    return Wanted(Path(file), restarts=int(restarts), **given)


def pods(plan: Plan) -> Pods:
    """What the plan needs. Raises UserError where its machines are not alike, which pods are."""
    by_node: dict[int, list[Rank]] = {}
    for rank in plan.ranks:
        by_node.setdefault(rank.node, []).append(rank)
    shapes = {(len(ranks), sum(rank.device != "cpu" for rank in ranks)) for ranks in by_node.values()}
    if len(shapes) > 1:
        raise UserError(
            f"The plan has unlike machines: {', '.join(str(len(ranks)) for ranks in by_node.values())} ranks each.",
            why="the pods of one manifest are alike",
            do="a cluster file of machines that are alike, or plan.pin.ranks",
        )
    (ranks, gpus) = shapes.pop()
    if 0 < gpus < ranks:
        raise UserError("The plan has ranks with and without a GPU.", do="give ranks of one kind: plan.pin")
    threads = max(sum(rank.threads for rank in ranks_of_node) for ranks_of_node in by_node.values())
    peak = plan.predicted.memory_bytes.get("peak", 0.0) if plan.predicted is not None else 0.0
    memory = ranks * (_HOST if gpus else int(peak * _MARGIN))
    return Pods(len(by_node), ranks, max(threads, ranks), -(-memory >> 20) << 20, gpus)


def manifest(wanted: Wanted, asked: Pods, words: list[str], files: dict[str, str]) -> str:
    """The manifest in YAML: the recipe's `files`, and the job that runs `espalier train` with `words`. The last one
    names the run."""
    train = ["-m", "espalier", "train", f"{_FILES}/recipe.toml", f"plan.cluster={_FILES}/cluster.toml", *words]
    return text_template.render(
        "kubernetes.yaml.j2",
        {"json": _quoted, "block": _block},
        wanted=wanted,
        pods=asked,
        name=words[-1].removeprefix("name="),
        words=train,
        files=files,
        folder=FOLDER,
        files_at=_FILES,
        port=PORT,
        grace=_GRACE,
    )


def _words(arguments: argparse.Namespace, name: str) -> list[str]:
    """What the pods' command ends with. The run folder is named by the recipe's name, as torchrun has a `--run`."""
    if arguments.run:
        raise UserError(
            f"--run {arguments.run} and --kubernetes were both given.",
            why=f"the run is kept in {FOLDER}/runs/NAME of the claim",
            do=f"name={Path(arguments.run).name}",
        )
    given = [word for word in arguments.overrides if not word.startswith("name=")]
    return [*given, *["--trust"] * bool(arguments.trust), f"name={name}"]


def _name(text: str) -> str:
    """`text` as Kubernetes takes a name."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:52].strip("-")
    return name or "run"


def _quoted(value: Any) -> str:
    """As JSON has it, of which YAML is a superset; what YAML takes for a line end or nobody sees is escaped."""
    plain = json.dumps(value, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in plain)


def _block(text: str, depth: int) -> str:
    """A text as a block of lines, where that gives it back; else quoted."""
    lines = text.split("\n")
    whole = (
        len(lines) > 2 and not lines.pop() and lines[-1] and lines[0][:1].strip() and all(map(str.isprintable, lines))
    )
    return "\n".join(["|", *(" " * depth + line if line else "" for line in lines)]) if whole else _quoted(text)
