"""From prompts to a graded batch: rollouts, conversations, dynamic sampling, weight sync."""
