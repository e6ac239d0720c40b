"""Estimates of the device memory that pictures take, beside those of `memory` for rows of tokens.

Each function returns bytes of one device, by kind. The scores of attention are largest; of a long
picture those of a part of its patches exist at a time.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import ModelConfig, make_model
from jaxrl_llm.models.image_slots import Room
from jaxrl_llm.models.tower import queries_at_once

# Measured on what XLA compiles for CPUs; tests/learner/test_picture_memory.py compares.
_FORWARD_SCORES = 1.5  # Copies of a part's scores in the forward pass.
_BACKWARD_SCORES = 3.0  # Copies in the backward pass of attention by parts.
_COTANGENTS = 0.5  # Gradients of a recomputed layer's activations, as a fraction of those.


def size(shapes: PyTree) -> int:
  """Returns the bytes of arrays that are not sharded."""
  return sum(int(np.prod(x.shape)) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(shapes))


def of_pass(shape: ModelConfig, mesh: Mesh, params: PyTree, room: Room, *, pictures: float) -> dict[str, float]:
  """Returns the memory of a forward pass of the tower over `pictures` pictures on a device.

  Args:
    shape: Shape of the model.
    mesh: Mesh of the learner.
    params: Abstract weights with their shardings.
    room: Room for the tokens of a picture.
    pictures: Number of pictures on a device.
  """
  vision, itemsize = shape.vision, jnp.dtype(shape.dtype).itemsize
  patches = room.tokens * vision.merge_size**2
  states, hidden = (pictures * patches * width * itemsize for width in (vision.d_model, vision.d_ff))
  attention = 4 * states + _FORWARD_SCORES * scores(shape, mesh, patches, pictures=pictures)
  # The four learned positions around each patch, in float32.
  begin = 4 * pictures * patches * vision.d_model * 4 + states
  features = pictures * room.tokens * (1 + len(vision.deep_layers)) * shape.d_model * itemsize
  parts = {"tower's activations": max(attention, 2 * states + 2 * hidden, begin), "features of pictures": features}
  return parts | {"gathered weights of the tower": gathered(params, mesh)}


def scores(shape: ModelConfig, mesh: Mesh, patches: int, *, pictures: float) -> float:
  """Returns the bytes of the scores of a part of the patches to all patches of their pictures."""
  heads = max(shape.vision.num_heads // mesh.shape["tensor"], 1)
  return pictures * heads * queries_at_once(patches) * patches * 4


def gathered(params: PyTree, mesh: Mesh) -> float:
  """Returns the bytes of a layer of the tower whose weights are gathered over `fsdp`."""
  if mesh.shape["fsdp"] == 1:
    return 0.0
  return sum(size(x) for x in jax.tree.leaves(params["tower"]["layers"])) / jax.tree.leaves(params["tower"]["layers"])[0].shape[0]


def of_update(shape: ModelConfig, mesh: Mesh, room: Room, *, pictures: float) -> dict[str, float]:
  """Returns what a trained tower adds to the memory of an update.

  Args:
    shape: Shape of the model.
    mesh: Mesh of the learner.
    room: Room for the tokens of a picture.
    pictures: Number of pictures of a micro-batch on a device.
  """
  patches, vision = room.tokens * shape.vision.merge_size**2, shape.vision
  saved, everything = (pictures * kept(shape._replace(remat=remat), room.tokens) for remat in (shape.remat, "none"))
  recomputed = (1 + _COTANGENTS) * (everything - saved) / vision.num_layers if shape.remat != "none" else 0.0
  by_parts = queries_at_once(patches) < patches
  repeated = (_BACKWARD_SCORES if by_parts else 1.0) * scores(shape, mesh, patches, pictures=pictures)
  return {"tower's activations": saved, "tower's recomputed layer": max(recomputed, 0.0), "tower's scores": repeated}


@functools.cache
def kept(shape: ModelConfig, tokens: int) -> int:
  """Traces what the tower's forward pass saves of a picture for its backward pass."""
  model = make_model(shape)
  params = jax.eval_shape(model.init, jax.random.key(0))

  def backward(tower, others, patches):
    return jax.vjp(lambda tower: model.features({**others, "tower": tower}, patches), tower)[1]

  one, two = (saved_by(backward, params["tower"], params, Room(shape, 1, tokens).patches(pictures)) for pictures in (1, 2))
  return two - one


def saved_by(backward: Callable, *arguments: PyTree) -> int:
  """Returns the bytes of the arrays that a traced function computes and its result holds."""
  jaxpr = jax.make_jaxpr(backward)(*arguments).jaxpr
  given = {id(x) for x in jaxpr.invars}
  return size({id(x): x.aval for x in jaxpr.outvars if id(x) not in given})


def of_prompts(mesh: Mesh, room: Room, *, prompts: int) -> float:
  """Returns the bytes of the pictures of a batch of prompts."""
  return size(room.shapes(prompts, 1)._replace(slots=None)) / mesh_lib.num_row_shards(mesh)
