"""Trains transformers' Llama with transformers' Trainer for a few steps; prints seconds per step and peak memory."""

from __future__ import annotations

import json
import resource
import sys
import time

import torch


def main() -> None:
    wanted = json.loads(sys.argv[1])
    torch.set_num_threads(wanted["threads"])
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    rows = torch.load(wanted["data"])
    length = rows.shape[1]
    config = LlamaConfig(
        **wanted["shape"],
        max_position_embeddings=length,
        attn_implementation="sdpa",
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            # The model shifts labels by one itself: sequence + 1 tokens would be one more than ours computes.
            return {"input_ids": rows[index, :-1], "labels": rows[index, :-1]}

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            self.seconds.append(time.perf_counter() - self.begun)

    clock = Clock()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=wanted["folder"],
            per_device_train_batch_size=wanted["batch"],
            max_steps=wanted["steps"],
            learning_rate=wanted["learning_rate"],
            weight_decay=0.1,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_num_workers=0,
        ),
        train_dataset=Rows(),
        callbacks=[clock],
    )
    trainer.train()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": clock.seconds, "memory": memory}))


if __name__ == "__main__":
    main()
