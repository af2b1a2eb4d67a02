"""Fourfold trains large models on the GPUs you have.

Give it a model and a cluster; it finds the fastest plan that fits in memory, shows it, and runs it. The public names are
loaded when first used, so that `import fourfold` is quick and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fourfold.cluster import Cluster as Cluster
    from fourfold.config import Config as Config
    from fourfold.errors import ConfigError as ConfigError
    from fourfold.errors import FourfoldError as FourfoldError
    from fourfold.errors import PlanError as PlanError
    from fourfold.model.operators import ModelSpec as ModelSpec
    from fourfold.offload.adamw import StreamedAdamW as StreamedAdamW
    from fourfold.plan import Plan as Plan
    from fourfold.planner.api import make_plan as make_plan
    from fourfold.planner.api import predict as predict
    from fourfold.planner.prediction import Prediction as Prediction
    from fourfold.train.callbacks import Callback as Callback
    from fourfold.train.parallelize import parallelize as parallelize
    from fourfold.train.worker import fit as fit
    from fourfold.view.why import explain_run as explain_run

__version__ = "0.1.0"

_HOMES = {
    "Callback": "fourfold.train.callbacks",
    "Cluster": "fourfold.cluster",
    "Config": "fourfold.config",
    "ConfigError": "fourfold.errors",
    "FourfoldError": "fourfold.errors",
    "ModelSpec": "fourfold.model.operators",
    "Plan": "fourfold.plan",
    "PlanError": "fourfold.errors",
    "Prediction": "fourfold.planner.evaluate",
    "StreamedAdamW": "fourfold.offload.adamw",
    "explain_run": "fourfold.view.why",
    "fit": "fourfold.train.worker",
    "make_plan": "fourfold.planner.api",
    "parallelize": "fourfold.train.parallelize",
    "predict": "fourfold.planner.api",
}

__all__ = [
    "Callback",
    "Cluster",
    "Config",
    "ConfigError",
    "FourfoldError",
    "ModelSpec",
    "Plan",
    "PlanError",
    "Prediction",
    "StreamedAdamW",
    "explain_run",
    "fit",
    "make_plan",
    "parallelize",
    "predict",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fourfold' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
