"""Fine-tunes with trl's trainers (and peft) for a few steps; prints seconds and tokens of each."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch


def options_of(wanted: dict[str, Any]) -> dict[str, Any]:
    return {
        "output_dir": str(Path(wanted["folder"]) / "trl"),
        "max_steps": wanted["steps"],
        "max_length": wanted["sequence"],
        "learning_rate": 1e-4,
        "weight_decay": 0.0,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def main() -> None:
    wanted = json.loads(sys.argv[1])
    torch.set_num_threads(wanted["threads"])
    warnings.simplefilter("ignore")
    import datasets
    import peft
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    folder = Path(wanted["folder"])
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    lines = (folder / f"{wanted['data']}.jsonl").read_text().splitlines()
    rows = datasets.Dataset.from_list([json.loads(line) for line in lines])
    own = options_of(wanted)
    adapters = None
    if wanted["kind"] != "full":
        alpha = 2 * wanted["rank"]
        adapters = peft.LoraConfig(
            r=wanted["rank"], lora_alpha=alpha, target_modules=wanted["targets"], lora_dropout=0.0
        )

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.tokens: list[float] = []

        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            self.seconds.append(time.perf_counter() - self.begun)
            if len(self.seconds) == 1:
                print("first step", flush=True)

    clock = Clock()
    common = {"model": model, "train_dataset": rows, "processing_class": tokenizer, "peft_config": adapters}
    if wanted["kind"] == "dpo":
        options = trl.DPOConfig(per_device_train_batch_size=wanted["rows"] // 2, beta=0.1, **own)
        trainer = trl.DPOTrainer(args=options, callbacks=[clock], **common)
    else:
        options = trl.SFTConfig(
            per_device_train_batch_size=wanted["rows"], packing=wanted["packed"], assistant_only_loss=True, **own
        )
        trainer = trl.SFTTrainer(args=options, callbacks=[clock], **common)
    collate = trainer.data_collator

    def counted(examples: list[dict[str, Any]]) -> Any:
        found = collate(examples)
        mask = found.get("attention_mask")
        clock.tokens.append(float(found["input_ids"].numel() if mask is None else mask.sum()))
        return found

    trainer.data_collator = counted
    trainer.train()
    print(json.dumps({"seconds": clock.seconds, "tokens": clock.tokens[: len(clock.seconds)]}))


if __name__ == "__main__":
    main()
