"""A plan for a run that starts now: the planner's, where the gain is worth it.

What every rank can do without a plan, a whole copy of the model and its share of the batch, is the yardstick: where it fits,
another plan must be predicted to be a tenth faster; and on `local`, whose numbers are a guess, it is taken.
"""

from __future__ import annotations

from dataclasses import replace

from fourfold.cluster import Cluster
from fourfold.config import Config
from fourfold.errors import PlanError
from fourfold.model.operators import ModelSpec
from fourfold.plan import Mesh, Plan, Precision
from fourfold.planner.constraints import parse_fixes
from fourfold.planner.layout import Setting
from fourfold.planner.make import default_precision, find_plan, judge, with_report

__all__ = ["plan_run", "run_setting"]

WORTH = 0.9
"""A plan is taken instead of plain copies if it takes at most this share of their time."""


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
        best = with_report(find_plan(setting, parse_fixes([])), setting)
        best.check(config, ranks)
    except PlanError as e:
        if plain is None:
            raise refusal or e from None
        return plain
    best = replace(best, alternatives=(best.alternatives or ())[:2])
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
