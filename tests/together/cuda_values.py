"""One step on the device `cuda` of what reads values, on ranks of their own, without a GPU: values lie in host memory.

    python tests/together/cuda_values.py LIBRARY FOLDER

As cuda_steps.py, whose folder and output it has. A tensor on `cuda` holds one on the processor, on which all is
computed; like a GPU's, it cannot be mixed with tensors of the processor, nor looked at by NumPy or by an address.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

ctypes.CDLL(sys.argv[1])

import msgspec  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

from espalier.cli import run_plan  # noqa: E402
from espalier.kernels import accelerator  # noqa: E402
from espalier.launch.ranks import agent  # noqa: E402
from espalier.machine import cluster as clusters  # noqa: E402
from espalier.mechanisms.expert_parallel.state import ExpertParallelState  # noqa: E402
from espalier.mechanisms.local_rounds.state import LocalRoundsState  # noqa: E402
from espalier.plan import base as plans  # noqa: E402
from espalier.recipe import recipe_file  # noqa: E402
from espalier.train import rank_spec as launch  # noqa: E402
from espalier.train import trainer, worker, workload_registry  # noqa: E402
from espalier.train.rank_setup import RankSetup  # noqa: E402

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
MIXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Their indices may be on the processor, as a GPU's may."""


class OnCuda(Tensor):
    """`held`, a tensor of the processor, as one on `cuda`."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnCuda:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, layout=held.layout, device=CUDA
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy.")

    def __array__(self, *given: Any) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        """For comparison alone: a kernel of the processor is not given it."""
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.held.tolist()

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        torch.Tensor.data.__set__(self, other)
        self.held = other.held  # type: ignore[attr-defined]


class Device(TorchDispatchMode):
    """Tensors are made on `cuda`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What `func` gives, computed on the processor, on the device where a GPU would have it."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    there = [one for one in tensors if isinstance(one, OnCuda)]
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if not there and (asked is None or asked.type != "cuda"):
        return func(*args, **kwargs)
    if func is aten._fused_sdp_choice.default:
        return 0
    if func is aten.copy_.default:
        args[0].copy_(args[1].held) if not isinstance(args[0], OnCuda) else args[0].held.copy_(plain(args[1]))
        return args[0]
    if func.namespace not in ("aten", "prim", "prims"):
        assert not there or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA"), f"{func} on cuda"
    if there and func not in MIXED and func is not aten._to_copy.default:
        strangers = [one for one in tensors if not isinstance(one, OnCuda) and one.dim()]
        assert not strangers, f"Expected all tensors to be on the same device: {func} of {list(map(describe, tensors))}"
    if asked is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    if "pin_memory" in kwargs:
        kwargs = kwargs | {"pin_memory": None}
    found = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    if asked is not None and asked.type != "cuda":
        return found
    wrapped = tree_map(there_too, found)
    if wrapped is None or not func._schema.returns or not there or asked is not None:
        return wrapped
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def there_too(one: Any) -> Any:
    return OnCuda(one) if isinstance(one, Tensor) else one


def plain(one: Any) -> Any:
    return one.held if isinstance(one, OnCuda) else one


def describe(one: Tensor) -> str:
    return f"{one.device}{list(one.shape)}"


def everywhere() -> None:
    """Threads have the device too."""
    run = threading.Thread.run

    def ran(self: threading.Thread) -> None:
        with Device():
            run(self)

    threading.Thread.run = ran  # type: ignore[method-assign]
    torch.cuda._lazy_init = lambda: None
    torch.cuda.get_device_capability = lambda device=None: (8, 0)
    torch._C._set_only_lift_cpu_tensors(True)
    accelerator.has_bf16 = accelerator.is_on
    accelerator.peak_memory = accelerator.peak_reserved = lambda device: 0
    torch.__future__.set_overwrite_module_params_on_conversion(True)


TRAIN: dict[str, Any] = {
    "steps": 4, "sequence": 96, "batch_tokens": 384, "validate_tokens": 64, "precision": "fp32",
    "optimizer": {"kind": "adamw"},
}  # fmt: skip
MODEL: dict[str, Any] = {"depth": 2, "width": 32, "heads": 2}
TEXT: dict[str, Any] = {"model": MODEL, "data": {"path": "corpus"}, "train": TRAIN}
EXPERTS = {**TEXT, "model": {**MODEL, "kind": "moe", "experts": 4}}
GRAPH = {
    "model": {"kind": "gcn", "width": 16}, "data": {"path": "planted:nodes=200"},
    "train": {"steps": 4, "precision": "fp32"},
}  # fmt: skip
SAMPLED = {**GRAPH, "model": {"kind": "sage", "width": 16}, "graph": {"fanout": [4, 3]}}
TASKS: dict[str, Any] = {
    "model": {"kind": "multitask", "length": 16},
    "towers": [{"name": name, "kind": "text", "width": 32, "depth": 2} for name in ("one", "two")],
    "tasks": [
        {"name": name, "data": "corpus", "towers": [tower], "loss": "next_token", "batch": 4}
        for name, tower in (("source", "one"), ("other", "two"))
    ],
    "train": {"steps": 4, "precision": "fp32"},
}
ROUNDS = LocalRoundsState(replicas=((0,), (1,)), method="co2", steps=2, adapt=False)
HELD = ((0, 2), (1, 3))


