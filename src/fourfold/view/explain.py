"""The planner's report of a plan as text, from the fields of the plan file (`planner/report.py` fills them in)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fourfold.errors import PlanError, ScheduleError
from fourfold.plan import Plan
from fourfold.planner.memory_model import CATEGORIES
from fourfold.program.ops import Op
from fourfold.schema import format_bytes, format_seconds

__all__ = ["describe_units", "explain", "table"]

_PARTS = {
    "compute": "compute",
    "recompute": "recomputation",
    "grid": "exposed collectives of the grid",
    "exposed": "exposed communication and copies",
    "bubble": "pipeline bubble",
    "update": "update",
}


def explain(plan: Plan) -> str:
    """The report of a plan that the planner made."""
    if plan.predicted is None:
        raise PlanError(
            "this plan was not made by the planner; `fourfold plan` makes one, and predicts any with --judge"
        )
    p, c = plan.predicted, plan.certificate or {}
    parts = [f"{name} {_seconds(p[key])}" for key, name in _PARTS.items() if p[key] > 0.0005 * p["seconds"]]
    lines = [
        *([f"does NOT fit: {p['misfit']}"] if p.get("misfit") else []),
        f"{p['model']}, {_count(p['parameters'])} parameters, {p['global_batch']} × {p['seq_len']} tokens a step, "
        f"on {p['ranks']} × {p['cluster']}, in {plan.precision.compute}{', matmuls in fp8' * (plan.precision.matmul == 'fp8')}",
        f"{format_seconds(p['seconds'])} a step, {p['tokens_per_second']:,.0f} tokens/s, "
        f"{p['mfu']:.1%} of the devices' peak in {plan.precision.compute} (MFU)",
        f"  {'; '.join(parts)}",
        *([p["note"]] if p.get("note") else []),
        *([f"predicted for {p['engine']}"] if p.get("engine", "fourfold") != "fourfold" else []),
        *_units(plan),
        *_runner_up(plan),
        *_memory(plan),
        *_binds(p),
        *_attention(p),
        *_gathers(p),
        *_flows(plan),
    ]
    if c:
        lines.append(
            f"certificate: {c['layouts']:,} layouts searched in {c['seconds']:.2g} s ({c['simulated']} simulated, "
            f"{c['too_large']} variants too large); under the planner's model no plan takes less than "
            f"{format_seconds(c['lower_bound'])}: this plan is at most {c['gap']:.2%} slower than the best"
        )
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    return format_seconds(float(f"{seconds:.3g}"))


def _count(n: float) -> str:
    return f"{n / 1e9:.3g} B" if n >= 1e9 else f"{n / 1e6:.3g} M"


def _units(plan: Plan) -> list[str]:
    """The mode and recomputation of each unit, if they differ."""
    by_choice: dict[str, dict[str, list[int]]] = {}
    for rule in plan.unit:
        within = f" within {rule.within}" if rule.within else ""
        split = f", split {rule.split}" if rule.split > 1 else ""
        again = f", recompute {rule.recompute}" if rule.recompute != "none" else ""
        reduced = ", reduced every micro-batch" if rule.reduce == "micro-batch" else ""
        numbers = [int(part) for part in rule.match.split(".") if part.isdigit()]
        pattern = ".".join("#" if part.isdigit() else part for part in rule.match.split("."))
        by_choice.setdefault(f"{rule.mode}{within}{again}{split}{reduced}", {}).setdefault(pattern, []).extend(numbers)
    if len(by_choice) < 2:
        return []
    lines = ["units (a name takes precedence over a pattern):"]
    for choice, patterns in by_choice.items():
        names = [name.replace("#", _ranges(numbers)) for name, numbers in patterns.items()]
        lines.append(f"  {choice}: {', '.join(names)}")
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Write numbers as ranges: 0, 1, 2, 5 as 0-2,5."""
    out: list[list[int]] = []
    for n in sorted(numbers):
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in out)


def _runner_up(plan: Plan) -> list[str]:
    """The next best layout, and how its step differs part by part."""
    others = plan.alternatives or ()
    if len(others) < 2:
        return []
    best, second = others[0], others[1]
    parts = []
    for key, name in _PARTS.items():
        gain = second[key] - best[key]
        if abs(gain) > 0.002 * best["seconds"]:
            parts.append(f"{'+' if gain > 0 else '-'}{_seconds(abs(gain))} {name}")
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
        f"at its peak ({_op_in_words(most['at'], plan.mesh.pipe > 1)}): {', '.join(parts)}"
    ]
    if plan.mesh.pipe > 1:
        lines += _memory_by_rank(p["memory"])
    fullest = max(p["memory"], key=lambda m: m.get("host", 0))
    activations = fullest.get("host_activations", 0)
    rollback = fullest.get("host_rollback", 0)
    state = fullest.get("host", 0) - activations - rollback
    sizes = {"optimizer state": state, "activations": activations, "state kept to roll updates back": rollback}
    on_host = [f"{format_bytes(size)} of {what}" for what, size in sizes.items() if size]
    if on_host:
        lines.append(f"host memory: {', '.join(on_host)} of {format_bytes(p['host_bytes'])} for every device")
    return lines


