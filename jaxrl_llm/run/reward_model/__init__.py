"""Training of a reward model on pairs of a chosen and a rejected response: what `configs/reward_model.py` runs."""
