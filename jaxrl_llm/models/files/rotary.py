"""Rotary settings and sliding windows in a `config.json`, in both layouts of transformers."""

import math
from typing import Any, NamedTuple

from jaxrl_llm.models.config import Linear, ModelConfig, RopeScaling, SlidingWindow, Yarn
from jaxrl_llm.models.files.json_fields import BOOL, COUNT, INT, NUMBER, get

SCALINGS = {Linear: "linear", RopeScaling: "llama3", Yarn: "yarn"}
"""Names that transformers gives the scalings."""

FULL, SLIDING = "full_attention", "sliding_attention"


class Windows(NamedTuple):
  """Which layers of a family have a sliding window.

  Attributes:
    period: Distance of the layers without one, such as 4 for every fourth; 0 if all have one.
    switch: Field without which no layer has one; "" if there is no such field.
    from_layer: Whether `max_window_layers` is the number of first layers without one.
    size: Default number of tokens that a token sees; None for no window.
    local_theta: Field with the rotary base of these layers, and its default; None if all layers
      rotate alike.
  """

  period: int = 0
  switch: str = ""
  from_layer: bool = False
  size: int | None = None
  local_theta: tuple[str, float] | None = None


def read_rope(raw: dict[str, Any], max_positions: int, where: str, *, theta: float, windows: Windows | None):
  """Reads the base and scaling of the rotary frequencies, and the base within windows.

  It accepts both layouts: `rope_theta` with `rope_scaling`, and `rope_parameters`, which may have
  an entry for each type of layer.

  Args:
    raw: Content of the file.
    max_positions: Context length in tokens.
    where: Path of the file, for messages.
    theta: Default of the base.
    windows: Sliding windows of the family; None if it has none.

  Raises:
    ValueError: If a setting is not implemented or has a wrong type.
  """
  local, parameters = windows and windows.local_theta, raw.get("rope_parameters")
  by_type = local is not None and isinstance(parameters, dict) and {FULL, SLIDING} & parameters.keys()
  if local is not None and parameters and not by_type:
    raise ValueError(f"{where}: rope_parameters: found {parameters!r}, expected an entry for each of {FULL!r} and {SLIDING!r}")
  of_layer = lambda kind: raw | {"rope_parameters": parameters.get(kind)} if by_type else raw
  base, scaling = _rope(of_layer(FULL), max_positions, where, theta, kind=f".{FULL}" if by_type else "")
  if local is None:
    return base, scaling, None
  field, default = local
  own = (of_layer(SLIDING) if by_type else {}) | {"rope_theta": get(raw, field, NUMBER, default, where=where), "rope_scaling": None}
  of_window, scaled = _rope(own, max_positions, where, default, kind=f".{SLIDING}")
  if scaled is not None:
    kind = SCALINGS[type(scaled)]
    raise ValueError(f"{where}: rope_parameters.{SLIDING}: found {kind!r}, expected 'default', the only type within windows")
  return base, scaling, of_window


def _rope(
  raw: dict[str, Any], max_positions: int, where: str, theta: float, kind: str = ""
) -> tuple[float, RopeScaling | Linear | Yarn | None]:
  """Reads the settings of one type of layer, whose name in messages is `kind`."""
  field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
  rope = raw.get(field)
  if rope is not None and not isinstance(rope, dict):
    raise ValueError(f"{where}: {field}: found {rope!r}, expected an object with rope_type")
  rope, inner = rope or {}, f"{where}: {field}{kind}"
  theta = float(get(rope, "rope_theta", NUMBER, None, where=inner) or get(raw, "rope_theta", NUMBER, theta, where=where))
  if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
    raise ValueError(f"{inner}.partial_rotary_factor: found {rope['partial_rotary_factor']!r}, expected 1.0")
  name = rope.get("rope_type", rope.get("type", "default"))
  if name == "default":
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
      raise ValueError(f"{inner}: found settings by layer type ({', '.join(nested)}), expected one rope_type for all layers")
    return theta, None
  if name not in SCALINGS.values():
    names = ", ".join(map(repr, ("default", *SCALINGS.values())))
    raise ValueError(f"{inner}.rope_type: found {name!r}, expected one of {names}; no other type is implemented")
  factor = float(get(rope, "factor", NUMBER, where=inner))
  if name == "linear":
    return theta, Linear(factor)
  original = get(rope, "original_max_position_embeddings", INT, max_positions, where=inner)
  if name == "yarn":
    return theta, _yarn(rope, factor, original, inner)
  low, high = (float(get(rope, bound, NUMBER, where=inner)) for bound in ("low_freq_factor", "high_freq_factor"))
  scaling = RopeScaling(factor, low, high, original)
  if scaling.low_freq_factor >= scaling.high_freq_factor:
    raise ValueError(
      f"{inner}: found low_freq_factor {scaling.low_freq_factor} >= high_freq_factor {scaling.high_freq_factor}, expected less"
    )
  return theta, scaling


