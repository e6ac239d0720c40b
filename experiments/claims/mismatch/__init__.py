"""On-policy learning with a sampler that differs from the learner (E17)."""
