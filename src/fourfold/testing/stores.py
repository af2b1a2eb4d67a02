"""Stores for tests of start-up: one that counts operations, and one in which all other ranks are already there.

Ranks find each other in a key-value store that one process serves: what each of them asks of it must not grow with their number.

    store = CountingStore(dist.TCPStore(...))
    agree(store, rank, ranks, timeout=10)
    store.operations                                # {"set": 1, "get": 2, …}
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch.distributed as dist

__all__ = ["CountingStore", "CrowdedStore"]


class CountingStore(dist.Store):
    """Passes every operation on to another store, and counts it."""

    def __init__(self, inner: Any):
        super().__init__()
        self.inner, self.operations = inner, Counter[str]()

    def _pass_on(self, name: str, *args: Any) -> Any:
        self.operations[name] += 1
        return getattr(self.inner, name)(*args)

    def set(self, key: str, value: Any) -> None:
        self._pass_on("set", key, value)

    def get(self, key: str) -> bytes:
        return self._pass_on("get", key)

    def add(self, key: str, number: int) -> int:
        return self._pass_on("add", key, number)

    def check(self, keys: list[str]) -> bool:
        return self._pass_on("check", keys)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._pass_on("wait", keys, *timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._pass_on("multi_get", keys)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._pass_on("multi_set", keys, values)

    def append(self, key: str, value: Any) -> None:
        self._pass_on("append", key, value)

    def set_timeout(self, timeout: Any) -> None:
        self.inner.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return bool(self.inner.has_extended_api())


class CrowdedStore:
    """The store of a job of many ranks as one rank sees it: it already has what the other ranks would write."""

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks
        self.values = {f"fourfold/number/{r}": b"x" for r in range(ranks) if r != rank}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()
        if self.rank != 0 and key == f"fourfold/number/{self.rank}":  # rank 0 sees it, and offers a session
            numbers = [self.values[f"fourfold/number/{r}"].decode() for r in range(self.ranks)]
            self.values |= {"fourfold/s/numbers": json.dumps(numbers).encode(), "fourfold/session": b"s"}

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def add(self, key: str, number: int) -> int:
        """The others have accepted; a rank that is not the first finds the session open after that."""
        self.values[key] = str(int(self.values.get(key, b"0")) + number).encode()
        if self.rank != 0:
            self.values["fourfold/s/open"] = b"yes"
        return int(self.values[key]) + self.ranks - 1

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def has_extended_api(self) -> bool:
        return True
