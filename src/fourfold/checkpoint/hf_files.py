"""Files of a Hugging Face folder other than weights: config.json, tokenizer, chat template. They are kept with a run. No torch.

    run directory      hf/     copies from the folder that the run started from, made when the run is created
    final/, exports            the same files, and a config.json for the new weights

`hf/types.json` is ours: the dtype of every tensor in the folder, so that tensors are exported with the same dtypes.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.config import Config
from fourfold.errors import RunDirError

__all__ = ["BASE", "TOKENIZER", "keep_files", "read_types", "tokenizer_in"]

BASE = ("config.json", "generation_config.json")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
)
TEMPLATES = "additional_chat_templates"
TYPES = "types.json"
LARGEST = 64 << 20
"""Maximum bytes of one such file."""


def keep_files(config: Config, out: Path, types: dict[str, str] | None = None) -> None:
    """Copy the tokenizer, and the files of the Hugging Face folder, of a (resolved) config into a run's folder."""
    out.mkdir(exist_ok=True)
    if config.model.init != "random":
        copy(Path(config.model.init), out, BASE)
    file = _tokenizer_file(config)
    if file is not None:
        copy(file.parent, out, TOKENIZER if file.name == "tokenizer.json" else ())
        if file.name != "tokenizer.json" and file.is_file():
            files.write_bytes(out / "tokenizer.json", files.read_bytes(file, RunDirError, most=LARGEST), RunDirError)
    if types:
        common = max(set(types.values()), key=list(types.values()).count)
        others = {name: kind for name, kind in types.items() if kind != common}
        files.write_json(out / TYPES, {"all": common, "others": others}, RunDirError)
    if not any(out.iterdir()):
        out.rmdir()


def _tokenizer_file(config: Config) -> Path | None:
    """The tokenizer of the data: the copy next to a token file, the one it was made with, or the config's; None: bytes."""
    source, name = Path(config.data.source), config.data.tokenizer
    with contextlib.suppress(OSError, ValueError):
        if source.is_file() and source.open("rb").read(8) == b"4FOLDTOK":
            copied = source.with_name(f"{source.name}.tokenizer.json")
            from fourfold.data.samples import open_corpus

            name = str(copied) if copied.is_file() else open_corpus(str(source)).tokenizer
    return Path(name) if name not in ("", "bytes") and Path(name).is_file() else None


def copy(folder: Path, out: Path, names: tuple[str, ...] = (*BASE, *TOKENIZER)) -> None:
    """Copy those of the files that exist, byte by byte."""
    for name in names:
        if (folder / name).is_file():
            files.write_bytes(out / name, files.read_bytes(folder / name, RunDirError, most=LARGEST), RunDirError)
    if "tokenizer.json" in names and (folder / TEMPLATES).is_dir():
        (out / TEMPLATES).mkdir(exist_ok=True)
        for file in sorted((folder / TEMPLATES).glob("*.jinja")):
            copied = files.read_bytes(file, RunDirError, most=LARGEST)
            files.write_bytes(out / TEMPLATES / file.name, copied, RunDirError)


def tokenizer_in(folder: Path) -> str:
    """The tokenizer of a folder: its tokenizer.json, or "" without one."""
    return str(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else ""


def read_types(folder: Path) -> tuple[str, dict[str, str]]:
    """The most frequent dtype of the original tensors, and the others by name; "" if the run did not start from files."""
    if not (folder / TYPES).is_file():
        return "", {}
    data: Any = files.read_json(folder / TYPES, RunDirError, follow=False)
    if not isinstance(data, dict) or not isinstance(data.get("all"), str) or not isinstance(data.get("others"), dict):
        raise RunDirError(f"{folder / TYPES}: damaged; remove it, and name a type with --dtype")
    return data["all"], {str(k): str(v) for k, v in data["others"].items()}
