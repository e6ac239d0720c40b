"""The bed of the study.

It is a small transformer that has learnt a made-up language, and real Adam steps of GRPO on what it
samples.

The language is a Markov chain with peaked and fork tokens: after most tokens one successor is
nearly certain, after every fifth one of four follows. A response's reward is the fraction of its
tokens in a target set, one half of the vocabulary: cheap, verifiable, and learnable.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objectives
from jaxrl_llm.advantages import group_advantages
from jaxrl_llm.learner.train_step import init_state, make_optimizer, make_train_step, policy_outputs
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.sampler import make_filter, make_sampler
from jaxrl_llm.types import Params, PolicyOutputs, TrainBatch, TrainState

PROMPT_TOKENS = 4


class Sizes(NamedTuple):
  """Sizes of the bed.

  Attributes:
    vocab_size: Tokens of the language.
    num_layers: Transformer blocks.
    d_model: Width.
    num_prompts: Prompts of a rollout batch.
    group_size: Responses to each prompt.
    num_minibatches: Pieces of a rollout batch; an update takes one of them.
    warm_steps: Supervised steps on the language.
    eval_rows: Sequences scored at once.
  """

  vocab_size: int = 64
  num_layers: int = 2
  d_model: int = 64
  num_prompts: int = 32
  group_size: int = 8
  num_minibatches: int = 16
  warm_steps: int = 100
  eval_rows: int = 64


SMOKE = Sizes(num_layers=1, d_model=16, num_prompts=4, group_size=4, num_minibatches=4, warm_steps=0, eval_rows=16)
"""Shows that everything runs, and measures nothing worth having."""


class Bed(NamedTuple):
  """A model and its compiled programs, shared by all seeds.

  Attributes:
    sizes: Sizes of the model and of its training.
    init: `(key) -> params`.
    warm_step: `(state, batch) -> (state, metrics)`, supervised.
    warm_state: `(params) -> state` for `warm_step`.
    outputs: `(params, batch) -> PolicyOutputs`.
    pull_back: `(params, batch, gradient in log π) -> gradient in the weights`.
    sampler: `(response tokens) -> (params, prompts, prompt_mask, key) -> Rollouts`.
    updater: `(learning rate) -> (fresh state of params, train step)`.
  """

  sizes: Sizes
  init: Callable[[jax.Array], Params]
  warm_step: Callable
  warm_state: Callable[[Params], TrainState]
  outputs: Callable[[Params, TrainBatch], PolicyOutputs]
  pull_back: Callable[[Params, TrainBatch, jax.Array], Params]
  sampler: Callable[[int], Callable]
  updater: Callable[[float], tuple[Callable[[Params], TrainState], Callable]]


class Language(NamedTuple):
  """A Markov chain over the vocabulary and the half of it that is rewarded."""

  transitions: np.ndarray
  target: np.ndarray


class Snapshot(NamedTuple):
  """The policy after some updates on frozen old log-probabilities.

  Attributes:
    updates: Optimizer updates so far.
    params: The policy's weights.
    batch: Responses that the old policy drew and that no update has seen, as those of the next
      mini-batch.
    log_ratio: Log π − log π_old of their tokens, [N, T].
    sampler_gap: Largest difference between the learner's and the sampler's log-probability of a
      token under the old weights, in nats.
  """

  updates: int
  params: Params
  batch: TrainBatch
  log_ratio: np.ndarray
  sampler_gap: float


@functools.cache
def make_bed(sizes: Sizes) -> Bed:
  """Builds the model once; programs compile at first use, one for each length of responses."""
  config = preset("nano", vocab_size=sizes.vocab_size)._replace(
    num_layers=sizes.num_layers, d_model=sizes.d_model, num_heads=4, num_kv_heads=2, head_dim=sizes.d_model // 4, d_ff=3 * sizes.d_model
  )
  model = make_model(config)
  outputs_fn = functools.partial(policy_outputs, model.logprobs, make_filter())
  adam = dict(weight_decay=0.0, b1=0.9, b2=0.99, max_grad_norm=1.0)

  warm, schedule = make_optimizer(learning_rate=5e-3, warmup_steps=10, decay_steps=sizes.warm_steps, **adam)
  warm_step = jax.jit(make_train_step(outputs_fn, objectives.make("sft"), warm, learning_rate=schedule), donate_argnums=0)

  @jax.jit
  def pull_back(params: Params, batch: TrainBatch, gradient: jax.Array) -> Params:
    return jax.vjp(lambda params: outputs_fn(params, batch).logprobs, params)[1](gradient)[0]

  @functools.cache
  def sampler(num_tokens: int) -> Callable:
    # No stop token: every response has the length that is asked for.
    settings = dict(group_size=sizes.group_size, max_new_tokens=num_tokens, stop_ids=(), pad_id=0)
    return jax.jit(make_sampler(model, **settings))

  @functools.cache
  def updater(learning_rate: float) -> tuple[Callable, Callable]:
    optimizer, schedule = make_optimizer(learning_rate=learning_rate, warmup_steps=0, **adam)
    objective = objectives.make("grpo", clip_low=0.2, clip_high=0.27, kl_coef=0.0)
    return lambda params: init_state(params, optimizer), jax.jit(make_train_step(outputs_fn, objective, optimizer, learning_rate=schedule))

  warm_state = lambda params: init_state(params, warm)
  return Bed(sizes, model.init, warm_step, warm_state, jax.jit(outputs_fn), pull_back, sampler, updater)


def make_language(vocab_size: int, rng: np.random.Generator) -> Language:
  """Returns a chain in which every fifth token is a fork.

  The likeliest successors form one cycle, so that no response gets stuck.
  """
  order = rng.permutation(vocab_size)
  transitions = np.full((vocab_size, vocab_size), 0.05 / vocab_size)
  transitions[order, np.roll(order, -1)] += 0.95
  for token in rng.permutation(vocab_size)[: vocab_size // 5]:
    successors = rng.choice(vocab_size, 4, replace=False)
    transitions[token] = 0.05 / vocab_size
    transitions[token, successors] += 0.95 * rng.dirichlet(np.full(4, 5.0))
  target = np.zeros(vocab_size, bool)
  target[rng.permutation(vocab_size)[: vocab_size // 2]] = True
  return Language(transitions, target)


def draw(language: Language, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
  """Returns the sequences of the language, [rows, tokens]."""
  cumulative = np.cumsum(language.transitions, axis=1)
  tokens = np.zeros(shape, np.int32)
  tokens[:, 0] = rng.integers(len(cumulative), size=shape[0])
  for t in range(1, shape[1]):
    # The last of the sums may be a little below 1.
    below = np.sum(rng.random((shape[0], 1)) > cumulative[tokens[:, t - 1]], axis=1)
    tokens[:, t] = np.minimum(below, len(cumulative) - 1)
  return tokens


def rectangle(tokens: np.ndarray, advantages: np.ndarray | None = None) -> TrainBatch:
  """Returns a batch of sequences of one length: a row each, the prompt not counted."""
  shape = tokens.shape
  mask = np.broadcast_to(np.arange(shape[1]) >= PROMPT_TOKENS, shape).astype(np.float32)
  advantages = np.ones(shape[0]) if advantages is None else advantages
  return TrainBatch(
    tokens=tokens.astype(np.int32),
    positions=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
    segments=np.ones(shape, np.int32),
    mask=mask,
    advantages=(mask * np.asarray(advantages)[:, None]).astype(np.float32),
    old_logprobs=np.zeros(shape, np.float32),
  )


def warm_params(bed: Bed, language: Language, seed: int) -> Params:
  """Returns the weights that have learnt the language from scratch."""
  rng = np.random.default_rng([seed, 1])
  state = bed.warm_state(bed.init(jax.random.key(seed)))
  for _ in range(bed.sizes.warm_steps):
    state, _ = bed.warm_step(state, rectangle(draw(language, (32, 64), rng)))
  return state.params


def score(bed: Bed, params: Params, batch: TrainBatch) -> np.ndarray:
  """Returns the log-probabilities of a batch's tokens, a few rows at a time, [N, P + T]."""
  rows = bed.sizes.eval_rows
  pieces = (jax.tree.map(lambda x, start=start: x[start : start + rows], batch) for start in range(0, len(batch.tokens), rows))
  return np.concatenate([np.asarray(bed.outputs(params, piece).logprobs) for piece in pieces])


