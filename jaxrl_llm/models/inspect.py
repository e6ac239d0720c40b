"""The command `python -m jaxrl_llm.models.inspect PATH`, which describes a checkpoint."""

import argparse
import collections
import math
import pathlib
import sys

import jax.numpy as jnp

from jaxrl_llm.messages import Problem, problem_of
from jaxrl_llm.models.config import ModelConfig, Vision
from jaxrl_llm.models.files import safetensors
from jaxrl_llm.models.files.families import architecture
from jaxrl_llm.models.files.hf_folder import read_json
from jaxrl_llm.models.files.loading import check_tensors, open_source
from jaxrl_llm.models.files.rotary import SCALINGS
from jaxrl_llm.models.files.tensor_names import num_active_params, num_params
from jaxrl_llm.models.files.tensor_source import TensorSource
from jaxrl_llm.pretrained import where
from jaxrl_llm.pretrained.tokenizer_files import TOKENIZER_FILES


def describe_checkpoint(path: str) -> str:
  """Describes a checkpoint in lines of text.

  Args:
    path: Path of the checkpoint, in any form that `load` accepts.

  Raises:
    ValueError: If there is no checkpoint, or it cannot be read; the message has one line.
  """
  config, source = open_source(path)
  check_tensors(config, source)
  tokenizer, template = _tokenizer(where.resolve(path))
  rows = {
    "path": str(source.path),
    "family": architecture(config),
    "layers": f"{config.num_layers}, width {config.d_model}, feed-forward {config.d_ff}",
    "heads": f"{config.num_heads} for queries, {config.num_kv_heads} for keys and values, width {config.head_dim}",
    "experts": _experts(config),
    **({} if config.vision is None else {"pictures": _pictures(config.vision)}),
    "vocabulary": f"{config.vocab_size}, head {'tied to the embedding' if config.tie_embeddings else 'of its own'}",
    "context": _context(config),
    "parameters": f"{num_params(config):,}" + (f", {num_active_params(config):,} active per token" if config.experts else ""),
    "stored": _stored(source),
    "tokenizer": tokenizer,
    "chat template": template,
  }
  return "\n".join(f"{name:<14}{value}" for name, value in rows.items())


def _experts(config: ModelConfig) -> str:
  if config.experts is None:
    return "none"
  e, sparse = config.experts, len(config.sparse_layers)
  gates = "gates sum to 1" if e.norm_top_k else "gates not normalised"
  return f"{e.num_experts} of width {e.d_ff} in {sparse} of {config.num_layers} layers, {e.top_k} per token, {gates}"


def _pictures(vision: Vision) -> str:
  sizes = f"tower of {vision.num_layers} layers, width {vision.d_model}, patches of {vision.pictures.patch_size}"
  return f"{sizes}, features behind {len(vision.deep_layers)} layers"


def _context(config: ModelConfig) -> str:
  length = "not stated" if config.max_positions is None else f"{config.max_positions:,} tokens"
  scaling, window = config.rope_scaling, config.window
  origin = f" from {scaling.original_max_positions:,}" if hasattr(scaling, "original_max_positions") else ""
  stretched = "" if scaling is None else f", stretched {scaling.factor:g} times{origin} ({SCALINGS[type(scaling)]})"
  of_window = "" if window is None or window.rope_theta is None else f" with rotary base {window.rope_theta:g}"
  windows = "" if window is None else f"; {len(window.layers)} layers see {window.size:,} tokens{of_window}"
  return f"{length}, rotary base {config.rope_theta:g}{stretched}{windows}"


def _stored(source: TensorSource) -> str:
  """Describes the tensors of each dtype, in bytes if the dtype has a fixed size per weight."""
  parts = []
  for dtype, count in collections.Counter(source.dtypes.values()).most_common():
    size = sum(math.prod(source.shapes[name]) for name, stored in source.dtypes.items() if stored == dtype)
    plain = dtype in safetensors.DTYPES.values()
    held = f"{size * jnp.dtype(dtype).itemsize:,} bytes" if plain else f"{size:,} weights in blocks"
    parts.append(f"{dtype}: {count} tensors, {held}")
  files = len(set(source.files.values()))
  return f"{', '.join(parts)}; {files} file{'s' * (files > 1)}"


def _tokenizer(path: pathlib.Path) -> tuple[str, str]:
  """Describes where the tokenizer and the chat template are, if there are any."""
  if path.suffix == ".gguf":
    from jaxrl_llm.pretrained.gguf_header import read_header

    metadata = read_header(path).metadata
    name = metadata.get("tokenizer.ggml.model")
    return ("none" if name is None else f"in the file ({name})"), ("in the file" if "tokenizer.chat_template" in metadata else "none")
  files = [name for name in TOKENIZER_FILES if (path / name).is_file()]
  templates = [name for name in files if name.startswith("chat_template")]
  settings = path / "tokenizer_config.json"
  if not templates and settings.is_file() and "chat_template" in read_json(settings):
    templates = [settings.name]
  tokenizers = [name for name in files if name in ("tokenizer.json", "tokenizer.model", "vocab.json")]
  return (tokenizers or ["none"])[0], (templates or ["none"])[0]


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit status."""
  description = "Describes a checkpoint from its headers."
  parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.models.inspect", description=description)
  parser.add_argument("path", help="a folder with config.json and safetensors, a .gguf file, or package:DIST")
  try:
    print(describe_checkpoint(parser.parse_args(argv).path))
  except (ValueError, OSError, ImportError) as error:
    problem = problem_of(error)
    # The path is an argument of this command.
    print(problem._replace(field="path") if isinstance(problem, Problem) else problem, file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
