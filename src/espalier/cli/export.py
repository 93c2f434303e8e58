"""`espalier export RUN`: the trained model as a Hugging Face (Llama-format) folder or as safetensors, then reloaded."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save_model

from espalier.checkpoint import run_identity, weight_files
from espalier.cli.open_run import DataChoice, Trained, load_trained
from espalier.recipe import Adapters, cache_dir, serialization
from espalier.recipe.errors import UserError
from espalier.recipe.terminal import say
from espalier.train import workload_registry
from espalier.train.workload_row import Exports

WEIGHTS = "model.safetensors"


def run(arguments: argparse.Namespace) -> int:
    """Writes the folder and says where it is."""
    trained = load_trained(arguments.run, arguments.trust, DataChoice(predicts=arguments.to == "embeddings"))
    row = workload_registry.row(trained.recipe)
    known = row.exports if isinstance(row, Exports) else {}
    form = arguments.to or ("hf" if "hf" in known else "safetensors")
    if form not in known and form != "safetensors":
        raise UserError(
            f"The run in {arguments.run} has no `{form}` form.",
            why="hf is for language models, embeddings and packed for graphs",
            do=f"espalier export {arguments.run} --to safetensors",
        )
    if arguments.merge:
        _refuse_merging(trained, form)
    if arguments.no_bos:
        _put_nothing_before_texts(trained)
    out = Path(arguments.out) if arguments.out else trained.folder.path / f"export-{form}"
    if form in known:
        loads = known[form](trained.workload, trained.model, out)
    else:
        loads = safetensors(trained, out, arguments.trust)
    _stamp(trained, out)
    if arguments.json:
        print(json.dumps({"folder": str(out), **trained.checkpoint}))
    else:
        trained.say_skipped()
        say(f"{out}: the model after step {trained.step}, checked by reloading.")
        say(f"  {loads}")
    return 0


def _stamp(trained: Trained, target: Path) -> None:
    """Writes beside the exported weights which run they are of, and after how many steps."""
    identity = run_identity.read(trained.folder.path)
    if identity is not None:
        stamp = {**msgspec.to_builtins(identity.run), "step": trained.step}
        cache_dir.replace(target / run_identity.EXPORT, json.dumps(stamp, indent=1), "name another folder with --out")


def _put_nothing_before_texts(trained: Trained) -> None:
    """Exports a tokenizer that puts nothing before a text. Raises UserError where there is no tokenizer."""
    workload: Any = trained.workload
    if not hasattr(workload, "exported_tokenizer"):
        raise UserError("--no-bos is for language models.", do=f"espalier export {trained.folder.path}")
    workload.tokenizer = workload.tokenizer.without_prefix()


def _refuse_merging(trained: Trained, form: str) -> None:
    """Raises UserError where there is nothing to merge, or the form holds adapters alone."""
    tune = trained.recipe.tune
    path = trained.folder.path
    if not isinstance(tune, Adapters) or not tune.rank:
        raise UserError(
            f"The run in {path} has no adapters to merge.", why='tune.kind = "lora" has', do=f"espalier export {path}"
        )
    if form in ("peft", "safetensors"):
        raise UserError(f"--to {form} writes adapters alone.", do=f"espalier export {path} --merge --to hf")


def safetensors(trained: Trained, target: Path, trust: bool = False) -> str:
    """Writes the weights under the model's own names, with the recipe and what preprocessing decided, into `target`.

    An earlier export there is replaced. Raises UserError when the folder holds something else or cannot be written.
    """

    state = trained.model.state_dict()

    def fill(folder: Path) -> None:
        save_model(trained.model, str(folder / WEIGHTS), metadata={"format": "pt", "step": str(trained.step)})
        serialization.sort_metadata(folder / WEIGHTS)
        stored = weight_files.stored([folder / WEIGHTS])  # of tensors under several names one is written
        weight_files.refuse_changed([folder / WEIGHTS], {name: state[name] for name in stored})
        shutil.copyfile(trained.folder.recipe, folder / "run.toml")
        if (frozen := trained.folder.kept()) is not None:
            shutil.copytree(
                frozen, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "hashes.json")
            )

    cache_dir.export(target, WEIGHTS, fill)
    model = f"espalier.open({str(trained.folder.path)!r}).model({'trust=True' if trust else ''})"
    return f"safetensors.torch.load_model({model}, {str(target / WEIGHTS)!r})"
