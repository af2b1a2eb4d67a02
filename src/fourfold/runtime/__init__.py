"""Execution: stages that compute, executors that run programs, and messages between stages."""
