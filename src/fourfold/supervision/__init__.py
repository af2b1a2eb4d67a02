"""Supervision of a run: time limits, hangs, stragglers, differing replicas, injected faults, failures and their diagnosis."""
