"""StreamedAdamW in Hugging Face's Trainer: optimizer state in host memory, by one argument.

python examples/streamed_adamw_in_trainer.py
"""

import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fourfold as ff


def train(optimizer: type, options: dict[str, Any], folder: str, resume: bool = False, steps: int = 4) -> list[float]:
    """The losses of a small model trained with an optimizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.arange(16)[:, None] + torch.arange(12)[None]]
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=rows,  # type: ignore[arg-type]
        optimizer_cls_and_kwargs=(
            optimizer,
            options,
        ),  # all it takes: the Trainer makes it when the model is on its device
    )
    trainer.train(resume_from_checkpoint=resume)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as here:
        print(train(ff.StreamedAdamW, {"lr": 1e-2}, here))
