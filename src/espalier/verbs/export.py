"""`espalier export RUN --to hf`: the trained model as a Hugging Face Llama-format folder, checked by reloading it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from espalier.errors import UserError
from espalier.language import gpt, hf
from espalier.language.workload import LanguageWorkload
from espalier.verbs.trained import open_trained


def run(arguments: argparse.Namespace) -> int:
    """Writes the folder and says where it is."""
    trained = open_trained(arguments.run)
    if not isinstance(trained.workload, LanguageWorkload):
        raise UserError(f"The run in {arguments.run} is not a language model; there is no `hf` form of it.")
    assert isinstance(trained.model, gpt.GPT)
    out = Path(arguments.out) if arguments.out else trained.folder.path / "export-hf"
    hf.export(trained.model, trained.workload.tokenizer, out)
    if arguments.json:
        print(json.dumps({"folder": str(out), "step": trained.step}))
    else:
        print(f"{out}: the model after step {trained.step}, checked by reloading.")
        print(f"  transformers.AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it.")
    return 0
