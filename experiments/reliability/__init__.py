"""Whether a run can be lost: kills at random and at chosen places, and what became of the run."""
