"""Bed of the study: running sums by a rambling teacher, and a small model that imitates it.

The model is then trained by RL, with Adam steps on its own samples. The task is that of
`experiments/claims/bed.py`, here always with six digits. In three of ten workings, right or wrong,
the teacher repeats its last sum several times before it ends. A response is right if it ends and
its last digit is the sum of all. Rambling therefore costs nothing, and length says nothing about
the answer:

    3 7 5 9 1 2 . . =        0 5 4 5 7 $            0 5 4 5 7 7 7 7 $
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.ablations.ratio_lab.measures import sequence_clip
from experiments.ablations.routing_replay.bed import piece
from experiments.claims.running_sums import DOT, END, ERROR_RATE, MOST_DIGITS, PAD, VOCAB_SIZE, graded, prompts_of, rectangle, split_of
from jaxrl_llm import objectives
from jaxrl_llm.advantages import group_advantages
from jaxrl_llm.decoding.sampler import make_filter, make_sampler, seeded
from jaxrl_llm.learner.train_step import init_state, make_optimizer, make_train_step, policy_outputs
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.types import Metrics, Params, TrainBatch, TrainState

DIGITS = 6
RAMBLES = 0.3  # Probability that the teacher repeats its last sum.
GOES_ON = 0.85  # Probability of another copy of the last sum, after each one.
MOST_COPIES = 14
BUDGET = 24
"""Budget of a response, in tokens. The longest demonstration has 20."""

CLIP = dict(clip_low=0.2, clip_high=0.27)
GSPO_CLIP = dict(zip(("clip_low", "clip_high"), sequence_clip(8), strict=True))
"""GSPO's band for responses of 8 tokens, which is about their mean length here.

