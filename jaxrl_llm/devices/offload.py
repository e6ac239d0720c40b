"""Optimizer moments in the memory of the hosts, brought to the devices tensor by tensor."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

# Number of tensors whose moments are on the devices at once: one travels while another is updated.
_WINDOW = 2


def is_on_host(x: Any) -> bool:
  """Returns whether an array lies in host memory although devices have memory of their own.

  Args:
    x: Array, concrete or traced.

  Example:
    >>> is_on_host(jnp.ones(2))
    False
  """
  return jax.typeof(x).memory_space == jax.memory.Space.Host


def offloaded(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Applies an optimizer tensor by tensor to a state in host memory.

  `mesh.state_shardings` with `offload` puts the state there. The moments of a tensor are fetched
  only once those of the tensor `_WINDOW` before it are back, so that the moments of at most
  `_WINDOW` tensors are on a device at once. A state that is not in host memory is updated as by
  `optimizer`, so the same steps follow.

  Args:
    optimizer: Transformation that works on each tensor by itself, as AdamW does. Transformations of
      all tensors together, such as clipping by the global norm, must come before it.

  Returns:
    The transformation. Its update takes `finite` and, if that is False, leaves the state as it was:
    the caller could not choose between an old and a new state in host memory.
  """
  optimizer = optax.with_extra_args_support(optimizer)

  def update(grads, state, params=None, *, finite=True, **extra):
    updates, after, returned = _nothing(grads), _nothing(state), []
    for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(grads)):
      there = _moments_of(path, optimizer, state, grads)
      if i >= _WINDOW:
        there, _ = jax.lax.optimization_barrier((there, returned[i - _WINDOW]))
      old = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, there)
      update, new = optimizer.update(_only(path, grads), old, None if params is None else _only(path, params), **extra)
      new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
      new = jax.tree.map(lambda n, was: jax.device_put(n, jax.memory.Space.Host) if is_on_host(was) else n, new, there)
      returned.append([x for x in jax.tree.leaves(new) if is_on_host(x)])
      updates, after = _joined(updates, update), _joined(after, new)
    return updates, after

  return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _only(path: tuple, tree: PyTree) -> PyTree:
  return jax.tree_util.tree_map_with_path(lambda p, x: x if p == path else None, tree)


def _moments_of(path: tuple, optimizer: optax.GradientTransformation, state: PyTree, grads: PyTree) -> PyTree:
  """Returns the state with the moments of one tensor only; the other moments are None."""
  chosen = jax.tree_util.tree_map_with_path(lambda p, _: p == path, grads)
  return optax.tree_utils.tree_map_params(optimizer, lambda moment, is_it: moment if is_it else None, state, chosen)


def _nothing(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda _: None, tree)


def _joined(a: PyTree, b: PyTree) -> PyTree:
  return jax.tree.map(lambda x, y: x if y is None else y, a, b, is_leaf=lambda x: x is None)


def check_offload(platform: str) -> None:
  """Raises ValueError on a platform on which offloading would save nothing: "cpu"."""
  if platform == "cpu":
    raise ValueError("config.learner.offload_optimizer: found True on cpu, whose devices have no memory but the host's; expected False")
