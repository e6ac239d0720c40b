"""Decoders by name: two small ones for laptops and tests, and the published sizes of the families that `load` can read."""

import difflib

from jaxrl_llm.models.config import DTYPES, ModelConfig

PRESETS = {
  # 0.8M parameters at a byte vocabulary: learns the laptop job in minutes on two CPU cores.
  "tiny": ModelConfig(
    vocab_size=264, num_layers=4, d_model=128, num_heads=4, num_kv_heads=2, head_dim=32, d_ff=384, qk_norm=True
  ),
  # For tests of plumbing: compiles and runs in no time, learns nothing worth having.
  "nano": ModelConfig(
    vocab_size=264, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64, qk_norm=True
  ),
}


def preset(name: str, *, vocab_size: int, dtype: str = "float32", remat: bool = False) -> ModelConfig:
  """A preset by name, for a tokenizer of `vocab_size` ids.

  Raises:
    ValueError: unknown name or dtype.

  Example:
    >>> preset("tiny", vocab_size=264).num_layers
    4
  """
  if name not in PRESETS:
    near = difflib.get_close_matches(str(name), PRESETS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"model.preset: unknown preset {name!r}, expected one of {', '.join(PRESETS)}{hint}")
  if dtype not in DTYPES:
    raise ValueError(f"model.dtype: found {dtype!r}, expected one of {', '.join(DTYPES)}")
  return PRESETS[name]._replace(vocab_size=vocab_size, dtype=dtype, remat=remat)
