"""The planner: from a model and a cluster to the fastest plan that fits, with its prediction and a certificate. No torch.

In reading order; each file needs only those above it (`memory_model` the types of `unit_cost`, too):

    engines           the system that runs the plan
    problem           the question: model, cluster, batch; constraints; how thorough the search is
    layouts           mesh, micro-batches, schedule, placements, and all layouts of a problem
    compute_cost      seconds of operators on a device
    comm_overlap      collectives next to computing: how much of them is exposed
    grid_cost         collectives of the tensor grid
    memory_model      workspace of a unit; the peak of a rank
    unit_cost         seconds and bytes of a unit, for every choice of mode, split and recomputation
    op_times          seconds of a stage's ops, with their gathers and reductions
    evaluate          a whole plan: `PlanEvaluation.step_time` adds up a step
    stage_partition   layers into stages
    knapsack          the fastest options within a budget of bytes
    unit_options      what units may choose; the choice for a rank
    lower_bounds      what no plan of a layout can beat
    build             one layout into a plan
    infeasible        the smallest plan; what would fit where nothing does
    local_search      changes of single units, evaluated as whole plans
    search            branch and bound over layouts
    report            what a plan's report says
    api               make_plan, predict, judge
    plan_export       options of torchtitan and Megatron-LM
"""
