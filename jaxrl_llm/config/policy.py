"""The policy that a config names: its shape, tokenizer, first weights and objective."""

from collections.abc import Callable

import jax
from jaxtyping import PRNGKeyArray, PyTree
from ml_collections import ConfigDict

from jaxrl_llm import objectives
from jaxrl_llm.config import renamed
from jaxrl_llm.config.fields import flatten, given
from jaxrl_llm.messages import Problem
from jaxrl_llm.models import Lora, Model, ModelConfig, load_params, preset, read_config
from jaxrl_llm.models.config import Vision
from jaxrl_llm.models.remat import AUTO
from jaxrl_llm.objectives.corrected import Term, corrected, read_terms
from jaxrl_llm.objectives.interpolation import interpolated
from jaxrl_llm.pretrained import where
from jaxrl_llm.pretrained.chat_options import parse_options
from jaxrl_llm.pretrained.tokenizer import load_tokenizer
from jaxrl_llm.text_types import Tokenizer
from jaxrl_llm.types import Objective, Params


def model_config(config: ConfigDict, *, vocab_size: int | None = None) -> ModelConfig:
  """Returns the model's shape with the options of `config.model`; reads headers but no weights.

  Args:
    config: Config of the experiment.
    vocab_size: Number of ids of the tokenizer, for a preset.

  Raises:
    ValueError: If the preset is unknown, or the checkpoint does not exist or cannot be used.
  """
  section = config.model
  shape = preset(section.preset, vocab_size=vocab_size) if section.path is None else read_config(where.resolve(section.path))
  options = {name: section[name] for name in ("dtype", "param_dtype", "remat", "attention", "head_tokens", "train_tower")}
  if section.remat == AUTO:  # Chosen where the memory of all programs is known.
    options["remat"] = "none"
  options["exact"] = config.numerics.exact
  targets = {} if section.lora_targets is None else {"targets": tuple(section.lora_targets)}
  rank, alpha = section.lora_rank, section.lora_alpha
  adapters = None if rank is None else Lora(rank, alpha or 2.0 * rank, **targets)
  return shape._replace(**options, lora=adapters, vision=shape.vision and with_image_tokens(shape.vision, section.image_tokens))


def with_image_tokens(vision: Vision, most: int | None) -> Vision:
  """Returns a tower whose pictures are reduced to at most so many image tokens; None reduces none.

  Example:
    >>> from jaxrl_llm.pretrained.pictures import grid_of, num_slots
    >>> pictures = with_image_tokens(Vision(24, 1024, 16, 4096), 1024).pictures
    >>> num_slots(grid_of(3000, 4000, pictures), pictures)
    972
  """
  if most is None:
    return vision
  pictures = vision.pictures
  pixels = min(pictures.max_pixels, most * pictures.token_size**2)
  return vision._replace(pictures=pictures._replace(max_pixels=pixels, min_pixels=min(pictures.min_pixels, pixels)))


def tokenizer(config: ConfigDict) -> Tokenizer | None:
  """Returns the checkpoint's tokenizer; None without a checkpoint, for the task's own.

  Raises:
    ValueError: If there is no tokenizer or no chat template, or the ids do not fit the model.
  """
  if config.model.path is None:
    return None
  task = config.task
  made = load_tokenizer(
    where.resolve(config.model.path),
    chat=task.get("chat") is not False,
    system=task.get("system"),
    vocab_rows=model_config(config).vocab_size,
    pad_token=task.get("pad_token"),
    chat_options=parse_options(task.get("chat_options") or ()),
    special_tokens=task.get("special_tokens") or "text",
  )
  for field in ("task.system", "task.prompt_template", "task.shot_template", "teacher.privileged"):
    text = flatten(config).get(field) or ""
    if spelt := [name for name in made.special if name in text]:
      what = f"{spelt[0]!r}, which is text there and not the special token"
      raise ValueError(Problem(field, what, "none, or config.task.special_tokens='tokens' if the texts of the data can be trusted"))
  return made


def first_params(config: ConfigDict, model: Model, shardings: PyTree) -> Callable[[PRNGKeyArray], Params]:
  """Returns `(key) -> params` for the run's first weights.

  They are random, or those of the checkpoint with fresh adapters.

  Args:
    config: Config of the experiment.
    model: Model of `model_config`.
    shardings: Shardings of its params.
  """
  if config.model.path is None:
    return jax.jit(model.init, out_shardings=shardings)
  return lambda key: load_params(where.resolve(config.model.path), model, key=key)


def bare_objective(config: ConfigDict) -> Objective:
  """Builds the objective that the config names, without its corrections."""
  return objectives.make(config.objective.name, **given(config.objective, "name"))


def corrections(config: ConfigDict) -> list[Term]:
  """Returns the corrections that the config asks for, in the order in which they apply."""
  return read_terms(bare_objective(config), renamed.correction_terms(config.correction))


def make_objective(config: ConfigDict) -> Objective:
  """Builds the objective, with the corrections and the old policy that the config asks for."""
  objective = corrected(bare_objective(config), renamed.correction_terms(config.correction))
  return interpolated(objective) if config.learner.old_logprobs == "interpolated" else objective

