"""One step of every workload and mechanism on the device `cuda`, without a GPU: tensors have a device and no data.

    python tests/together/cuda_steps.py LIBRARY FOLDER

FOLDER gets the data, LIBRARY is made from cuda_without_gpu.cpp. Prints JSON: `all`, the names of all cases, and
`failed`, of each of those that ran an empty text, or where it failed.

What reads values is in cuda_values.py: codecs, rounds, experts over ranks, graphs over parts and on disk. What copies
beside computation, offloading and optimizer nodes (LuWu), is tested on recorded streams
(shard/offload/test_cuda_streams.py).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

ctypes.CDLL(sys.argv[1])

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import FakeProcessGroup  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402

from espalier import comm  # noqa: E402
from espalier import recipe as config  # noqa: E402
from espalier.comm.backends import INNER  # noqa: E402
from espalier.kernels import accelerator  # noqa: E402
from espalier.kernels.ragged import Ragged  # noqa: E402
from espalier.language import gpt, hf  # noqa: E402
from espalier.language.tokenizer import ByteTokenizer  # noqa: E402
from espalier.language.tune.workload import TuneWorkload  # noqa: E402
from espalier.mechanisms.sharding import broadcast  # noqa: E402
from espalier.parallel import stage_messages as messages  # noqa: E402
from espalier.parallel.workload import to_device  # noqa: E402
from espalier.plan import base as plans  # noqa: E402
from espalier.recipe import defaults, recipe_file  # noqa: E402
from espalier.train import every_step, trainer, workload_registry  # noqa: E402
from espalier.train.rank_setup import RankSetup  # noqa: E402
from espalier.train.rank_spec import RankSpec  # noqa: E402

TRAIN: dict[str, Any] = {
    "steps": 4,
    "sequence": 96,
    "batch_tokens": 384,
    "validate_tokens": 64,
    "optimizer": {"kind": "adamw"},
}
MODEL: dict[str, Any] = {"depth": 2, "width": 32, "heads": 2}
TEXT = {"path": "corpus"}
CHATS = {"path": "chats.jsonl", "validation": 0.2}
GRAPH = {"path": "planted:nodes=200"}
CSR: dict[str, Any] = {"format": "csr"}
"""CBM is made of data, before there is a model."""
LOCAL = {
    **MODEL,
    "family": "gemma3_text",
    "tied": True,
    "window": 9,
    "local_theta": 50.0,
    "rope": {"kind": "yarn", "factor": 2.0, "original": 16, "query": 0.1},
}
FAMILY = {**MODEL, "family": "gemma2", "tied": True, "window": 9, "attention_cap": 5.0, "logit_cap": 5.0}
SCENE = {"path": "spheres:"}


PAIRS = {"path": "pairs.jsonl", "validation": 0.2}

MINE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def build():
    data = TensorDataset(torch.randn(16, 1, 8, 8), torch.arange(16) % 4)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 4))

    def loss(model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), torch.tensor(len(y))

    return model, data, loss, data
"""
# name -> (tables of the recipe, changes of the plan)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decoder": ({"model": MODEL, "data": TEXT}, {}),
    "accumulation": ({"model": MODEL, "data": TEXT}, {"micro_batch": 2}),
    "recompute selective": ({"model": MODEL, "data": TEXT}, {"recompute": "selective"}),
    "recompute block": ({"model": MODEL, "data": TEXT}, {"recompute": "block"}),
    "muon": ({"model": MODEL, "data": TEXT, "train": {**TRAIN, "optimizer": {"kind": "muon"}}}, {}),
    "clip": ({"model": MODEL, "data": TEXT, "train": {**TRAIN, "clip": 0.1}}, {}),
    "bf16": ({"model": MODEL, "data": TEXT}, {"precision": "bf16"}),
    "fp16": ({"model": MODEL, "data": TEXT}, {"precision": "fp16"}),
    "tf32": ({"model": MODEL, "data": TEXT}, {"precision": "tf32"}),
    "mixture of experts": ({"model": {**MODEL, "kind": "moe", "experts": 4}, "data": TEXT}, {}),
    "chats": ({"model": MODEL, "data": CHATS, "tune": {"kind": "full"}}, {}),
    "adapters": ({"model": {"initial": "base"}, "data": CHATS, "tune": {"kind": "lora", "rank": 2}}, {}),
    "int8 frozen": ({"model": {"initial": "base"}, "data": CHATS, "tune": {"kind": "lora", "frozen": "int8"}}, {}),
    "preferences": ({"model": {"initial": "base"}, "data": PAIRS, "tune": {"kind": "dpo", "rank": 2}}, {}),
    "optimizer in host memory": ({"model": MODEL, "data": TEXT}, {"offload": plans.Offload(optimizer="host")}),
    "two ranks": ({"model": MODEL, "data": TEXT}, {"cut": {}}),
    "states in shards": ({"model": MODEL, "data": TEXT}, {"cut": {}, "shard": (2, 2, 2)}),
    "matrices over 2": ({"model": MODEL, "data": TEXT}, {"cut": {"tensor": 2}, "algorithm": "fsp"}),
    "context of 2": ({"model": MODEL, "data": TEXT}, {"cut": {"context": 2}}),
    "heads of 2": ({"model": MODEL, "data": TEXT}, {"cut": {"heads": 2}}),
    "first of two stages": ({"model": MODEL, "data": TEXT}, {"cut": {}, "layers": ((0, 1), (1, 2))}),
    "last of two stages": ({"model": MODEL, "data": TEXT}, {"cut": {}, "layers": ((0, 1), (1, 2)), "at": 1}),
    "other family": ({"model": FAMILY, "data": TEXT}, {}),
    "local positions": ({"model": LOCAL, "data": TEXT}, {}),
    "shared expert": (
        {"model": {**MODEL, "kind": "moe", "experts": 4, "shared": 24, "normalized": False}, "data": TEXT},
        {},
    ),
    "graph transformer": (
        {"model": {"kind": "graph-transformer", "width": 16, "heads": 2}, "data": GRAPH, "train": {"steps": 4}},
        {},
    ),
    "graph regression": (
        {"model": {"kind": "gin"}, "data": GRAPH, "train": {"steps": 4}, "graph": {**CSR, "target": "values"}},
        {},
    ),
    "scene": ({"model": {"kind": "voxels", "resolution": 8}, "data": SCENE, "train": {"steps": 4}}, {}),
    "spiking scene": ({"model": {"kind": "spikingnerf", "resolution": 8}, "data": SCENE, "train": {"steps": 4}}, {}),
    "module": ({"model": {"kind": "module", "build": "mine:build"}, "train": {"steps": 4, "batch_tokens": 4}}, {}),
    "tasks": (
        {
            "model": {"kind": "multitask", "length": 16},
            "towers": [{"name": "text", "kind": "text", "width": 32, "depth": 2}],
            "tasks": [{"name": "source", "data": "corpus", "towers": ["text"], "loss": "next_token", "batch": 4}],
            "train": {"steps": 4},
        },
        {},
    ),
    **{
        f"graph, {kind}": (
            {"model": {"kind": kind, "width": 16}, "data": GRAPH, "train": {"steps": 4}, "graph": CSR},
            {},
        )
        for kind in ("gcn", "sage", "gat", "gin")
    },
}


