"""Bed of the study: a small mixture of experts trained by GRPO on arithmetic.

The model first imitates an unreliable teacher. Adam steps of GRPO on its own samples follow.

Every problem has two steps (such as 7+8-5), so all prompts have the same length, and a batch is a
rectangle with one response per row.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm import objectives
from jaxrl_llm.advantages import group_advantages
from jaxrl_llm.decoding.sampler import make_filter, make_sampler, seeded
from jaxrl_llm.learner.train_step import init_state, make_optimizer, make_train_step, policy_outputs
from jaxrl_llm.models import Experts, ModelConfig, lower_precision, make_model, preset, routing
from jaxrl_llm.rewards.final_answer import final_answer
from jaxrl_llm.tasks.files.storage import split_of
from jaxrl_llm.tasks.sets import arithmetic
from jaxrl_llm.text_types import Completion
from jaxrl_llm.types import Metrics, Params, Rollouts, TrainBatch, TrainState

ALPHABET = "0123456789+-=#\n"
PAD, END, VOCAB_SIZE = len(ALPHABET), len(ALPHABET) + 1, 24
LEVEL = 2
# Fraction of the teacher's steps that are wrong. With a third, as in the laptop job, this small
# model needs twice as long to imitate the teacher.
ERROR_RATE = 0.2
PROMPT_TOKENS = 6
RESPONSE_TOKENS = 24
"""Budget of a response, in tokens. The teacher's longest working has 23 tokens."""

CLIP = dict(clip_low=0.2, clip_high=0.27)


class Sizes(NamedTuple):
  """Sizes of the bed.

  Attributes:
    num_layers: Number of transformer blocks, all with experts.
    d_model: Width of the model.
    num_experts: Number of experts per layer.
    top_k: Number of experts that a token visits in a layer.
    d_ff: Width of an expert.
    num_prompts: Number of prompts in a rollout batch.
    group_size: Number of samples per prompt (G).
    num_minibatches: Number of mini-batches in a rollout batch. The probe of E5 has the size of one.
    warm_steps: Number of supervised steps.
    warm_rows: Number of demonstrations per supervised step.
  """

  num_layers: int = 4
  d_model: int = 64
  num_experts: int = 8
  top_k: int = 2
  d_ff: int = 32
  num_prompts: int = 32
  group_size: int = 8
  num_minibatches: int = 4
  warm_steps: int = 300
  warm_rows: int = 64


SMOKE = Sizes(num_layers=2, d_model=16, num_experts=4, d_ff=8, num_prompts=4, group_size=4, num_minibatches=2, warm_steps=2, warm_rows=8)
"""Tiny sizes that show that everything runs. The measurements are meaningless."""


class Scored(NamedTuple):
  """Result of a forward pass of the learner.

  Attributes:
    logprobs: Log-probability of each token, [B, T].
    entropy: Entropy of the distribution that each token is drawn from, in nats, [B, T].
    visited: Experts that each token visited, [B, T, L, K].
    live: Experts that the routers chose by themselves from their inputs in this pass, [B, T, L, K].
  """

  logprobs: jax.Array
  entropy: jax.Array
  visited: jax.Array
  live: jax.Array


class Bed(NamedTuple):
  """Model and its compiled programs, shared by all seeds and arms.

  Attributes:
    sizes: Sizes of the model and of its training.
    config: Config of the model.
    init: `(key) -> params`.
    warm_step: `(state, batch) -> (state, metrics)`, supervised.
    warm_state: `(params) -> state` for `warm_step`.
    score: `(params, batch) -> Scored`; replays `batch.routing`.
    sampler: `(dtype) -> (params, prompts, prompt_mask, requests) -> Rollouts`, with routes.
    new_state: `(params) -> state` for `step`.
    step: `(state, batch, learning rate) -> (state, metrics)`, an update of GRPO that replays
      `batch.routing`. One program serves all rates.
  """

  sizes: Sizes
  config: ModelConfig
  init: Callable[[jax.Array], Params]
  warm_step: Callable
  warm_state: Callable[[Params], TrainState]
  score: Callable[[Params, TrainBatch], Scored]
  sampler: Callable[[str], Callable[..., Rollouts]]
  new_state: Callable[[Params], TrainState]
  step: Callable[[TrainState, TrainBatch, float], tuple[TrainState, Metrics]]


