"""One case of bench/gpu.py: a few steps of a recipe on the GPU or on the processor, by the same plan.

    python bench/gpu_case.py NAME cuda|cpu STEPS [STOP]

The plan is made for a machine with as many GPUs as the case has ranks. Its ranks share this machine's one GPU, and
their messages go through host memory. With STOP the run is interrupted after that step, and resumed. Prints JSON: the
losses, seconds of a step, bytes allocated on the GPU.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from espalier.cli import run_plan
from espalier.kernels import accelerator
from espalier.language import gpt, hf
from espalier.language.tokenizer import ByteTokenizer
from espalier.launch.ranks import agent
from espalier.machine import cluster as clusters
from espalier.plan.base import Plan
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import Interrupted
from espalier.train import rank_spec as launch
from espalier.train import worker, workload_registry
from espalier.train.rank_setup import RankSetup

if not hasattr(dist, "all_gather_single"):  # PyTorch before 2.13
    dist.all_gather_single = dist.all_gather_into_tensor

GPT: dict[str, Any] = {
    "model": {"depth": 4, "width": 128, "heads": 4},
    "data": {"path": "corpus"},
    "train": {"sequence": 128, "batch_tokens": 2048, "optimizer": {"kind": "adamw"}, "precision": "fp32"},
}
MOE: dict[str, Any] = {**GPT, "model": {**GPT["model"], "kind": "moe", "experts": 4, "active": 2}}
TUNED: dict[str, Any] = {**GPT, "model": {"initial": "base"}, "data": {"path": "chats.jsonl", "validation": 0.2}}
PAIRS: dict[str, Any] = {**TUNED, "data": {"path": "pairs.jsonl", "validation": 0.2}}
GRAPH: dict[str, Any] = {"data": {"path": "planted:nodes=20000,degree=10"}, "train": {"precision": "fp32"}}
SCENE: dict[str, Any] = {"data": {"path": "spheres:"}, "train": {"precision": "fp32"}}


def pinned(table: dict[str, Any], **pins: Any) -> dict[str, Any]:
    return {**table, "plan": {"pin": pins}}


def graph(kind: str, **tables: Any) -> dict[str, Any]:
    return {**GRAPH, "model": {"kind": kind, "dropout": 0.0}, **tables}


def sent(codec: str) -> dict[str, Any]:
    return {**pinned(GPT, dp=2), "comm": {"codec": codec}}


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "decoder": (GPT, 1),
    "decoder, recompute blocks": (pinned(GPT, recompute="block"), 1),
    "decoder, recompute selectively": (pinned(GPT, recompute="selective"), 1),
    "decoder, 4 micro-batches": (pinned(GPT, micro_batch=4), 1),
    "decoder, Muon": ({**GPT, "train": {**GPT["train"], "optimizer": {"kind": "muon"}}}, 1),
    "decoder, tf32": ({**GPT, "train": {**GPT["train"], "precision": "tf32"}}, 1),
    "decoder, bf16": ({**GPT, "train": {**GPT["train"], "precision": "bf16"}}, 1),
    "decoder, fp16": ({**GPT, "train": {**GPT["train"], "precision": "fp16"}}, 1),
    "states in host memory": (pinned(GPT, offload="host"), 1),
    "states on disk": (pinned(GPT, offload="disk"), 1),
    "mixture of experts": (MOE, 1),
    "chats, all weights": ({**TUNED, "tune": {"kind": "full"}}, 1),
    "chats, adapters": ({**TUNED, "tune": {"kind": "lora", "rank": 4}}, 1),
    "chats, adapters on int8": ({**TUNED, "tune": {"kind": "lora", "rank": 4, "frozen": "int8"}}, 1),
    "preferences": ({**PAIRS, "tune": {"kind": "dpo", "rank": 4}}, 1),
    "graph, gcn": (graph("gcn"), 1),
    "graph, sage": (graph("sage"), 1),
    "graph, gat": (graph("gat"), 1),
    "graph, gin": (graph("gin"), 1),
    "graph, CBM": (graph("gcn", graph={"format": "cbm"}), 1),
    "graph, 8 of 32 activations": ({**GRAPH, "model": {"kind": "sage", "width": 32, "k": 8, "dropout": 0.0}}, 1),
    "graph, sampled": (graph("sage", graph={"fanout": [5, 5]}), 1),
    "graph on disk": (
        {
            "model": {"kind": "sage", "dropout": 0.0},
            "data": {"path": "planted:nodes=20000,degree=10,features=128,classes=16,train=0.05"},
            "graph": {"fanout": [5, 5]},
            "store": {"memory": "4MiB"},
            "train": {"batch_tokens": 32, "precision": "fp32"},
        },
        1,
    ),
    "graph, A2Q": (graph("gcn", quant={"kind": "a2q"}), 1),
    "graph, MEGA": (graph("gcn", quant={"kind": "mega"}), 1),
    "graph transformer": (graph("graph-transformer"), 1),
    "scene": ({**SCENE, "model": {"kind": "voxels", "resolution": 32}}, 1),
    "spiking scene": ({**SCENE, "model": {"kind": "spikingnerf", "resolution": 32}}, 1),
    "module": (
        {"model": {"kind": "module", "build": "mine:build"}, "train": {"batch_tokens": 4, "precision": "fp32"}},
        1,
    ),
    "tasks": (
        {
            "model": {"kind": "multitask", "length": 16},
            "towers": [{"name": "text", "kind": "text", "width": 32, "depth": 2}],
            "tasks": [{"name": "source", "data": "corpus", "towers": ["text"], "loss": "next_token", "batch": 4}],
            "train": {"precision": "fp32"},
        },
        1,
    ),
    "samples over 2": (pinned(GPT, dp=2), 2),
    "states over 2": (pinned(GPT, shard={"params": 2, "grads": 2, "optimizer": 2}), 2),
    "matrices over 2": (pinned(GPT, tp=2), 2),
    "matrices over 2, gathered": (pinned(GPT, tp=2, algorithm="fsp"), 2),
    "keys and values round 2": (pinned(GPT, cp=2), 2),
    "heads over 2": (pinned(GPT, hp=2), 2),
    "2 stages": (pinned(GPT, pp=2), 2),
    "2 stages, zero bubble": (pinned(GPT, pp=2, schedule="zero_bubble"), 2),
    "experts over 2": (pinned(MOE, ep=2), 2),
    "gradients of 8 bits": (sent("int8"), 2),
    "gradients of 1 bit": (sent("int1"), 2),
    "gradients by ZFP": (sent("zfp:8"), 2),
    "gradients by MPC": (sent("mpc"), 2),
    "gradients, largest 5 %": (sent("topk:0.05"), 2),
    "rounds of 4 steps": ({**GPT, "sync": {"kind": "co2", "replicas": 2, "steps": 4}}, 2),
    "optimizer node": (pinned(GPT, offload="node"), 2),
    "halos of fp32": (graph("sage", graph={"halo": {"bits": 32}}, plan={"pin": {"ranks": 2}}), 2),
    "halos of 1 bit": (graph("sage", graph={"halo": {"bits": 1}}, plan={"pin": {"ranks": 2}}), 2),
    "graph transformer over 2": (graph("graph-transformer", plan={"pin": {"ranks": 2}}), 2),
}

MINE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def build():
    made = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(16, 1, 8, 8, generator=made), torch.arange(16) % 4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 4))

    def loss(model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), torch.tensor(len(y))

    return model, data, loss, data
"""