class Answers(TorchDispatchMode):
    """What a program asks of data: a number is 1, a condition false for numbers and true for each row of a mask."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            kind = args[0].dtype
            return False if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        if func is aten.equal.default:
            return True
        if func is aten.nonzero.default:
            return args[0].new_zeros((args[0].numel(), args[0].ndim), dtype=torch.int64)
        if func is aten.repeat_interleave.Tensor and not (kwargs or {}).get("output_size"):
            return args[0].new_zeros(args[0].numel())
        if func is aten.bincount.default:
            return args[0].new_zeros(kwargs["minlength"] if kwargs else args[2])
        if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            args = (args[0], [part for one in args[1] for part in places(one)], *args[2:])
        return func(*args, **(kwargs or {}))


def places(index: Any) -> list[Any]:
    """A mask as indices of all its elements."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [index.new_zeros(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]


def swap(one: Any, other: Any) -> None:
    """As torch.utils.swap_tensors, which refuses tensors that FakeTensorMode remembers."""
    one.__dict__, other.__dict__ = dict(other.__dict__), dict(one.__dict__)
    torch._C._swap_tensor_impl(one, other)


def read(self: Any, values: Any) -> Any:
    """Sums of a step that went well."""
    assert values.numel()
    return 1.0, 1.0, False, (), ()


def load(path: Any, *given: Any) -> Any:
    """Weights of a file have data, also here."""
    with _disable_current_modes():
        return loads(path, *given)


torch.utils.swap_tensors = swap
every_step.Totals.read = read
loads, hf.load = hf.load, load
aten = torch.ops.aten