LUSPO has the same band, so that the two differ only in the weights of tokens.
"""

OBJECTIVES = {
  "one_over_length": lambda: objectives.make("grpo", **CLIP, kl_coef=0.0),
  "constant": lambda: objectives.make("dr_grpo", **CLIP, max_tokens=BUDGET),
  "gspo": lambda: objectives.make("gspo", **GSPO_CLIP),
  "luspo": lambda: objectives.make("luspo", **GSPO_CLIP),
}


class Arm(NamedTuple):
  """Arm of the study.

  Attributes:
    objective: Key of `OBJECTIVES`.
    std: Whether advantages are divided by the standard deviation of their group.
  """

  objective: str
  std: bool = True


class Sizes(NamedTuple):
  """Sizes of the bed.

  Attributes:
    d_model: Width of the two layers.
    d_ff: Width of their feed-forward part.
    num_prompts: Number of prompts per rollout batch.
    group_size: Number of samples per prompt (G).
    updates: Number of updates per rollout batch.
    rate: Learning rate of Adam in RL.
    warm_steps: Number of steps of imitation.
    warm_rows: Number of demonstrations per step of imitation.
  """

  d_model: int = 32
  d_ff: int = 64
  num_prompts: int = 16
  group_size: int = 8
  updates: int = 4
  rate: float = 1e-3
  warm_steps: int = 500
  warm_rows: int = 128


SMOKE = Sizes(d_model=16, d_ff=16, num_prompts=4, group_size=4, updates=2, warm_steps=1, warm_rows=4)


class Bed(NamedTuple):
  """Model and its compiled programs, shared by all seeds and arms.

  Attributes:
    sizes: Sizes of the model and of its training.
    init: Initializer `(key) -> params`.
    warm_state: Function `(params) -> state` that makes the state of `warm_step`.
    warm_step: Step of imitation `(state, batch) -> (state, metrics)`.
    sample: Sampler `(params, prompts, prompt_mask, requests) -> Rollouts`.
    logprobs: Function `(params, batch) -> [B, T]` that computes log-probabilities.
    new_state: Function `(params) -> state` that makes the state of an RL step.
    step: Function `(objective)` that makes an RL step `(state, batch) -> (state, metrics)`.
  """

  sizes: Sizes
  init: Callable[[jax.Array], Params]
  warm_state: Callable[[Params], TrainState]
  warm_step: Callable[[TrainState, TrainBatch], tuple[TrainState, Metrics]]
  sample: Callable
  logprobs: Callable[[Params, TrainBatch], jax.Array]
  new_state: Callable[[Params], TrainState]
  step: Callable[[str], Callable[[TrainState, TrainBatch], tuple[TrainState, Metrics]]]


@functools.cache
def make_bed(sizes: Sizes) -> Bed:
  """Builds the model, once for equal sizes. Programs compile at first use."""
  shape = dict(d_model=sizes.d_model, head_dim=sizes.d_model // 4, d_ff=sizes.d_ff)
  model = make_model(preset("nano", vocab_size=VOCAB_SIZE)._replace(**shape))
  outputs_fn = functools.partial(policy_outputs, model.logprobs, make_filter())
  warm_settings = dict(warmup_steps=20, decay_steps=sizes.warm_steps, weight_decay=0.0, b1=0.9, b2=0.99, max_grad_norm=1.0)
  warm, warm_schedule = make_optimizer(learning_rate=1e-2, **warm_settings)
  adam, schedule = make_optimizer(learning_rate=sizes.rate, warmup_steps=4, weight_decay=0.0, b1=0.9, b2=0.99, max_grad_norm=1.0)

  @functools.cache
  def step(objective: str) -> Callable[[TrainState, TrainBatch], tuple[TrainState, Metrics]]:
    return jax.jit(make_train_step(outputs_fn, OBJECTIVES[objective](), adam, learning_rate=schedule))

  return Bed(
    sizes=sizes,
    init=model.init,
    warm_state=lambda params: init_state(params, warm),
    warm_step=jax.jit(make_train_step(outputs_fn, objectives.make("sft"), warm, learning_rate=warm_schedule), donate_argnums=0),
    sample=jax.jit(make_sampler(model, group_size=sizes.group_size, max_new_tokens=BUDGET, stop_ids=(END,), pad_id=PAD)),
    logprobs=jax.jit(lambda params, batch: outputs_fn(params, batch).logprobs),
    new_state=lambda params: init_state(params, adam),
    step=step,
  )


def problems(split: str, count: int, rng: np.random.Generator) -> np.ndarray:
  """Draws problems of a split, "train" or "test".

  Returns:
    Digits, padded with dots on the right, [count, MOST_DIGITS].
  """
  rows = []
  while len(rows) < count:
    digits = rng.integers(10, size=DIGITS)
    if split_of(digits.tolist()) == split:
      rows.append(np.pad(digits, (0, MOST_DIGITS - DIGITS), constant_values=DOT))
  return np.array(rows, np.int32)


def demonstrations(chosen: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Writes the teacher's responses to problems, padded to [n, BUDGET].

  Example:
    >>> chosen = np.array([[3, 7, 5, 9, 1, 2, DOT, DOT]])
    >>> [token for token in demonstrations(chosen, np.random.default_rng(1))[0].tolist() if token != PAD]
    [0, 4, 3, 4, 6, 6, 6, 6, 6, 12]
  """
  count, rows = len(chosen), np.arange(len(chosen))
  responses, value = np.full((count, BUDGET), PAD, np.int32), chosen[:, 0]
  for step in range(1, DIGITS):
    wrong = (rng.random(count) < ERROR_RATE) * rng.integers(1, 10, size=count)
    value = (value + chosen[:, step] + wrong) % 10
    responses[:, step - 1] = value
  copies = np.minimum(rng.geometric(1 - GOES_ON, size=count), MOST_COPIES) * (rng.random(count) < RAMBLES)
  for place in range(MOST_COPIES):
    responses[:, DIGITS - 1 + place] = np.where(place < copies, value, PAD)
  responses[rows, DIGITS - 1 + copies] = END
  return responses


@functools.cache
def warm_params(sizes: Sizes, seed: int) -> Params:
  """Trains weights from scratch to imitate the teacher."""
  bed, rng = make_bed(sizes), np.random.default_rng([seed, 0])
  state = bed.warm_state(bed.init(jax.random.key(seed)))
  for _ in range(sizes.warm_steps):
    chosen = problems("train", sizes.warm_rows, rng)
    responses = demonstrations(chosen, rng)
    state, _ = bed.warm_step(state, rectangle(prompts_of(chosen), responses, responses != PAD))
  return state.params


