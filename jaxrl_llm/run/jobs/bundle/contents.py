"""The contents of a bundle: a state and batches as arrays by name, and the rest as JSON."""

import hashlib
import types
import typing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxrl_llm.config.recorded import saved_config
from jaxrl_llm.messages import shown
from jaxrl_llm.run.jobs.bundle.box import Box
from jaxrl_llm.types import Params

FORMAT = 1
"""Version of the format."""

ABOUT, RESPONSES = "about.json", "responses.json"
"""Names of the entries in JSON."""


def is_exact(source: str) -> bool:
  """Returns whether a run had exact numerics, so that flags can be set before devices start.

  Args:
    source: WORKDIR@STEP, or the file of a bundle.

  Raises:
    BoxError: If the file is no undamaged bundle.
  """
  if source.endswith(".zip"):
    about = Box(Path(source)).read_json(ABOUT)
    config = about.get("config") if isinstance(about, dict) else None
  else:
    config = saved_config(Path(source.rpartition("@")[0]))
  numerics = config.get("numerics") if isinstance(config, dict) else None
  return isinstance(numerics, dict) and numerics.get("exact") is True


def named(tree: PyTree, prefix: str) -> dict[str, Any]:
  """Returns the leaves of a tree by name.

  Example:
    >>> named({"embed": {"weight": 1}, "head": None}, "state")
    {'state/embed/weight': 1}
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {f"{prefix}/{jax.tree_util.keystr(path, simple=True, separator='/')}": x for path, x in leaves}


def digest(params: Params) -> str:
  """Returns the SHA-256 of names, dtypes, shapes and bits of weights, in hexadecimal.

  Example:
    >>> ones = {"w": np.ones(2, np.float32)}
    >>> digest(ones) == digest({"w": np.ones(2, np.float32)}), digest(ones) == digest({"w": np.ones(2)})
    (True, False)
  """
  total = hashlib.sha256()
  for name, x in sorted(named(params, "").items()):
    x = np.ascontiguousarray(x)
    total.update(f"{name} {x.dtype} {x.shape}\n".encode())
    total.update(x.reshape(-1).view(np.uint8).data)
  return total.hexdigest()


def to_json(value: Any) -> Any:
  """Returns a value as JSON has it: a NamedTuple as an object, what JSON lacks as its `repr`.

  Example:
    >>> from jaxrl_llm.models import Lora
    >>> to_json({"adapters": Lora(8, 2.0, ("mlp/up",)), "at": 1j})
    {'adapters': {'rank': 8, 'alpha': 2.0, 'targets': ['mlp/up']}, 'at': '1j'}
  """
  if hasattr(value, "_asdict"):
    value = value._asdict()
  if isinstance(value, dict):
    return {str(name): to_json(x) for name, x in value.items()}
  if isinstance(value, list | tuple):
    return [to_json(x) for x in value]
  return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def from_json(kind: Any, value: Any, name: str) -> Any:
  """Rebuilds a NamedTuple, or a part of one, from `to_json`.

  Args:
    kind: Type of the result.
    value: JSON value of any origin.
    name: Name of the value, for messages.

  Raises:
    ValueError: If the value does not have the type. One line.

  Example:
    >>> from jaxrl_llm.models import Experts, ModelConfig, preset
    >>> shape = preset("nano", vocab_size=8)._replace(experts=Experts(8, 2, 16, layers=(0,)))
    >>> from_json(ModelConfig, to_json(shape), "model") == shape
    True
    >>> from_json(Experts, {"num_experts": "8", "top_k": 2, "d_ff": 16}, "experts")
    Traceback (most recent call last):
      ...
    ValueError: experts.num_experts: found '8', expected int
  """
  origin, parts = typing.get_origin(kind), typing.get_args(kind)
  if origin in (typing.Union, types.UnionType):
    if value is None and type(None) in parts:
      return None
    (kind,) = (part for part in parts if part is not type(None))
    return from_json(kind, value, name)
  if origin is tuple and isinstance(value, list):
    kinds = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
    if len(kinds) == len(value):
      return tuple(from_json(part, x, f"{name}[{i}]") for i, (part, x) in enumerate(zip(kinds, value, strict=True)))
  elif hasattr(kind, "_fields") and isinstance(value, dict):
    hints, needed = typing.get_type_hints(kind), set(kind._fields) - kind._field_defaults.keys()
    if set(value) <= set(kind._fields) and needed <= set(value):
      return kind(**{field: from_json(hints[field], x, f"{name}.{field}") for field, x in value.items()})
  elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
    return float(value)
  elif isinstance(kind, type) and type(value) is kind:
    return value
  raise ValueError(f"{name}: found {shown(value)}, expected {getattr(kind, '__name__', kind)}")
