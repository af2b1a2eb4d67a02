"""The planner as a page: `fourfold plan --serve` and `make site`. No torch."""