def prepare_data() -> None:
    """The data of all cases, in this folder."""
    Path("corpus").mkdir()
    for number in range(9):
        text = "".join(f"{number} plus {i} is {number + i}\n" for i in range(800))
        Path("corpus", f"{number}.txt").write_text(text)
    chats = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes."}] for n in range(400)]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    pairs = [{"prompt": f"{n}?", "chosen": f"yes {n % 3}", "rejected": f"no, {n % 4}"} for n in range(400)]
    Path("pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    Path("mine.py").write_text(MINE)
    size = {"depth": 2, "width": 64, "heads": 4, "kv_heads": 2, "feed_forward": 96, "vocabulary": 256, "context": 512}
    options: Any = defaults.resolve(recipe_file.from_table({"model": {"kind": "gpt", **size}}))[0].model
    model = gpt.GPT(options)
    gpt.initialise(model, 1)
    hf.export(model, ByteTokenizer(), Path("base"))


def planned(name: str, steps: int) -> tuple[Any, Any, Plan]:
    """(recipe, workload, plan) of a case, for as many GPUs of this kind as it has ranks."""
    table, ranks = CASES[name]
    table = {**table, "name": "case", "train": {"steps": steps, **table.get("train", {})}}
    resolved = workload_registry.settle(recipe_file.from_table(table), Path.cwd())
    workload = workload_registry.open_workload(resolved)
    disk = '[[nodes.disks]]\npath = "."\nread = 1e9\nwrite = 1e9\niops = 10000.0\n'
    Path("cluster.toml").write_text(f'[[nodes]]\ndevice = "H100"\ndevices = {ranks}\n{disk}')
    return resolved, workload, run_plan.choose(resolved, workload, clusters.read("cluster.toml"), ranks)


def main() -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    name, device, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        prepare_data()
        resolved, workload, plan = planned(name, steps)
        where = "cuda:0" if device == "cuda" else "cpu"
        devices = [where if one.role == "trainer" else "cpu" for one in plan.ranks]
        both = zip(plan.ranks, devices, strict=True)
        ranks = tuple(msgspec.structs.replace(one, device=on, threads=2) for one, on in both)
        plan = msgspec.structs.replace(plan, ranks=ranks)

        def life(place: launch.RankSpec, stop: int | None) -> dict[str, Any]:
            found: list[tuple[float, float]] = []

            def emit(event: str, **fields: Any) -> None:
                if event == "step":
                    found.append((fields["loss"], fields["seconds"]))

            setting = RankSetup(resolved.recipe, plan, workload, place, Path("run"), emit, stop)
            with contextlib.suppress(Interrupted):
                worker.train(setting, None)
            memory = accelerator.peak_memory(torch.device(place.device)) if place.device != "cpu" else 0
            return {"steps": found, "memory": memory}

        Path("run").mkdir()
        stops = [*map(int, sys.argv[4:]), None]
        lives = [agent.run(functools.partial(life, stop=stop), launch.places(plan)) for stop in stops]
    steps_taken = [step for ended in lives for step in next(one for one in ended if one["steps"])["steps"]]
    losses, seconds = zip(*steps_taken, strict=True)
    taken = statistics.median(seconds[2:])
    memory = sum(one["memory"] for one in lives[-1])
    sys.stdout.write(json.dumps({"losses": losses, "seconds": taken, "memory": memory}) + "\n")


if __name__ == "__main__":
    main()
