"""Training of a reward model on pairs of a chosen and a rejected response: what `configs/reward_model.py` runs."""

OBJECTIVE = "bradley_terry"
"""`config.objective.name` of a config that trains a reward model."""