def _yarn(rope: dict[str, Any], factor: float, original: int, where: str) -> Yarn:
  """Reads YaRN's settings; its factor of sines and cosines is 0.1 ln(factor) + 1 unless given."""
  for field in ("mscale", "mscale_all_dim"):
    if rope.get(field):
      raise ValueError(f"{where}.{field}: found {rope[field]!r}, expected none; write attention_factor instead")
  return Yarn(
    factor,
    original,
    float(get(rope, "attention_factor", NUMBER, 0.1 * math.log(max(factor, 1)) + 1, where=where)),
    float(get(rope, "beta_fast", NUMBER, 32.0, where=where)),
    float(get(rope, "beta_slow", NUMBER, 1.0, where=where)),
    get(rope, "truncate", BOOL, True, where=where),
  )


def read_window(raw: dict[str, Any], num_layers: int, where: str, windows: Windows | None) -> SlidingWindow | None:
  """Reads which layers have a sliding window; None if no layer has one.

  Raises:
    ValueError: If a layer is of another type or a field has a wrong type.
  """
  types = raw.get("layer_types")
  if types is not None and (not isinstance(types, list) or set(types) - {FULL, SLIDING} or len(types) != num_layers):
    raise ValueError(f"{where}: layer_types: found {types!r}, expected {FULL!r} or {SLIDING!r} for each of {num_layers} layers")
  sliding = [i for i, kind in enumerate(types or ()) if kind == SLIDING]
  if windows is None:
    if sliding:
      raise ValueError(f"{where}: layer_types: found {SLIDING!r}, expected {FULL!r} everywhere: the family has no windows")
    return None
  size = get(raw, "sliding_window", INT, None if "sliding_window" in raw else windows.size, where=where)
  if windows.switch and not get(raw, windows.switch, BOOL, False, where=where):
    size = None
  if types is None:
    first = get(raw, "max_window_layers", COUNT, 28, where=where) if windows.from_layer else 0
    period = get(raw, "sliding_window_pattern", INT, windows.period, where=where) if windows.period else 0
    sliding = [i for i in range(first, num_layers) if not period or (i + 1) % period]
  elif sliding and size is None:
    fix = f"{windows.switch}: true and a number" if windows.switch else "a number"
    raise ValueError(f"{where}: sliding_window: found none, expected {fix}, because layer_types has {SLIDING!r}")
  return None if size is None or not sliding else SlidingWindow(size, tuple(sliding))


def is_writable(config: ModelConfig, windows: Windows | None) -> bool:
  """Returns whether a family has the sliding windows of a model."""
  if config.window is None:
    return True
  if windows is None or (config.window.rope_theta is not None and windows.local_theta is None):
    return False
  return bool(windows.period or windows.from_layer) or len(config.window.layers) == config.num_layers


def to_json(config: ModelConfig, windows: Windows | None) -> dict[str, Any]:
  """Writes rotary settings and windows; inverts `read_rope` and `read_window`.

  Rotary settings are written as in published checkpoints, `rope_theta` with `rope_scaling`, which
  every version of transformers reads; those of a family whose windows rotate in their own way also
  by type of layer, which only version 5 reads.
  """
  scaling = config.rope_scaling
  rope = None if scaling is None else {"rope_type": SCALINGS[type(scaling)], **scaling._asdict()}
  if rope and "original_max_positions" in rope:
    rope["original_max_position_embeddings"] = rope.pop("original_max_positions")
  raw = {"rope_theta": config.rope_theta, "rope_scaling": rope}
  if windows is None:
    return raw
  kinds = [FULL if config.window_of(layer) is None else SLIDING for layer in range(config.num_layers)]
  size = config.window and config.window.size
  if windows.switch:
    raw |= {windows.switch: size is not None}
  if size is not None or not windows.switch:
    raw |= {"sliding_window": size}
  if SLIDING in kinds and (windows.period or windows.from_layer):
    raw |= {"layer_types": kinds}
  if windows.local_theta is not None:
    local = config.rope_theta if config.window is None or config.window.rope_theta is None else config.window.rope_theta
    of_all = {"rope_type": "default"} if rope is None else rope
    raw["rope_parameters"] = {FULL: of_all | {"rope_theta": config.rope_theta}, SLIDING: {"rope_type": "default", "rope_theta": local}}
    raw |= {windows.local_theta[0]: local} if windows.local_theta[0] != "rope_theta" else {}
  return raw
