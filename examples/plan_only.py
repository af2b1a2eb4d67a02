"""Plan only: which layout is fastest, will it fit, and what would another machine change? No torch, no GPU.

python examples/plan_only.py
"""

import fourfold as ff

LLAMA_8B = {
    "family": "llama",
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
    "seq_len": 8192,
    "tie": False,
}

if __name__ == "__main__":
    spec = ff.ModelSpec.from_config(ff.Config.from_dict({"model": LLAMA_8B}).model)
    cluster = ff.Cluster.preset("h100-sxm", nodes=1)
    plan = ff.make_plan(spec, cluster, global_batch=64)
    print(plan.explain())

    # a plan of your own, predicted
    mine = ff.Plan.from_dict(
        {
            "mesh": {"pipe": 2, "data": 4},
            "batch": {"micro_batches": 16},
            "unit": [{"match": "*", "mode": "keep", "recompute": "selective"}],
            "precision": {"compute": "bf16"},
        }
    )
    for name, p in (("planner's", plan), ("mine", mine)):
        predicted = ff.predict(p, spec, cluster, global_batch=64)
        print(f"{name}: {predicted.seconds:.2f} s a step, {predicted.exposed * 1e3:.0f} ms of it exposed communication")

    # the same question with less memory
    try:
        small = ff.make_plan(spec, cluster.what_if({"memory": "24GiB"}), global_batch=64)
        print(f"with 24 GiB: {small.mesh.product()}, {small.predicted['seconds']:.1f} s a step")
    except ff.FourfoldError as e:
        print(f"with 24 GiB: {e}")
