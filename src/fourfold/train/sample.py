"""Generates text from a trained model: next tokens for gpt and llama, filled-in blanks for bert. One process, whole model.

Opens a run (its newest checkpoint) or a Hugging Face folder, on a GPU if there is one. Keys and values of earlier tokens are
cached, so that a new token costs a forward of one token.

[Note: the KV cache]
`Cache` patches the attention of each block: it appends new keys and values to the cached ones, and passes the positions of the
new tokens to rotary and learned embeddings. The model's code is the one used in training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.checkpoint import save_load
from fourfold.checkpoint.adapters import check_base, fill_from_adapter, fill_model, is_adapter_folder, open_adapter
from fourfold.checkpoint.hf_files import tokenizer_in
from fourfold.checkpoint.remote import fetch_newest, is_url, local_run
from fourfold.checkpoint.weights import check_weights, fill
from fourfold.config import ModelConfig
from fourfold.data.chats import ChatTemplate
from fourfold.data.samples import Tokenizer, load_tokenizer, open_corpus
from fourfold.errors import ConfigError
from fourfold.model.build import build_model, materialize_buffers
from fourfold.model.hf import LONGEST, hf_file
from fourfold.model.layers import Attention, Positions, Rotary
from fourfold.model.lora import is_adapter
from fourfold.model.transformer import Transformer
from fourfold.train.rundir import RunDir

__all__ = ["Cache", "Sampler", "chat_prompt", "continue_text", "fill_blanks", "next_tokens", "open_model"]

BLANK = "[MASK]"


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen: among the `top_k` most likely (0: all) whose probabilities add up to `top_p`."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0

    def choose(self, logits_v: Tensor, generator: torch.Generator) -> int:
        if self.temperature == 0:
            return int(logits_v.argmax())
        logits_v = logits_v.float().cpu() / self.temperature
        if 0 < self.top_k < logits_v.numel():
            logits_v = logits_v.masked_fill(logits_v < logits_v.topk(self.top_k).values[-1], -torch.inf)
        if self.top_p < 1:
            ordered, at = logits_v.softmax(-1).sort(descending=True)
            rest = ordered.cumsum(-1) - ordered >= self.top_p  # the likeliest is always kept
            logits_v = logits_v.index_fill(0, at[rest], -torch.inf)
        return int(torch.multinomial(logits_v.softmax(-1), 1, generator=generator))


@dataclass(frozen=True)
class Opened:
    """A model with its tokenizer; the folder of its chat template; ids that end a text; the step of the run it came from."""

    model: Transformer
    tokenizer: Tokenizer
    folder: Path
    stops: frozenset[int]
    step: int


# ---- opening ----


def open_model(path: str | Path, tokens: int = 0) -> Opened:
    """Open a run's newest checkpoint, or a Hugging Face folder; `tokens`: the longest context needed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    path = local_run(str(path)) if is_url(str(path)) else Path(path)
    if is_adapter_folder(path):
        m, folder = open_adapter(path)
        source = check_weights(m)
        model = _empty(_longer(m, tokens), device, dtype)
        fill(source, m, [save_load.holding_of(n, p) for n, p in model.named_parameters() if not is_adapter(n)])
        fill_from_adapter(model, path, m, source.family)
        folder, step = (path if tokenizer_in(path) else folder), 0
        tokenizer = load_tokenizer(tokenizer_in(folder))
    elif path.is_dir() and (path / "config.json").is_file() and hf_file(path):
        m = ModelConfig(hf=str(path), seq_len=1).resolve()
        model = _empty(_longer(m, tokens), device, dtype)
        holdings = [save_load.holding_of(n, p) for n, p in model.named_parameters()]
        fill(check_weights(m), m, holdings)
        found = tokenizer_in(path)
        if not found:
            raise ConfigError(f"{path}: has no tokenizer.json")
        tokenizer, folder, step = load_tokenizer(found), path, 0
    else:
        run = RunDir.find(path)
        config, _ = run.read()
        url = config.checkpoint.dir
        directory = save_load.newest(run.checkpoints) or (fetch_newest(url, run.checkpoints) if url else None)
        if directory is None:
            raise ConfigError(f"{run.path}: has no complete checkpoint yet")
        model = _empty(_longer(config.model, tokens), device, dtype)
        if config.model.lora is not None:
            check_base(run.path / "hf", config.model, first=False)
        step = fill_model(model, directory, config.model, checksums=False)
        tokenizer, folder = _tokenizer(run, config.data.source, config.data.tokenizer), run.path / "hf"
    if tokenizer.vocab > model.config.vocab:
        raise ConfigError(
            f"{path}: its tokenizer has {tokenizer.vocab} ids, but the model {model.config.vocab}: they do not belong together"
        )
    return Opened(model.eval(), tokenizer, folder, _stops(folder, tokenizer), step)


