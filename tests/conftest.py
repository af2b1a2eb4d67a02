"""Ranks are forked: torch must never have run a multi-threaded kernel in this process."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
