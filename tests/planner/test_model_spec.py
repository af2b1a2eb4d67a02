"""Model specs: what the planner counts against what the real modules have and save."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.cluster import Cluster
from fourfold.commands.plan import read_model
from fourfold.config import LoraConfig, ModelConfig
from fourfold.errors import ConfigError
from fourfold.model.build import build_model, serial_model
from fourfold.model.hf import read_config
from fourfold.model.operators import ModelSpec, Operator
from fourfold.model.spec import flops_per_token, parameter_count
from fourfold.plan import Plan, Precision
from fourfold.planner.api import make_plan
from fourfold.planner.compute_cost import matmul_seconds
from fourfold.planner.evaluate import predict
from fourfold.planner.memory_model import _saved_per_token
from fourfold.planner.problem import PlanProblem
from fourfold.runtime.stage import ChainLink, Stage
from tests.hub import GRANITE, HUB, MISTRAL, STARCODER2

FEATURES: dict[str, dict[str, Any]] = {
    "windows": {"windows": (5, 0), "rope_layers": (True, False)},
    "capped": {"attn_softcap": 2.0, "logit_softcap": 3.0, "activation": "gelu_tanh", "embed_scale": 8.0},
    "sandwich": {"block": "sandwich", "norm": "layer", "norm_bias": True, "rope_dim": 8},
    "parallel": {"block": "parallel", "gated": False, "activation": "gelu", "mlp_bias": True, "residual_scale": 0.5},
    "parallel, one norm": {"block": "parallel-shared", "norm": "layer", "qk_norm": "per-head", "logit_scale": 0.5},
}


def config(family: Any) -> ModelConfig:
    more: dict[str, Any] = {"kv_heads": 2} if family == "llama" else {}
    if family in FEATURES:
        family, more = "llama", {"kv_heads": 2} | FEATURES[family]
    return ModelConfig(family=family, layers=2, hidden=64, heads=4, ffn=160, vocab=96, seq_len=32, **more).resolve()


class _Unit:
    def __init__(self, module: nn.Module):
        self.module = module

    def need(self) -> None: ...
    def lends_grads(self) -> bool:
        return False

    def accumulate(self, grads: Any) -> None: ...
    def add_weight_grad(self, name: str, x: Tensor, dy: Tensor) -> None: ...

    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]


def saved_bytes(model: Any, name: str, module: nn.Module, dtype: torch.dtype, recompute: Any) -> int:
    """Bytes of storages that a link keeps of two sequences, parameters and tables left out."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    tokens = torch.zeros(2, 32, dtype=torch.long)
    value = tokens if name == "embed" else torch.randn(2, 32, 64, dtype=dtype)
    stage = Stage([ChainLink(name, _Unit(module), module, recompute)])
    found: dict[int, int] = {value.untyped_storage().data_ptr(): value.nbytes}
    alive = []

    def pack(t: Tensor) -> Tensor:
        alive.append(t)
        if t.untyped_storage().data_ptr() not in own:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        stage.forward(0, value, (tokens,) if name == "head" else ())
    return sum(found.values())


@pytest.mark.parametrize("family", ["gpt", "llama", "bert", *FEATURES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_bytes_are_those_of_the_real_modules(family: str, dtype: torch.dtype) -> None:
    m = config(family)
    spec, model = ModelSpec.from_config(m), serial_model(m, 0, dtype=dtype)
    compute: Any = "fp32" if dtype == torch.float32 else "bf16"
    problem = PlanProblem(spec, Cluster.local(1), 2, Precision(compute=compute))
    for unit in spec.units:
        module = model.units()[unit.name]
        for recompute in ("none", "full"):
            want = saved_bytes(model, unit.name, module, dtype, recompute)
            have = _saved_per_token(problem, unit.saved[recompute], unit, recompute) * 64
            if unit.name == "head":  # the targets are an input too, also where all is recomputed
                want = max(want, 64 * 64 * dtype.itemsize + 64 * 8) if recompute == "full" else want
            assert have == pytest.approx(want, rel=0.012), (unit.name, recompute)


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_parameters_and_flops(family: str) -> None:
    m = config(family)
    spec = ModelSpec.from_config(m)
    assert spec.parameters == parameter_count(m)
    assert spec.flops_per_token == pytest.approx(flops_per_token(m))
    assert [u.name for u in spec.units] == list(build_model(m).units())
    assert len(spec.kinds) == 4  # alike units are counted once


def test_any_module_on_meta() -> None:
    m = config("gpt")
    ours = ModelSpec.from_config(m)
    ids = torch.zeros(2, 32, dtype=torch.long)
    traced = ModelSpec.from_module(build_model(m), (ids, ids))
    assert traced.parameters == ours.parameters
    assert (traced.seq_len, traced.hidden, traced.layers) == (32, 64, 4)
    assert traced.flops_per_token == pytest.approx(ours.flops_per_token)
    assert len(traced.kinds) == 3
    block = traced.units[1]
    assert block.saved["full"].narrow == 64
    assert block.saved["none"].narrow > 6 * 64


# ---- modules as people write them ----


class Encoder(nn.Module):
    """An embedding, torch's own encoder and a head; which of them is defined first says nothing of which runs first."""

    def __init__(self, *, head_first: bool, dropout: float = 0.0):
        super().__init__()
        if head_first:
            self.head = nn.Linear(64, 96)
        self.embed = nn.Embedding(96, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 160, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        if not head_first:
            self.head = nn.Linear(64, 96)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids)))


