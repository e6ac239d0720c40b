"""A checkpoint opened for the service: model, weights and tokenizer, from a run or from files."""

import sys
from pathlib import Path
from typing import NamedTuple

import jax

from jaxrl_llm.config.check import config_problems
from jaxrl_llm.config.command_line import UsageError
from jaxrl_llm.messages import one_line
from jaxrl_llm.models import Model, load, make_model, merge
from jaxrl_llm.pretrained import where
from jaxrl_llm.pretrained.tokenizer import load_tokenizer
from jaxrl_llm.run.evaluate import source as source_lib
from jaxrl_llm.run.evaluate.restored import restore
from jaxrl_llm.run.evaluate.source import Source
from jaxrl_llm.run.experiment import build_experiment
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


def open_checkpoint(text: str, *, dtype: str | None = None) -> Opened:
  """Opens the checkpoint that a user names.

  Args:
    text: Workdir of a run (its newest checkpoint), WORKDIR@STEP, a folder in Hugging Face's format,
      a .gguf file, or package:NAME.
    dtype: Dtype of published weights; None is float32. A run has its own.

  Raises:
    ValueError: If there is no checkpoint, or it cannot be used.
    ImportError: If an optional package is missing.
  """
  try:
    source = source_lib.find(text)
    if source.kind == "run" and dtype is not None:
      raise UsageError(f"--dtype: found {dtype!r} with a run, expected none: a run has its own, config.model.dtype")
    if source.kind == "run":
      return _of_run(source)
  except UsageError as error:
    raise ValueError(str(error)) from error
  path = where.resolve(source.path)
  model, params = load(path, dtype=dtype or "float32")
  return Opened(model, params, _tokenizer(path, model.config.vocab_size), path.stem if path.is_file() else path.resolve().name, 0)


def _of_run(source: Source) -> Opened:
  config = source_lib.run_config(source.path)
  if problems := config_problems(config):
    raise ValueError("\n".join(problems))
  experiment = build_experiment(config)
  params, steps = restore(experiment, experiment.config, source)
  model = experiment.learner.model
  if model.config.lora is not None:
    model, params = merge(model, params)
  # The engine decodes on one device.
  model, params = make_model(model.config), jax.device_put(params, jax.devices()[0])
  return Opened(model, params, experiment.task.tokenizer, f"{source.path.resolve().name}@{source.step}", steps)


def _tokenizer(path: Path, rows: int) -> Tokenizer:
  """Loads a tokenizer, without its chat template if that is missing or does not work."""
  try:
    return load_tokenizer(path, vocab_rows=rows)
  except ValueError as error:
    tokenizer = load_tokenizer(path, chat=False, vocab_rows=rows)
    print(f"note: /v1/chat/completions is off: {one_line(error, typed=False).partition(';')[0]}", file=sys.stderr)
    return tokenizer