def _op_in_words(at: str, staged: bool) -> str:
    """`3F0` as words; what is no op stays as it is."""
    try:
        op = Op.parse(at)
    except ScheduleError:
        return at
    kind = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}[op.kind]
    return f"{at}: {kind} of micro-batch {op.micro_batch}" + f" in stage {op.stage}" * staged


def _memory_by_rank(memory: Sequence[dict[str, Any]]) -> list[str]:
    """The peak of every rank of the pipeline; consecutive ranks with the same peak share a line."""
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
    lines = [("rank", "peak", "at", *names), *((rank, *row) for rank, row in zip(ranks, rows, strict=True))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  " + "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in lines]


def _binds(p: dict[str, Any]) -> list[str]:
    if not p["binding"]:  # the plan was judged without a search
        return [] if p.get("misfit") else [f"memory is {p['peak_bytes'] / p['usable_bytes']:.1%} full"]
    if p["binding"] != "memory":
        text, more = f"what binds: {p['binding']}; one more GiB on every device would not make this layout faster", ""
        if "with_more" in p:
            size, saves = format_bytes(p["with_more"]["bytes"]), p["with_more"]["saves"]
            more = f", nor would {size} more make any"
            if saves > 0:
                more = f"; {size} more would save about {_seconds(saves)} a step, with {p['with_more']['plan']}"
        return [text + more]
    return [f"what binds: memory; one more GiB on every device would save about {_seconds(p['price'])} a step"]


def _attention(p: dict[str, Any]) -> list[str]:
    if "not_deterministic" not in p:
        return []
    return [
        f"attention: its gradient is deterministic, as by default; train.deterministic = false allows a faster kernel, "
        f"{_seconds(p['not_deterministic'])} a step"
    ]


def _gathers(p: dict[str, Any]) -> list[str]:
    need, has = p["break_even_tokens"], p["tokens_per_micro_batch"]
    if not need:
        return []
    tokens = f"{need:,} token" + "s" * (need != 1)
    text = f"gathering a unit overlaps with its forward from {tokens} in a micro-batch; this plan has {has:,}"
    return [f"break-even: {text}"]


def _flows(plan: Plan) -> list[str]:
    """Communication of every matmul on the grid, and the exposed time of the next best flow."""
    found = (plan.predicted or {}).get("flows")
    if not found:
        return []
    kept = ", ".join(plan.tensor.keep) or "nothing"
    overlap = "some overlapped with matmuls" if plan.tensor.overlap else "none overlapped (overlap is off)"
    lines = [f"on the grid, kept: {kept}; collectives of a micro-batch, {overlap}:"]
    for each in found:
        flow, costs, window = each["flow"], each["seconds"], each["beside"] if plan.tensor.overlap else 0.0
        exposed_with = {f: exposed + max(0.0, can_overlap - window) for f, (exposed, can_overlap) in costs.items()}
        exposed, can_overlap = costs[flow]
        others = sorted((t, f) for f, t in exposed_with.items() if f != flow)
        instead = f"; {others[0][1]} would expose {_seconds(others[0][0])}" if others else ""
        text = f"{_seconds(exposed)} exposed, {_seconds(can_overlap)} overlapped with {_seconds(each['beside'])} of matmuls"
        lines.append(f"  {each['product']:<5} {flow:<6} {text}{instead}")
    return lines


def table(plan: Plan) -> list[tuple[str, ...]]:
    """The best plans as a table."""
    return [
        (
            str(i),
            a["plan"],
            describe_units(a),
            format_seconds(a["seconds"]),
            f"{a['mfu']:.1%}",
            format_bytes(a["peak_bytes"]),
            _seconds(a["exposed"] + a["grid"]),
            _seconds(a["bubble"]),
        )
        for i, a in enumerate(plan.alternatives or (), 1)
    ]


def describe_units(a: dict[str, Any]) -> str:
    """The modes of an alternative's units, and its state and activations on the host."""
    state, on_host = a["host_state"], []
    if state:
        on_host.append("optimizer" if state > 0.999 else f"{max(0.01, state):.0%} of the optimizer")
    if a["activations"] != "device":
        on_host.append("activations")
    return "; ".join(x for x in (a["units"], f"{', '.join(on_host)} on the host" if on_host else "") if x)
