"""Time a Hugging Face ``Trainer``: the regions of its steps, and tokens per second in its own log.

Run it with::

    python examples/hf_trainer.py
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from deep500_timing_torch.trainers.huggingface import TimerCallback


def main() -> None:
    """Train a small GPT-2 on random tokens."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=64, n_embd=64, n_layer=2, n_head=2))
    data = [{"input_ids": row, "labels": row} for row in torch.randint(96, (80, 64))]
    arguments = TrainingArguments(
        "out",
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    callback = TimerCallback()
    Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()  # pyright: ignore[reportArgumentType]
    callback.timer.print_all_time_stats()


if __name__ == "__main__":
    main()
