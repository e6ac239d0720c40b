"""The layout of weights while responses are drawn, in which no step gathers weights.

Experts and vocabulary are sharded over all devices.

A learner shards each weight over `fsdp` and gathers it layer by layer, which pays for itself over
the thousands of tokens of an update. A decoding step has one token per row: gathering the weights
would take ten to fifty times as long as reading them. Here, weights stay where they are, and the
few activations of a step travel. The same rules hold for a sampler with its own devices, which has
no `fsdp`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from jax.sharding import Mesh

from jaxrl_llm.devices.mesh.devices import AXES
from jaxrl_llm.devices.mesh.placement import RULES

EXPERT_AXES = ("expert", "fsdp")
"""Mesh axes that experts are sharded over while decoding.

In this order the move from the learner's layout is one all-to-all over `fsdp`: a device's experts
are among those that it already holds a part of.
"""


class Serving(NamedTuple):
  """A layout of weights for decoding.

  Attributes:
    mesh: The sampler's devices in their order; rows are sharded as on the sampler's mesh.
    rules: Mesh axes of each logical axis, in place of `RULES`.
  """

  mesh: Mesh
  rules: Mapping[str, str | tuple[str, ...] | None]


def choose_layout(mesh: Mesh, layout: str | None, *, num_experts: int | None, vocab_size: int) -> Serving | None:
  """Returns the layout for decoding that a config asks for, or the one that moves fewer bytes.

  "spread" shards experts and vocabulary over all devices but those of `data`. Attention is
  replicated over `fsdp` and `expert`, and each device attends for its own rows.

  Args:
    mesh: Mesh of the sampler, which is the learner's unless it has its own devices.
    layout: "spread", "learner", or None for the choice.
    num_experts: Number of experts of a layer; None for a dense model, for whose products the
      compiler moves activations instead of weights in any case.
    vocab_size: Size of the vocabulary.

  Returns:
    The layout; None for that of the params.

  Raises:
    ValueError: If "spread" is asked for and changes nothing, or the devices do not divide the
      experts.

  Example:
    >>> import jax
    >>> from jaxrl_llm.devices.mesh import make_mesh
    >>> mesh = make_mesh(fsdp=4, expert=2, devices=jax.devices()[:8])
    >>> layout = choose_layout(mesh, "spread", num_experts=4, vocab_size=264)
    >>> layout.mesh.shape["data"], layout.mesh.shape["fsdp"], layout.mesh.shape["expert"]
    (2, 2, 2)
    >>> layout.rules["expert"], layout.rules["vocab"]
    (('expert', 'fsdp'), ('tensor', 'expert', 'fsdp'))
  """
  if layout == "learner":
    return None
  if num_experts is None or mesh.shape["fsdp"] == mesh.shape["expert"] == 1:
    if layout is None:
      return None
    why = "the model has no experts" if num_experts is None else "mesh.fsdp and mesh.expert are 1: every device has all experts"
    raise ValueError(f"config.serving.layout: found {layout!r}, expected None, because {why}")
  shape = dict(mesh.shape)
  if num_experts % shape["expert"]:
    raise ValueError(f"mesh.expert={shape['expert']} does not divide the model's {num_experts} experts; choose a divisor of {num_experts}")
  # Where there are more devices than experts, some of them hold the same experts for other rows.
  most = num_experts // shape["expert"]
  fsdp = max(size for size in range(1, shape["fsdp"] + 1) if shape["fsdp"] % size == 0 and most % size == 0)
  sizes = shape | {"data": shape["data"] * (shape["fsdp"] // fsdp), "fsdp": fsdp}
  arranged = Mesh(mesh.devices.reshape(tuple(sizes[axis] for axis in AXES)), AXES, axis_types=mesh.axis_types)
  vocab, parts = (), 1
  for axis in ("tensor", *EXPERT_AXES):
    if vocab_size % (parts * sizes[axis]):
      break
    vocab, parts = (*vocab, axis), parts * sizes[axis]
  return Serving(arranged, MappingProxyType({**RULES, "embed": None, "expert": EXPERT_AXES, "vocab": vocab or None}))
