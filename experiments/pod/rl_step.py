"""Least time of an RL step, from its compiled programs and responses of realistic lengths."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.pod import lengths
from experiments.pod.proof import Plan, Proof
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import ragged
from jaxrl_llm.sampler import default_blocks
from jaxrl_llm.sampler.begin import num_rows


class Estimate(NamedTuple):
  """The least time of an RL step at lengths of one mean.

  Attributes:
    mean: Mean length of a response in tokens, before it is cut at the budget.
    rollouts: What the sampler does with such lengths.
    step_s: Least time of a decoding step in seconds, on average.
    parts: Least time of each part of the RL step in seconds.
  """

  mean: float
  rollouts: lengths.Rollouts
  step_s: float
  parts: dict[str, float]

  @property
  def seconds(self) -> float:
    """Least time of the whole RL step."""
    return sum(self.parts.values())


def estimate(plan: Plan, proofs: Sequence[Proof], mean: float, *, seed: int = 0) -> Estimate:
  """Adds up the bounds of an RL step; programs that were not compiled count nothing.

  A decoding step takes as long as its slowest bound. It reads the weights, the prompts, and of the
  responses the columns that are allocated, or the blocks that hold tokens if the kernel reads them.

  Args:
    plan: Plan of the run.
    proofs: Compiled programs, "decode" among them.
    mean: Mean length of a response in tokens.
    seed: Seed of the lengths.
  """
  section, mesh = plan.config.rollout, plan.sampler_mesh
  by_name = {proof.name: proof for proof in proofs}
  decode, updates = by_name["decode"], plan.config.learner.updates_per_rollout
  num_prompts = section.num_prompts + section.spare_prompts
  rows = num_rows(mesh, num_prompts * section.group_size, section.slots)
  blocks = tuple(section.cache_blocks or default_blocks(section.max_new_tokens))
  platform = mesh_lib.platform_of(mesh)
  reads_tokens = all(ragged.is_used(plan.config.serving.attention, platform, plan.model.head_dim, size) for size in blocks)
  drawn = lengths.draw(
    np.random.default_rng(seed), mean, num_prompts=num_prompts, group_size=section.group_size, budget=section.max_new_tokens
  )
  columns = ragged.block_columns(min(blocks), platform) or 1
  rollouts = lengths.simulate(drawn, slots=rows, shards=mesh_lib.num_row_shards(mesh), blocks=blocks, block_columns=columns)
  of_prompts = num_prompts * max(section.prompt_buckets)
  read = of_prompts + rows * (rollouts.held if reads_tokens else rollouts.columns)
  cache = decode.parts["cache"] * read / (of_prompts + rows * section.max_new_tokens)
  num_bytes = decode.work.num_bytes - decode.parts["cache"] + cache
  bounds = decode.seconds(plan.topology) | {"memory": num_bytes / plan.topology.chip.bytes_per_s}
  step_s = max(bounds.values())
  of_program = lambda name: max(by_name[name].seconds(plan.topology).values()) if name in by_name else 0.0
  parts = {
    "rollouts": rollouts.steps * step_s + of_program("prefill"),
    "scores": updates * of_program("score"),
    "updates": updates * of_program("update"),
  }
  return Estimate(mean, rollouts, step_s, parts)