def _longer(m: ModelConfig, tokens: int) -> ModelConfig:
    """The model for a context of up to `tokens` tokens, limited by its positions; the weights are the same."""
    length = min(m.positions, max(m.seq_len, min(tokens or LONGEST, LONGEST)))
    return replace(m, seq_len=length).resolve()


def _empty(m: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    model = build_model(m)
    model.to(dtype).to_empty(device=device).tie()
    materialize_buffers(model, device, dtype)
    return model.requires_grad_(False)


def _tokenizer(run: RunDir, source: str, name: str) -> Tokenizer:
    """The tokenizer saved with a run, or that of its data; a token file records the one it was made with."""
    own = tokenizer_in(run.path / "hf")
    if own:
        return load_tokenizer(own)
    if name in ("", "bytes") and Path(source).is_file():
        corpus = open_corpus(source) if Path(source).read_bytes()[:8] == b"4FOLDTOK" else None
        name = corpus.tokenizer if corpus is not None else name
    return load_tokenizer(name)


def _stops(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end a text: the tokenizer's, and those in the folder's generation config."""
    found: Any = []
    if (folder / "generation_config.json").is_file():
        found = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    return frozenset({tokenizer.end, *(i for i in ids if isinstance(i, int))})


# ---- the KV cache ----


class Cache:
    """[Note: the KV cache]"""

    def __init__(self, model: Transformer):
        self.model, self.length = model, 0
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._patched: list[tuple[nn.Module, str]] = []
        for module in model.modules():
            if isinstance(module, Attention):
                self._put(module, "attend", self._attend(module))
            elif isinstance(module, Rotary):
                self._put(module, "tables", self._tables(module))
            elif isinstance(module, Positions):
                self._put(module, "forward", self._positions(module))

    def _put(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        module.__dict__[name] = function
        self._patched.append((module, name))

    def close(self) -> None:
        for module, name in self._patched:
            del module.__dict__[name]

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """Logits [V] after the last of the new tokens: the prompt first, then one token at a time."""
        assert self.length == 0 or len(tokens) == 1
        at = next(self.model.parameters()).device
        x_btd = self.model.embed(torch.tensor([tokens], device=at))
        for block in self.model.blocks:
            x_btd = block(x_btd)
        out: Tensor = self.model.head(x_btd[:, -1:])[0, -1]  # of a prompt, only the last token's logits are needed
        self.length += len(tokens)
        return out

    def forget(self) -> None:
        self.length = 0
        self._kept.clear()

    def _attend(self, module: Attention) -> Callable[..., Tensor]:
        plain = module.attend

        def attend(q: Tensor, k: Tensor, v: Tensor, _documents: None = None) -> Tensor:
            if self.length:
                before = self._kept[id(module)]
                k, v = torch.cat((before[0], k), dim=2), torch.cat((before[1], v), dim=2)
                if module.window:
                    k, v = k[:, :, -module.window :], v[:, :, -module.window :]
            self._kept[id(module)] = k, v
            return _one_query(module, q, k, v) if self.length else plain(q, k, v)

        return attend

    def _tables(self, rotary: Rotary) -> Callable[..., tuple[Tensor, Tensor]]:
        return lambda n, *_: (rotary.cos[self.length : self.length + n], rotary.sin[self.length : self.length + n])

    def _positions(self, positions: Positions) -> Callable[..., Tensor]:
        return lambda tokens, *_: positions.weight[self.length : self.length + tokens.shape[1]]


def _one_query(module: Attention, q_bh1d: Tensor, k_bgtd: Tensor, v_bgtd: Tensor) -> Tensor:
    """Attention of the last token to all cached keys; `g` counts heads of keys, each shared by several heads of queries.

    Two matmuls: a kernel of `scaled_dot_product_attention` may be prepared anew for every number of keys.
    """
    q = q_bh1d.unflatten(1, (k_bgtd.shape[1], -1)).squeeze(3)
    scores = (q @ k_bgtd.mT).float() * (module.scale or module.head_dim**-0.5)
    if module.softcap:
        scores = module.softcap * torch.tanh(scores / module.softcap)
    return (scores.softmax(-1).to(v_bgtd.dtype) @ v_bgtd).flatten(1, 2).unsqueeze(2)


# ---- generating ----


def next_tokens(model: Transformer, tokens: list[int], count: int, sampler: Sampler) -> Iterator[int]:
    """Sample `count` tokens after `tokens`.

    The context is the last seq_len tokens; when it is full, its second half is computed again and sampling continues from it.
    """
    generator = torch.Generator().manual_seed(sampler.seed)
    context, longest = list(tokens), model.config.seq_len
    cache = Cache(model)
    try:
        fresh = context[-longest:]
        for _ in range(count):
            if cache.length + len(fresh) > longest:
                cache.forget()
                fresh = context[-max(1, longest // 2) :]
            token = sampler.choose(cache.logits(fresh), generator)
            context.append(token)
            fresh = [token]
            yield token
    finally:
        cache.close()


def continue_text(opened: Opened, prompt: str, count: int, sampler: Sampler, *, begin: bool = True) -> Iterator[str]:
    """The model's continuation of a prompt, in pieces of whole characters; stops at a token that ends a text."""
    tokenizer = opened.tokenizer
    tokens = tokenizer.encode(prompt).tolist()
    if begin and tokenizer.begin is not None:
        tokens = [tokenizer.begin, *tokens]
    new: list[int] = []
    shown = ""
    for token in next_tokens(opened.model, tokens or [tokenizer.end], count, sampler):
        if token in opened.stops:
            break
        new.append(token)
        text = tokenizer.decode(new)
        if not text.endswith("\ufffd"):  # otherwise its last character is incomplete
            yield text[len(shown) :]
            shown = text
    text = tokenizer.decode(new)
    if text != shown:
        yield text[len(shown) :]


def chat_prompt(opened: Opened, question: str, system: str = "") -> str:
    """A user's message rendered by the model's template, up to the beginning of the assistant's answer."""
    template = ChatTemplate.load(opened.folder) if opened.folder.is_dir() else None
    if template is None:
        raise ConfigError(f"{opened.folder}: has no chat template; leave out --chat to continue a text")
    messages = [{"role": "system", "content": system}] if system else []
    return template.render([*messages, {"role": "user", "content": question}], add_generation_prompt=True)


@torch.no_grad()
def fill_blanks(opened: Opened, prompt: str) -> str:
    """The prompt with every [MASK] replaced by the most likely token."""
    model, tokenizer = opened.model, opened.tokenizer
    if BLANK not in prompt or tokenizer.mask is None:
        raise ConfigError(f"a bert model fills blanks: write {BLANK} into the prompt where it should guess")
    tokens: list[int] = []
    for i, part in enumerate(prompt.split(BLANK)):
        tokens += ([tokenizer.mask] if i else []) + tokenizer.encode(part).tolist()
    if len(tokens) > model.config.seq_len:
        raise ConfigError(f"the prompt has {len(tokens)} tokens; the model's context is {model.config.seq_len}")
    at = next(model.parameters()).device
    guess = model(torch.tensor([tokens], device=at))[0].argmax(-1).tolist()
    return tokenizer.decode(g if t == tokenizer.mask else t for t, g in zip(tokens, guess, strict=True))
