"""Number of updates of one rollout batch that each objective tolerates (E20)."""
