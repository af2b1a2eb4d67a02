"""A plan's report in words: why this plan, what binds it, what more memory would buy, what each rank holds."""

from __future__ import annotations

from typing import Any

from fourfold.errors import PlanError
from fourfold.plan import Plan
from fourfold.planner.replay import CATEGORIES
from fourfold.schema import format_bytes

__all__ = ["explain", "table"]

PARTS = {
    "compute": "computing",
    "recompute": "recomputing",
    "grid": "the grid's collectives",
    "exposed": "gathers and reductions that nothing hides",
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
        f"on {p['ranks']} × {p['cluster']}",
        f"{p['seconds']:.4g} s a step, {p['tokens_per_second']:,.0f} tokens/s, {p['mfu']:.1%} of the devices' peak (MFU)",
        "  " + "; ".join(f"{told} {p[name]:.3g} s" for name, told in PARTS.items() if p[name] > 0.0005 * p["seconds"]),
        *_why(plan),
        *_memory(plan),
        *_price(p),
        *_gathers(p),
        *_flows(plan),
    ]
    if c:
        lines.append(
            f"certificate: {c['layouts']:,} layouts searched in {c['seconds']:.2g} s ({c['simulated']} simulated, "
            f"{c['too_large']} solved and too large); under the planner's model none takes less than "
            f"{c['lower_bound']:.4g} s: this plan is at most {c['gap']:.2%} slower than the best"
        )
    return "\n".join(lines)


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
            parts.append(f"{gain:+.3g} s {told}")
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
    state, activations = most.get("host", 0) - most.get("host_activations", 0), most.get("host_activations", 0)
    there = [
        f"{format_bytes(size)} of {what}"
        for what, size in (("optimizer state", state), ("activations", activations))
        if size
    ]
    if there:
        lines.append(f"  and on the host, for every device: {', '.join(there)} of {format_bytes(p['host_bytes'])}")
    return lines


def _price(p: dict[str, Any]) -> list[str]:
    if not p["binding"]:  # judged: nothing else was tried
        return [] if p.get("misfit") else [f"memory is {p['peak_bytes'] / p['usable_bytes']:.1%} full"]
    if p["binding"] != "memory":
        return [f"what binds: {p['binding']}; more memory would not make this layout faster"]
    return [f"what binds: memory; a GiB more on every device would save about {p['price'] * 1e3:.3g} ms a step"]


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
        instead = f"; {others[0][1]} would show {others[0][0]:.3g} s" if others else ""
        text = f"{shown:.3g} s shown, {hidden:.3g} s beside {each['beside']:.3g} s of products"
        lines.append(f"  {each['product']:<5} {flow:<6} {text}{instead}")
    return lines


def table(plan: Plan) -> list[tuple[str, ...]]:
    """Rows for people: the best plans."""
    rows: list[tuple[str, ...]] = []
    for i, a in enumerate(plan.alternatives or (), 1):
        where = [w for w, v in (("optimizer", a["optimizer"]), ("activations", a["activations"])) if v != "device"]
        rows.append(
            (
                str(i),
                a["plan"],
                a["units"] + (f"; {', '.join(where)} on the host" if where else ""),
                f"{a['seconds']:.4g} s",
                f"{a['mfu']:.1%}",
                format_bytes(a["peak_bytes"]),
                f"{a['exposed'] + a['grid']:.3g} s",
                f"{a['bubble']:.3g} s",
            )
        )
    return rows
