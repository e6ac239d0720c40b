"""Rates of a learner and engines on slices of their own, and the lag at which no side waits."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.pod import lengths, rl_step
from experiments.pod.engine_proof import EnginePlan
from experiments.pod.proof import Plan, Proof
from experiments.pod.weight_move import Way
from jaxrl_llm.devices.mesh import platform_of
from jaxrl_llm.models import ragged
from jaxrl_llm.rollouts.samplers import engine_columns, engine_sizes

MOST_LAG = 16
"""Largest lag that is tried."""

_SLACK = 1.02
_BATCHES = 40


class Balance(NamedTuple):
  """Least times of both sides for the batch of an RL step, at lengths of one mean.

  Attributes:
    mean: Mean length of a response in tokens, before it is cut at the budget.
    tokens: Number of tokens of all responses of a batch.
    step_s: Least time of a decoding step in seconds, all rows busy.
    drawing_s: Least time in which the engines draw a batch if all their rows are always busy.
    learning_s: Least time of the scores and updates of a batch.
    longest_s: Least time in which the longest response is drawn.
    lags: Least lag at which an RL step takes as long as the slower side, by the way of the weights;
      None if `MOST_LAG` is not enough.
  """

  mean: float
  tokens: int
  step_s: float
  drawing_s: float
  learning_s: float
  longest_s: float
  lags: dict[str, int | None]


def balance(
  plan: Plan, own: EnginePlan, proofs: Sequence[Proof], ways: Sequence[Way], mean: float, *, prompt_tokens: int | None = None, seed: int = 0
) -> Balance:
  """Compares the bounds of the learner's programs with those of the engines.

  Args:
    plan: Plan of the learner.
    own: Plan of the engines.
    proofs: Compiled programs of both. Those of the engines are "prefill", "decode" and "copy".
    ways: Ways of new weights from the learner to the engines.
    mean: Mean length of a response in tokens.
    prompt_tokens: Number of tokens of each prompt; None for the largest bucket of prompts.
    seed: Seed of the lengths.
  """
  section, by_name = plan.config.rollout, {proof.name: proof for proof in proofs}
  num_prompts, prompt = section.num_prompts + section.spare_prompts, prompt_tokens or max(section.prompt_buckets)
  sizes = dict(num_prompts=num_prompts, group_size=section.group_size, budget=section.max_new_tokens)
  drawn = lengths.draw(np.random.default_rng(seed), mean, **sizes)
  _, parts = rl_step.learning(plan, proofs, drawn, prompt_tokens=prompt_tokens)
  bound = lambda name: max(by_name[name].seconds(own.topology).values()) if name in by_name else 0.0
  decode, columns = by_name["decode"], engine_columns(plan.config, own.mesh)
  # Rows that are refilled at once hold long responses more often than short ones.
  held = float(np.sum(drawn * (prompt + drawn / 2 + (ragged.block_columns(columns, platform_of(own.mesh)) or 1) / 2)) / np.sum(drawn))
  num_bytes = decode.parts["weights"] + decode.parts["cache"] * held / columns
  memory_s = num_bytes / own.topology.chip.bytes_per_s
  step_s = max((decode.seconds(own.topology) | {"memory": memory_s}).values())
  rows, chunks = own.rows * own.num_engines, -(-prompt // engine_sizes(plan.config)["chunk"])
  of_prompts = num_prompts * (chunks * bound("prefill") + (section.group_size - 1) * bound("copy")) / (own.spans * own.num_engines)
  tokens = int(drawn.sum())
  drawing_s, learning_s = tokens / rows * step_s + of_prompts, sum(parts.values())
  # Prefills interrupt the steps of all rows alike.
  of_token = drawing_s * rows / tokens
  slower = max(drawing_s, learning_s)

  def lag_of(move_s: float) -> int | None:
    takes = lambda lag: rl_step_s(drawn.reshape(-1), rows=rows, token_s=of_token, learning_s=learning_s, move_s=move_s, lag=lag)
    return next((lag for lag in range(int(move_s / slower), MOST_LAG + 1) if takes(lag) <= _SLACK * slower), None)

  lags = {f"{way.name}, {way.limits}: {way.move.seconds:.3g} s": lag_of(way.move.seconds) for way in ways}
  return Balance(mean, tokens, step_s, drawing_s, learning_s, int(drawn.max()) * of_token, lags)


def rl_step_s(lengths: np.ndarray, *, rows: int, token_s: float, learning_s: float, move_s: float, lag: int) -> float:
  """Simulates an asynchronous run, and returns the time of an RL step.

  The prompts of batch b are taken when step b − η begins, and its responses get rows, the oldest
  first, once weights of that step have arrived. A move begins when the one before has ended, and
  takes the newest weights.

  Args:
    lengths: Number of tokens of the responses of a batch.
    rows: Number of rows of all engines.
    token_s: Time of a token of a row.
    learning_s: Time in which a batch is learned from.
    move_s: Time of a move of weights.
    lag: Largest lag in RL steps (η).

  Example:
    >>> one = dict(rows=2, token_s=1.0, learning_s=3.0, move_s=0.0)
    >>> [rl_step_s(np.array([2, 6]), lag=lag, **one) for lag in range(4)]
    [9.0, 5.5, 4.0, 4.0]
  """
  free, begins, ends = [0.0] * rows, [0.0], []
  newest, arrived = -1, 0.0
  for batch in range(_BATCHES):
    while newest < batch - lag:
      sent = max(arrived, begins[newest + 1])
      newest, arrived = max(i for i, begin in enumerate(begins) if begin <= sent), sent + move_s
    asked = arrived if batch >= lag else 0.0
    ready = 0.0
    for length in lengths.tolist():
      end = max(free[0], asked) + length * token_s
      heapq.heapreplace(free, end)
      ready = max(ready, end)
    ends.append(max(begins[-1], ready) + learning_s)
    begins.append(ends[-1])
  half = _BATCHES // 2
  return (ends[-1] - ends[half - 1]) / half
