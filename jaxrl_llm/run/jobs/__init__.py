"""Other jobs than training a policy: evaluation, reward model, pilot, publication, serving."""