class Rollout(NamedTuple):
  """Rollout batch.

  Attributes:
    batch: Batch with live routes, advantages, and the sampler's log-probabilities as the old ones.
    sampled: Routes that the sampler recorded, [N, T, L, K].
    rewards: Reward of each response, 1 for a right one and 0 for the others, [N].
  """

  batch: TrainBatch
  sampled: np.ndarray
  rewards: np.ndarray


@functools.cache
def make_bed(sizes: Sizes) -> Bed:
  """Builds the model, once for equal sizes. Programs compile at first use."""
  config = preset("tiny-moe", vocab_size=VOCAB_SIZE)._replace(
    num_layers=sizes.num_layers, d_model=sizes.d_model, num_heads=4, num_kv_heads=2, head_dim=sizes.d_model // 4,
    experts=Experts(sizes.num_experts, sizes.top_k, sizes.d_ff),
  )  # fmt: skip
  model = make_model(config)
  outputs_fn = functools.partial(policy_outputs, model.logprobs, make_filter())

  adam = dict(learning_rate=1e-2, warmup_steps=20, decay_steps=sizes.warm_steps, weight_decay=0.0, b1=0.9, b2=0.99, max_grad_norm=1.0)
  warm, schedule = make_optimizer(**adam)
  warm_step = jax.jit(make_train_step(outputs_fn, objectives.make("sft"), warm, learning_rate=schedule), donate_argnums=0)

  # The rate is an input of the program rather than a constant, so a sweep does not recompile it.
  adam = optax.inject_hyperparams(optax.adam)(learning_rate=0.0, b1=0.9, b2=0.99)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
  update = jax.jit(make_train_step(outputs_fn, objectives.make("grpo", **CLIP, kl_coef=0.0), optimizer, learning_rate=lambda count: 0.0))

  def step(state: TrainState, batch: TrainBatch, learning_rate: float) -> tuple[TrainState, Metrics]:
    clip, inner = state.opt_state
    inner = inner._replace(hyperparams=inner.hyperparams | {"learning_rate": jnp.float32(learning_rate)})
    return update(state._replace(opt_state=(clip, inner)), batch)

  @jax.jit
  def score(params: Params, batch: TrainBatch) -> Scored:
    out = outputs_fn(params, batch)
    return Scored(out.logprobs, out.entropy, routing.replayed(batch.routing, out.live_routing), out.live_routing)

  @functools.cache
  def sampler(dtype: str) -> Callable[..., Rollouts]:
    lower = make_model(config._replace(dtype=dtype))
    settings = dict(group_size=sizes.group_size, max_new_tokens=RESPONSE_TOKENS, stop_ids=(END,), pad_id=PAD)
    sample = make_sampler(lower, record_routing=True, **settings)
    return jax.jit(lambda params, *rest: sample(lower_precision(params, dtype), *rest))

  warm_state = lambda params: init_state(params, warm)
  new_state = lambda params: init_state(params, optimizer)
  return Bed(sizes, config, model.init, warm_step, warm_state, score, sampler, new_state, step)


def encode(text: str) -> list[int]:
  """Encodes a text as ids.

  Example:
    >>> encode("7+8=")
    [7, 10, 8, 12]
  """
  return [ALPHABET.index(character) for character in text]


def questions(split: str) -> list[str]:
  """Returns the problems of a split, "train" or "test", in a fixed order."""
  return [question for question in arithmetic.questions_of(LEVEL) if split_of(question) == split]


def prompts_of(chosen: Sequence[str]) -> np.ndarray:
  """Encodes the prompts of problems, [n, PROMPT_TOKENS]."""
  return np.array([encode(f"{question}\n") for question in chosen], np.int32)


def rectangle(bed: Bed, tokens: np.ndarray, drawn: np.ndarray) -> TrainBatch:
  """Builds a batch with one sequence per row and live routes.

  Args:
    bed: Bed, whose config gives the shape of the routes.
    tokens: Prompts and responses, [N, T].
    drawn: Whether each token of the response was drawn, [N, R].
  """
  shape = tokens.shape
  mask = np.pad(drawn, ((0, 0), (PROMPT_TOKENS, 0))).astype(np.float32)
  live = np.full((*shape, bed.config.num_layers, bed.config.experts.top_k), routing.LIVE, np.int16)
  return TrainBatch(
    tokens=tokens.astype(np.int32),
    positions=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
    segments=np.pad(drawn, ((0, 0), (PROMPT_TOKENS, 0)), constant_values=True).astype(np.int32),
    mask=mask,
    advantages=mask,
    old_logprobs=np.zeros(shape, np.float32),
    routing=live,
  )


