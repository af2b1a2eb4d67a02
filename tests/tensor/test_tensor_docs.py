"""The examples of docs/tensor.md run as they stand, and its plan is legal."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from fourfold.config import Config
from fourfold.plan import Plan

PAGE = (Path(__file__).parents[2] / "docs" / "tensor.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), ids=("costs", "modules"))
def test_example(code: str) -> None:
    exec(compile(code, "docs/tensor.md", "exec"), {"__name__": "__main__"})


def test_plan() -> None:
    text = "".join(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
    config = Config.load(Path(__file__).parents[2] / "configs" / "gpt-tiny.toml").resolve()
    Plan.from_dict(tomllib.loads(text)).check(config, 8)
