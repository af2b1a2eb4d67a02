"""Every Python example of docs/lab.md runs as it stands; its assertions are tests too (torchrun across two hosts is one)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fourfold.testing.network import missing

PAGE = Path(__file__).parents[2] / "docs" / "lab.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
TOPICS = ("ranks", "ledger", "budget", "pipeline", "queue", "products", "network", "torchrun")


@pytest.mark.parametrize(("topic", "code"), list(zip(TOPICS, EXAMPLES, strict=True)), ids=TOPICS)
def test_example(topic: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if topic in ("network", "torchrun") and (why := missing()) is not None:
        pytest.skip(why)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(code)  # on disk, for the lines that a refusal quotes
    exec(compile(code, str(script), "exec"), {"__name__": "__main__"})


def test_the_page_shows_every_tool() -> None:
    text = "".join(EXAMPLES)
    for tool in ("ranks", "ledger", "budget", "emulate", "network"):
        assert f"from fourfold.testing.{tool} import" in text