class Tied(nn.Module):
    """A GPT whose head is its embedding, with positions as they are often made."""

    def __init__(self, vocab: int = 96, width: int = 64, layers: int = 3):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.positions, self.tokens = nn.Embedding(32, width), nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = x + 0.5 * block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Loop(nn.Module):
    """Its layers, one after the other, and then what `forward` is given to do."""

    def __init__(self, then: Any = None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.then = then

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x if self.then is None else self.then(x)


IDS = torch.zeros(2, 32, dtype=torch.long)


def encoder_layers() -> list[nn.Module]:
    return [nn.TransformerEncoderLayer(64, 4, 160, batch_first=True, device="meta") for _ in range(4)]


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*encoder_layers())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_sequential_is_what_it_is_as_an_attribute() -> None:
    sample = torch.zeros(2, 32, 64)
    alone, within = (ModelSpec.from_module(m, sample) for m in (nn.Sequential(*encoder_layers()), Attribute()))
    assert [u.name for u in alone.units] == ["embed", "0", "1", "2", "3", "head"]
    assert [u.name for u in within.units] == ["embed", *(f"layers.{i}" for i in range(4)), "head"]
    assert [u.parameters for u in alone.units] == [0, *[within.parameters // 4] * 4, 0]
    for a, b in zip(alone.units, within.units, strict=True):
        assert (a.operators, a.saved, a.forward, a.backward) == (b.operators, b.saved, b.forward, b.backward)
    plans = [make_plan(spec, Cluster.preset("a100-40g"), global_batch=8).predicted for spec in (alone, within)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert [plans[0][key] for key in ("seconds", "peak_bytes")] == [plans[1][key] for key in ("seconds", "peak_bytes")]


def test_the_ends_of_a_sequential_are_embedding_and_head() -> None:
    blocks = encoder_layers()
    ends = nn.Embedding(96, 64), nn.LayerNorm(64), nn.Linear(64, 96)
    flat = nn.Sequential(ends[0], nn.Dropout(0.0), *blocks, *ends[1:])
    nested = nn.Sequential(ends[0], nn.Dropout(0.0), nn.Sequential(*blocks), *ends[1:])
    for module, names in ((flat, ["2", "3", "4", "5"]), (nested, ["2.0", "2.1", "2.2", "2.3"])):
        spec = ModelSpec.from_module(module, IDS)
        assert [u.name for u in spec.units] == ["embed", *names, "head"]
        assert spec.units[0].parameters == 96 * 64
        assert spec.units[-1].parameters == 2 * 64 + 64 * 96 + 96
        assert spec.parameters == sum(p.numel() for p in module.parameters())
        assert spec.alike
    named = nn.Sequential(OrderedDict(embed=nn.Linear(8, 8), middle=nn.LayerNorm(8), head=nn.Embedding(8, 8)))
    with pytest.raises(ConfigError, match="does not run on the sample"):
        ModelSpec.from_module(named, torch.zeros(2, 3, 8))
    named = nn.Sequential(OrderedDict(embed=nn.Linear(8, 8), middle=nn.LayerNorm(8), head=nn.PReLU()))
    assert [u.name for u in ModelSpec.from_module(named, torch.zeros(2, 3, 8)).units] == [
        *("before", "embed", "middle", "head", "after")
    ]


@pytest.mark.parametrize("head_first", [False, True])
def test_parameters_are_where_the_forward_uses_them(head_first: bool) -> None:
    spec = ModelSpec.from_module(Encoder(head_first=head_first), IDS)
    assert [u.name for u in spec.units] == ["embed", *(f"encoder.layers.{i}" for i in range(3)), "head"]
    assert set(spec.units[0].shapes) == {"embed.weight"}
    assert set(spec.units[-1].shapes) == {"head.weight", "head.bias"}
    assert not spec.tied
    layer = 2 * 64 * (4 * 64 + 2 * 160) + 4 * 32 * 64  # FLOPs of a token: matmuls, and attention over 32 keys
    assert [u.flops for u in spec.units] == [0, layer, layer, layer, 2 * 64 * 96]


def test_tied_weights_count_once() -> None:
    module = Tied()
    spec = ModelSpec.from_module(module, (IDS, IDS))
    assert spec.parameters == sum(p.numel() for p in module.parameters())
    assert spec.tied
    assert next(iter(spec.units[0].shapes)) == "tokens.weight"  # which of the embedding's the head borrows
    assert set(spec.units[0].shapes) == {"tokens.weight", "positions.weight"}
    assert set(spec.units[-1].shapes) == {"norm.weight", "norm.bias"}
    assert spec.units[-1].flops == 2 * 64 * 96
    assert spec.kinds.keys() == {"embed", "blocks.0", "blocks.2", "head"}  # what is done after a block belongs to it
    untied = Tied()
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    apart = ModelSpec.from_module(untied, (IDS, IDS))
    assert (apart.tied, apart.parameters - spec.parameters) == (False, 96 * 64)
    assert module.head.weight is module.tokens.weight  # the module is as it was
    assert module.head.weight.device.type == "cpu"


def test_tied_modules_take_the_memory_of_tied_models() -> None:
    m = ModelConfig(family="gpt", layers=2, hidden=64, heads=4, vocab=4096, seq_len=32).resolve()
    ours, traced = ModelSpec.from_config(m), ModelSpec.from_module(serial_model(m, 0), (IDS, IDS))
    assert (traced.tied, traced.parameters) == (True, ours.parameters)
    for pipe in (1, 2):  # a copy of the table on the last rank
        plan = Plan.from_dict({"mesh": {"pipe": pipe}, "batch": {"micro_batches": 2}})
        peaks = [
            predict(plan, PlanProblem(spec, Cluster.local(pipe), 4, Precision())).memory[-1] for spec in (ours, traced)
        ]
        assert peaks[1].peak == pytest.approx(peaks[0].peak, rel=0.05)


def test_a_layer_that_is_used_again_counts_once_and_computes_each_time() -> None:
    layer = nn.Linear(8, 8)
    spec = ModelSpec.from_module(nn.Sequential(layer, layer, layer), torch.zeros(2, 3, 8))
    assert [u.parameters for u in spec.units] == [0, 72, 0, 0, 0]
    assert [u.flops for u in spec.units] == [0, 128, 128, 128, 0]


def test_convolutions_are_products() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, groups=2, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 8, 2, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip
    spec = ModelSpec.from_module(module, torch.zeros(4, 3, 16, 16))
    assert (spec.seq_len, spec.parameters) == (1, sum(p.numel() for p in module.parameters()))
    first, second = 2 * 16 * 16 * 16 * 27, 2 * 6 * 6 * 32 * 8 * 9
    assert [(u.name, u.flops) for u in spec.units] == [
        *(("embed", 0), ("0", first), ("3", second), ("head", 2 * 6 * 6 * 32 * 8 * 4 + 2 * 8 * 10))
    ]
    assert spec.units[1].operators[0].rows == 256
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(4, 3, 16, 16))
    assert sum(u.flops for u in spec.units) * 4 == counter.get_total_flops()


def test_products_of_other_rows_than_tokens_take_their_own_time() -> None:
    """A pooled sequence has one row in the head, an image many: one matmul of that many rows, not many matmuls."""
    problem = PlanProblem(ModelSpec.from_config(config("gpt")), Cluster.preset("a100-40g"), 8, Precision())
    pooled = Operator("head", "product", 64, 96, flops=2.0 * 64 * 96 / 32, rows=1 / 32)
    whole = replace(pooled, flops=2.0 * 64 * 96, rows=1.0)
    assert matmul_seconds(problem, pooled, 8 * 32, 1, 1) == pytest.approx(matmul_seconds(problem, whole, 8, 1, 1))


@pytest.mark.parametrize(
    ("sample", "length", "tokens"),
    [
        (torch.zeros(64, 8), 1, 64),  # rows of features
        (torch.zeros(8), 1, 8),
        (torch.zeros(4, 16, 8), 16, 64),
        (torch.zeros(2, 3, 5, 8), 1, 2),  # images
    ],
)
def test_what_a_token_is(sample: Tensor, length: int, tokens: int) -> None:
    spec = ModelSpec.from_module(Loop(), sample)
    assert spec.seq_len == length
    rows = sample.numel() // 8
    assert spec.flops_per_token == 3 * 3 * 128 * rows / tokens


@pytest.mark.parametrize(
    ("module", "sample", "message"),
    [
        (
            Loop(lambda x: x.sum().item()),
            torch.zeros(2, 3, 8),
            r"Loop cannot be traced .*\.item\(\).*A trace has shapes only",
        ),
        (Loop(lambda x: x if x.sum() > 0 else -x), torch.zeros(2, 3, 8), r"at test_model_spec.py:\d+ .*x.sum\(\) > 0"),
        (Loop(lambda x: x[x > 0]), torch.zeros(2, 3, 8), "A trace has shapes only"),
        (Loop(lambda x: x.numpy()), torch.zeros(2, 3, 8), "leave out of the forward what depends on values"),
        (
            Loop(),
            torch.zeros(2, 3, 7),
            r"Loop does not run on the sample, \[2, 3, 7\] of float32: RuntimeError at test_model_",
        ),
        (Encoder(head_first=False), torch.zeros(2, 3), r"\[2, 3\] of float32: .* Pass the arguments of its forward"),
        (Tied(), IDS, "TypeError: .*missing 1 required positional argument: 'targets'. Pass .* a tuple"),
        (nn.Sequential(*encoder_layers()), torch.zeros(2, 3, 7), "was expecting embedding dimension of 64, but got 7"),
        (3, IDS, "the module to trace is 3, of type int: give an nn.Module"),
        (nn.Linear, IDS, "the module to trace is Linear, a class"),
        (nn.Linear(4, 4), torch.zeros(2, 3, 4), "no list of layers"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (), "the sample must hold a tensor"),
        (Loop(), torch.zeros(0, 3, 8), r"\[0, 3, 8\] of float32, which has no token"),
        (nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), torch.zeros(2, 4), "parameters without a shape"),
    ],
)
def test_modules_that_cannot_be_traced(module: Any, sample: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSpec.from_module(module, sample)


def test_layers_that_do_not_run() -> None:
    class Aside(Loop):
        def forward(self, x: Tensor) -> Any:
            return nn.functional.linear(x, self.layers[0].weight)

    with pytest.raises(ConfigError, match=r"runs none of its layers \('layers.0' and its siblings\)"):
        ModelSpec.from_module(Aside(), torch.zeros(2, 3, 8))


def test_fingerprints_of_configs_stay() -> None:
    found = [
        ModelSpec.from_config(ModelConfig(family=f, layers=2, hidden=64, seq_len=32)) for f in ("gpt", "bert", "llama")
    ]
    assert [spec.fingerprint for spec in found] == ["84c56d2e280a", "f4351d4d46a1", "b9f07327762c"]


HF = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 96,
    "max_position_embeddings": 8192,
}


def test_hugging_face_files(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF))
    spec = ModelSpec.from_hf(folder, seq_len=128)
    assert (spec.name, spec.seq_len, spec.layers) == ("tiny", 128, 6)
    assert ModelSpec.from_hf(folder).seq_len == 4096
    (folder / "mine.json").write_text(json.dumps(HF))
    assert ModelSpec.from_hf(folder / "mine.json").name == "mine"


GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 96, "n_positions": 128}
BERT = {
    **{
        "model_type": "bert",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    },
    **{"vocab_size": 96, "max_position_embeddings": 128},
}
EXPERTS = "a mixture of experts is not supported"


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (GPT2, {"n_embd": "768"}, "n_embd = '768' must be a whole number"),
        (GPT2, {"n_embd": None}, "n_embd = null must be a whole number"),
        (GPT2, {"n_embd": 0}, "n_embd = 0 must be a whole number from 1"),
        (GPT2, {"n_head": 0}, "n_head = 0 must be"),
        (GPT2, {"n_head": 7}, "n_head = 7 does not divide n_embd = 64; the nearest that does is 8"),
        (GPT2, {"n_positions": 0}, "n_positions = 0 must be"),
        (GPT2, {"n_positions": None}, "n_positions = null must be"),
        (GPT2, {"n_layer": True}, "n_layer = True must be"),
        (GPT2, {"n_layer": 100_000}, "n_layer = 100000 must be a whole number from 1 to 10000"),
        (GPT2, {"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no' must be true or false"),
        (HF, {"num_key_value_heads": 0}, "num_key_value_heads = 0 must be"),
        (HF, {"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads = 4"),
        (HF, {"rope_theta": -1}, "rope_theta = -1 must be a number above 0"),
        (HF, {"rope_scaling": "llama3"}, "rope_scaling = 'llama3' must be a table"),
        (HF, {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        (HF, {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor = '2' must be a number"),
        (HF, {"model_type": "mixtral"}, f"Mixtral (model_type 'mixtral'): {EXPERTS}"),
        (HF, {"model_type": "qwen3_moe"}, f"Qwen 3 MoE (model_type 'qwen3_moe'): {EXPERTS}"),
        (HF, {"model_type": "deepseek_v3"}, "a mixture of experts, latent attention and FP8 weights are not supported"),
        (HF, {"model_type": "gemma3"}, "Gemma 3 with vision (model_type 'gemma3'): images are not supported"),
        (
            HF,
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping = 50.0: soft-capping is not supported for this family",
        ),
        (
            HF,
            {"model_type": "gemma2", "use_bidirectional_attention": True},
            "attention to later tokens is not supported",
        ),
        (HF, {"model_type": "other", "num_experts": 8}, f"num_experts = 8: {EXPERTS}"),
        (HF, {"model_type": "other"}, "model_type 'other' is not supported; known: gpt2, bert"),
        (HF, {"num_experts_per_tok": 2}, EXPERTS),
        (HF, {"moe_intermediate_size": 64}, EXPERTS),
        (HF, {"quantization_config": {"quant_method": "fp8"}}, "FP8 weights are not supported"),
        (HF, {"quantization_config": {"bits": 4}}, "quantization_config: quantized weights are not supported"),
        (HF, {"compression_config": {"quant_method": "gptq"}}, "quantized weights are not supported"),
        (HF, {"torch_dtype": "float8_e4m3fn"}, "torch_dtype = 'float8_e4m3fn': FP8 weights are not supported"),
        (HF, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: a rotary embedding on a part"),
        (HF, {"layer_types": ["linear_attention"] * 4}, "layer_types has 'linear_attention', which is not supported"),
        (
            HF,
            {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 4, "sliding_window": 0},
            "sliding_window is missing",
        ),
        (HF, {"model_type": "smollm3", "no_rope_layers": [1, 0]}, "one entry for each of the 4 layers"),
        (HF, {"model_type": "phi3", "partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5 must be at most 1"),
        (HF, {"sliding_window": 64}, "sliding_window = 64 is shorter than the sequence of 4096 tokens"),
        (
            HF,
            {"layer_types": ["full_attention"] * 3},
            "layer_types has 3 entries for num_hidden_layers = 4; leave it out",
        ),
        (HF, {"layer_types": "full_attention"}, "layer_types has 'full_attention' for num_hidden_layers = 4"),
        (
            HF,
            {"architectures": ["LlamaForSequenceClassification"]},
            "architectures = LlamaForSequenceClassification: llama is",
        ),
        (HF, {"architectures": ["LlamaForTokenClassification"]}, 'write "architectures": ["LlamaForCausalLM"]'),
        (HF, {"architectures": "LlamaModel"}, "architectures = LlamaModel: llama is trained as a language model"),
        (GPT2, {"architectures": ["GPT2DoubleHeadsModel"]}, 'write "architectures": ["GPT2LMHeadModel"]'),
        (BERT, {"architectures": ["BertForQuestionAnswering"]}, 'write "architectures": ["BertForMaskedLM"]'),
        (BERT, {"architectures": ["BertLMHeadModel"]}, "no other head is supported"),
        (BERT, {"is_decoder": True}, "is_decoder = True: BERT with causal attention is not supported"),
        (BERT, {"type_vocab_size": -1}, "type_vocab_size = -1 must be a whole number from 0"),
        (
            GPT2,
            {"attn_pdrop": 0.0},
            "resid_pdrop = 0.1, embd_pdrop = 0.1, attn_pdrop = 0.0: one dropout for embedding, parts",
        ),
        (BERT, {"hidden_dropout_prob": 0.2}, "choose it: model.dropout = 0, or for example 0.2"),
        (HF, {"attention_dropout": 0.1}, "attention_dropout = 0.1 and no other dropout: one dropout"),
        (GPT2, {"resid_pdrop": "0.1"}, "resid_pdrop = '0.1' must be at least 0 and below 1"),
        (GPT2, {"resid_pdrop": 1}, "resid_pdrop = 1 must be at least 0 and below 1"),
    ],
)
def test_hugging_face_files_that_ask_for_more_or_nonsense(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(base | change))
    with pytest.raises(ConfigError) as e:
        ModelSpec.from_hf(tmp_path)
    assert message in str(e.value)
    assert "did you mean" not in str(e.value)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 4096},
        {"sliding_window": 64, "use_sliding_window": False, "model_type": "qwen2"},
        {"sliding_window": None, "layer_types": ["full_attention"] * 4, "model_type": "qwen3"},
        {"partial_rotary_factor": 1.0, "rope_scaling": None, "head_dim": None, "num_experts": 0},
    ],
)
def test_hugging_face_files_that_only_look_so(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF | change))
    assert ModelSpec.from_hf(tmp_path).layers == 6


@pytest.mark.parametrize("name", HUB)
def test_hugging_face_files_of_the_hub(tmp_path: Path, name: str) -> None:
    data, parameters, dropout = HUB[name]
    (tmp_path / "config.json").write_text(json.dumps(data))
    spec = ModelSpec.from_hf(tmp_path)
    assert spec.parameters == parameters
    assert spec.config is not None
    assert spec.config.dropout == dropout
    assert spec.config.resolve() == spec.config


def write_config(folder: Path, data: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (GPT2, {"output_past": True, "n_special": 0, "predict_special_tokens": True}),
        (BERT, {"directionality": "bidi", "pooler_type": "first_token_transform", "pooler_num_fc_layers": 3}),
        (MISTRAL, {"custom_pipelines": {"text-generation": {"impl": "a.B"}}}),
    ],
)
def test_keys_of_published_files_that_no_model_reads(
    tmp_path: Path, data: dict[str, Any], keys: dict[str, Any]
) -> None:
    assert read_config(write_config(tmp_path, data | keys)) == read_config(write_config(tmp_path, data))


def test_windows_longer_than_the_sequence_allow_dropout(tmp_path: Path) -> None:
    """StarCoder 2 is published with both."""
    path = write_config(tmp_path, STARCODER2)
    spec = ModelSpec.from_hf(path)
    assert spec.parameters == 7_173_923_840
    assert spec.config is not None
    assert (spec.config.seq_len, spec.config.dropout) == (4096, 0.1)
    with pytest.raises(
        ConfigError, match=r"dropout = 0.1 and model.windows \(at model.seq_len = 8192\) cannot be combined"
    ):
        ModelSpec.from_hf(path, seq_len=8192)


@pytest.mark.parametrize(("data", "seq_len"), [(GRANITE, None), (STARCODER2, 8192)])
def test_plans_of_models_with_other_dropouts(
    tmp_path: Path, data: dict[str, Any], seq_len: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, *_ = read_model(str(write_config(tmp_path, data)), seq_len)
    assert spec.config is not None
    assert spec.config.dropout == 0
    said = capsys.readouterr().err
    assert "dropout = 0.1" in said
    assert "planned with 0 (a run: --model.dropout 0)" in said
    with pytest.raises(ConfigError, match="hidden_size"):
        read_model(str(write_config(tmp_path, data | {"hidden_size": 0})), None)


def test_dropout_beside_a_hugging_face_file_is_the_one(tmp_path: Path) -> None:
    where = tmp_path / "config.json"
    where.write_text(json.dumps(GPT2 | {"attn_pdrop": 0.0}))
    for asked in (0.0, 0.2):
        assert ModelConfig(hf=str(where), seq_len=64, dropout=asked).resolve().dropout == asked
        spec = ModelSpec.from_hf(where, dropout=asked)
        assert spec.config is not None
        assert spec.config.dropout == asked
    where.write_text(json.dumps(GPT2))
    assert ModelConfig(hf=str(where), seq_len=64).resolve().dropout == 0.1


def test_a_rank_of_zero_adapts_nothing() -> None:
    """As the config says: 0 means no LoRA, so all weights are trained."""
    whole = ModelConfig(family="llama", layers=2, hidden=128, heads=2, vocab=256, seq_len=64)
    without = replace(whole, lora=LoraConfig())
    assert without == whole
    assert not any(u.frozen for u in ModelSpec.from_config(without).units)
    assert all(u.frozen for u in ModelSpec.from_config(replace(whole, lora=LoraConfig(rank=4))).units)
