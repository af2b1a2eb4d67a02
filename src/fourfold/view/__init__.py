"""Terminal output: timelines, plans, comparisons, the training console. No torch."""
