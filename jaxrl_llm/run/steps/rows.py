"""The rows of a run's learner: how sequences are arranged in them, and what they replay."""

from typing import Any

import jax

from jaxrl_llm.devices.mesh import num_row_shards, own_row_shards
from jaxrl_llm.learner import packing
from jaxrl_llm.run.setup.start import Run
from jaxrl_llm.types import TrainBatch


def arrange(run: Run, sequences: list[packing.Trajectory], **options: Any) -> packing.Layout:
  """Arranges the sequences of an update in rows; a prompt can be stored once for its responses."""
  return packing.arrange(sequences, **row_options(run) | options)


def row_options(run: Run) -> dict[str, Any]:
  """Returns the options of `packing.arrange` for the rows of an update."""
  learner = run.config.learner
  options = dict(row_buckets=learner.row_buckets, share_prompts=learner.share_prompts, group_size=run.config.rollout.group_size)
  options |= dict(row_tokens=learner.row_tokens, row_images=learner.row_images)
  mesh = run.experiment.mesh
  return options | {"num_shards": num_row_shards(mesh), "own_shards": own_row_shards(mesh)}


def live_routes(run: Run, batch: TrainBatch) -> jax.Array | None:
  """Returns routes that replay nothing, for a pass compiled for R3; None without R3."""
  return run.experiment.learner.routes.live(batch.tokens, batch.segments) if run.config.moe.replay == "R3" else None
