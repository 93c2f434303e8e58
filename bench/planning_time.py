"""How long the planner takes: processor seconds and priced layouts of one decision.

    python bench/planning_time.py [--only "QUESTION, ..."]

Each question is asked once, as a second time finds much of it worked out; its recipe is resolved before.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from advice import Question, decoder, nodes
from espalier.cli import resolve_recipe
from espalier.plan.decide import decide
from espalier.recipe import units
from table import arguments

LLAMA_405B = 'shape = "llama3-405b"'
EXPERTS_256 = """kind = "moe"
width = 7168
depth = 61
heads = 128
kv_heads = 128
feed_forward = 2048
vocabulary = 129280
experts = 256
active = 8"""
H100_AND_A100 = """[[nodes]]
device = "H100"
devices = 8
count = 2

[[nodes]]
device = "A100-80GB"
devices = 8
count = 4

[links]
between = "800Gbit/s"
"""
FAST = "3200Gbit/s"
QUESTIONS = {
    "7B on 8 RTX 4090": ('shape = "llama-7b"', 2**18, nodes("RTX 4090", 8)),
    "70B on 64 H100": ('shape = "llama-70b"', 2**22, nodes("H100", 8, 8, FAST)),
    "70B on 16 H100 and 32 A100": ('shape = "llama-70b"', 2**22, H100_AND_A100),
    "256 experts on 64 H800": (EXPERTS_256, 2**22, nodes("H800", 8, 8, FAST)),
    "256 experts on 256 H800": (EXPERTS_256, 2**24, nodes("H800", 8, 32, FAST)),
    "256 experts on 2,048 H800": (EXPERTS_256, 15 * 2**22, nodes("H800", 8, 256, FAST)),
    "405B on 1,024 H100": (LLAMA_405B, 2**24, nodes("H100", 8, 128, FAST)),
    "405B on 10,000 H100": (LLAMA_405B, 2**24, nodes("H100", 8, 1250, FAST)),
    "405B on 100,000 H100": (LLAMA_405B, 2**27, nodes("H100", 8, 12500, FAST)),
}
"""By name: model, tokens of a batch, machines."""


def main() -> None:
    """Asks and prints."""
    options = arguments("How long the planner takes.", only={"default": "", "help": "questions, by commas"})
    print("| question | seconds of one core | layouts priced | step |")
    print("|---|---|---|---|")
    for name, (model, tokens, machines) in QUESTIONS.items():
        if options.only and name not in options.only.split(", "):
            continue
        question = Question(name, "", decoder(model, f"sequence = 4096\nbatch_tokens = {tokens}"), machines)
        request, cluster = resolve_recipe.request(question.asked), question.machines
        begin = time.process_time()
        decision = decide(request, cluster)
        seconds, predicted = time.process_time() - begin, decision.plan.predicted
        assert predicted is not None
        step = units.show_seconds(predicted.step_seconds) if decision.fits else "does not fit"
        print(f"| {name} | {seconds:.1f} | {decision.search_result.priced:,} | {step} |", flush=True)


if __name__ == "__main__":
    main()
