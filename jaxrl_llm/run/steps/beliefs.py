"""What a run remembers of each prompt between its responses: a belief, and the last response."""

from typing import Any

import numpy as np
from jaxtyping import Float

from jaxrl_llm.advantages import FIRST_BELIEF
from jaxrl_llm.advantages.estimators import Evidence
from jaxrl_llm.devices import hosts
from jaxrl_llm.devices.mesh import place_tokens
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.needs import needed_by_logprobs
from jaxrl_llm.learner.packing import Trajectory
from jaxrl_llm.rollouts import trajectories
from jaxrl_llm.rollouts.batch import Batch
from jaxrl_llm.run.setup.start import Run
from jaxrl_llm.run.steps.rows import live_routes, row_options
from jaxrl_llm.tasks.curriculum import key_of

STORED = ("tokens", "mask", "sampler_logprobs")
"""Arrays of a response that a checkpoint keeps."""


def with_beliefs(run: Run, batch: Batch, evidence: Evidence) -> Evidence:
  """Returns the evidence with each prompt's belief, and how far the policy has moved since it.

  Args:
    run: RL run, with the weights that the batch will update.
    batch: Graded batch.
    evidence: Evidence of the batch.
  """
  known, keys = run.record.beliefs, [key_of(row, "problem") for row in batch.examples]
  beliefs = [known[key]["belief"] if key in known else FIRST_BELIEF for key in keys]
  seen = sorted({key for key in keys if "tokens" in known.get(key, {})})
  moved = dict(zip(seen, drifts(run, [response_of(known[key]) for key in seen], at_once=len(keys)), strict=True))
  return evidence._replace(beliefs=np.float32(beliefs), drift=np.float32([moved.get(key, 0.0) for key in keys]))


def drifts(run: Run, responses: list[Trajectory], *, at_once: int) -> list[float]:
  """Returns the mean change of the log-probabilities of earlier responses, in nats per token.

  Args:
    run: RL run.
    responses: The responses, with the log-probabilities that they were drawn with.
    at_once: Number of sequences of a rollout batch, of which rows are made for each update.
  """
  result, size = [], max(at_once // run.config.learner.updates_per_rollout, 1)
  for start in range(0, len(responses), size):
    part = responses[start : start + size]
    layout = packing.arrange(part, **row_options(run))
    placed = place_tokens(run.experiment.mesh, packing.pack(part, layout))
    rows = needed_by_logprobs(placed._replace(routing=live_routes(run, placed)))
    now = packing.lift(hosts.to_host([run.experiment.learner.logprobs(run.state.params, rows).logprobs])[0], layout)
    for response, logprobs in zip(part, now, strict=True):
      counted = response.mask > 0
      change = np.abs(logprobs - response.sampler_logprobs)[counted]
      result.append(float(np.mean(change)) if len(change) else 0.0)
  return result


def remembered(run: Run, batch: Batch, beliefs: Float[np.ndarray, "n 2"]) -> dict[str, dict[str, Any]]:
  """Returns what the run remembers after a batch, as JSON: its beliefs, and the last responses.

  The response of a prompt is the last one that is learned from. Those that show pictures are not
  kept: their beliefs are forgotten as if the policy had not moved.

  Args:
    run: RL run.
    batch: Graded batch.
    beliefs: Beliefs after the batch.
  """
  memory = dict(run.record.beliefs)
  drawn = trajectories.trajectories(batch.rollouts, batch.counted) if run.experiment.drawing.gallery is None else ()
  for number, belief in enumerate(np.asarray(beliefs).tolist()):
    rows = range(number * batch.group_size, (number + 1) * batch.group_size)
    key = key_of(batch.examples[rows[0]], "problem")
    last = [drawn[row] for row in rows if batch.counted[row]] if drawn else []
    kept = {"num_prompt": last[-1].num_prompt} | {name: getattr(last[-1], name).tolist() for name in STORED} if last else {}
    memory[key] = memory.get(key, {}) | {"belief": belief} | kept
  return memory


def response_of(memory: dict[str, Any]) -> Trajectory:
  """Returns the last response of a prompt from what a run remembers of it."""
  arrays = {name: np.asarray(memory[name], np.int32 if name == "tokens" else np.float32) for name in STORED}
  return Trajectory(**arrays, advantages=np.zeros(len(memory["tokens"]), np.float32), num_prompt=memory["num_prompt"])
