"""Optimizer moments in the memory of the hosts, brought to the devices one tensor at a time while an update is computed."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

# Tensors whose moments are on the devices at once: one travels while another is updated.
_WINDOW = 2


def is_on_host(x: Any) -> bool:
  """Whether an array, concrete or traced, lies in the memory of a host that has devices with memory of their own.

  Example:
    >>> is_on_host(jnp.ones(2))
    False
  """
  return jax.typeof(x).memory_space == jax.memory.Space.Host


def offloaded(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """`optimizer` tensor by tensor, for a state that lies in host memory (`mesh.state_shardings` with `offload`).

  Each tensor's moments are fetched only once those of the tensor `_WINDOW` before it are back, so that never more than these are on a
  device at a time. A state that is not in host memory is updated as by `optimizer`, so the same steps follow.

  Args:
    optimizer: works on each tensor by itself, as AdamW does. What looks at all of them, such as clipping by the global norm, goes before.

  Returns:
    The transformation. Its update takes `finite`, and where that is False the state stays what it was: nobody else could choose between an
    old and a new state in host memory.
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
  """The state with the moments of one tensor, None in the place of the others'; counters stay."""
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
