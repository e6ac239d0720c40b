"""Trained and frozen weights as two trees, and as one."""

import jax
from jaxtyping import PyTree

from jaxrl_llm.types import Params


def partition(params: Params, trainable: PyTree | None) -> tuple[Params, Params]:
  """Splits weights into the trained and the frozen ones, two trees with None in the place of each other's.

  `trainable` is the params tree with True where a weight is trained; None trains all of them.
  """
  if trainable is None:
    return params, jax.tree.map(lambda _: None, params)
  pick = lambda wanted: jax.tree.map(lambda is_trained, x: x if is_trained == wanted else None, trainable, params)
  return pick(True), pick(False)


def combine(trained: Params, frozen: Params) -> Params:
  """Joins what `partition` split."""
  return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None)
