"""Examples of fine-tuning: formats, chat templates and which tokens are trained. transformers is the oracle."""

from __future__ import annotations

import datetime
import gzip
import importlib.util
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.data.chats import Chat, ChatTemplate, PlainExample, parse_example, time_limit
from fourfold.data.encode import Encoder, Encoding
from fourfold.data.samples import IGNORE, ByteTokenizer, Corpus, Samples, load_tokenizer, open_corpus, write_tokens
from fourfold.errors import DataError
from tests.helpers import make_config, run_training, series

# Small templates, each with what makes one family's hard.
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TRIMS = "{{ bos_token }}{% for m in messages %}<|head|>{{ m['role'] }}<|/head|>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}"
RENAMES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<|turn|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|eot|>\n{% endfor %}"
)
DROPS_THOUGHTS = (  # of all turns but the last, and splits the content
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' and '</think>' in c and not loop.last %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>\n{% endfor %}"
)
MARKED = "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>a\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
ROLE_ENDS = "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|turn|>' }}{{ m.content }}{% endfor %}"
TALK = [
    {"role": "user", "content": "Hello, wörld?"},
    {"role": "assistant", "content": "  Fine – thanks! "},
    {"role": "user", "content": "Fine – thanks!"},
    {"role": "assistant", "content": "Again: Fine"},
]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<|turn|>", "<|bos|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, SPECIAL, {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "chat_template": CHATML})
    return path


