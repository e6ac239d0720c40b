"""What a run does in each RL step, and around it: sample, grade, learn, save, stop."""
