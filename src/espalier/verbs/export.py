"""`espalier export RUN --to hf`: the trained model as a Hugging Face Llama-format folder, checked by reloading it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from espalier import workload_registry
from espalier.errors import UserError
from espalier.terminal import say
from espalier.verbs.load_run import open_trained


def run(arguments: argparse.Namespace) -> int:
    """Writes the folder and says where it is."""
    trained = open_trained(arguments.run, arguments.trust)
    write = workload_registry.row(trained.recipe).exports.get(arguments.to)
    if write is None:
        raise UserError(f"The run in {arguments.run} is not a language model; there is no `{arguments.to}` form of it.")
    out = Path(arguments.out) if arguments.out else trained.folder.path / f"export-{arguments.to}"
    loads = write(trained.workload, trained.model, out)
    if arguments.json:
        print(json.dumps({"folder": str(out), "step": trained.step}))
    else:
        say(f"{out}: the model after step {trained.step}, checked by reloading.")
        say(f"  {loads}")
    return 0
