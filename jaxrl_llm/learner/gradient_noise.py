"""Noise and bias of a policy gradient: moments of the gradients of single responses.

An objective sees one log-probability and one entropy per token. Its gradient with respect to them
(`cotangents`) is computed once, on the whole batch. The gradient of response i is then
g_i = N · Σ_t (∂L/∂log π_it) ∇log π_it, and their mean is the gradient of the loss. A backward pass
of the row that holds the response computes it, and only sums are kept:

  Σ_i g_i, Σ_i |g_i|² and Σ_j |Σ_{i in group j} g_i|²   ->   signal |E g|², noise tr Cov(g)

Responses to one prompt share a baseline and are not independent, so that the signal is estimated
from pairs of responses to different prompts.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxrl_llm.learner.train_step import map_micro_batches
from jaxrl_llm.models.params import combine, partition
from jaxrl_llm.objectives.reinforce import reinforce
from jaxrl_llm.segments import token_weights
from jaxrl_llm.types import Objective, Params, PolicyOutputs, TrainBatch


class Cotangents(NamedTuple):
  """Gradient of a loss with respect to the outputs of the policy, per nat.

  Attributes:
    logprobs: Gradient with respect to the log-probability of each token.
    entropy: Gradient with respect to the entropy at each token; None if no objective reads it.
  """

  logprobs: Float[Array, "*K B T"]
  entropy: Float[Array, "*K B T"] | None = None


class Moments(NamedTuple):
  """Sums over the gradients of n responses, for each of K losses, on the host in float64.

  Attributes:
    count: Number of responses (n).
    num_pairs: Number of pairs of responses to one prompt, in order, each with itself included.
    totals: Sums of the gradients, or of their projections.
    squares: Sums of the squared norms of the gradients.
    group_squares: Sums over the prompts of the squared norm of the sum of its responses' gradients,
      or of its projection.
  """

  count: int
  num_pairs: int
  totals: Float[np.ndarray, "K d"]
  squares: Float[np.ndarray, " K"]
  group_squares: Float[np.ndarray, " K"]


class Noise(NamedTuple):
  """Properties of the gradient of one response, as an estimate of the gradient of the loss.

  Attributes:
    responses: Number of responses that they are estimated from.
    noise: Variance tr Cov(g) of a response's gradient, summed over the weights.
    in_groups: G times the variance of the mean over the G responses to a prompt. It differs from
      `noise` because they share a baseline.
    signal: Squared norm |E g|² of the mean gradient, without the share that noise adds to it.
    ratio: Signal over `in_groups`. Its inverse is the number of responses with which a batch's
      gradient is as much signal as noise.
  """

  responses: int
  noise: float
  in_groups: float
  signal: float
  ratio: float


class Bias(NamedTuple):
  """Comparison of a mean gradient with that of other responses, such as fresh ones.

  Attributes:
    cosine: Cosine of the angle between both.
    length: Norm of the first relative to that of the second.
    error: Squared distance of both relative to the squared norm of the second.
  """

  cosine: float
  length: float
  error: float


def cotangents(objective: Objective, outputs: PolicyOutputs, batch: TrainBatch) -> Cotangents:
  """Computes the gradient of an objective's loss with respect to log-probabilities and entropies.

  Args:
    objective: Objective, which may read statistics of the whole batch but neither a critic's values
      nor a teacher.
    outputs: Outputs of the policy on the whole batch.
    batch: Batch of n responses, with what the objective reads.

  Returns:
    The gradient of Σ w·l over the batch. The entropy's part is None unless the objective reads it.

  Example:
    >>> from jaxrl_llm.objectives import make
    >>> ones, ids = jnp.ones((1, 2)), jnp.ones((1, 2), int)
    >>> batch = TrainBatch(ids, ids, ids, mask=ones, advantages=ones, old_logprobs=-ones)
    >>> cotangents(make("grpo", kl_coef=0.0), PolicyOutputs(-ones), batch).logprobs.tolist()
    [[-0.5, -0.5]]
  """
  batch = batch if objective.prepare is None else objective.prepare(batch)
  weights = token_weights(objective, batch.mask, batch.segments, batch.groups)
  reads_entropy = "entropy" in objective.needs

  def loss(own: Cotangents) -> Float[Array, ""]:
    seen = outputs._replace(logprobs=own.logprobs, live_routing=None, router_losses=None, comparison=None)
    losses, _ = objective.token_loss(seen._replace(entropy=own.entropy) if reads_entropy else seen, batch)
    return jnp.sum(jnp.where(weights > 0, weights * losses, 0))

  return jax.grad(loss)(Cotangents(outputs.logprobs, outputs.entropy if reads_entropy else None))


def plain(objective: Objective) -> Objective:
  """Returns the policy gradient without a ratio or gate, with the weights of an objective.

  Example:
    >>> from jaxrl_llm.objectives import make
    >>> plain(make("gspo")).needs
    frozenset()
  """
  return reinforce()._replace(weigh=objective.weigh, needs=objective.needs & {"groups"})


def stacked(own: Sequence[Cotangents]) -> Cotangents:
  """Stacks the cotangents of several losses; entropies that a loss does not read have zeros."""
  logprobs = jnp.stack([x.logprobs for x in own])
  if all(x.entropy is None for x in own):
    return Cotangents(logprobs)
  return Cotangents(logprobs, jnp.stack([jnp.zeros_like(x.logprobs) if x.entropy is None else x.entropy for x in own]))


def multipliers(
  own: Float[Array, "B T"], plain: Float[Array, "B T"], units: Int[np.ndarray, "n 3"], batch: TrainBatch
) -> Float[np.ndarray, " n"]:
  """Computes by how much an objective multiplies each response's part of the plain gradient.

  It is Σ_t ∂L/∂log π_t over that of the policy gradient without a ratio, the mean importance
  ratio of the tokens that no clip leaves out. It is NaN for a response without an advantage.

  Args:
    own: Cotangents of the objective's log-probabilities.
    plain: Those of the policy gradient without a ratio and with the same weights.
    units: Responses; see `units_of`.
    batch: The batch.
  """
  own, plain, segments, units = (np.asarray(x) for x in (own, plain, batch.segments, units))
  total = lambda x: np.array([np.sum(x[row], where=segments[row] == segment, dtype=np.float64) for row, segment, _ in units])
  of_plain = total(plain)
  return np.where(of_plain != 0, total(own) / np.where(of_plain != 0, of_plain, 1), np.nan)


def effective_share(weights: Float[np.ndarray, " n"]) -> float:
  """Computes the effective sample size (Σ w)² / Σ w² of weights, relative to their number.

  Weights that are NaN do not count. The share is NaN if all others are 0.

  Example:
    >>> effective_share(np.array([1.0, 1.0, 0.0, np.nan]))
    0.6666666666666666
  """
  weights = weights[~np.isnan(weights)]
  squares = np.sum(weights**2)
  return float(np.sum(weights) ** 2 / (len(weights) * squares)) if squares > 0 else math.nan


def units_of(batch: TrainBatch) -> Int[np.ndarray, "n 3"]:
  """Returns row, segment and prompt of each response of a batch, in the order of the prompts.

  A response is a segment with tokens that count. Without `TrainBatch.groups`, each has a prompt of
  its own.

  Example:
    >>> segments, mask = jnp.array([[1, 2, 2], [1, 1, 0]]), jnp.array([[0.0, 1, 1], [0, 1, 0]])
    >>> units_of(TrainBatch(segments, segments, segments, mask, mask, mask)).tolist()
    [[0, 2, 0], [1, 1, 1]]
  """
  segments, mask = np.asarray(batch.segments), np.asarray(batch.mask) > 0
  rows = np.broadcast_to(np.arange(len(segments))[:, None], segments.shape)
  groups = np.zeros_like(segments) if batch.groups is None else np.asarray(batch.groups)
  units = np.unique(np.stack([x[mask] for x in (groups, rows, segments)], axis=1), axis=0)
  if batch.groups is None:
    units[:, 0] = np.arange(len(units))
  return units[:, [1, 2, 0]].astype(np.int32)


def _in_groups(units: Int[np.ndarray, "n 3"], at_once: int, room: tuple[int, int]) -> Int[np.ndarray, "groups chunks m 2"]:
  """Arranges responses by prompt and chunk, with padding of a segment that no row has."""
  _, starts, counts = np.unique(units[:, 2], return_index=True, return_counts=True)
  num_groups, group_size = np.maximum((len(counts), np.max(counts)), room)
  chunks = -(-group_size // at_once)
  padded = np.tile(np.int32([0, -1]), (num_groups, chunks * at_once, 1))
  for own, start, count in zip(padded, starts, counts, strict=False):
    own[:count] = units[start : start + count, :2]
  return padded.reshape(num_groups, chunks, at_once, 2)


class Projection(NamedTuple):
  """Random linear map of gradients to d numbers, which keeps lengths and angles on average.

  Each weight is multiplied by a random sign and added to one of d sums; runs of d weights are
  shifted at random against one another. The squared length of a projection has the right mean, and
  relative to it a standard deviation of at most about √(2/d).

  Attributes:
    dims: Number of dimensions (d).
    seed: Seed of signs and shifts.

  References:
    Finding frequent items in data streams (count sketch), Charikar et al., 2002.
  """

  dims: int
  seed: int = 0

  @property
  def error(self) -> float:
    """Bound of the relative error of a squared length: three standard deviations."""
    return 3 * math.sqrt(2 / self.dims)

  def signs(self, template: Params) -> list[tuple[Array, Array]]:
    """Draws the signs and the source of each sum in each run of weights, for each leaf."""

    def of_leaf(i: int, x: Array) -> tuple[Array, Array]:
      runs = -(-x.size // self.dims)
      of_signs, of_shifts = jax.random.split(jax.random.fold_in(jax.random.key(self.seed), i))
      shifts = jax.random.randint(of_shifts, (runs, 1), 0, self.dims)
      return jax.random.rademacher(of_signs, (runs, self.dims), jnp.int8), (jnp.arange(self.dims) - shifts) % self.dims

    return [of_leaf(i, x) for i, x in enumerate(jax.tree.leaves(template))]

  def apply(self, signs: list[tuple[Array, Array]], tree: Params) -> Float[Array, " d"]:
    """Projects one vector of weights."""
    total = 0.0
    for (of_leaf, sources), x in zip(signs, jax.tree.leaves(tree), strict=True):
      runs = jnp.pad(x.reshape(-1), (0, of_leaf.size - x.size)).reshape(of_leaf.shape)
      total += jnp.sum(jnp.take_along_axis(runs * of_leaf, sources, axis=1), axis=0)
    return total


def make_moments(
  outputs_fn: Callable[[Params, TrainBatch], PolicyOutputs],
  *,
  trainable: PyTree | None = None,
  at_once: int = 1,
  projection: Projection | None = None,
  room: tuple[int, int] = (0, 0),
) -> Callable[[Params, TrainBatch, Cotangents, Int[np.ndarray, "n 3"]], Moments]:
  """Makes a function that computes the moments of the responses' gradients.

  It never holds more than `at_once` gradients. A response's row passes forward once, and backward
  once for each loss.

  Args:
    outputs_fn: Function `(params, batch) -> PolicyOutputs`, as in `make_train_step`.
    trainable: Params tree with True for each weight whose gradient counts; None takes all.
    at_once: Number of responses that are computed at a time.
    projection: Projection of the gradients' sums, for many weights or losses; None keeps the sums
      themselves. The squared norms of single gradients are exact in any case.
    room: Least number of prompts and of responses to each that the program has room for. Batches
      with more compile it again.

  Returns:
    `(params, batch, cotangents, units) -> Moments` of K stacked cotangents and of the responses
    that `units_of` lists. Gradients are scaled so that their mean over these responses is the
    gradient of the loss.
  """

  @jax.jit
  def sums(params: Params, batch: TrainBatch, own: Cotangents, units: Int[Array, "groups chunks m 2"]) -> tuple[Array, Array, Array]:
    trained, frozen = partition(params, trainable)
    signs = None if projection is None else projection.signs(trained)

    def outputs_of(trained: Params, row: TrainBatch) -> Cotangents:
      outputs = outputs_fn(combine(trained, frozen), jax.tree.map(lambda x: x[None], row))
      return Cotangents(outputs.logprobs[0], None if own.entropy is None else outputs.entropy[0])

    def of_chunk(totals: tuple[Array, Array], units: Int[Array, "m 2"]) -> tuple[tuple[Array, Array], None]:
      rows, segments = units[:, 0], units[:, 1]
      batches = jax.tree.map(lambda x: x[rows], batch)
      copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(units), *x.shape)), trained)
      _, pull = jax.vjp(lambda copies: jax.vmap(outputs_of)(copies, batches), copies)
      chosen = batches.segments == segments[:, None]

      def of_loss(of_tokens: Cotangents) -> tuple[Array, Array]:
        (gradients,) = pull(jax.tree.map(lambda x: jnp.where(chosen, x[rows], 0), of_tokens))
        squares = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(gradients))
        summed = jax.tree.map(lambda x: jnp.sum(x, axis=0), gradients)
        if projection is not None:
          return projection.apply(signs, summed), squares
        return jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(summed)]), squares

      return jax.tree.map(jnp.add, totals, jax.lax.map(of_loss, own)), None

    num_losses, dtype = len(own.logprobs), own.logprobs.dtype
    size = sum(x.size for x in jax.tree.leaves(trained)) if projection is None else projection.dims
    nothing = jnp.zeros((num_losses, size), dtype), jnp.zeros(num_losses, dtype)

    def of_group(carry: tuple[Array, Array, Array], units: Int[Array, "chunks m 2"]) -> tuple[tuple[Array, Array, Array], None]:
      (total, squares), _ = jax.lax.scan(of_chunk, nothing, units)
      return jax.tree.map(jnp.add, carry, (total, squares, jnp.sum(total**2, axis=1))), None

    return jax.lax.scan(of_group, (*nothing, nothing[1]), units)[0]

  def moments(params: Params, batch: TrainBatch, own: Cotangents, units: Int[np.ndarray, "n 3"]) -> Moments:
    count, sizes = len(units), np.unique(units[:, 2], return_counts=True)[1]
    totals, *squares = (np.asarray(x, np.float64) for x in sums(params, batch, own, _in_groups(units, at_once, room)))
    return Moments(count, int(np.sum(sizes**2)), count * totals, *(count**2 * x for x in squares))

  return moments


def joined(parts: Sequence[Moments]) -> Moments:
  """Joins the moments of batches of equal size, as if each were part of one batch."""
  return Moments(*(sum(x[1:], x[0]) for x in zip(*parts, strict=True)))


def _mean_square(moments: Moments, k: int) -> float:
  """Estimates |E g|² from the products of responses to different prompts, which are independent."""
  pairs = moments.count**2 - moments.num_pairs
  return (float(np.sum(moments.totals[k] ** 2)) - float(moments.group_squares[k])) / pairs if pairs else math.nan


def noise(moments: Moments, k: int) -> Noise:
  """Estimates signal and noise of the gradient of one response, for loss k; all without bias.

  Example:
    >>> noise(Moments(2, 2, np.array([[4.0]]), np.array([10.0]), np.array([10.0])), 0)  # gradients 1 and 3
    Noise(responses=2, noise=2.0, in_groups=2.0, signal=3.0, ratio=1.5)
  """
  count, signal = moments.count, _mean_square(moments, k)
  spread = float(moments.squares[k]) / count - signal
  in_groups = (float(moments.group_squares[k]) - moments.num_pairs * signal) / count
  return Noise(count, spread, in_groups, signal, signal / in_groups if in_groups > 0 else math.nan)


def bias(moments: Moments, k: int, fresh: Moments, j: int) -> Bias:
  """Compares the mean gradient of loss k with that of loss j over other, independent responses.

  All of it is NaN where the signal of either is not above 0.

  Example:
    >>> ours = Moments(2, 2, np.array([[4.0]]), np.array([8.0]), np.array([8.0]))
    >>> fresh = Moments(2, 2, np.array([[2.0]]), np.array([2.0]), np.array([2.0]))
    >>> bias(ours, 0, fresh, 0)
    Bias(cosine=1.0, length=2.0, error=1.0)
  """
  own, other = _mean_square(moments, k), _mean_square(fresh, j)
  if not (own > 0 and other > 0):
    return Bias(math.nan, math.nan, math.nan)
  product = float(np.dot(moments.totals[k], fresh.totals[j])) / (moments.count * fresh.count)
  return Bias(product / math.sqrt(own * other), math.sqrt(own / other), (own + other - 2 * product) / other)


def make_measurement(
  outputs_fn: Callable[[Params, TrainBatch], PolicyOutputs],
  objective: Objective,
  *,
  trainable: PyTree,
  num_rows: int,
  num_sequences: int,
  group_size: int,
  projection: Projection | None = None,
) -> Callable[[Params, TrainBatch], dict[str, float]]:
  """Makes a function that measures an objective on a batch, beside the gradient without a ratio.

  Its programs compile once, whatever the batch holds.

  Args:
    outputs_fn: Function `(params, batch) -> PolicyOutputs`.
    objective: Objective of the run.
    trainable: Params tree with True for each weight that is trained.
    num_rows: Largest number of rows of a batch.
    num_sequences: Largest number of responses in a batch.
    group_size: Number of responses to a prompt (G).
    projection: Projection of the gradients' sums; see `make_moments`.

  Returns:
    `(params, batch) -> metrics`, where the batch has `groups`: `gradient/noise`, `gradient/signal`,
    `gradient/snr` (their ratio in `Noise`), `gradient/inflation`, the noise relative to that of the
    gradient without a ratio, and `gradient/effective`; see `effective_share`. One that cannot be
    estimated is left out.
  """

  @jax.jit
  def of_losses(params: Params, batch: TrainBatch) -> Cotangents:
    outputs = map_micro_batches(partial(outputs_fn, params), batch, 1)
    return stacked([cotangents(x, outputs, batch) for x in (objective, plain(objective))])

  # A mini-batch may begin and end within a group.
  room = -(-num_sequences // group_size) + (num_sequences % group_size > 0), group_size
  moments = make_moments(outputs_fn, trainable=trainable, projection=projection, room=room)

  def measure(params: Params, batch: TrainBatch) -> dict[str, float]:
    more = num_rows - len(batch.mask)
    # On the host, where another number of rows compiles nothing.
    batch = jax.tree.map(lambda x: np.pad(x, ((0, more), *((0, 0) for _ in x.shape[1:]))), jax.device_get(batch))
    own, units = of_losses(params, batch), units_of(batch)
    sums = moments(params, batch, own, units)
    of_loss, of_plain = noise(sums, 0), noise(sums, 1)
    metrics = {"noise": of_loss.noise, "signal": of_loss.signal, "snr": of_loss.ratio}
    metrics["inflation"] = of_loss.noise / of_plain.noise if of_plain.noise > 0 else math.nan
    metrics["effective"] = effective_share(multipliers(own.logprobs[0], own.logprobs[1], units, batch))
    return {f"gradient/{name}": value for name, value in metrics.items() if math.isfinite(value)}

  return measure