def write_tokenizer(path: Path, special: list[str], config: dict[str, str]) -> None:
    """A byte-level tokenizer with special tokens, as a Hugging Face folder has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    library = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(t, special=True) for t in special])
    library.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))


def encoded(
    folder: Path, template: str, messages: list[dict[str, Any]], tmp_path: Path, **options: str
) -> tuple[str, str]:
    """The decoded text of a chat, and of its trained tokens with a bar between runs of them."""
    (tmp_path / "t.jinja").write_text(template)
    codec = load_tokenizer(str(folder / "tokenizer.json"))
    encoder = Encoder(codec, Encoding(str(folder / "tokenizer.json"), str(tmp_path / "t.jinja"), **options))
    chat = parse_example({"messages": [dict(m) for m in messages]}, "here")
    ((ids, mask),) = encoder([("here", chat)])
    mask = np.ones(len(ids), np.uint8) if mask is None else mask
    runs = np.split(ids, np.nonzero(np.diff(mask.astype(int)))[0] + 1)
    kept = [run for i, run in enumerate(runs) if (i % 2 == 0) == bool(mask[0])]
    decode = codec._library.decode  # type: ignore[attr-defined]
    return decode(ids.tolist(), False), "|".join(decode(run.tolist(), False) for run in kept)


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        (CHATML, "  Fine – thanks! <|im_end|>|Again: Fine<|im_end|>"),
        (TRIMS, "Fine – thanks!<|eot|>|Again: Fine<|eot|>"),
        (RENAMES, "Fine – thanks!<|eot|>|Again: Fine<|eot|>"),
        (MARKED, "  Fine – thanks! <|im_end|>|Again: Fine<|im_end|>"),
        (ROLE_ENDS, "  Fine – thanks! <|im_start|>|Again: Fine"),
    ],
    ids=["chatml", "trims", "renames", "marked", "role-ends"],
)
def test_the_assistants_turns_are_trained(folder: Path, tmp_path: Path, template: str, trained: str) -> None:
    text, found = encoded(folder, template, TALK, tmp_path)
    assert found == trained
    everything, whole = encoded(folder, template, TALK, tmp_path, loss_on="all")
    assert everything == whole == text


def test_a_template_that_splits_the_content(folder: Path, tmp_path: Path) -> None:
    talk = [*TALK[:1], {"role": "assistant", "content": "<think>hm</think>\nYes"}, *TALK[2:]]
    text, found = encoded(folder, DROPS_THOUGHTS, talk, tmp_path)
    assert "hm" not in text
    assert found == "Yes<|im_end|>|Again: Fine<|im_end|>"


def test_templates_agree_with_transformers(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    codec = load_tokenizer(str(folder / "tokenizer.json"))
    for template in (CHATML, TRIMS, RENAMES, DROPS_THOUGHTS, MARKED, ROLE_ENDS):
        ours = ChatTemplate(template, "t", {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"})
        for prompt in (False, True):
            expected = theirs.apply_chat_template(
                TALK, chat_template=template, tokenize=False, add_generation_prompt=prompt
            )
            assert ours.render(TALK, add_generation_prompt=prompt) == expected
    full = theirs.apply_chat_template(
        TALK, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    (tmp_path / "t.jinja").write_text(MARKED)
    encoder = Encoder(codec, Encoding(str(folder / "tokenizer.json"), str(tmp_path / "t.jinja")))
    ((ids, mask),) = encoder([("here", parse_example({"messages": [dict(m) for m in TALK]}, "here"))])
    assert ids.tolist() == list(full["input_ids"])
    assert mask is not None
    assert mask.tolist() == list(full["assistant_masks"])


CONTROL = re.compile(r"<[|｜][^<>'\"{}\s]+[|｜]>|<(?:start_of_turn|end_of_turn|turn\|)>|<\|turn>")


def test_templates_of_many_families(tmp_path: Path) -> None:
    """Templates that TRL has of models, as they are and with `{% generation %}` added: text and ids of transformers, masks of TRL.

    Where a template has no blocks, an answer and the token that ends it are trained; TRL's copies also mark what stands around
    them (a newline, an empty thought), and ours lies within.
    """
    transformers = pytest.importorskip("transformers")
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl is not installed")
    sources = {f.stem: f.read_text() for f in sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))
               if not f.stem.startswith(("idefics", "smolvlm", "llava"))}  # fmt: skip # these want content in parts
    control = sorted({"<BOS>", "<EOS>"}.union(*(CONTROL.findall(source) for source in sources.values())))
    write_tokenizer(tmp_path, control, {"bos_token": "<BOS>", "eos_token": "<EOS>"})
    theirs, path = transformers.AutoTokenizer.from_pretrained(str(tmp_path)), tmp_path / "tokenizer.json"
    codec, talk = load_tokenizer(str(path)), [{**m, "content": m["content"].strip()} for m in TALK]
    chat = parse_example({"messages": [dict(m) for m in talk]}, "here")
    families, blocks = set(), 0
    for name, source in sources.items():
        (tmp_path / "t.jinja").write_text(source)
        encoding = Encoding(str(path), str(tmp_path / "t.jinja"), datetime.date.today().isoformat())
        ((ids, mask),) = Encoder(codec, encoding)([("here", chat)])
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        expected = theirs.apply_chat_template(talk, chat_template=source, **options)
        assert ids.tolist() == list(expected["input_ids"]), name
        assert mask is not None
        if any(expected["assistant_masks"]):  # the template marks them itself
            assert mask.tolist() == list(expected["assistant_masks"]), name
            blocks += 1
            continue
        runs = np.split(ids, np.nonzero(np.diff(mask.astype(int)))[0] + 1)[1::2]
        trained = [theirs.decode(run.tolist()) for run in runs]
        for i, answer in enumerate(("Fine – thanks!", "Again: Fine")):
            end = trained[i].removeprefix(answer)
            assert len(trained[i]) - len(end) == len(answer), (name, trained)
            assert end in control or end == "<|end|>\n<EOS>" or (not end and name == "glm4moe" and i), (name, trained)
        families.add(name.split("_")[0].rstrip("0123456789"))
        if copy := sources.get(f"{name}_training"):
            marked = theirs.apply_chat_template(talk, chat_template=copy, **options)
            if list(marked["input_ids"]) == ids.tolist():
                assert np.all(np.asarray(marked["assistant_masks"]) >= mask), name
    assert len(families) >= 10, families
    assert blocks >= 25


def test_the_token_that_stops_a_turn_may_follow_another(tmp_path: Path) -> None:
    """As Command R7B writes it: the end of the response, then the end of the turn, at which generation stops."""
    write_tokenizer(tmp_path, ["<|end|>", "<|stop|>"], {"eos_token": "<|stop|>"})
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|><|stop|>{% endfor %}"
    assert encoded(tmp_path, template, TALK[:2], tmp_path)[1] == "  Fine – thanks! <|end|><|stop|>"


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            ["user a", "assistant b"],
        ),
        (
            {"messages": [{"from": "human", "value": "a"}, {"role": "assistant", "content": "b"}]},
            ["user a", "assistant b"],
        ),
        ({"instruction": "do", "input": "it", "output": "b"}, ["user do\nit", "assistant b"]),
        ({"instruction": "do", "input": "", "output": "b", "system": "s"}, ["system s", "user do", "assistant b"]),
        (
            {"instruction": "do", "output": "d", "history": [["a", "b"]]},
            ["user a", "assistant b", "user do", "assistant d"],
        ),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
            ["user a", "assistant b"],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}]},
                    {"role": "assistant", "content": "b"},
                ]
            },
            ["user a", "assistant b"],
        ),
    ],
)
def test_formats_of_chats(item: dict[str, Any], expected: list[str]) -> None:
    chat = parse_example(item, "here")
    assert isinstance(chat, Chat)
    assert [f"{m['role']} {m['content']}" for m in chat.messages] == expected
    assert chat.trained == tuple(i for i, turn in enumerate(expected) if turn.startswith("assistant"))


def test_turns_that_are_not_trained() -> None:
    talk = [dict(m) for m in TALK]
    talk[1]["weight"] = 0
    chat = parse_example({"messages": talk}, "here")
    assert isinstance(chat, Chat)
    assert chat.trained == (3,)
    assert "weight" not in chat.messages[1]


def test_plain_formats() -> None:
    assert parse_example({"prompt": "a", "completion": "b"}, "here") == PlainExample("b", "a")
    assert parse_example({"prompt": "a", "answer": "b", "text": None}, "here") == PlainExample("b", "a")
    assert parse_example({"text": "b"}, "here") == PlainExample("b")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ([1], "expected a JSON object, found a list"),
        ({"txt": "a"}, "not an example: has 'txt'; expected 'messages'"),
        ({"text": "a", "messages": []}, "has both 'messages' and 'text'"),
        ({"messages": []}, "expected a list of messages, found an empty list"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no assistant turn to train on"),
        ({"messages": [{"role": "assistant"}]}, "message 1: has no 'content'"),
        ({"messages": [{"content": "a"}]}, "message 1: has no 'role'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a content part of type 'image_url'"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, "has weight 0.5; a turn is trained"),
        ({"prompt": "a"}, "has 'prompt' without 'completion'"),
        ({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}, "use text or messages for both"),
        ({"instruction": "a"}, "'output' is nothing; expected text"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "'history' must be a list of [question, answer]"),
    ],
)
def test_bad_examples_are_named(item: Any, message: str) -> None:
    with pytest.raises(DataError, match=r"x.jsonl:7: .*") as e:
        parse_example(item, "x.jsonl:7")
    assert message in str(e.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "refuses the chat: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "refuses the chat: access to attribute 'append'"),
        ("{% for m in messages %}", "not a chat template"),
        ("{{ raise_exception('no') }}", "refuses the chat: no"),
        (
            "{% for i in range(90000) %}{% for j in range(90000) %}{{ 'a' * 100000 }}{% endfor %}{% endfor %}",
            "writes more than",
        ),
        ("{{ 1 / 0 }}", "fails: division by zero"),
        ("{{ 'x' * 10000000000 }}", "needs more than 1,024 MiB of memory"),
        ("{{ '%010000000000d' % 1 }}", "needs more than 1,024 MiB of memory"),
        (
            "{% set n = namespace(s='xxxx') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
            "needs more than 1,024 MiB of memory",
        ),
        ("{{ 10 ** (messages | length * 1000000000) }}", "refuses the chat: 10 .. 4000000000 is too large"),
        ("{{ 2 ** 'a' }}", "refuses the chat: bad operand type for abs"),
    ],
)
def test_hostile_templates_are_refused(template: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ChatTemplate(template, "t").render(TALK)


@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_a_role_that_the_template_does_not_write_is_named(tmp_path: Path, loss_on: str) -> None:
    """Also where the content of the message occurs elsewhere in the chat."""
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.role }}: {{ m.content }}|{% endif %}{% endfor %}"
    )
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    path = tmp_path / "chats.jsonl"
    encoding = Encoding("bytes", str(template), loss_on=loss_on)
    path.write_text(json.dumps({"messages": talk}))
    open_corpus(str(path), "bytes", encoding)
    for content in ("watch", "hello"):
        said = [{"messages": talk}, {"messages": [{"role": "observer", "content": content}, *talk]}]
        path.write_text("\n".join(map(json.dumps, said)))
        with pytest.raises(DataError, match=rf"{path}:2: .*leaves out message 1, whose role is 'observer'"):
            open_corpus(str(path), "bytes", encoding)


def test_a_template_that_loops_is_ended() -> None:
    loops = ChatTemplate("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "t")
    began = time.monotonic()
    with (
        pytest.raises(DataError, match="a.jsonl:7: its chat template takes longer than 0.5 s"),
        time_limit("a.jsonl:7", 0.5),
    ):
        loops.render(TALK)
    assert time.monotonic() - began < 30


def test_chats_without_a_template_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": TALK}))
    refusal = rf"^{path}:1: a chat, but the tokenizer 'bytes' has no chat template"
    with pytest.raises(DataError, match=refusal):
        open_corpus(str(path))
    with pytest.raises(DataError, match=refusal):
        write_tokens(str(path), "bytes", tmp_path / "out.tokens")
    assert [p.name for p in tmp_path.iterdir()] == ["chats.jsonl"]


def corpus_of(path: Path, lines: list[dict[str, Any]], **options: str) -> Corpus:
    path.write_text("\n".join(map(json.dumps, lines)))
    return open_corpus(str(path), "bytes", Encoding(**options))


def test_a_sample_is_one_whole_example(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "b" * i}]}
        for i in range(1, 30)
    ]
    corpus = corpus_of(
        tmp_path / "a.jsonl", [*lines, {"messages": [{"role": "assistant", "content": ""}]}], template="plain"
    )
    samples = Samples(corpus, seq_len=40, vocab=256, seed=0, packing="none")
    assert (samples.count, corpus.left_out, samples.segments.cut, samples.segments.empty) == (29, 1, 9, 0)
    seen = set()
    for k in range(29):
        tokens, targets = samples[k]
        text = ByteTokenizer().decode(tokens)
        number = int(text.split("\n")[0].removeprefix("user: "))
        answer = ByteTokenizer().decode(t for t in targets if t != IGNORE)
        whole = "b" * number + "\n"
        assert text.startswith(f"user: {number}\nassistant: ")
        assert answer == whole[: len(answer)]
        assert answer == whole or len(text) == 40
        seen.add(number)
    assert seen == set(range(1, 30))
    assert "29 examples" in samples.describe(4, 10)
    assert "9 cut to fit" in samples.describe(4, 10)
    assert Samples(corpus, seq_len=40, vocab=256, seed=0, packing="none", overlong="drop").count == 20
    with pytest.raises(DataError, match="9 of 29 examples are longer than model.seq_len = 40"):
        Samples(corpus, seq_len=40, vocab=256, seed=0, overlong="error")
    with pytest.raises(DataError, match="no example has a token to predict within model.seq_len = 5"):
        Samples(corpus, seq_len=5, vocab=256, seed=0)


def test_token_files_keep_examples_apart(tmp_path: Path) -> None:
    lines = [{"prompt": "a" * i, "completion": "b" * i} for i in range(1, 20)]
    corpus = corpus_of(tmp_path / "a.jsonl", lines)
    written = write_tokens(str(tmp_path / "a.jsonl"), "bytes", tmp_path / "a.tokens")
    assert written.fingerprint == corpus.fingerprint
    assert written.prompted
    assert written.starts is not None
    assert corpus.starts is not None
    assert (written.starts == corpus.starts).all()
    for k in range(5):
        ours, theirs = (Samples(c, seq_len=30, vocab=256, seed=1)[k] for c in (corpus, written))
        assert (ours[0] == theirs[0]).all()
        assert (ours[1] == theirs[1]).all()


def test_sources_of_many_files(tmp_path: Path) -> None:
    for i in range(3):
        with gzip.open(tmp_path / f"{i}.jsonl.gz", "wt") as f:
            f.write(json.dumps({"text": "abc"}) + "\n")
    (tmp_path / "list.json").write_text(json.dumps([{"text": "abc"}] * 2))
    assert len(open_corpus(str(tmp_path / "*.jsonl.gz")).tokens) == 12
    assert len(open_corpus(str(tmp_path / "list.json")).tokens) == 8
    with pytest.raises(DataError, match=r"has examples \(0.jsonl.gz\) and list.json, .* for example '.*/\*.jsonl.gz'"):
        open_corpus(str(tmp_path))
    (tmp_path / "list.json").rename(tmp_path / "README.md")  # as a dataset of the hub has it
    with pytest.raises(DataError, match="and README.md, which is of another kind"):
        open_corpus(str(tmp_path))
    (tmp_path / "README.md").rename(tmp_path.parent / "list.json")
    assert len(open_corpus(str(tmp_path)).tokens) == 12
    (tmp_path / "one.json").write_text('{"text": "a"}')
    with pytest.raises(DataError, match="a file with one object per line is named .jsonl"):
        open_corpus(str(tmp_path / "one.json"))
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"bad.jsonl:2: byte 10 is not UTF-8"):
        open_corpus(str(tmp_path / "bad.jsonl"))
    (tmp_path / "cut.jsonl.gz").write_bytes((tmp_path / "0.jsonl.gz").read_bytes()[:-12])
    with pytest.raises(DataError, match="cut.jsonl.gz: cannot be read"):
        open_corpus(str(tmp_path / "cut.jsonl.gz"))


def test_encoded_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real tokenizer a source is encoded by a process of its own and kept; a changed file is encoded again."""
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "cache"))
    path, name = tmp_path / "a.jsonl", str(folder / "tokenizer.json")
    path.write_text(json.dumps({"messages": TALK}))
    first = open_corpus(str(path), name)
    kept = list((tmp_path / "cache" / "data").glob("*.tokens"))
    changed = kept[0].stat().st_mtime_ns
    again = open_corpus(str(path), name)
    assert kept[0].stat().st_mtime_ns == changed
    assert (again.tokens == first.tokens).all()
    assert isinstance(again.tokens, np.memmap)
    codec = load_tokenizer(name)
    assert codec.end == codec._library.token_to_id("<|im_end|>")  # type: ignore[attr-defined]
    path.write_text(json.dumps({"messages": [{"role": "assistant", "content": 7}]}))
    with pytest.raises(DataError, match=r"a.jsonl:1: messages, message 1: 'content' is a number"):
        open_corpus(str(path), name)


