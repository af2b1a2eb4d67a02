"""The planner: from a model and a cluster to the fastest plan that fits, with its prediction and a certificate. No torch.

In reading order; each file imports only files above it (`memory_model` also imports types of `unit_cost`):

    engines           the system that runs the plan
    problem           the question: model, cluster, batch; constraints; how thorough the search is
    layouts           mesh, micro-batches, schedule, placements, and all layouts of a problem
    compute_cost      compute time of operators on a device
    comm_overlap      exposed and overlapped communication
    grid_cost         collectives of the tensor grid
    memory_model      workspace of a unit; the peak of a rank
    unit_cost         seconds and bytes of a unit, for every choice of mode, split and recomputation
    op_times          times of a stage's ops, with their gathers and reductions
    stage_partition   a plan's schedule; layers into stages
    prediction        what is predicted of a plan: seconds by part, memory by rank, units
    evaluate          a whole plan: `PlanEvaluation.step_time` adds up a step
    knapsack          the fastest options within a memory budget
    unit_options      the options of a unit; the choice for a rank
    lower_bounds      lower bounds on step time and memory of a layout
    build             builds a plan from one layout; the plan that needs the least memory
    local_search      changes of single units, evaluated as whole plans
    report            the report of a plan, as fields of its file (view/explain.py has it as text); why none fits
    search            branch and bound over layouts
    api               make_plan, predict, judge
"""