def draw(bed: Bed, params: Params, chosen: np.ndarray, key: jax.Array) -> tuple[TrainBatch, np.ndarray, np.ndarray]:
  """Samples a rollout batch.

  Returns:
    The batch without advantages; the rewards, 1 for each right response, [N]; the lengths of the
    responses in tokens, [N].
  """
  prompts = prompts_of(chosen)
  requests = seeded(key, len(prompts) * bed.sizes.group_size)
  rollouts = jax.device_get(bed.sample(params, jnp.asarray(prompts), jnp.ones(prompts.shape, bool), requests))
  batch = rectangle(rollouts.prompts, rollouts.tokens, rollouts.mask)
  return batch, graded(chosen, rollouts.tokens, rollouts.mask, rollouts.stopped), rollouts.mask.sum(axis=1)


def train(sizes: Sizes, arm: Arm, seed: int, *, steps: int, held_out: int) -> tuple[list[dict], dict]:
  """Trains one arm of a seed from the warm start that all arms share.

  Args:
    sizes: Sizes of the bed.
    arm: Arm to train.
    seed: Seed of problems and samples.
    steps: Number of rollout batches, with `sizes.updates` updates each.
    held_out: Number of batches of test problems at the end.

  Returns:
    One row per rollout batch, with the entries of `lengths_by_answer`; and the held-out results at
    the end. The latter are lists with one entry per problem: the number of `right` responses, the
    `tokens` of all responses and the `wrong_tokens` of the wrong ones. `responses` is the number of
    responses to each problem.
  """
  bed = make_bed(sizes)
  state, update, key = bed.new_state(warm_params(sizes, seed)), bed.step(arm.objective), jax.random.key(seed)
  rng, rows = np.random.default_rng([seed, 1]), []
  for step in range(steps):
    chosen = problems("train", sizes.num_prompts, rng)
    batch, rewards, tokens = draw(bed, state.params, chosen, jax.random.fold_in(key, step))
    rows.append({"step": step + 1} | lengths_by_answer(rewards, tokens))
    advantages = np.asarray(group_advantages(rewards, sizes.group_size, normalize_std=arm.std))[:, None] * batch.mask
    batch = batch._replace(advantages=advantages.astype(np.float32), old_logprobs=np.asarray(bed.logprobs(state.params, batch)))
    for number in range(sizes.updates):
      state, _ = update(state, piece(batch, number, sizes.updates))
  test = problems("test", held_out * sizes.num_prompts, np.random.default_rng(0))
  history: dict[str, list[int]] = {"right": [], "tokens": [], "wrong_tokens": []}
  for number, chosen in enumerate(np.split(test, held_out)):
    _, rewards, tokens = draw(bed, state.params, chosen, jax.random.fold_in(jax.random.key(2**20 + seed), number))
    for name, x in (("right", rewards), ("tokens", tokens), ("wrong_tokens", tokens * (1 - rewards))):
      history[name] += x.reshape(-1, sizes.group_size).sum(axis=1).astype(int).tolist()
  return rows, history | {"responses": sizes.group_size}


def lengths_by_answer(rewards: np.ndarray, tokens: np.ndarray) -> dict[str, float | None]:
  """Measures the lengths of right and wrong responses.

  Args:
    rewards: Rewards, 1 for each right response and 0 for the others, [N].
    tokens: Lengths of the responses, [N].

  Returns:
    `right`, the fraction of right responses; `tokens`, `tokens_right` and `tokens_wrong`, the mean
    lengths of all, right and wrong responses (None if there are none); `spread`, the standard
    deviation of the lengths; `cut`, the fraction of responses cut at the budget; `correlation`, the
    correlation of length and answer among the others (None if either does not vary).

  Example:
    >>> lengths = lengths_by_answer(np.array([1, 0, 0]), np.array([10, 20, 24]))
    >>> lengths["tokens_wrong"], lengths["cut"], round(lengths["correlation"], 3)
    (22.0, 0.3333333333333333, -1.0)
  """
  right, whole = rewards > 0, tokens < BUDGET
  mean = lambda x: float(np.mean(x)) if len(x) else None
  varies = np.std(right[whole]) > 0 and np.std(tokens[whole]) > 0 if whole.any() else False
  return {
    "right": float(right.mean()),
    "tokens": float(tokens.mean()),
    "tokens_right": mean(tokens[right]),
    "tokens_wrong": mean(tokens[~right]),
    "spread": float(tokens.std()),
    "cut": float(np.mean(~whole)),
    "correlation": float(np.corrcoef(right[whole], tokens[whole])[0, 1]) if varies else None,
  }
