"""`fourfold export`: a checkpoint as a Hugging Face folder, or as a distributed checkpoint of torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fourfold import schema
from fourfold.errors import ConfigError
from fourfold.view.text import printable

__all__ = ["ExportArgs", "export_command"]

SPELLED = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "fp64": "F64"}


@dataclass(frozen=True)
class ExportArgs:
    """Write a checkpoint as a Hugging Face folder that `transformers` opens, also while its run continues."""

    source: Annotated[str, tyro.conf.Positional]
    """Run directory (its newest checkpoint), or a checkpoint in one."""
    out: Annotated[str, tyro.conf.Positional]
    """Folder to write: new, or empty."""
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] | None = None
    """Dtype of the tensors; default: that of the original weights, fp32 for a model trained from scratch."""
    format: Literal["hf", "dcp"] = "hf"
    """hf: safetensors, config and tokenizer. dcp: a distributed checkpoint of torch under the same names."""
    merge: bool = False
    """For a LoRA run: write the whole model with merged adapters, instead of a PEFT adapter."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show tracebacks of errors."""


def export_command(args: ExportArgs) -> int:
    from fourfold.checkpoint.export import check_out, export, find_checkpoint

    out = Path(args.out)
    run, directory = find_checkpoint(args.source)
    check_out(out)
    config, _ = run.read()
    dtype = SPELLED[args.dtype] if args.dtype else ""
    lora = config.model.lora is not None
    if args.merge and not lora:
        raise ConfigError(
            f"--merge: {run.path} has no adapters, all of its weights are trained; export it without --merge"
        )
    if args.format == "dcp" and lora and not args.merge:
        raise ConfigError(
            "--format dcp: an adapter is written in PEFT's format; use --format hf, or --merge for a whole model"
        )
    made = export(run, config, directory, out, dtype=dtype, form=args.format, merge=args.merge)
    if args.json:
        print(json.dumps({"out": str(out), **dataclasses.asdict(made)}))
        return 0
    what = f"{made.tensors} tensors, {schema.format_bytes(made.bytes)}, {made.dtype}"
    kind = "PEFT adapter" if lora and not args.merge else f"model_type {made.model_type or 'none'}"
    print(f"{printable(out)}: step {made.step}, {what}, {kind}")
    if not made.model_type:
        print("no Hugging Face architecture computes this model: tensors have our names, config.json is ours")
    return 0
