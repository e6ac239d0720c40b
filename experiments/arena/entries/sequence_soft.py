"""SAPO's gate on GSPO's ratio, with sharper sides: an example of an entry, not tuned."""

from jaxrl_llm import objectives


def objective(*, factor, length):
  """Builds the objective."""
  del length
  slots = dict(ratio="sequence", gate="soft", weights="sequence_mean")
  return objectives.make("custom", **slots, tau_pos=2.0 * factor, tau_neg=2.0 * factor)
