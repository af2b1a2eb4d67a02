"""StreamedAdamW in TRL's SFTTrainer: optimizer state in host memory, by one argument.

python examples/streamed_adamw_sft.py          # needs trl and datasets: pip install trl datasets
"""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import fourfold as ff

WORDS = ["<pad>", "<end>", "one", "two", "three", "four", "five", "plus", "is"]


def train(optimizer: type, options: dict[str, Any], folder: str) -> list[float]:
    """The losses of a small model trained with an optimizer on prompts and completions."""
    torch.manual_seed(0)
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>")
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
    )
    numbers = WORDS[2:7]
    rows = [
        {"prompt": f"{a} plus {b} is", "completion": f" {numbers[(i + j) % 5]}"}
        for i, a in enumerate(numbers)
        for j, b in enumerate(numbers)
    ]
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        SFTConfig(
            folder,
            max_steps=4,
            per_device_train_batch_size=4,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            bf16=False,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=(optimizer, options),  # all it takes
    )
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as here:
        print(train(ff.StreamedAdamW, {"lr": 1e-2}, here))