def bincount(numbers: Any, minlength: int) -> Any:
    """How many of them are 0, 1, …: as many of each."""
    found = numbers.new_zeros(minlength)
    found.told = [numbers.numel() // minlength] * minlength
    return found


def tolist(tensor: Any) -> Any:
    return getattr(tensor, "told", None) or lists(tensor)


def numpy(tensor: Any) -> Any:
    """Of host memory only, as ever."""
    assert tensor.device.type == "cpu", f"numpy() of a tensor on {tensor.device}"
    return np.ones(tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def read_form(cls: Any, header: Any) -> Any:
    """What a stage is told of what it gets: a block's output."""
    assert header.device.type == "cuda"
    return messages.MessageForm(((torch.float32, torch.Size((2, TRAIN["sequence"], MODEL["width"]))),), False)


messages.MessageForm.read = classmethod(read_form)
Ragged.checked = lambda self: self  # type: ignore[method-assign]
FakeTensor.numpy = numpy
torch.Tensor.bincount = bincount  # type: ignore[assignment]
lists, FakeTensor.tolist = FakeTensor.tolist, tolist
broadcast.hashed = lambda tensors: 2  # of data that ranks start from
accelerator.has_bf16 = accelerator.is_on


def plan_of(workload: Any, changes: dict[str, Any]) -> plans.Plan:
    """Of one rank, or of two where something is cut or shared; the program is the first."""
    changes, samples = {"precision": "fp32", **changes}, workload.global_batch
    cut, layers = changes.pop("cut", None), changes.pop("layers", ((0, 2),))
    if cut is None:
        return plans.Plan(
            ranks=(plans.Rank(device="cuda:0", share=(0, samples)),), **{"micro_batch": samples, **changes}
        )
    shared = bool(cut) or len(layers) > 1
    shares = [(0, samples)] * 2 if shared else [(0, samples // 2), (samples // 2, samples)]
    each = [(0,), (1,)] if len(layers) > 1 else [(0, 1)]
    stages = tuple(plans.Stage(ranks=ranks, layers=held, **cut) for ranks, held in zip(each, layers, strict=True))
    factors = ("params", "grads", "optimizer")
    groups = {name: (0, 1) for name, factor in zip(factors, changes.pop("shard", ()), strict=False) if factor > 1}
    return plans.Plan(
        ranks=tuple(plans.Rank(device="cuda:0", share=share) for share in shares),
        units=(plans.Unit(**groups, whole=True),),
        stages=stages,
        **{"micro_batch": samples // 2, **changes},
    )


def step(tables: dict[str, Any], changes: dict[str, Any]) -> None:
    """Build, forward, backward, exchange, update, validate."""
    recipe = recipe_file.from_table({"train": TRAIN, **tables})
    resolved = workload_registry.settle(recipe, Path.cwd())
    workload = workload_registry.open_workload(resolved)
    at = changes.get("at", 0)
    plan = plan_of(workload, {key: value for key, value in changes.items() if key != "at"})
    channel = None
    if len(plan.ranks) > 1:
        store = dist.HashStore()
        dist.PrefixStore("ranks", store).set(f"here/{1 - at}", "")  # the other rank, which nobody is
        channel = comm.connect(store, at, 2, timeout=20.0, inner="fake")
    try:
        place = RankSpec(rank=at, device="cuda:0", world=len(plan.ranks))
        setting = RankSetup(resolved.recipe, plan, workload, place)
        batches = workload.batches(0, setting.shard)
        with FakeTensorMode(allow_non_fake_inputs=True), Answers():
            one = trainer.Trainer(setting, channel)
            where = {parameter.device.type for parameter in one.built.model.parameters()}
            assert where == {"cuda"}, where
            one.train_step([to_device(batch, setting.device) for batch in batches])
            found = {one.grad.device.type for one in one.built.model.parameters() if one.grad is not None}
            assert found <= {"cuda"}, found
            if len(plan.stages) < 2:  # else a stage is told forms of two kinds
                one.validate()
            one.built.close()
    finally:
        if channel is not None:
            comm.disconnect()


def _nobody(asked: Any) -> dict[str, Any]:
    """Collectives that return at once, with whatever is in their outputs."""
    inner = FakeProcessGroup._create_internal(asked.rank, asked.size)
    return {"cpu": inner, "cuda": inner}


INNER["fake"] = _nobody


def forgotten() -> None:
    """A loss that looks up something which it left on the processor."""
    whole = TuneWorkload.loss

    def loss(self: Any, model: Any, batch: Any) -> Any:
        total, weight = whole(self, model, batch)
        return total * torch.ones(3), weight

    TuneWorkload.loss = loss  # type: ignore[method-assign]
    try:
        step(*CASES["chats"])
    finally:
        TuneWorkload.loss = whole  # type: ignore[method-assign]


def prepare() -> None:
    """The data, in this folder."""
    Path("corpus").mkdir()
    for number in range(9):
        Path("corpus", f"{number}.txt").write_text("".join(f"{number} plus {i} is {number + i}\n" for i in range(80)))
    chats = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes."}] for n in range(24)]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    Path("mine.py").write_text(MINE)
    pairs = [{"prompt": f"{n}?", "chosen": f"yes {n % 3}", "rejected": f"no, {n % 4}"} for n in range(16)]
    Path("pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    size = {"depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "feed_forward": 48, "vocabulary": 256, "context": 512}
    options: Any = defaults.resolve(config.Recipe(model=config.Gpt(**size)))[0].model
    model = gpt.GPT(options)
    gpt.initialise(model, 1)
    hf.export(model, ByteTokenizer(), Path("base"))


def main() -> None:
    """All of them, or those named."""
    os.chdir(sys.argv[2])
    os.environ["XDG_CACHE_HOME"] = os.getcwd()
    prepare()
    found = {}
    for name in sys.argv[3:] or [*CASES, "one tensor forgotten"]:
        try:
            if name in CASES:
                step(*CASES[name])
            else:
                forgotten()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    sys.stdout.write(json.dumps({"all": list(CASES), "failed": found}) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
