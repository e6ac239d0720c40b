"""Least time of an RL step, from its compiled programs and responses of realistic lengths."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.pod import lengths, packed
from experiments.pod.costs import Work
from experiments.pod.proof import Plan, Proof, score_work, update_work
from jaxrl_llm.decoding.sampler import default_blocks
from jaxrl_llm.decoding.sampler.begin import num_rows
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import ragged


class Estimate(NamedTuple):
  """The least time of an RL step at lengths of one mean.

  Attributes:
    mean: Mean length of a response in tokens, before it is cut at the budget.
    rollouts: What the sampler does with such lengths.
    step_s: Least time of a decoding step in seconds, on average.
    updates: Rows of each update.
    parts: Least time of each part of the RL step in seconds.
  """

  mean: float
  rollouts: lengths.Rollouts
  step_s: float
  updates: tuple[packed.Update, ...]
  parts: dict[str, float]

  @property
  def seconds(self) -> float:
    """Least time of the whole RL step."""
    return sum(self.parts.values())


def estimate(plan: Plan, proofs: Sequence[Proof], mean: float, *, prompt_tokens: int | None = None, seed: int = 0) -> Estimate:
  """Adds up the bounds of an RL step; programs that were not compiled count nothing.

  A decoding step takes as long as its slowest bound. It reads the weights, the prompts, and of the
  responses the columns that are allocated, or the blocks that hold tokens if the kernel reads them.

  An update and its scoring take as long as the bucket of rows that its sequences need. Programs are
  compiled for the largest bucket: of its operations and collectives, a smaller one has the part of
  its rows. This leaves out what does not depend on the rows, and is therefore a lower bound too.

  Args:
    plan: Plan of the run.
    proofs: Compiled programs, "decode" among them.
    mean: Mean length of a response in tokens.
    prompt_tokens: Number of tokens of each prompt in the rows of the updates; None for the largest
      bucket of prompts.
    seed: Seed of the lengths.
  """
  section, mesh = plan.config.rollout, plan.sampler_mesh
  by_name = {proof.name: proof for proof in proofs}
  decode = by_name["decode"]
  num_prompts = section.num_prompts + section.spare_prompts
  rows = num_rows(mesh, num_prompts * section.group_size, section.slots)
  blocks = tuple(section.cache_blocks or default_blocks(section.max_new_tokens, plan.model, mesh))
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
  needed, learned = learning(plan, proofs, drawn, prompt_tokens=prompt_tokens)
  prefill_s = max(by_name["prefill"].seconds(plan.topology).values()) if "prefill" in by_name else 0.0
  return Estimate(mean, rollouts, step_s, needed, {"rollouts": rollouts.steps * step_s + prefill_s} | learned)


def learning(
  plan: Plan, proofs: Sequence[Proof], drawn: np.ndarray, *, prompt_tokens: int | None = None
) -> tuple[tuple[packed.Update, ...], dict[str, float]]:
  """Returns the updates of responses of some lengths, and the least time of their parts."""
  needed = packed.updates_of(plan.config, drawn[: plan.config.rollout.num_prompts], prompt_tokens=prompt_tokens)

  def of_rows(name: str, work_of: Callable[[Plan, int], Work]) -> float:
    proof = next((proof for proof in proofs if proof.name == name), None)
    return 0.0 if proof is None else sum(_seconds(plan, proof, work_of(plan, update.bucket), update.bucket) for update in needed)

  return needed, {"scores": of_rows("score", score_work), "updates": of_rows("update", update_work)}


def _seconds(plan: Plan, proof: Proof, work: Work, rows: int) -> float:
  """Returns the least time of a compiled program of the learner for another number of rows."""
  part = rows / proof.rows
  operations = proof.compiled.operations and proof.compiled.operations.scaled(part)
  bounds = proof._replace(work=work, compiled=proof.compiled._replace(operations=operations)).seconds(plan.topology)
  return max((bounds | {"network": part * bounds["network"]}).values())
