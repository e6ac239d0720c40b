"""Bed of the study: a small transformer, a made-up language that it learns, and updates of GRPO.

The language is a Markov chain with peaked and fork tokens. After most tokens one successor is
nearly certain. A fifth of the tokens are forks, after which one of four tokens follows. GRPO trains
the transformer on its own samples with Adam. The reward of a response is the fraction of its tokens
in a target set, which is one half of the vocabulary. It is cheap, verifiable and learnable.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objectives
from jaxrl_llm.advantages import group_advantages
from jaxrl_llm.decoding.sampler import make_filter, make_sampler, seeded
from jaxrl_llm.learner.train_step import init_state, make_optimizer, make_train_step, policy_outputs
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.types import Params, PolicyOutputs, TrainBatch, TrainState

PROMPT_TOKENS = 4


class Sizes(NamedTuple):
  """Sizes of the bed.

  Attributes:
    vocab_size: Number of tokens of the language.
    num_layers: Number of transformer blocks.
    d_model: Width of the model.
    num_prompts: Number of prompts in a rollout batch.
    group_size: Number of samples per prompt (G).
    num_minibatches: Number of mini-batches in a rollout batch. An update uses one of them.
    warm_steps: Number of supervised steps on the language.
    eval_rows: Number of sequences scored at once.
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
"""Tiny sizes that show that everything runs. The measurements are meaningless."""


class Bed(NamedTuple):
  """Model and its compiled programs, shared by all seeds.

  Attributes:
    sizes: Sizes of the model and of its training.
    init: Initializer of the weights, `(key) -> params`.
    warm_step: Supervised update, `(state, batch) -> (state, metrics)`.
    warm_state: Initializer of the state of `warm_step`, `(params) -> state`.
    outputs: Forward pass, `(params, batch) -> PolicyOutputs`.
    pull_back: Backward pass, `(params, batch, gradient in log π) -> gradient in the weights`.
    sampler: Maker of a sampler for one length of responses,
      `(response tokens) -> (params, prompts, prompt_mask, requests) -> Rollouts`.
    updater: Maker of an initializer of the state and of an update of GRPO,
      `(learning rate) -> ((params) -> state, train step)`.
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
  """Markov chain over the vocabulary, with the rewarded half of the vocabulary.

  Attributes:
    transitions: Probability of each successor of each token, [V, V].
    target: Mask of the rewarded tokens, [V].
  """

  transitions: np.ndarray
  target: np.ndarray


class Snapshot(NamedTuple):
  """Policy after some updates, compared with frozen old log-probabilities.

  Attributes:
    updates: Number of optimizer updates so far.
    params: Weights of the policy.
    batch: Responses that the old policy drew and that no update has seen, like those of the next
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
  """Builds the model, once for equal sizes.

  Programs compile at first use, one for each length of responses.
  """
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
    # Without a stop token every response has the requested length.
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
  """Makes a chain in which one token in five is a fork.

  The likeliest successors form one cycle apart from the forks, so that no response gets stuck.
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
  """Draws sequences of the language, [rows, tokens]."""
  cumulative = np.cumsum(language.transitions, axis=1)
  tokens = np.zeros(shape, np.int32)
  tokens[:, 0] = rng.integers(len(cumulative), size=shape[0])
  for t in range(1, shape[1]):
    # Because of rounding the last cumulative sum can lie a little below 1.
    below = np.sum(rng.random((shape[0], 1)) > cumulative[tokens[:, t - 1]], axis=1)
    tokens[:, t] = np.minimum(below, len(cumulative) - 1)
  return tokens


def rectangle(tokens: np.ndarray, advantages: np.ndarray | None = None) -> TrainBatch:
  """Makes a batch of sequences of one length.

  Args:
    tokens: Tokens of prompts and responses, [N, T]. Each row is a sequence. The first
      `PROMPT_TOKENS` of a row are its prompt, which the mask leaves out.
    advantages: Advantages of the sequences, [N]; None means 1.
  """
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
  """Trains weights on the language from scratch."""
  rng = np.random.default_rng([seed, 1])
  state = bed.warm_state(bed.init(jax.random.key(seed)))
  for _ in range(bed.sizes.warm_steps):
    state, _ = bed.warm_step(state, rectangle(draw(language, (32, 64), rng)))
  return state.params


def score(bed: Bed, params: Params, batch: TrainBatch) -> np.ndarray:
  """Computes the log-probabilities of a batch's tokens in pieces of `eval_rows`, [N, P + T]."""
  rows = bed.sizes.eval_rows
  pieces = (jax.tree.map(lambda x, start=start: x[start : start + rows], batch) for start in range(0, len(batch.tokens), rows))
  return np.concatenate([np.asarray(bed.outputs(params, piece).logprobs) for piece in pieces])


def rollout(bed: Bed, language: Language, params: Params, num_tokens: int, key: jax.Array) -> TrainBatch:
  """Samples a batch with its group advantages and the sampler's log-probabilities as old ones."""
  prompt_key, sample_key = jax.random.split(key)
  rng = np.random.default_rng(np.asarray(jax.random.key_data(prompt_key)))
  prompts = draw(language, (bed.sizes.num_prompts, PROMPT_TOKENS), rng)
  requests = seeded(sample_key, len(prompts) * bed.sizes.group_size)
  rollouts = bed.sampler(num_tokens)(params, jnp.asarray(prompts), jnp.ones(prompts.shape, bool), requests)
  responses = np.asarray(rollouts.tokens)
  rewards = np.mean(language.target[responses], axis=1)
  batch = rectangle(np.concatenate([rollouts.prompts, responses], axis=1), np.asarray(group_advantages(rewards, bed.sizes.group_size)))
  return batch._replace(old_logprobs=np.pad(np.asarray(rollouts.logprobs), ((0, 0), (PROMPT_TOKENS, 0))))


def minibatch(batch: TrainBatch, index: int, count: int) -> TrainBatch:
  """Slices mini-batch `index` modulo `count` from a batch. Groups stay together."""
  size = len(batch.tokens) // count
  start = index % count * size
  return jax.tree.map(lambda x: x[start : start + size], batch)


def snapshots(
  bed: Bed, language: Language, params: Params, *, num_tokens: int, learning_rate: float, measure_at: tuple[int, ...], key: jax.Array
) -> Iterator[Snapshot]:
  """Updates the policy on one rollout batch and measures it on another one.

  A first rollout batch warms up the moments of Adam, whose first step would otherwise be ±learning
  rate in every weight. The policy after it is the old policy, and it draws two batches. Updates
  train on one of them, and the snapshots measure the other one, whose old log-probabilities do not
  change between updates.

  Args:
    bed: Bed with the model.
    language: Language of prompts and rewards.
    params: Weights to start from.
    num_tokens: Length of every response, in tokens.
    learning_rate: Learning rate of Adam.
    measure_at: Numbers of updates after which the policy is measured, rising.
    key: Random key of all batches.

  Yields:
    A snapshot after each number of updates in `measure_at`.
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
