"""A rare token with a positive advantage over the updates of one rollout batch (E19)."""
