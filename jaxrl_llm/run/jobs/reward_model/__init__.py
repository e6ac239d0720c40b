"""Training of a reward model on pairs of chosen and rejected responses.

This is what `configs/reward_model.py` runs.
"""
