"""The most bytes that a unit holds for a while, above what it keeps of a micro-batch; and what it keeps."""

from __future__ import annotations

import math

from fourfold.model.operators import Held, Moment, UnitSpec
from fourfold.plan import Mesh
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.products import flow_of

__all__ = ["Heights", "at_once"]


def at_once(setting: Setting, mesh: Mesh) -> bool:
    """Whether each weight's gradient is added when it is made: on a grid, and by the hooks of any module."""
    return mesh.row * mesh.col > 1 or setting.spec.config is None


class Heights:
    """The most bytes that a unit holds for a while, above what it keeps of a micro-batch."""

    def __init__(
        self, setting: Setting, layout: Layout, unit: UnitSpec, recompute: str, tokens: int, grads: float, slices: int
    ):
        mesh, self.overlap = layout.mesh, layout.tensor.overlap
        self.setting, self.unit, self.mesh, self.slices = setting, unit, mesh, slices
        self.recompute, self.tokens, self.grads = recompute, tokens, grads / slices
        self.width, self.scale = setting.compute, tokens / mesh.col
        self.at_once = at_once(setting, mesh)
        sizes = [math.prod(s) for s in unit.shapes.values() if len(s) > 1]
        self.largest = max(sizes, default=0) / max(1, unit.matrices)  # share of the largest weight
        self.full = (_bytes(setting, unit.saved["none"], unit, "none") + self._shared_keys) * self.scale
        self.kept = (
            _bytes(setting, unit.saved.get(self.recompute, unit.saved["full"]), unit, self.recompute) * self.scale
        )
        self.joined = 0.0  # inputs of all columns, kept for the backward
        if "inputs" in layout.tensor.keep and mesh.col > 1 and unit.flops and self.recompute != "selective":
            self.joined = setting.spec.hidden * self.width * (tokens - self.scale)
        if self.recompute == "none":  # dropout's mask, in every slice
            masks = (slices - 1) * unit.mask * (self.width if setting.cluster.device.kind == "cpu" else 1)
            self.kept = self.full + self.joined + masks * self.scale
        self.moving = self._moving(layout) if mesh.row > 1 and unit.output else 0.0

    def _moving(self, layout: Layout) -> float:
        """Bytes more than `os` and `ls` hold: `ws` gathers activations over the rows, `summa` copies what it sums."""
        mesh, hidden, tensor = self.mesh, self.setting.spec.hidden, layout.tensor
        products = [o for o in self.unit.operators if o.kind == "product"]
        flows = {flow_of(self.setting, o, self.tokens, mesh.row, mesh.col, tensor, layout.steps) for o in products}
        widest = max((max(o.inputs, o.outputs) for o in products), default=0)
        if flows & {"ws-in", "ws-out"}:
            return self.width * (((mesh.row - 1) * widest + 2 * hidden) * self.scale + hidden * self.tokens)
        return self.width * (widest + 2 * hidden) * self.scale if "summa" in flows else 0.0

    @property
    def _shared_keys(self) -> float:
        """Bytes of a token: with fewer key heads than columns, every column holds one whole (keys, values, turned keys)."""
        config, col = self.setting.spec.config, self.mesh.col
        if self.unit.kind != "attn" or config is None or config.kv_heads is None or config.head_dim is None:
            return 0.0
        return 3.0 * max(0, col - config.kv_heads) * config.head_dim * self.width

    def _most(self, moments: tuple[Moment, ...]) -> float:
        return max((self._bytes(m) for m in moments), default=0.0)

    def _bytes(self, m: Moment) -> float:
        e, mesh = self.width, self.mesh
        size = (m.held.bytes(e) + m.inner.bytes(e) / self.slices) * self.scale
        size += min(m.grads, self.largest if self.at_once else 1.0) * self.grads
        if mesh.col > 1:
            size += m.full * self.tokens * e
        if mesh.row > 1:  # gathered, or (a gradient) not yet summed over the rows
            wide = 4 if m.grads and e < 4 else 0
            ahead = self.largest if m.weights and self.overlap else 0.0
            size += (m.weights * (e + wide) + ahead * e) * self.unit.matrices / mesh.col
        return size

    @property
    def _again(self) -> float:
        """Bytes that a backward computes again before it begins."""
        if self.recompute == "none":
            return 0.0
        again = max(0.0, self.full - self.kept) / self.slices + self.joined
        if self.recompute == "selective":
            again += self.unit.output * self.width * self.scale  # the last product's output, which nobody reads
        return again

    @property
    def _sum(self) -> float:
        """Bytes of what the slices add to."""
        return self.setting.spec.hidden * self.width * self.scale if self.slices > 1 else 0.0

    def forward(self) -> float:
        name = "full" if self.recompute == "per-slice" else self.recompute
        cast = 4 * self.unit.cast / self.slices if self.width < 4 else 0.0
        return self._most(self.unit.forward[name]) + cast * self.scale + self._sum + self.moving

    def backward(self) -> float:
        """What is recomputed is there before the backward begins, and a forward's own workspace while it is recomputed."""
        if self.slices > 1:
            probabilities = self.unit.cast * max(4, self.width) / self.slices * self.scale
            return max(self.split() + probabilities, self._first_slice)
        most = self._again + self._most(self.unit.backward) + self.moving
        output = self.unit.output * self.width
        if self.recompute != "none":
            most = max(most, self._again + self._most(self.unit.forward["none"]) + output * self.scale)
        return most

    def split(self) -> float:
        return self._again + self._most(self.unit.split) + self._sum + self.moving

    def closing(self) -> float:
        """With all of what is kept in it, but where slices keep it for each other."""
        if self.slices > 1:
            return self.kept + self._first_slice + self.grads / 4  # a quarter of a product at a time
        return self.unit.closing * self.width * self.scale + (0.0 if self.at_once else self.grads)

    @property
    def _first_slice(self) -> float:
        """At the norm: gradients of the sum, of what feeds the slices and of the input; what products wait for."""
        hidden, e = self.setting.spec.hidden, self.width
        waits = self.unit.for_weight_grad.narrow - (2 if self.unit.output else 1) * hidden
        unfused = 4 * self.unit.unfused * max(4, e) if self.setting.cluster.device.kind == "cpu" else 0.0
        gathered = hidden * e * (self.tokens + self.scale) if self.mesh.col > 1 else 0.0
        return 4 * self._sum + (waits * e / self.slices + unfused) * self.scale + gathered

    def product(self) -> float:
        """The largest weight gradient."""
        return self.largest * self.grads


def _bytes(setting: Setting, held: Held, unit: UnitSpec, recompute: str) -> float:
    """Bytes for one token, with dropout's mask, and what a CPU's RMSNorm and attention keep besides."""
    e, size = setting.compute, held.bytes(setting.compute)
    if setting.cluster.device.kind != "cpu":
        return size + (unit.mask if recompute == "none" else 0.0)
    wide = unit.scores * {"none": 3, "selective": 1}.get(recompute, 0)
    if recompute == "none":
        size += unit.mask * e
        wide += unit.unfused * (2 if e < 4 else 1) + _unfused_heads(setting, unit)
    return size + wide * max(4, e)


def _unfused_heads(setting: Setting, unit: UnitSpec) -> float:
    """Elements more that a CPU keeps where its attention is not fused: keys and values for every head, in fp32 or wider."""
    config = setting.spec.config
    if not unit.scores or config is None:
        return 0.0
    assert config.kv_heads
    assert config.head_dim
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    narrower = (q + 2 * kv) * (1 - setting.compute / 4) if setting.compute < 4 else 0.0
    return 2 * (q - kv) / (2 if config.qk_norm else 1) + narrower
