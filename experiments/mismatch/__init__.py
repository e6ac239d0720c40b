"""Where sampler and learner compute other numbers, and whether they ever do."""
