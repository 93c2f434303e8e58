"""The planned language run beside what a user would write or take instead: same model, same data, same machine.

    python bench/language.py [--quick] [--pairs N] [--json FILE] [--only SHAPE,...,first-step,chunked-loss]

Peers: a plain DistributedDataParallel loop (fused AdamW, gradient_as_bucket_view), FSDP2, one process with all threads,
the 60 lines of bench/plain_loop.py, and the Hugging Face Trainer with its own Llama of the same shape. All train fp32
with AdamW and clip at 1.0. Each measurement is a fresh set of forked ranks that runs a few steps; ours and every peer
take turns, so that the machine's mood strikes all alike. Also measured: peak memory, the time from command to first
step, and (chunked-loss) one rank whose vocabulary is large, its loss by chunks of tokens beside the whole form and
beside the plain loop with a chunked cross entropy, whose logits are computed again in backward.

Where there is a GPU, one rank trains on it by Espalier's own plan, as do the plain loop (under autocast to bfloat16, as
it stands and through torch.compile) and the Trainer (bf16); a row more says how far the plan's prediction was off.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from espalier.cli import resolve_recipe, run_plan
from espalier.kernels import accelerator
from espalier.launch.ranks import agent
from espalier.machine.peak_memory import peak_memory
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import Interrupted
from espalier.train import rank_spec as launch
from espalier.train import trainer, worker, workload_registry
from espalier.train.rank_setup import RankSetup
from espalier.train.workload_registry import Resolved
from table import Row, arguments, compare, publish, within

TURN = 180.0
"""Seconds in which a contestant takes its turn, else it is ended: ranks of a plain loop may hang as they part."""
CORES = len(os.sched_getaffinity(0))
DEVICE = accelerator.of_rank(0)


@dataclass(frozen=True)
class Shape:
    """One case: a decoder and a batch."""

    name: str
    depth: int
    width: int
    sequence: int
    batch_tokens: int


SHAPES = (
    Shape("1M-128", 2, 192, 128, 4096),
    Shape("2M-256", 4, 192, 256, 4096),
    Shape("5M-512", 6, 256, 512, 4096),
    Shape("10M-256", 6, 384, 256, 2048),
    Shape("20M-1024", 6, 512, 1024, 2048),
)
WORDS, CHUNK = 32_768, 256
CHUNKED = Shape("7M-32k-words", 2, 192, 512, 2048)
ON_GPU = (Shape("120M-1024", 12, 768, 1024, 32768), Shape("350M-2048", 24, 1024, 2048, 32768))


@dataclass(frozen=True)
class Measured:
    """One measurement: median tokens per second over its steps, and the most memory all its ranks held, in bytes."""

    tokens_per_second: float
    memory: float


@dataclass(frozen=True)
class Case:
    """A shape made ready: recipe, corpus, and the plan Espalier chose."""

    shape: Shape
    resolved: Resolved
    workload: Any
    plan: Any

    def batches(self, rank: int, world: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The (tokens, targets) of `count` steps for one of `world` equal ranks: the same data ours reads."""
        from espalier.parallel.workload import Shard

        total = self.workload.global_batch
        cuts = [total * one // world for one in (rank, rank + 1)]
        shard = Shard(cuts[0], cuts[1], cuts[1] - cuts[0])
        return [self.workload.batches(step, shard)[0][:2] for step in range(count)]


def make_case(shape: Shape, cache: Path, **changes: dict[str, Any]) -> Case:
    """Derives the recipe, opens the corpus and lets Espalier plan (trials included). `changes`: of tables."""
    table = {
        "name": shape.name,
        "model": {"depth": shape.depth, "width": shape.width},
        "data": {"path": "python:stdlib"},
        "train": {
            "steps": 1000,
            "sequence": shape.sequence,
            "batch_tokens": shape.batch_tokens,
            "optimizer": {"kind": "adamw"},
        },
    }
    for name, change in changes.items():
        table[name] = {**table.get(name, {}), **change}
    recipe, derivations = defaults.resolve(recipe_file.from_table(table))
    resolved = Resolved(recipe, derivations)
    workload = workload_registry.open_workload(resolved)
    plan = run_plan.choose(resolved, workload, resolve_recipe.machines(recipe))
    return Case(shape, resolved, workload, plan)


# --- the contestants ---------------------------------------------------------------------------------------------


def ours(case: Case, steps: int) -> Measured:
    """The run as `espalier train` does it, without checkpoints and validation."""
    plan = case.plan

    def life(place: launch.RankSpec) -> tuple[list[float], float]:
        seconds: list[float] = []

        def emit(event: str, **fields: Any) -> None:
            if event == "step":
                seconds.append(fields["seconds"])

        setting = RankSetup(case.resolved.recipe, plan, case.workload, place, emit=emit, stop_after=steps)
        with worker.joined(place, 60.0) as channel:
            one = trainer.Trainer(setting, channel)
            with contextlib.suppress(Interrupted):
                one.run()
        return seconds, peak_memory(setting.device)

    return _summary(case, agent.run(life, launch.places(plan)))


def plain_ddp(case: Case, steps: int) -> Measured:
    """DistributedDataParallel with everything PyTorch recommends, one rank per core."""

    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    return _loop(case, steps, CORES, 1, wrap)


def fsdp2(case: Case, steps: int) -> Measured:
    """FSDP2: every block sharded, then the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        mesh = init_device_mesh("cpu", (CORES,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    return _loop(case, steps, CORES, 1, wrap)


def one_process(case: Case, steps: int) -> Measured:
    """One process with a thread per core."""
    return _loop(case, steps, 1, CORES, lambda model: model)


def _loop(case: Case, steps: int, world: int, threads: int, wrap: Callable[..., Any]) -> Measured:
    """The training loop of the tutorials: forward, backward, clip, step."""

    def life(place: launch.RankSpec) -> tuple[list[float], float]:
        torch.set_num_threads(place.threads)
        if world > 1:
            dist.init_process_group("gloo", store=launch.store(place, 60.0), rank=place.rank, world_size=world)
        workload = case.workload
        model = workload.build(torch.device("cpu"), torch.float32)
        wrapped = wrap(model)
        options = case.resolved.recipe.train.optimizer
        optimizer = torch.optim.AdamW(
            wrapped.parameters(), lr=options.learning_rate, betas=options.betas, weight_decay=0.1, fused=True
        )
        batches = case.batches(place.rank, world, steps)
        seconds = []
        for tokens, targets in batches:
            begun = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            logits = wrapped(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            loss.item()  # a loop that logs its loss
            seconds.append(time.perf_counter() - begun)
            peak_memory(torch.device("cpu"))  # looks as often as ours
        if world > 1:
            dist.barrier()  # and no more: a Reducer that is the group's last owner waits for Gloo with the GIL held
        return seconds, peak_memory(torch.device("cpu"))

    places = [launch.RankSpec(rank=index, world=world, local_rank=index, threads=threads) for index in range(world)]
    return _summary(case, agent.run(life, places))


def compiled(case: Case, steps: int) -> Measured:
    """The same 60 lines, the model through torch.compile."""
    return plain_loop(case, steps, compiled=True)


def plain_loop(case: Case, steps: int, compiled: bool = False, chunk: int = 0, threads: int = CORES) -> Measured:
    """The 60 lines of bench/plain_loop.py: the same decoder in plain PyTorch, one process with a thread per core."""
    options = case.resolved.recipe.model
    names = ("width", "depth", "heads", "kv_heads", "feed_forward", "vocabulary")
    sizes = {name: getattr(options, name) for name in names}
    sizes |= {"tied": bool(options.tied), "sequence": case.shape.sequence}
    with tempfile.TemporaryDirectory() as folder:
        data, file = Path(folder) / "batches.pt", Path(folder) / "request.json"
        rows = [torch.cat([tokens, targets[:, -1:]], dim=1) for tokens, targets in case.batches(0, 1, steps)]
        torch.save(torch.cat(rows), data)
        rate = case.resolved.recipe.train.optimizer.learning_rate
        micro_batch = len(rows[0]) if DEVICE.type == "cpu" else case.plan.micro_batch
        request = {"sizes": sizes, "data": str(data), "batch": len(rows[0]), "micro_batch": micro_batch}
        request |= {"device": str(DEVICE), "compiled": compiled, "chunk": chunk}
        file.write_text(json.dumps({**request, "threads": threads, "learning_rate": rate}))
        program = Path(__file__).parent / "plain_loop.py"
        done = subprocess.run([sys.executable, program, file], capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return _summary(case, [(answer["seconds"], answer["memory"])])


def hf_trainer(case: Case, steps: int) -> Measured:
    """The Hugging Face Trainer with its Llama of the same shape, one process with a thread per core."""
    program = Path(__file__).parent / "peers" / "hf_trainer.py"
    options = case.resolved.recipe.model
    shape = {
        "hidden_size": options.width,
        "num_hidden_layers": options.depth,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "intermediate_size": options.feed_forward,
        "vocab_size": options.vocabulary,
        "tie_word_embeddings": bool(options.tied),
    }
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "batches.pt"
        rows = [torch.cat([tokens, targets[:, -1:]], dim=1) for tokens, targets in case.batches(0, 1, steps)]
        torch.save(torch.cat(rows), data)
        request = {
            "shape": shape,
            "data": str(data),
            "batch": len(rows[0]) if DEVICE.type == "cpu" else case.plan.micro_batch,
            "accumulate": 1 if DEVICE.type == "cpu" else len(rows[0]) // case.plan.micro_batch,
            "device": DEVICE.type,
            "steps": steps,
            "threads": CORES,
            "learning_rate": case.resolved.recipe.train.optimizer.learning_rate,
            "folder": folder,
        }
        done = subprocess.run(
            [sys.executable, program, json.dumps(request)], capture_output=True, text=True, check=False, timeout=600
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    return _summary(case, [(answer["seconds"], answer["memory"])])


def _summary(case: Case, ranks: list[tuple[list[float], float]]) -> Measured:
    """Step time is the slowest rank's; the first two steps warm up."""
    steps = [max(times) for times in zip(*(seconds for seconds, _ in ranks), strict=True)][2:]
    return Measured(case.shape.batch_tokens / statistics.median(steps), sum(memory for _, memory in ranks))


PEERS = {
    "ddp": plain_ddp,
    "fsdp2": fsdp2,
    "one-process": one_process,
    "plain-loop": plain_loop,
    "hf-trainer": hf_trainer,
}
if DEVICE.type != "cpu":
    PEERS = {"plain-loop": plain_loop, "plain-loop, compiled": compiled, "hf-trainer": hf_trainer}


# --- the measurements --------------------------------------------------------------------------------------------


def throughput(case: Case, pairs: int, steps: int, note: str) -> list[Row]:
    """Ours beside every peer in turn, `pairs` times."""
    found: dict[str, list[Measured | None]] = {name: [] for name in ("ours", *PEERS)}
    for _ in range(pairs):
        for name, contestant in {"ours": ours, **PEERS}.items():
            found[name].append(turn(contestant, case, steps))
        last = {
            name: "late" if (one := turns[-1]) is None else f"{one.tokens_per_second:,.0f}"
            for name, turns in found.items()
        }
        print(f"  {case.shape.name}: " + ", ".join(f"{name} {said}" for name, said in last.items()))
    plan = f"{len(case.plan.ranks)}x{case.plan.ranks[0].threads}"
    label = f"{case.shape.name} (ours {plan}, {case.plan.precision}){note}"
    rows = [_predicted(case, label, found["ours"])] if DEVICE.type != "cpu" else []
    for name in PEERS:
        both = [(a, b) for a, b in zip(found["ours"], found[name], strict=True) if a is not None and b is not None]
        late = f", {pairs - len(both)} of {pairs} turns left out: not done in {TURN:.0f} s" if len(both) < pairs else ""
        if not both:
            print(f"  {label}, {name}: no row{late}")
            continue
        speeds = [(a.tokens_per_second, b.tokens_per_second) for a, b in both]
        rows.append(compare(label + late, name, "tokens/s", speeds))
        if name in ("ddp", "plain-loop") or DEVICE.type != "cpu":
            memory = [(a.memory / 2**20, b.memory / 2**20) for a, b in both]
            rows.append(compare(label + late, name, "MiB peak, all ranks", memory, higher_is_better=False))
    return rows


def chunked_loss(pairs: int, steps: int, note: str) -> list[Row]:
    """The loss by chunks beside the whole form and the plain loop's chunks, one rank of one thread."""

    def case(chunk: int) -> Case:
        pin = {"ranks": 1, "threads": 1, "recompute": "none", "loss_chunk": chunk}
        pin["micro_batch"] = CHUNKED.batch_tokens // CHUNKED.sequence
        model, train = {"vocabulary": WORDS, "tied": True}, {"precision": "fp32"}
        return make_case(CHUNKED, Path(), model=model, train=train, plan={"trial": False, "pin": pin})

    ours_chunked, whole = case(CHUNK), case(0)
    contestants: dict[str, Callable[[], Measured]] = {
        "ours": lambda: ours(ours_chunked, steps),
        "the whole form": lambda: ours(whole, steps),
        "plain loop, chunked": lambda: plain_loop(whole, steps, chunk=CHUNK, threads=1),
        "plain loop, whole": lambda: plain_loop(whole, steps, threads=1),
    }
    turns = [{name: contestant() for name, contestant in contestants.items()} for _ in range(pairs)]
    rows, label = [], f"{CHUNKED.name}, loss by {CHUNK} tokens{note}"
    for name in list(contestants)[1:]:
        speeds = [(each["ours"].tokens_per_second, each[name].tokens_per_second) for each in turns]
        rows.append(compare(label, name, "tokens/s", speeds))
    memory = [(each["ours"].memory / 2**20, each["the whole form"].memory / 2**20) for each in turns]
    return [*rows, compare(label, "the whole form", "MiB peak", memory, higher_is_better=False)]


def _predicted(case: Case, label: str, turns: list[Measured | None]) -> Row:
    """Seconds of a step beside the plan's."""
    said = case.plan.predicted.step_seconds
    seconds = [(case.shape.batch_tokens / one.tokens_per_second, said) for one in turns if one is not None]
    return compare(f"{label}: a step, as planned", "prediction", "s", seconds, higher_is_better=False)


def turn(contestant: Callable[[Case, int], Measured], case: Case, steps: int) -> Measured | None:
    """One measurement; None where it was not done in time, and was ended."""
    try:
        with within(TURN):
            return contestant(case, steps)
    except TimeoutError:
        return None


def first_step(pairs: int, note: str) -> list[Row]:
    """Seconds from the command to its first step: with nothing cached (limit 20), then with everything (limit 8)."""
    recipe = Path(__file__).parent.parent / "examples" / "language.toml"
    rows = []
    for label, limit, fresh in (("first time", 20.0, True), ("cached probe", 8.0, False)):
        seconds = []
        cache = Path(tempfile.mkdtemp())
        for number in range(pairs + (not fresh)):
            if fresh:
                shutil.rmtree(cache)
            taken = _until_first_step(recipe, cache)
            if fresh or number:
                seconds.append(taken)
        shutil.rmtree(cache)
        rows.append(
            compare(
                f"command to first step, {label}{note}",
                "limit",
                "s",
                [(value, limit) for value in seconds],
                higher_is_better=False,
            )
        )
    return rows


def _until_first_step(recipe: Path, cache: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        begun = time.time()
        process = subprocess.Popen(
            [sys.executable, "-m", "espalier", "train", recipe, "--run", f"{folder}/run", "--json"],
            env={**os.environ, "XDG_CACHE_HOME": str(cache)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        log = Path(folder) / "run" / "events.jsonl"
        try:
            while process.poll() is None and time.time() - begun < 120:
                if log.exists():
                    for line in log.read_text().splitlines():
                        if '"event":"step"' in line:
                            return float(json.loads(line)["time"]) - begun
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
    raise RuntimeError("no step was taken")


def main() -> None:
    """Runs everything and prints the table."""
    wanted = arguments(__doc__ or "", only={"help": "names of shapes, or first-step"})
    torch.set_num_threads(1)
    note = ", quick" if wanted.quick else ""
    known = SHAPES if DEVICE.type == "cpu" else ON_GPU
    every = [shape.name for shape in (known[:2] if wanted.quick else known)] + ["first-step", "chunked-loss"]
    asked = wanted.only.split(",") if wanted.only else every
    shapes = [shape for shape in known if shape.name in asked]
    pairs = wanted.pairs or (3 if wanted.quick else 15)
    rows = []
    for shape in shapes:
        case = make_case(shape, Path())
        rows += throughput(case, pairs, 5 if DEVICE.type == "cpu" else 12, note)
    if "chunked-loss" in asked:
        rows += chunked_loss(pairs, 5, note)
    if "first-step" in asked:
        rows += first_step(3 if wanted.quick else 5, note)
    publish(rows, wanted.json)


if __name__ == "__main__":
    main()
