"""Trains transformers' Llama with transformers' Trainer for a few steps; prints seconds per step and peak memory."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from espalier.machine.peak_memory import peak_memory


class Rows(torch.utils.data.Dataset):
    """One sample per row of tokens. The model shifts the labels by one itself."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index, :-1], "labels": self.rows[index, :-1]}


def model_of(shape: dict[str, Any], length: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = LlamaConfig(**shape, **none, max_position_embeddings=length, attn_implementation="sdpa", use_cache=False)
    torch.manual_seed(1)
    return LlamaForCausalLM(config)


def options_of(wanted: dict[str, Any]) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=wanted["folder"],
        per_device_train_batch_size=wanted["batch"],
        max_steps=wanted["steps"],
        learning_rate=wanted["learning_rate"],
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        use_cpu=wanted["device"] == "cpu",
        bf16=wanted["device"] != "cpu",
        gradient_accumulation_steps=wanted["accumulate"],
        dataloader_num_workers=2 if wanted["device"] != "cpu" else 0,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )


def main() -> None:
    wanted = json.loads(sys.argv[1])
    torch.set_num_threads(wanted["threads"])
    from transformers import Trainer, TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            self.seconds.append(time.perf_counter() - self.begun)
            peak_memory(torch.device(wanted["device"]))  # looks as often as ours

    rows = torch.load(wanted["data"])
    clock = Clock()
    model = model_of(wanted["shape"], rows.shape[1])
    Trainer(model=model, args=options_of(wanted), train_dataset=Rows(rows), callbacks=[clock]).train()
    memory = peak_memory(torch.device(wanted["device"]))
    print(json.dumps({"seconds": clock.seconds, "memory": memory}))


if __name__ == "__main__":
    main()
