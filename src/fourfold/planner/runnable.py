"""A plan for a run that starts now: the planner's, as far as this version executes it and the gain is worth it.

What every rank can do without a plan, a whole copy of the model and its share of the batch, is the yardstick: where it fits,
another plan must be predicted to be a tenth faster; and on `local`, whose numbers are a guess, it is taken.
"""

from __future__ import annotations

from dataclasses import replace

from fourfold.cluster import Cluster
from fourfold.config import Config
from fourfold.errors import NotYetError, PlanError
from fourfold.model.operators import ModelSpec
from fourfold.plan import Mesh, Plan, Precision
from fourfold.planner.layout import Setting
from fourfold.planner.layouts import parse_fixes
from fourfold.planner.make import default_precision, find_plan, judge, with_report

__all__ = ["first_runnable", "plan_run", "run_setting"]

WORTH = 0.9
"""A plan is taken instead of plain copies if it takes at most this share of their time."""
LADDER: tuple[tuple[str, ...], ...] = (
    (),
    ("optimizer=device", "activations=device"),
    ("row=1", "col=1", "optimizer=device", "activations=device"),
    ("row=1", "col=1", "mode=replicate", "optimizer=device", "activations=device"),
)
"""Constraints to try in turn until a plan is one that this version executes."""


def plan_run(config: Config, cluster: Cluster, precision: Precision | None = None) -> Plan:
    """The plan of a resolved config on all ranks of a cluster, with its prediction."""
    ranks, setting = cluster.ranks, run_setting(config, cluster, precision)
    refusal: PlanError | None = None
    try:
        plain = _plain(config, setting, ranks)
    except PlanError as e:
        plain, refusal = None, e
    if plain is not None and cluster.name == "local":
        return plain
    try:
        best = first_runnable(config, setting, ranks)
    except PlanError as e:
        if plain is None:
            raise refusal or e from None
        return plain
    if plain is None or plain.predicted is None or best.predicted is None:
        return best
    return best if best.predicted["seconds"] <= WORTH * plain.predicted["seconds"] else plain


def run_setting(config: Config, cluster: Cluster, precision: Precision | None = None) -> Setting:
    """What a run asks of the planner."""
    spec = ModelSpec.from_config(config.model)
    return Setting(spec, cluster, config.train.global_batch, precision or default_precision(cluster))


def _plain(config: Config, setting: Setting, ranks: int) -> Plan | None:
    """Every rank a copy, judged; None where it does not fit. Raises PlanError where the batch does not divide."""
    plan = Plan(mesh=Mesh(data=ranks), precision=setting.precision)
    plan.check(config, ranks)
    judged = judge(plan, setting)
    assert judged.predicted is not None
    return judged if judged.predicted["peak_bytes"] <= setting.cluster.usable else None


def first_runnable(config: Config, setting: Setting, ranks: int) -> Plan:
    """The planner's plan under the first constraints of the ladder that this version executes."""
    refused: NotYetError | None = None
    for fixes in LADDER:
        plan = with_report(find_plan(setting, parse_fixes(list(fixes))), setting)
        try:
            plan.check(config, ranks)
        except NotYetError as e:
            refused = e
            continue
        return replace(plan, alternatives=(plan.alternatives or ())[:2])
    assert refused is not None
    raise refused
