"""Fine-tune a Hugging Face folder on chats by LoRA, merge the adapter, and open the result in transformers.

python examples/fine_tune_folder.py                      # makes a tiny folder and four chats first
python examples/fine_tune_folder.py FOLDER CHATS.jsonl   # yours
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fourfold.cli import main

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATS = (
    ("One plus one?", "Two."),
    ("Two plus two?", "Four."),
    ("One plus two?", "Three."),
    ("Two plus one?", "Three."),
)


def tiny_folder(path: Path) -> None:
    """A model of random weights, with a byte-level tokenizer and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    library.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    library.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {"vocab_size": len(alphabet) + 2, "eos_token_id": len(alphabet) + 1, "max_position_embeddings": 128}
    LlamaForCausalLM(LlamaConfig(**sizes, **words, tie_word_embeddings=False)).save_pretrained(path)
    library.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def fine_tune(folder: Path, chats: Path, run: Path, steps: int) -> Path:
    """Train adapters on the folder's frozen weights; returns the folder of the merged model."""
    words = ["train", str(folder), "--data", str(chats), "--lora.rank", "4", "--train.run-dir", str(run)]
    if main([*words, "--train.steps", str(steps), "--train.global-batch", "4"]):
        raise SystemExit("training failed")
    if main(["export", str(run), str(run / "merged"), "--merge"]):
        raise SystemExit("export failed")
    return run / "merged"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        if len(sys.argv) == 3:
            folder, chats, run, steps = Path(sys.argv[1]), Path(sys.argv[2]), Path("runs/fine-tuned"), 100
        else:
            folder, chats, run, steps = here / "tiny", here / "chats.jsonl", here / "run", 4
            tiny_folder(folder)
            talks = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in CHATS]
            chats.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
        merged = fine_tune(folder, chats, run, steps)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(merged), AutoTokenizer.from_pretrained(merged)
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": CHATS[0][0]}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        print(tokenizer.decode(model.generate(**asked, max_new_tokens=8, do_sample=False)[0]))
        if len(sys.argv) != 3:
            print(
                "(Four steps from random weights: the answer is noise. With FOLDER and CHATS.jsonl it is your model's.)"
            )