def coded(codec: str) -> dict[str, Any]:
    return {"exchanges": (plans.Exchange(traffic="gradients", codec=codec),)}


# name -> (tables of the recipe, changes of the plan of two ranks)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "codec int8": (TEXT, coded("int8")),
    "codec topk": (TEXT, coded("topk")),
    "codec mpc": (TEXT, coded("mpc")),
    "rounds of co2": (TEXT, {"choices": {"local_rounds": ROUNDS}}),
    "experts over ranks": (EXPERTS, {"choices": {"expert_parallel": ExpertParallelState(experts=HELD)}}),
    "graph over parts": (GRAPH, {}),
    "regression over parts": ({**GRAPH, "graph": {"target": "values", "halo": {"bits": 32}}}, {}),
    "sylvie": ({**GRAPH, "graph": {"halo": {"bits": 1}}}, {}),
    "sampled graph": (SAMPLED, {}),
    "a2q": ({**GRAPH, "quant": {"kind": "a2q"}}, {}),
    "mega": ({**GRAPH, "quant": {"kind": "mega"}}, {}),
    "transformer over parts": ({**GRAPH, "model": {"kind": "graph-transformer", "width": 16, "heads": 2}}, {}),
    "waves of tasks": (TASKS, {}),
    "features on disk": ({**SAMPLED, "store": {"path": "packed", "memory": "1MiB"}}, {}),
}


def plan_of(workload: Any, changes: dict[str, Any]) -> plans.Plan:
    """Of two ranks that divide a batch."""
    samples = workload.global_batch
    shares = ((0, samples // 2), (samples // 2, samples))
    ranks = tuple(plans.Rank(device="cuda:0", share=share) for share in shares)
    return plans.Plan(ranks=ranks, micro_batch=samples // 2, precision="fp32", **changes)


def waves_of(resolved: Any, workload: Any) -> plans.Plan:
    """Of two ranks, as planned for two GPUs."""
    Path("cluster.toml").write_text('[[nodes]]\ndevice = "H100"\ndevices = 2\n')
    with mock.patch.object(accelerator, "available", return_value=True):  # parts are timed in a child then
        plan = run_plan.choose(resolved, workload, clusters.read("cluster.toml"), 2)
    assert "task_waves" in plan.choices
    ranks = tuple(msgspec.structs.replace(one, device="cuda:0", threads=1) for one in plan.ranks)
    return msgspec.structs.replace(plan, ranks=ranks)


def step(tables: dict[str, Any], changes: dict[str, Any]) -> None:
    """Four steps on both ranks."""
    resolved = workload_registry.settle(recipe_file.from_table(tables), Path.cwd())
    workload = workload_registry.open_workload(resolved)
    plan, folder = plan_of(workload, changes), Path(tempfile.mkdtemp(dir="."))
    if "tasks" in tables:
        plan = waves_of(resolved, workload)
    places = launch.places(plan)
    if resolved.recipe.store is not None:
        workload.pack([RankSetup(resolved.recipe, plan, workload, place).shard for place in places])

    def life(place: launch.RankSpec) -> list[float]:
        everywhere()
        losses: list[float] = []

        def emit(event: str, **fields: Any) -> None:
            if event == "step":
                losses.append(fields["loss"])

        setting = RankSetup(resolved.recipe, plan, workload, place, folder, emit)
        with Device(), worker.joined(place, 20.0, staged=True) as channel:
            one = trainer.Trainer(setting, channel)
            where = {type(parameter.detach()) for parameter in one.built.model.parameters()}
            assert where == {OnCuda}, where
            one.run()
            one.built.close()
        return losses

    losses = agent.run(life, places)[0]
    assert len(losses) == 4, losses


def main() -> None:
    """All of them, or those named."""
    os.chdir(sys.argv[2])
    os.environ["XDG_CACHE_HOME"] = os.getcwd()
    Path("corpus").mkdir(exist_ok=True)
    for number in range(9):
        Path("corpus", f"{number}.txt").write_text("".join(f"{number} plus {i} is {number + i}\n" for i in range(80)))
    found = {}
    for name in sys.argv[3:] or list(CASES):
        try:
            step(*CASES[name])
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    sys.stdout.write(json.dumps({"all": list(CASES), "failed": found}) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