def test_every_plan_sees_the_same_examples(tmp_path: Path) -> None:
    """Samples of different numbers of trained tokens, over data, grid and pipeline: the losses of one process."""
    lines = [{"prompt": "a" * (i % 5 + 1), "completion": f"{i * i} is the square of {i}" * (i % 3)} for i in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = []
    for name, mesh in (("one", {}), ("many", {"data": 2, "pipe": 2})):
        config = make_config(
            tmp_path / name, data={"source": str(tmp_path / "a.jsonl"), "eval_fraction": 0.2}, train={"steps": 3}
        )
        plan = {"mesh": mesh, "precision": {"compute": "fp64"}}
        found.append(run_training(config, plan, 4 if mesh else 1))
    for key in ("loss", "grad_norm"):
        assert np.allclose(series(found[0], key), series(found[1], key), rtol=1e-9, atol=0)


def test_characters_are_located_among_tokens(folder: Path) -> None:
    """Against the places of all tokens, on random text with characters of several tokens and control tokens."""
    codec, r = load_tokenizer(str(folder / "tokenizer.json")), random.Random(0)
    alphabet = ["a", " ", "é", "–", "😀", "\n", "字", "\u0301", "<|im_end|>", "👍🏽"]
    for _ in range(200):
        text = "".join(r.choices(alphabet, k=r.randrange(1, 30)))
        first = r.randrange(len(text))
        last = r.randrange(first + 1, len(text) + 1)
        ((_, tokens),) = codec.encode_all([text], locate=True)
        places = codec._library.encode(text, add_special_tokens=False).offsets  # type: ignore[attr-defined]
        assert list(range(*tokens(first, last))) == [i for i, (a, b) in enumerate(places) if b > first and a < last]
        ((ids, tokens),) = ByteTokenizer().encode_all([text], locate=True)
        assert bytes(ids[slice(*tokens(first, last))]).decode() == text[first:last]
