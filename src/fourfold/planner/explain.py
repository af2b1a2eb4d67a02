"""A plan's report in words: why this plan, what binds it, what more memory would buy, what each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fourfold.errors import PlanError
from fourfold.plan import Plan
from fourfold.planner.replay import CATEGORIES
from fourfold.schema import format_bytes, format_seconds

__all__ = ["explain", "table", "told_units"]

PARTS = {
    "compute": "computing",
    "recompute": "recomputing",
    "grid": "the grid's collectives",
    "exposed": "collectives and copies that nothing hides",
    "bubble": "waiting for other ranks",
    "update": "the update",
}


def explain(plan: Plan) -> str:
    """The report of a plan that the planner made."""
    if plan.predicted is None:
        raise PlanError(
            "this plan was not made by the planner; `fourfold plan` makes one, and predicts any with --judge"
        )
    p, c = plan.predicted, plan.certificate or {}
    lines = [
        *([f"does NOT fit: {p['misfit']}"] if p.get("misfit") else []),
        f"{p['model']}, {_count(p['parameters'])} parameters, {p['global_batch']} × {p['seq_len']} tokens a step, "
        f"on {p['ranks']} × {p['cluster']}, in {plan.precision.compute}",
        f"{format_seconds(p['seconds'])} a step, {p['tokens_per_second']:,.0f} tokens/s, "
        f"{p['mfu']:.1%} of the devices' peak in {plan.precision.compute} (MFU)",
        "  "
        + "; ".join(f"{told} {_seconds(p[name])}" for name, told in PARTS.items() if p[name] > 0.0005 * p["seconds"]),
        *_why(plan),
        *_memory(plan),
        *_price(p),
        *_gathers(p),
        *_flows(plan),
    ]
    if c:
        lines.append(
            f"certificate: {c['layouts']:,} layouts searched in {c['seconds']:.2g} s (of the ways to run them {c['simulated']} "
            f"simulated, {c['too_large']} too large); under the planner's model none takes less than "
            f"{format_seconds(c['lower_bound'])}: this plan is at most {c['gap']:.2%} slower than the best"
        )
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    """Three digits will do."""
    return format_seconds(float(f"{seconds:.3g}"))


def _count(n: float) -> str:
    return f"{n / 1e9:.3g} B" if n >= 1e9 else f"{n / 1e6:.3g} M"


def _why(plan: Plan) -> list[str]:
    """This plan against the runner-up, part by part."""
    others = plan.alternatives or ()
    if len(others) < 2:
        return []
    best, second = others[0], others[1]
    parts = []
    for name, told in PARTS.items():
        gain = second[name] - best[name]
        if abs(gain) > 0.002 * best["seconds"]:
            parts.append(f"{'+' if gain > 0 else '-'}{_seconds(abs(gain))} {told}")
    text = f"runner-up: {second['plan']}, {second['seconds'] / best['seconds'] - 1:+.1%}"
    return [text + (f" ({', '.join(parts)})" if parts else "")]


def _memory(plan: Plan) -> list[str]:
    """The fullest rank at its peak, by category."""
    p = plan.predicted or {}
    most = max(p["memory"], key=lambda m: m["bytes"])
    where = f" on pipeline rank {most['rank']}" if plan.mesh.pipe > 1 else ""
    parts = [f"{name} {format_bytes(most[name])}" for name in CATEGORIES if most.get(name)]
    lines = [
        f"memory: {format_bytes(most['bytes'])} of {format_bytes(p['usable_bytes'])}{where}, "
        f"at its peak ({most['at']}): {', '.join(parts)}"
    ]
    if plan.mesh.pipe > 1:
        lines += _ranks(p["memory"])
    there = max(p["memory"], key=lambda m: m.get("host", 0))
    state, activations = there.get("host", 0) - there.get("host_activations", 0), there.get("host_activations", 0)
    told = [
        f"{format_bytes(size)} of {what}"
        for what, size in (("optimizer state", state), ("activations", activations))
        if size
    ]
    if told:
        lines.append(f"  and on the host, for every device: {', '.join(told)} of {format_bytes(p['host_bytes'])}")
    return lines


def _ranks(memory: Sequence[dict[str, Any]]) -> list[str]:
    """What every rank of the pipeline holds at its peak; neighbours that hold the same once."""
    names = [name for name in CATEGORIES if any(m.get(name) for m in memory)]
    rows: list[tuple[str, ...]] = []
    ranks: list[str] = []
    for m in memory:
        row = (format_bytes(m["bytes"]), m["at"], *(format_bytes(m.get(name, 0)) for name in names))
        if rows and rows[-1] == row:
            ranks[-1] = f"{ranks[-1].partition('-')[0]}-{m['rank']}"
        else:
            rows.append(row)
            ranks.append(str(m["rank"]))
    head = ("rank", "peak", "at", *names)
    table = [head, *((rank, *row) for rank, row in zip(ranks, rows, strict=True))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  " + "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in table]


def _price(p: dict[str, Any]) -> list[str]:
    if not p["binding"]:  # judged: nothing else was tried
        return [] if p.get("misfit") else [f"memory is {p['peak_bytes'] / p['usable_bytes']:.1%} full"]
    if p["binding"] != "memory":
        return [f"what binds: {p['binding']}; more memory would not make this layout faster"]
    return [f"what binds: memory; a GiB more on every device would save about {_seconds(p['price'])} a step"]


def _gathers(p: dict[str, Any]) -> list[str]:
    need, has = p["break_even_tokens"], p["tokens_per_micro_batch"]
    if not need:
        return []
    text = f"gathering a unit hides behind its forward from {need:,} tokens in a micro-batch; this plan has {has:,}"
    return [f"break-even: {text}"]


def _flows(plan: Plan) -> list[str]:
    """How every product moves over the grid, and what the next best flow would take."""
    found = (plan.predicted or {}).get("flows")
    if not found:
        return []
    kept = ", ".join(plan.tensor.keep) or "nothing"
    beside = "beside products" if plan.tensor.overlap else "not beside products (overlap is off)"
    lines = [f"on the grid, kept: {kept}; a micro-batch's collectives, of which some run {beside}:"]
    for each in found:
        flow, costs, room = each["flow"], each["seconds"], each["beside"] if plan.tensor.overlap else 0.0
        late = {f: shown + max(0.0, hidden - room) for f, (shown, hidden) in costs.items()}
        shown, hidden = costs[flow]
        others = sorted((t, f) for f, t in late.items() if f != flow)
        instead = f"; {others[0][1]} would show {_seconds(others[0][0])}" if others else ""
        text = f"{_seconds(shown)} shown, {_seconds(hidden)} beside {_seconds(each['beside'])} of products"
        lines.append(f"  {each['product']:<5} {flow:<6} {text}{instead}")
    return lines


def table(plan: Plan) -> list[tuple[str, ...]]:
    """Rows for people: the best plans."""
    rows: list[tuple[str, ...]] = []
    for i, a in enumerate(plan.alternatives or (), 1):
        rows.append(
            (
                str(i),
                a["plan"],
                told_units(a),
                format_seconds(a["seconds"]),
                f"{a['mfu']:.1%}",
                format_bytes(a["peak_bytes"]),
                _seconds(a["exposed"] + a["grid"]),
                _seconds(a["bubble"]),
            )
        )
    return rows


def told_units(a: dict[str, Any]) -> str:
    """What units choose, and what is on the host."""
    state, there = a["host_state"], []
    if state:
        there.append("optimizer" if state > 0.999 else f"{max(0.01, state):.0%} of the optimizer")
    if a["activations"] != "device":
        there.append("activations")
    return "; ".join(x for x in (a["units"], f"{', '.join(there)} on the host" if there else "") if x)
