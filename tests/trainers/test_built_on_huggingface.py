"""TRL, PEFT and sentence-transformers, with models from a config and made data: libraries on the ``Trainer``."""

from __future__ import annotations

import inspect

import pytest
import torch
from suite_trainers import PARTS, counts, share, timer_of_processor

pytest.importorskip("transformers", reason="times transformers.Trainer")
pytest.importorskip("datasets", reason="these trainers take its data sets")
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from deep500_timing_torch.trainers.huggingface import TimerCallback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.matrix,
    pytest.mark.one_form,
    pytest.mark.filterwarnings("ignore::Warning"),  # their own advice
]

WORDS = [f"word{number}" for number in range(60)]
QUICK = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
}


def tokenizer():
    """Whole words."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<unk>", "<eos>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def language_model():
    """A GPT-2 of two layers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 63, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=2, eos_token_id=2, pad_token_id=0, **sizes))


def test_sft_of_a_peft_model(tmp_path):
    """TRL's SFT trains a LoRA: tokens and the MFU by the whole model, with a third less work for frozen weights."""
    trl = pytest.importorskip("trl", reason="times TRL")
    peft = pytest.importorskip("peft", reason="times PEFT")
    callback = TimerCallback(timer_of_processor(), peak_flops=1e12)
    settings = trl.SFTConfig(str(tmp_path), max_steps=3, per_device_train_batch_size=4, max_length=16, **QUICK)
    trainer = trl.SFTTrainer(
        language_model(), settings, train_dataset=Dataset.from_list([{"text": " ".join(WORDS[:12])}] * 24),
        processing_class=tokenizer(), peft_config=peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True),
        callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    found = counts(callback.timer)
    assert [found[name] for name in ("BATCH", "FORWARD", "BACKWARD", "optimizer")] == [3, 3, 3, 3]
    assert share(callback.timer, "BATCH", *PARTS) == pytest.approx(1, abs=0.05)
    assert callback.throughput.tokens_per_s > 0
    assert "trained M=" in str(callback.throughput.utilization)
    assert "time/mfu" in trainer.state.log_history[0]


def test_grpo(tmp_path):
    """TRL's GRPO generates and rewards: their own regions, inside the first BATCH that uses them."""
    trl = pytest.importorskip("trl", reason="times TRL")
    callback = TimerCallback()
    settings = trl.GRPOConfig(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, num_generations=2, max_completion_length=4, **QUICK
    )
    trainer = trl.GRPOTrainer(
        language_model(), lambda completions, **_: [float(len(one)) for one in completions], settings,
        train_dataset=Dataset.from_list([{"prompt": " ".join(WORDS[:4])}] * 8), processing_class=tokenizer(),
        callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    found = counts(callback.timer)
    assert [found[name] for name in ("BATCH", "generate", "reward", "FORWARD", "optimizer")] == [2, 2, 2, 2, 2]
    from trl.generation import vllm_generation

    assert list(inspect.signature(vllm_generation.VLLMGeneration.sync_weights).parameters) == ["self"]


def test_sentence_transformers(tmp_path):
    """Its trainer, with its own loss."""
    sentences = pytest.importorskip("sentence_transformers", reason="times sentence-transformers")
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    folder = str(tmp_path / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=63, max_position_embeddings=64, **sizes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    encoder = Transformer(folder)
    model = sentences.SentenceTransformer(modules=[encoder, Pooling(32)], device="cpu")
    pairs = Dataset.from_list([{"anchor": WORDS[n], "positive": WORDS[n + 1]} for n in range(32)])
    callback = TimerCallback()
    settings = sentences.SentenceTransformerTrainingArguments(
        str(tmp_path / "out"), num_train_epochs=1, per_device_train_batch_size=8, **QUICK
    )
    loss = losses.MultipleNegativesRankingLoss(model)
    sentences.SentenceTransformerTrainer(model, settings, pairs, loss=loss, callbacks=[callback]).train()
    found = counts(callback.timer)
    assert [found[name] for name in ("BATCH", "IO", "FORWARD", "BACKWARD", "optimizer")] == [4, 4, 4, 4, 4]
