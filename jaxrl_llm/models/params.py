"""Params trees: their branches, and splitting them into trained and frozen weights."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from jaxrl_llm.types import Params


def partition(params: Params, trainable: PyTree | None) -> tuple[Params, Params]:
  """Splits params into a tree of trained weights and a tree of frozen ones.

  Each tree holds None in place of the weights of the other. `trainable` is the params tree with
  True for each weight that is trained; None trains all of them.
  """
  if trainable is None:
    return params, jax.tree.map(lambda _: None, params)
  pick = lambda wanted: jax.tree.map(lambda is_trained, x: x if is_trained == wanted else None, trainable, params)
  return pick(True), pick(False)


def combine(trained: Params, frozen: Params) -> Params:
  """Joins the two trees that `partition` returns."""
  return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None)


def at_path(params: Params, path: Sequence[str]) -> Any:
  """Returns the array or branch at a path of a params tree, or of a tree of the same form."""
  return functools.reduce(operator.getitem, path, params)
