"""Text from a trained model: next tokens for gpt and llama, filled-in blanks for bert. One process, whole model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fourfold.errors import ConfigError
from fourfold.model.transformer import Transformer
from fourfold.train.data import ByteTokenizer, Tokenizer, load_tokenizer
from fourfold.train.export import load_model
from fourfold.train.rundir import RunDir

__all__ = ["continue_text", "fill_blanks", "next_tokens", "open_run"]

BLANK = "[MASK]"


def open_run(run: RunDir) -> tuple[Transformer, Tokenizer, int]:
    """A run's model, tokenizer and step."""
    config, _ = run.read()
    model, step = load_model(run)
    name = config.data.tokenizer
    return model.eval(), ByteTokenizer() if name == "bytes" else load_tokenizer(name), step


@torch.no_grad()
def next_tokens(
    model: Transformer, tokens: list[int], count: int, *, temperature: float, top_k: int, seed: int
) -> Iterator[int]:
    """Sample `count` tokens after `tokens`; temperature 0 takes the likeliest. Only the last seq_len tokens are seen."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(tokens)
    for _ in range(count):
        logits_v = model(torch.tensor([tokens[-model.config.seq_len :]]))[0, -1].float()
        tokens.append(_choose(logits_v, temperature, top_k, generator))
        yield tokens[-1]


def _choose(logits_v: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_v.argmax())
    if 0 < top_k < logits_v.numel():
        logits_v = logits_v.masked_fill(logits_v < logits_v.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial((logits_v / temperature).softmax(-1), 1, generator=generator))


def continue_text(
    model: Transformer, tokenizer: Tokenizer, prompt: str, count: int, *, temperature: float, top_k: int, seed: int
) -> str:
    """The prompt and what the model writes after it; stops at an end-of-text token."""
    tokens = tokenizer.encode(prompt).tolist() or [tokenizer.end]
    new: list[int] = []
    for token in next_tokens(model, tokens, count, temperature=temperature, top_k=top_k, seed=seed):
        if token == tokenizer.end:
            break
        new.append(token)
    return prompt + tokenizer.decode(new)


@torch.no_grad()
def fill_blanks(model: Transformer, tokenizer: Tokenizer, prompt: str) -> str:
    """The prompt with every [MASK] replaced by the likeliest token."""
    if BLANK not in prompt or tokenizer.mask is None:
        raise ConfigError(f"a bert model fills blanks: write {BLANK} into the prompt where it should guess")
    tokens: list[int] = []
    for i, part in enumerate(prompt.split(BLANK)):
        tokens += ([tokenizer.mask] if i else []) + tokenizer.encode(part).tolist()
    if len(tokens) > model.config.seq_len:
        raise ConfigError(f"the prompt has {len(tokens)} tokens; the model sees {model.config.seq_len} at most")
    guess = model(torch.tensor([tokens]))[0].argmax(-1).tolist()
    return tokenizer.decode(g if t == tokenizer.mask else t for t, g in zip(tokens, guess, strict=True))
