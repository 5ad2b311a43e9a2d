"""Hugging Face's Trainer on a small model made from its configuration."""

import json
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 1000, (640, 64))]
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=64, n_embd=256, n_layer=4, n_head=4)),
        TrainingArguments(
            folder,
            per_device_train_batch_size=16,
            max_steps=80,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            bf16=torch.cuda.is_available(),
            logging_steps=20,
        ),
        train_dataset=data,
    )
    trainer.train()
print(json.dumps({"steps": trainer.state.global_step, "step_ms": None}))
