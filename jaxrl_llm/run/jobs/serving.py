"""A checkpoint opened for the service: model, weights and tokenizer, from a run or from files."""

import sys
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl_llm.config import recorded
from jaxrl_llm.config.check import config_problems
from jaxrl_llm.config.command_line import UsageError
from jaxrl_llm.devices.mesh import make_mesh, param_shardings
from jaxrl_llm.messages import one_line
from jaxrl_llm.models import Model, load, make_model, merge
from jaxrl_llm.pretrained import where
from jaxrl_llm.pretrained.tokenizer import load_tokenizer
from jaxrl_llm.run.jobs.evaluate.restored import restore
from jaxrl_llm.run.setup import source as source_lib
from jaxrl_llm.run.setup.experiment import build_experiment
from jaxrl_llm.run.setup.source import Source
from jaxrl_llm.text_types import Tokenizer
from jaxrl_llm.types import Params


class Opened(NamedTuple):
  """A checkpoint on its devices.

  Attributes:
    model: Model, without adapters.
    params: Params of the model.
    tokenizer: Tokenizer, with the chat template if there is one.
    name: Name of the model, without the folders above it.
    version: Number of RL steps behind the weights; 0 if no run has trained them.
  """

  model: Model
  params: Params
  tokenizer: Tokenizer
  name: str
  version: int


def open_checkpoint(text: str, *, dtype: str | None = None, tensor: int = 1) -> Opened:
  """Opens the checkpoint that a user names.

  Args:
    text: Workdir of a run (its newest checkpoint), WORKDIR@STEP, a folder in Hugging Face's format,
      a .gguf file, or package:NAME.
    dtype: Dtype of published weights; None is float32. A run has its own.
    tensor: Number of devices that split the heads of an engine's model. All devices are used.

  Raises:
    ValueError: If there is no checkpoint, it cannot be used, or the devices do not fit it.
    ImportError: If an optional package is missing.
  """
  try:
    source = source_lib.find(text)
    if source.kind == "run" and dtype is not None:
      raise UsageError(f"--dtype: found {dtype!r} with a run, expected none: a run has its own, config.model.dtype")
    if source.kind == "run":
      return _of_run(source, tensor)
  except UsageError as error:
    raise ValueError(str(error)) from error
  path = where.resolve(source.path)
  mesh = _mesh(tensor)
  try:
    model, params = load(path, dtype=dtype or "float32", mesh=mesh)
  except ValueError as error:
    raise ValueError(str(error).replace("mesh.tensor", "--tensor")) from error
  return Opened(model, params, _tokenizer(path, model.config.vocab_size), where.name_of(path), 0)


def _mesh(tensor: int) -> Mesh | None:
  """Returns a mesh of all devices; None if there is one."""
  count = jax.device_count()
  if count % tensor:
    raise ValueError(f"--tensor: found {tensor}, expected a number that divides the {count} devices here")
  return None if count == 1 else make_mesh(data=count // tensor, tensor=tensor)


def _of_run(source: Source, tensor: int) -> Opened:
  config = recorded.run_config(source.path)
  config.numerics.exact = False  # Nothing is learned here.
  if problems := config_problems(config):
    raise ValueError("\n".join(problems))
  experiment = build_experiment(config)
  params, steps = restore(experiment, source)
  model = experiment.learner.model
  if model.config.lora is not None:
    model, params = merge(model, params)
  mesh = _mesh(tensor)
  model = make_model(model.config, mesh=mesh)
  try:
    place = jax.devices()[0] if mesh is None else param_shardings(mesh, model.logical_axes, params)
  except ValueError as error:
    raise ValueError(str(error).replace("mesh.tensor", "--tensor")) from error
  params = jax.device_put(params, place)
  return Opened(model, params, experiment.task.tokenizer, f"{source.path.resolve().name}@{source.step}", steps)


def _tokenizer(path: Path, rows: int) -> Tokenizer:
  """Loads a tokenizer, without its chat template if that is missing or does not work."""
  try:
    return load_tokenizer(path, vocab_rows=rows)
  except ValueError as error:
    tokenizer = load_tokenizer(path, chat=False, vocab_rows=rows)
    print(f"note: /v1/chat/completions is off: {one_line(error, typed=False).partition(';')[0]}", file=sys.stderr)
    return tokenizer
