"""Search for a schedule: a portfolio of list and modulo schedules, improved by local search on the critical path.

    synthesizer   what a caller asks for: the best schedule for these costs and this memory cap
    portfolio     the orders that are tried for one number of stages per rank
    modulo        orders that repeat: the ops of a few micro-batches are placed once
    periodic      finds the repeating body of an order, so that a long run is searched as a short one
    improve       swaps on the critical path; fuses I and W where splitting the backward gains nothing

List scheduling (`program.greedy`) and lower bounds (`program.bounds`) are shared with the named schedules and the simulator.
"""
