"""Writes docs/advice.md (`make pages`): everyday questions about hardware, each answered by the planner itself."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from unittest.mock import patch

import torch

from espalier.cli import resolve_recipe
from espalier.machine import cluster as clusters
from espalier.machine.cluster import whatif
from espalier.plan import refusals
from espalier.plan.ask import PlanDecision
from espalier.plan.decide import decide
from espalier.recipe import Checkpoint, model_kinds, units
from espalier.sparse import partition
from espalier.train.workload_registry import Resolved

HEAD = """# What to expect from the hardware you have

Thirty-six questions, each with a recipe, a cluster file and the planner's own answer.
`espalier plan RECIPE --cluster FILE` answers the same way about files of yours, with more detail. All numbers are
predictions from datasheets: nothing on this page was measured ([how the planner works](planner.md)). `make pages`
writes the page, and a test compares it with a fresh run.
"""
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Question:
    """What somebody wants to train (`recipe`) on what they have (`cluster`), as TOML. `better`: a change of the cluster
    that the answer is compared with."""

    title: str
    ask: str
    recipe: str
    cluster: str
    better: str = ""

    @cached_property
    def asked(self) -> Resolved:
        """The recipe with nothing left open."""
        folder = Path(tempfile.mkdtemp())
        try:
            (folder / "recipe.toml").write_text(self.recipe, encoding="utf-8")
            return resolve_recipe.resolve(folder / "recipe.toml", [])
        finally:
            shutil.rmtree(folder)

    @cached_property
    def machines(self) -> clusters.Cluster:
        """The cluster."""
        return clusters.loads(self.cluster, self.title)

    @cached_property
    def answer(self) -> PlanDecision:
        """What the planner says, without trials and checkpoints."""
        return self._on(self.machines)

    @cached_property
    def compared(self) -> PlanDecision:
        """The same on the better cluster."""
        return self._on(whatif.changed(self.machines, [self.better]))

    def _on(self, cluster: clusters.Cluster) -> PlanDecision:
        sys.path.insert(0, str(HERE))  # where a module's function is looked for
        try:
            torch.set_num_threads(1)  # as `espalier plan` does: what a product of a graph takes depends on it
            with patch.object(partition, "installed", return_value=False):  # as after a plain install
                return decide(resolve_recipe.request(self.asked).changed(checkpoint=Checkpoint(every=1)), cluster)
        finally:
            sys.path.remove(str(HERE))

    @property
    def anchor(self) -> str:
        """As GitHub makes it of the heading."""
        return "".join(one for one in self.title.lower().replace(" ", "-") if one.isalnum() or one in "-_")


def section(one: Question) -> Iterator[str]:
    """The lines of one question."""
    yield from ("", f"## {one.title}", "", one.ask, "", "```toml", one.recipe.strip(), "```", "")
    yield from ("```toml", one.cluster.strip(), "```", "")
    found = one.answer
    if not found.fits:
        refusal = found.refusal()
        yield from (
            f"**{refusal.what}**",
            "",
            f"{refusal.why[0].upper()}{refusal.why[1:]}.",
            "",
            "What would fit, the cheapest first:",
            "",
        )
        yield from (f"- {change}" for change in refusal.do.split(refusals.SEPARATOR))
        return
    first, *others = found.plan.why
    assert found.plan.predicted is not None
    unit = model_kinds.of(one.asked.recipe.model).unit
    speed = f"{units.show_count(found.plan.predicted.tokens_per_second)} {unit}/s"
    yield from (f"**{first.removesuffix('.')}: {speed}.**", "")
    yield from (f"- {sentence}" for sentence in others)
    if one.better:
        yield f"- {compared(one)}"


def compared(one: Question) -> str:
    """What the better cluster would change."""
    here, there = one.answer.plan, one.compared.plan
    assert here.predicted is not None
    assert there.predicted is not None
    seconds = units.show_seconds(there.predicted.step_seconds)
    times = here.predicted.step_seconds / there.predicted.step_seconds
    gain = f"{times:.2g} times as fast" if abs(times - 1) > 0.05 else "no faster"
    return f"What would be better: `--what-if {one.better}` takes {seconds} a step, {gain} ({there.layout})."


def page() -> str:
    """All questions and answers."""
    table = [f"- [{one.title}](#{one.anchor})" for one in QUESTIONS]
    return "\n".join([HEAD, *table, *(line for one in QUESTIONS for line in section(one))]) + "\n"


def decoder(model: str, train: str, data: str = 'path = "python:stdlib"') -> str:
    """A recipe of a language model."""
    return f"[model]\n{model}\n\n[data]\n{data}\n\n[train]\n{train}\n"


def adapters(shape: str, frozen: str) -> str:
    """A recipe of LoRA, planned from a shape alone."""
    return f'[model]\nshape = "{shape}"\n\n[tune]\nkind = "lora"\nfrozen = "{frozen}"\n'


def nodes(device: str, devices: int = 1, count: int = 1, between: str = "", memory: str = "") -> str:
    """A cluster of equal machines."""
    lines = ["[[nodes]]", f'device = "{device}"']
    lines += [f"devices = {devices}"] * (devices > 1) + [f"count = {count}"] * (count > 1)
    lines += [f'memory = "{memory}"'] * bool(memory)
    return "\n".join([*lines, *(["", "[links]", f'between = "{between}"'] if between else [])])


BATCH = "sequence = 2048\nbatch_tokens = 524288"
EIGHT_BILLION = "width = 4096\ndepth = 32\nheads = 32\nkv_heads = 8\nfeed_forward = 14336\nvocabulary = 128256"
QWEN3_30B = (
    'kind = "moe"\nfamily = "qwen3"\nwidth = 2048\ndepth = 48\nheads = 32\nkv_heads = 4\nhead_size = 128\n'
    "feed_forward = 768\nvocabulary = 151936\nexperts = 128\nactive = 8"
)
MIXTRAL = (
    'kind = "moe"\nwidth = 4096\ndepth = 32\nheads = 32\nkv_heads = 8\nfeed_forward = 14336\nvocabulary = 32000\n'
    "experts = 8\nactive = 2"
)
DEEPSEEK_V3 = (
    'kind = "moe"\nwidth = 7168\ndepth = 61\nheads = 128\nkv_heads = 128\nfeed_forward = 2048\nvocabulary = 129280\n'
    "experts = 256\nactive = 8\nshared = 2048"
)
LAPTOP = 'device = "cpu"\ncores = 8\nmemory = "16GiB"'

QUESTIONS = (
    Question(
        "7B on eight RTX 4090",
        "I have one machine with eight RTX 4090. How do I train a 7B model?",
        decoder('shape = "llama-7b"', BATCH),
        nodes("RTX 4090", 8),
        "nodes.device=H100",
    ),
    Question(
        "1B on two laptops",
        "Two laptops, a home network. Can they train a model of one billion parameters together?",
        decoder("depth = 20\nwidth = 2048\nheads = 16", "sequence = 1024\nbatch_tokens = 65536"),
        f'[[nodes]]\ncount = 2\n{LAPTOP}\n\n[links]\nbetween = "1Gbit/s"',
        "nodes.cores=16",
    ),
    Question(
        "7B on four hosts at 100 Mbit/s",
        "Four hosts with an A100 each, at four sites with 100 Mbit/s between them. What works for a 7B model?",
        decoder('shape = "llama-7b"', BATCH),
        nodes("A100-80GB", 1, 4, "100Mbit/s"),
        "links.between=10Gbit/s",
    ),
    Question(
        "70B on 64 H100",
        "Eight machines with eight H100 each. Which layout for a 70B model?",
        decoder('shape = "llama-70b"', "sequence = 4096\nbatch_tokens = 4194304"),
        nodes("H100", 8, 8, "3200Gbit/s"),
        "links.between=400Gbit/s",
    ),
    Question(
        "A mixture of eight 7B experts",
        "A mixture of experts with the sizes of Mixtral 8x7B, on two machines with eight H100.",
        decoder(
            MIXTRAL,
            "sequence = 4096\nbatch_tokens = 1048576",
        ),
        nodes("H100", 8, 2, "3200Gbit/s"),
        "nodes.count=4",
    ),
    Question(
        "128 Ki tokens of context",
        "An 8B model on sequences of 131,072 tokens, on eight H100.",
        decoder(EIGHT_BILLION, "sequence = 131072\nbatch_tokens = 1048576"),
        nodes("H100", 8),
        "nodes.device=H200",
    ),
    Question(
        "GPT-2 on one RTX 3060",
        "A model of GPT-2's size on the RTX 3060 in my desk.",
        decoder('shape = "gpt2-124m"', "sequence = 1024\nbatch_tokens = 65536"),
        nodes("RTX 3060"),
        "nodes.device=RTX 4090",
    ),
    Question(
        "Fine-tuning 8B on one RTX 4090",
        "An 8B model on one RTX 4090, as people do with LoRA.",
        decoder(EIGHT_BILLION, "sequence = 2048\nbatch_tokens = 65536"),
        nodes("RTX 4090"),
    ),
    Question(
        "LoRA of 8B on one RTX 4090",
        "The same with adapters beside frozen weights in bf16.",
        adapters("llama3-8b", "bf16"),
        nodes("RTX 4090"),
        "nodes.device=RTX 5090",
    ),
    Question(
        "LoRA of 70B on two RTX 3090",
        "Adapters for a 70B model on two cards of 24 GB, its frozen weights in 4 bits.",
        adapters("llama3-70b", "int4"),
        nodes("RTX 3090", 2),
    ),
    Question(
        "7B on one RTX 4090 with 128 GiB of memory",
        "One RTX 4090 in a machine with 128 GiB of memory: can it train all weights of a 7B model?",
        decoder('shape = "llama-7b"', 'sequence = 2048\nbatch_tokens = 16384\noptimizer = { kind = "adamw" }'),
        nodes("RTX 4090", memory="128GiB"),
        "nodes.devices=2",
    ),
    Question(
        "350M on a laptop with a GPU",
        "A model of 350 million parameters on the 8 GB card of a laptop.",
        decoder('shape = "gpt2-355m"', "sequence = 1024\nbatch_tokens = 65536"),
        nodes("RTX 4070 Laptop"),
        "nodes.device=RTX 4090 Laptop",
    ),
    Question(
        "13B on two machines with L40S",
        "Two machines with eight L40S each, 100 Gbit/s between them, a 13B model.",
        decoder('shape = "llama-13b"', BATCH),
        nodes("L40S", 8, 2, "100Gbit/s"),
        "links.between=400Gbit/s",
    ),
    Question(
        "Four cards of three kinds",
        "An RTX 5090, two RTX 3090 and an RTX 4070 in three machines, 10 Gbit/s between them: a model of GPT-2's size.",
        decoder('shape = "gpt2-124m"', "sequence = 1024\nbatch_tokens = 262144"),
        '[[nodes]]\ndevice = "RTX 5090"\n\n[[nodes]]\ndevice = "RTX 3090"\ndevices = 2\n\n[[nodes]]\n'
        'device = "RTX 4070"\n\n[links]\nbetween = "10Gbit/s"',
        "links.between=25Gbit/s",
    ),
    Question(
        "Eight servers without GPUs",
        "Eight servers with 32 cores each, 10 Gbit/s between them: a model of GPT-2's size.",
        decoder('shape = "gpt2-124m"', "sequence = 1024\nbatch_tokens = 262144"),
        '[[nodes]]\ncount = 8\ndevice = "cpu"\ncores = 32\nmemory = "128GiB"\n\n[links]\nbetween = "10Gbit/s"',
        "links.between=100Gbit/s",
    ),
    Question(
        "A mixed lab",
        "One RTX 4090, two RTX 3090 and one T4 in three machines, 10 Gbit/s between them: a model of GPT-2's size.",
        decoder('shape = "gpt2-124m"', "sequence = 1024\nbatch_tokens = 262144"),
        '[[nodes]]\ndevice = "RTX 4090"\n\n[[nodes]]\ndevice = "RTX 3090"\ndevices = 2\n\n[[nodes]]\ndevice = "T4"\n\n'
        '[links]\nbetween = "10Gbit/s"',
        "links.between=25Gbit/s",
    ),
    Question(
        "13B on one A100",
        "One A100 with 80 GB: does a 13B model train on it?",
        decoder('shape = "llama-13b"', BATCH),
        nodes("A100-80GB"),
    ),
    Question(
        "A graph on a laptop",
        "GraphSAGE on a graph of 20,000 nodes, on the processor of a laptop.",
        '[model]\nkind = "sage"\n\n[data]\npath = "planted:nodes=20000,degree=16"\n\n[train]\nsteps = 100\n',
        f"[[nodes]]\n{LAPTOP}",
    ),
    Question(
        "A residual network on two GPUs",
        "A network like ResNet-50 ([`bench/residual.py`](../bench/residual.py)), on two RTX 3090.",
        '[model]\nkind = "module"\nbuild = "residual:build"\narguments = { classes = 1000 }\n\n'
        "[train]\nsteps = 1000\nbatch_tokens = 256        # samples per step here\n",
        nodes("RTX 3090", 2),
        "nodes.devices=4",
    ),
    Question(
        "1,024 A100",
        "A 70B model on 128 machines with eight A100 each.",
        decoder('shape = "llama-70b"', "sequence = 4096\nbatch_tokens = 8388608"),
        nodes("A100-80GB", 8, 128, "800Gbit/s"),
        "nodes.count=256",
    ),
    Question(
        "Two old machines with V100",
        "Two machines with four V100 (16 GB) each, 1 Gbit/s between them, a model of one billion parameters.",
        decoder("depth = 20\nwidth = 2048\nheads = 16", "sequence = 2048\nbatch_tokens = 262144"),
        nodes("V100-16GB", 4, 2, "1Gbit/s"),
        "links.between=25Gbit/s",
    ),
    Question(
        "A small model without a GPU",
        "The first model of the README on a machine with 16 cores.",
        decoder("depth = 3", "steps = 300"),
        '[[nodes]]\ndevice = "cpu"\ncores = 16\nmemory = "64GiB"',
        "nodes.cores=32",
    ),
    Question(
        "Two sites with eight H100 each",
        "Eight H100 here and eight there, 1 Gbit/s between the sites: do they train a 7B model together?",
        decoder('shape = "llama-7b"', "sequence = 4096\nbatch_tokens = 2097152"),
        nodes("H100", 8, 2, "1Gbit/s"),
        "links.between=25Gbit/s",
    ),
    Question(
        "Rounds or every step at 25 Gbit/s",
        "Four machines with eight A100 each, 25 Gbit/s between them, a model of one billion parameters: sums at every "
        "step, or rounds of local steps as CO2 has them?",
        decoder("depth = 20\nwidth = 2048\nheads = 16", "sequence = 2048\nbatch_tokens = 524288"),
        nodes("A100-80GB", 8, 4, "25Gbit/s"),
        "links.between=100Gbit/s",
    ),
    Question(
        "Eight RTX 3060 at 100 Mbit/s",
        "Eight desktops with an RTX 3060 each at 100 Mbit/s: a model of 350 million parameters.",
        decoder('shape = "gpt2-355m"', "sequence = 1024\nbatch_tokens = 262144"),
        nodes("RTX 3060", 1, 8, "100Mbit/s"),
        "nodes.device=RTX 3090",
    ),
    Question(
        "Qwen3-30B-A3B on eight H100",
        "A mixture of 128 small experts with the sizes of Qwen3-30B-A3B, on one machine with eight H100.",
        decoder(QWEN3_30B, "sequence = 4096\nbatch_tokens = 1048576"),
        nodes("H100", 8, memory="2TiB"),
        "nodes.device=H200",
    ),
    Question(
        "Mixtral on eight RTX 4090",
        "Mixtral 8x7B on eight RTX 4090 in a machine with 1 TiB of memory.",
        decoder(MIXTRAL, 'sequence = 2048\nbatch_tokens = 262144\noptimizer = { kind = "adamw" }'),
        nodes("RTX 4090", 8, memory="1TiB"),
        "nodes.device=RTX 5090",
    ),
    Question(
        "DeepSeek-V3 on 2,048 H800",
        "A mixture of 256 experts with the sizes of DeepSeek-V3, attention and first layers as all others here, "
        "on 256 machines with eight H800.",
        decoder(DEEPSEEK_V3, "sequence = 4096\nbatch_tokens = 62914560"),
        nodes("H800", 8, 256, "3200Gbit/s"),
        "nodes.count=512",
    ),
    Question(
        "512 Ki tokens of context",
        "An 8B model on sequences of 524,288 tokens, on eight H100.",
        decoder(EIGHT_BILLION, "sequence = 524288\nbatch_tokens = 1048576"),
        nodes("H100", 8),
        "nodes.device=H200",
    ),
    Question(
        "1 Mi tokens of context",
        "An 8B model on sequences of 1,048,576 tokens, on eight H200.",
        decoder(EIGHT_BILLION, "sequence = 1048576\nbatch_tokens = 1048576"),
        nodes("H200", 8, between="3200Gbit/s"),
        "nodes.count=2",
    ),
    Question(
        "70B on eight MI300X",
        "One machine with eight MI300X: does a 70B model train on it?",
        decoder('shape = "llama3-70b"', "sequence = 4096\nbatch_tokens = 1048576"),
        nodes("MI300X", 8, between="3200Gbit/s"),
        "nodes.count=2",
    ),
    Question(
        "70B on eight B200",
        "The same on eight B200.",
        decoder('shape = "llama3-70b"', "sequence = 4096\nbatch_tokens = 1048576"),
        nodes("B200", 8, between="3200Gbit/s"),
        "nodes.count=2",
    ),
    Question(
        "70B on H100 and A100",
        "Two machines with eight H100 and four with eight A100, 800 Gbit/s between them: a 70B model on all of them?",
        decoder('shape = "llama-70b"', "sequence = 4096\nbatch_tokens = 4194304"),
        f"{nodes('H100', 8, 2)}\n\n{nodes('A100-80GB', 8, 4, '800Gbit/s')}",
    ),
    Question(
        "405B on 1,024 H100",
        "128 machines with eight H100 each. Which layout for a 405B model?",
        decoder('shape = "llama3-405b"', "sequence = 8192\nbatch_tokens = 16777216"),
        nodes("H100", 8, 128, "3200Gbit/s"),
    ),
    Question(
        "405B on 10,000 H100",
        "The same on 1,250 machines.",
        decoder('shape = "llama3-405b"', "sequence = 8192\nbatch_tokens = 16777216"),
        nodes("H100", 8, 1250, "3200Gbit/s"),
    ),
    Question(
        "LoRA of 70B on one RTX 4090",
        "Adapters for a 70B model on one card of 24 GB and 128 GiB of host memory, its frozen weights in 4 bits.",
        adapters("llama3-70b", "int4"),
        nodes("RTX 4090", memory="128GiB"),
    ),
)


if __name__ == "__main__":
    sys.stdout.write(page())
