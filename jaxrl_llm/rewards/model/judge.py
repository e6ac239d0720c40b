"""Rewards from a reward model, in batches of a few shapes, on this process's devices alone.

Other processes do not take part.
"""

import functools
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.devices.compilation import compiled_for
from jaxrl_llm.devices.mesh import make_mesh, num_row_shards, param_shardings, place_rows
from jaxrl_llm.models import RewardModel, load_reward_params, make_reward_model, read_reward_config
from jaxrl_llm.models.reward_model import pad_id

# Tokens per batch: enough to keep a device busy, and activations of a few layers fit beside a
# policy.
_ROW_TOKENS = 2**14
_MAX_ROWS = 256

JudgeFn = Callable[[Sequence[Sequence[int]]], np.ndarray]


def make_judge(path: str | os.PathLike, *, max_tokens: int, dtype: str = "float32") -> JudgeFn:
  """Makes a function `(sequences of ids) -> float32 rewards`.

  The rewards may be non-finite. The first call loads the weights and compiles all shapes.

  Args:
    path: Folder of the reward model.
    max_tokens: Length of the longest sequence, in tokens.
    dtype: Dtype of weights and activations; the reward is float32.

  Raises:
    ValueError: If the config of the reward model is invalid, as in `read_reward_config`.
  """
  config = read_reward_config(path)._replace(param_dtype=dtype, dtype=dtype)
  padding = pad_id(path)
  widths = buckets(max_tokens)

  @functools.cache
  def loaded():
    mesh = _local_mesh(make_reward_model(config))
    model = make_reward_model(config, mesh=mesh)
    params = load_reward_params(path, model)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    signatures = [(abstract, *place_rows(mesh, _blank(width, mesh))) for width in widths]
    return mesh, params, compiled_for(jax.jit(model.rewards), signatures)

  def judge(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    scores = np.zeros(len(sequences), np.float32)
    if not len(sequences):
      return scores
    mesh, params, program = loaded()
    sequences = [_without_padding(x, padding) for x in sequences]
    order, pending = sorted(range(len(sequences)), key=lambda i: len(sequences[i])), []
    while order:
      width = next(x for x in widths if x >= len(sequences[order[-1]]))
      tokens, lengths = _blank(width, mesh)
      # Longest first: shorter sequences of the same width fill up the batch.
      own, order = order[-len(tokens) :], order[: -len(tokens)]
      for row, i in enumerate(own):
        tokens[row, : len(sequences[i])] = sequences[i]
        lengths[row] = len(sequences[i])
      pending.append((own, program(params, *place_rows(mesh, (tokens, lengths)))))
    for own, rewards in pending:  # One wait, after all batches are dispatched.
      scores[own] = np.asarray(jax.device_get(rewards))[: len(own)]
    return scores

  return judge


def buckets(max_tokens: int) -> tuple[int, ...]:
  """Returns row widths: a quarter, a half and all of the longest sequence, as multiples of 8.

  Example:
    >>> buckets(40), buckets(1000)
    ((16, 24, 40), (256, 504, 1000))
  """
  return tuple(sorted({max(-(-max_tokens // parts // 8) * 8, 8) for parts in (4, 2, 1)}))


def _blank(width: int, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens and lengths of a batch of empty rows, the same number for each row shard.

  Each length is 1, since a row must have an end.
  """
  shards = num_row_shards(mesh)
  rows = max(min(_ROW_TOKENS // width, _MAX_ROWS) // shards, 1) * shards
  return np.zeros((rows, width), np.int32), np.ones(rows, np.int32)


def _without_padding(sequence: Sequence[int], padding: int | None) -> Sequence[int]:
  """Strips trailing padding tokens from a sequence.

  Transformers reads the reward at the last token that is not padding, even if the sequence itself
  ends with such tokens.
  """
  end = len(sequence)
  while end > 1 and sequence[end - 1] == padding:
    end -= 1
  return sequence[:end]


def _local_mesh(model: RewardModel) -> Mesh:
  """Returns a mesh of this process's devices.

  The weights are sharded over them if possible. Otherwise each device holds a copy.
  """
  devices = jax.local_devices()[: jax.device_count()]
  split, copied = make_mesh(data=1, fsdp=len(devices), devices=devices), make_mesh(data=len(devices), devices=devices)
  try:
    param_shardings(split, model.logical_axes, jax.eval_shape(model.init, jax.random.key(0)))
  except ValueError:
    return copied
  return split
