"""What a sharding mode means: when a unit's parameters are gathered and released, and when its gradients are reduced.

Lowering places GATHER, RELEASE and REDUCE by these rules, and the planner's model of time and memory reads the same ones.

| mode | gathered before | released after |
|---|---|---|
| replicate | never | never |
| keep | its first forward of a step | its last backward of a step |
| zero2 | a forward with no micro-batch of the stage in flight | a backward that leaves none in flight |
| zero3 | every forward and backward | every forward and backward |
"""

from __future__ import annotations

from typing import Literal

__all__ = ["Mode", "ReduceAfter", "gathered_for_each_op", "gathers", "once_a_step", "reduces", "releases", "shards"]

Mode = Literal["replicate", "zero2", "zero3", "keep"]
ReduceAfter = Literal["step", "micro-batch"]
"""Gradients are reduced once per step, or after every micro-batch."""


def shards(mode: str) -> bool:
    """Whether each rank of the group holds a part of the unit's parameters, gradients and optimizer state."""
    return mode != "replicate"


def gathered_for_each_op(mode: str) -> bool:
    """Whether a unit is gathered for every forward and every backward, and held only meanwhile."""
    return gathers(mode, "B", first=False, none_in_flight=False)


def once_a_step(mode: str, reduce: str) -> bool:
    """Whether a unit's collectives run once a step under every schedule: before its first forward, after its last backward."""
    return mode in ("replicate", "keep") and not reduces(reduce, last=False)


def gathers(mode: str, kind: str, *, first: bool, none_in_flight: bool) -> bool:
    """Whether an op of kind F, B, I or W gathers a unit before it is used; `first`: the first forward of a step."""
    if mode == "zero3":
        return kind != "W"
    if kind != "F" or mode == "replicate":
        return False
    return none_in_flight if mode == "zero2" else first


def releases(mode: str, *, last: bool, none_in_flight: bool) -> bool:
    """Whether a unit is released after a use; `last`: its last use of a step; `none_in_flight`: after it."""
    if mode == "zero3":
        return True
    return mode != "replicate" and (none_in_flight if mode == "zero2" else last)


def reduces(reduce: str, *, last: bool) -> bool:
    """Whether gradients are reduced after a contribution; `last`: the last one of a step."""
    return last or reduce == "micro-batch"
