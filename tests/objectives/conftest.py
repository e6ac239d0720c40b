"""Small batches with ratios away from clip bounds, and objectives compiled once for all tests."""

import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objectives import OBJECTIVES, make, value

DIFFERENTIATED = ("logprobs", "entropy", "values")


class Evaluation(NamedTuple):
  """Evaluation of an objective on a batch, as NumPy arrays.

  Attributes:
    loss: Scalar loss.
    metrics: Scalar metrics by name.
    grads: Gradient of the loss in each of `DIFFERENTIATED` that the batch has.
  """

  loss: np.ndarray
  metrics: dict[str, np.ndarray]
  grads: dict[str, np.ndarray]


@pytest.fixture
def make_batch():
  """Factory of the arguments of `objectives.value`, as float64 NumPy arrays.

  `spread` is the standard deviation of the token log-ratios. `lengths` are the numbers of counted
  tokens of the rows.
  """

  def make_arrays(seed=0, *, lengths=(5, 3, 1, 6), num_tokens=6, spread=0.4, level="token"):
    rng = np.random.default_rng(seed)
    shape = (len(lengths), num_tokens)
    mask = (np.arange(num_tokens) < np.asarray(lengths)[:, None]).astype(float)
    old_logprobs = -rng.uniform(0.5, 3, shape)
    logprobs = old_logprobs + spread * rng.standard_normal(shape)
    advantages = rng.standard_normal(len(lengths))
    if level == "token":
      advantages = rng.standard_normal(shape)
    values = rng.standard_normal(shape)
    return {
      "logprobs": logprobs,
      "old_logprobs": old_logprobs,
      "advantages": advantages,
      "mask": mask,
      "ref_logprobs": logprobs + 0.5 * rng.standard_normal(shape),
      "entropy": rng.uniform(0.1, 2, shape),
      "values": values,
      "returns": rng.standard_normal(shape),
      "old_values": values + 0.4 * rng.standard_normal(shape),
      "sampler_logprobs": old_logprobs + 0.1 * rng.standard_normal(shape),
    }

  return make_arrays


def _switched(name, coefficients):
  """Returns settings that give each penalty of the objective its coefficient."""
  takes = inspect.signature(OBJECTIVES[name]).parameters
  return {setting: coef for setting, coef in coefficients.items() if setting in takes}


@pytest.fixture
def everything_on():
  """`name -> settings` with every penalty on, so that an objective reads all its inputs."""
  return lambda name: _switched(name, {"kl_coef": 0.1, "entropy_coef": 0.01})


@pytest.fixture
def penalties_off():
  """`name -> settings` that keep only the policy term."""
  return lambda name: _switched(name, {"kl_coef": 0.0, "entropy_coef": 0.0})


@functools.cache
def _program(name, settings, wanted):
  objective = make(name, **dict(settings))

  def loss_fn(differentiated, fixed):
    loss, metrics = value(objective, **differentiated, **fixed)
    return loss, {metric: x for metric, x in metrics.items() if metric.startswith(wanted)}

  return jax.jit(jax.value_and_grad(loss_fn, has_aux=True))


def _evaluate(name, batch, *, wanted=("",), **settings):
  # Conversion to JAX arrays gives Python scalars, NumPy arrays and JAX arrays the same program.
  arrays = {key: jnp.asarray(x) for key, x in batch.items()}
  differentiated = {key: arrays.pop(key) for key in DIFFERENTIATED if key in arrays}
  program = _program(name, tuple(sorted(settings.items())), wanted)
  (loss, metrics), grads = jax.device_get(program(differentiated, arrays))
  return Evaluation(loss, metrics, grads)


@pytest.fixture
def evaluate():
  """`(name, batch, wanted=("",), **settings) -> Evaluation`.

  It compiles once per objective, settings, and shapes and types of a batch. `wanted` are prefixes
  of metric names. Other metrics are not compiled, which saves up to three quarters of the time.
  """
  return _evaluate


@pytest.fixture
def num_programs():
  """`(name, **settings) -> number of programs that evaluate has compiled`."""
  return lambda name, **settings: _program(name, tuple(sorted(settings.items())), ("",))._cache_size()


@pytest.fixture
def gradient():
  """`(name, batch, **settings) -> gradient in logprobs` of the policy term."""

  def grad_of(name, batch, **settings):
    fields = ("logprobs", "old_logprobs", "sampler_logprobs", "advantages", "mask", "segments")
    needed = {field: batch[field] for field in fields if field in batch}
    off = _switched(name, {"kl_coef": 0.0, "entropy_coef": 0.0})
    return _evaluate(name, needed, wanted=(), **(off | settings)).grads["logprobs"]

  return grad_of
