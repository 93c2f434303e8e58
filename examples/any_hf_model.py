"""Any causal language model of transformers, by its own code, with adapters of peft beside its frozen weights.

espalier train examples/any_hf_model.toml
python examples/any_hf_model.py runs/any_hf_model exported

The second line writes the model with the adapters merged into it, under its family's own names. Of a model that also
sees pictures (Gemma 3, Mistral 3) the text part is trained; all else is written as it was.
"""

import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

OTHERS = ("vision", "multi_modal", "image")  # what modules are called that text does not go through


def build(name, text, length=512, rank=8):
    """(model, dataset, loss, held-out dataset): the model `name` of the hub or in a folder, and the file `text`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    torch.manual_seed(0)  # every rank must build the same
    sees = hasattr(AutoConfig.from_pretrained(name), "vision_config")
    family = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = family.from_pretrained(name, dtype=torch.float32)
    model.config.use_cache = False
    for part, module in model.named_modules():
        if part.rpartition(".")[2].startswith(OTHERS):
            module.requires_grad_(False)
    if rank:  # else all weights are trained
        others = rf".*({'|'.join(OTHERS)}).*"
        options = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", exclude_modules=others, task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, options)

    def rows():
        tokenizer = AutoTokenizer.from_pretrained(name)
        ids = tokenizer(Path(text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
        return ids[: len(ids) // length * length].view(-1, length)

    def loss(model, batch):  # (sum over the batch, weight), never a mean
        (tokens,) = batch
        logits = model(input_ids=tokens).logits[:, :-1].flatten(0, 1).float()
        targets = tokens[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum"), torch.tensor(len(targets))

    return model, lambda: TensorDataset(rows()[1:]), loss, lambda: TensorDataset(rows()[:1])


def export(run, folder):
    """Writes the newest checkpoint of `run` as transformers loads it."""
    from transformers import AutoTokenizer

    import espalier

    model = espalier.open(run).model()
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    model.config.use_cache = True
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model.name_or_path).save_pretrained(folder)


if __name__ == "__main__":
    export(*sys.argv[1:])