def demonstrations(bed: Bed, chosen: Sequence[str], rng: np.random.Generator) -> TrainBatch:
  """Writes the teacher's responses to problems, with one wrong step in five."""
  tokens = np.full((len(chosen), PROMPT_TOKENS + RESPONSE_TOKENS), PAD, np.int32)
  drawn = np.zeros((len(chosen), RESPONSE_TOKENS), bool)
  for row, question in enumerate(chosen):
    seed = int(rng.integers(arithmetic.DEMONSTRATIONS_PER_PROBLEM))
    text = arithmetic.working(question, error_rate=ERROR_RATE, seed=seed)
    response = [*encode(text), END]
    tokens[row, : PROMPT_TOKENS + len(response)] = [*encode(f"{question}\n"), *response]
    drawn[row, : len(response)] = True
  return rectangle(bed, tokens, drawn)


def warm_params(bed: Bed, seed: int) -> Params:
  """Trains weights from scratch to imitate the teacher."""
  rng = np.random.default_rng([seed, 0])
  train = questions("train")
  state = bed.warm_state(bed.init(jax.random.key(seed)))
  for _ in range(bed.sizes.warm_steps):
    state, _ = bed.warm_step(state, demonstrations(bed, rng.choice(train, bed.sizes.warm_rows), rng))
  return state.params


def graded(rollouts: Rollouts, chosen: Sequence[str]) -> np.ndarray:
  """Grades responses: 1 for each right one and 0 for the others, [N]."""
  group_size = len(rollouts.tokens) // len(chosen)
  answers = [{"answer": str(arithmetic.evaluate(question))} for question in chosen for _ in range(group_size)]
  rewards = []
  for tokens, mask, stopped, answer in zip(rollouts.tokens, rollouts.mask, rollouts.stopped, answers, strict=True):
    # An id without a character makes the response wrong, wherever it occurs.
    text = "".join(ALPHABET[i] if i < len(ALPHABET) else "?" for i in tokens[mask] if i != END)
    completion = Completion(text=text, token_ids=tuple(tokens[mask].tolist()), num_tokens=int(mask.sum()), stopped=bool(stopped))
    rewards.append(final_answer(completion, answer))
  return np.array(rewards, np.float32)


def draw(bed: Bed, params: Params, chosen: Sequence[str], key: jax.Array, *, dtype: str = "float32") -> Rollout:
  """Samples a rollout batch with its group advantages.

  Args:
    bed: Model and its programs.
    params: The learner's weights. The sampler lowers their precision itself.
    chosen: Problems, as many as the bed has prompts.
    key: Random key of this batch alone.
    dtype: Type of the sampler's arithmetic.
  """
  prompts = prompts_of(chosen)
  requests = seeded(key, len(prompts) * bed.sizes.group_size)
  rollouts = jax.device_get(bed.sampler(dtype)(params, jnp.asarray(prompts), jnp.ones(prompts.shape, bool), requests))
  rewards = graded(rollouts, chosen)
  batch = rectangle(bed, np.concatenate([rollouts.prompts, rollouts.tokens], axis=1), rollouts.mask)
  advantages = np.asarray(group_advantages(rewards, bed.sizes.group_size))[:, None] * batch.mask
  logprobs = np.pad(rollouts.logprobs, ((0, 0), (PROMPT_TOKENS, 0)))
  return Rollout(batch._replace(advantages=advantages.astype(np.float32), old_logprobs=logprobs), rollouts.routing, rewards)


def problem_batches(bed: Bed, seed: int) -> Iterator[list[str]]:
  """Yields the training problems of each rollout batch. All arms of a seed share them."""
  rng, train = np.random.default_rng([seed, 1]), questions("train")
  while True:
    yield list(rng.choice(train, bed.sizes.num_prompts, replace=False))


def held_out(bed: Bed, params: Params, *, batches: int) -> float:
  """Measures the accuracy on test problems in float32, at temperature 1.

  Problems and keys are the same at every call.
  """
  order = np.random.default_rng(0).permutation(questions("test"))
  size = bed.sizes.num_prompts
  pieces = [order[start * size : (start + 1) * size] for start in range(batches)]
  return float(np.mean([np.mean(draw(bed, params, x, jax.random.key(i)).rewards) for i, x in enumerate(pieces)]))


def piece(batch: TrainBatch, index: int, count: int) -> TrainBatch:
  """Returns mini-batch number `index` of `count`. Groups stay together."""
  size = len(batch.tokens) // count
  return jax.tree.map(lambda x: x[index * size : (index + 1) * size], batch)
