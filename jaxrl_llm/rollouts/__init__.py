"""Rollouts, conversations, dynamic sampling and weight sync: from prompts to a graded batch."""
