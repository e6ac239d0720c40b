"""The checkpoints of `record_checkpoints.py`, and changes of their files."""

import pathlib

from jaxrl_llm.models.files import safetensors

CHECKPOINTS = pathlib.Path(__file__).parent / "checkpoints"
NAMES = sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json"))
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def read(path):
  """Reads all tensors of a file of safetensors by name."""
  return {name: safetensors.read_tensor(tensor) for name, tensor in safetensors.read_header(path).items()}


def write(path, tensors):
  """Writes a file of safetensors."""
  safetensors.write_file(path, {name: (x.shape, x.dtype.name) for name, x in tensors.items()}, tensors.values())


def rewrite(path, change):
  """Rewrites a file of safetensors after `change` has edited its dict from name to array."""
  tensors = read(path)
  change(tensors)
  write(path, tensors)