def rollout(bed: Bed, language: Language, params: Params, num_tokens: int, key: jax.Array) -> TrainBatch:
  """Samples a batch with its group advantages. Its old log-probabilities are the sampler's."""
  prompt_key, sample_key = jax.random.split(key)
  rng = np.random.default_rng(np.asarray(jax.random.key_data(prompt_key)))
  prompts = draw(language, (bed.sizes.num_prompts, PROMPT_TOKENS), rng)
  rollouts = bed.sampler(num_tokens)(params, jnp.asarray(prompts), jnp.ones(prompts.shape, bool), sample_key)
  responses = np.asarray(rollouts.tokens)
  rewards = np.mean(language.target[responses], axis=1)
  batch = rectangle(np.concatenate([rollouts.prompts, responses], axis=1), np.asarray(group_advantages(rewards, bed.sizes.group_size)))
  return batch._replace(old_logprobs=np.pad(np.asarray(rollouts.logprobs), ((0, 0), (PROMPT_TOKENS, 0))))


def minibatch(batch: TrainBatch, index: int, count: int) -> TrainBatch:
  """Returns the piece number `index`, from 0 and round again, of `count`; groups stay together."""
  size = len(batch.tokens) // count
  start = index % count * size
  return jax.tree.map(lambda x: x[start : start + size], batch)


def snapshots(
  bed: Bed, language: Language, params: Params, *, num_tokens: int, learning_rate: float, measure_at: tuple[int, ...], key: jax.Array
) -> Iterator[Snapshot]:
  """Updates the policy and looks at it.

  A first rollout batch is trained on and thrown away: it warms up Adam's moments, whose first step
  would else be ±learning rate in every weight. The second is the one that is measured: its old
  log-probabilities stay as they are from the first update to the last.

  Args:
    bed: The model.
    language: What it speaks.
    params: Weights to start from.
    num_tokens: Length of every response.
    learning_rate: Learning rate of Adam.
    measure_at: Numbers of updates, rising.
    key: All randomness.

  Yields:
    A snapshot at each of `measure_at`.
  """
  keys = jax.random.split(key, 3)
  new_state, step = bed.updater(learning_rate)
  count = bed.sizes.num_minibatches
  state = new_state(params)
  first = rollout(bed, language, params, num_tokens, keys[0])
  for index in range(count):
    state, _ = step(state, minibatch(first, index, count))
  trained, fresh = (rollout(bed, language, state.params, num_tokens, key) for key in keys[1:])
  drawn, fresh = fresh.old_logprobs, fresh._replace(old_logprobs=score(bed, state.params, fresh))
  gap = float(np.max(np.abs(drawn - fresh.old_logprobs)[:, PROMPT_TOKENS:]))
  done = 0
  for updates in measure_at:
    for index in range(done, updates):
      state, _ = step(state, minibatch(trained, index, count))
    done = updates
    log_ratio = (score(bed, state.params, fresh) - fresh.old_logprobs)[:, PROMPT_TOKENS:]
    yield Snapshot(updates, state.params, fresh, log_ratio, gap)
