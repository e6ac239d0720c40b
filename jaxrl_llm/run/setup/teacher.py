"""The teachers that a config names: where they are, their shapes, vocabularies and weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree
from ml_collections import ConfigDict

from jaxrl_llm.config import policy, recorded
from jaxrl_llm.config.command_line import UsageError
from jaxrl_llm.messages import Problem
from jaxrl_llm.models import Model, ModelConfig, load_params, read_config, trainable
from jaxrl_llm.models.params import combine, partition
from jaxrl_llm.pretrained import where
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.byte_tokenizer_files import is_byte_tokenizer
from jaxrl_llm.pretrained.tokenizer import PretrainedTokenizer, load_tokenizer
from jaxrl_llm.run.setup import source as source_lib
from jaxrl_llm.run.setup.checkpoint_params import read_params
from jaxrl_llm.text_types import Tokenizer
from jaxrl_llm.types import Params


class Teacher(NamedTuple):
  """A teacher, of which only headers have been read.

  Attributes:
    named: Path in the config.
    setting: Field of the config that names it.
    source: Place of its weights.
    config: Config of the run that trained it; None for published weights.
    shape: Shape of the model, with the dtype that the student's config asks for.
  """

  named: str
  setting: str
  source: source_lib.Source
  config: ConfigDict | None
  shape: ModelConfig

  @property
  def path(self) -> Path:
    """Folder or file of the weights."""
    if self.source.kind == "run":
      return self.source.path / "checkpoints" / str(self.source.step)
    return where.resolve(self.source.path)

  def fingerprint(self) -> str:
    """Returns a hash that distinguishes teachers."""
    # A run's manifest has the digest of every file of the checkpoint.
    return where.fingerprint(self.path / "manifest.json" if self.source.kind == "run" else self.path)


def find_teachers(config: ConfigDict) -> dict[str, Teacher]:
  """Finds the teachers of a config by name, "" for the only one.

  The policy itself, if it is the teacher, is none of them.

  Raises:
    ValueError: If one does not exist or cannot be used. One line.
  """
  section = config.teacher
  if section.paths is not None:
    return {name: _find(path, "config.teacher.paths", config) for name, path in (text.split("=", 1) for text in section.paths)}
  return {} if section.path in (None, "self") else {"": _find(section.path, "config.teacher.path", config)}


def _find(path: str, setting: str, config: ConfigDict) -> Teacher:
  section = config.teacher
  try:
    source = source_lib.find(path)
    run = recorded.run_config(source.path) if source.kind == "run" else None
  except UsageError as error:
    raise ValueError(str(error).replace("--checkpoint", setting, 1)) from error
  try:
    shape = read_config(where.resolve(source.path)) if run is None else policy.model_config(run, vocab_size=ByteTokenizer.vocab_size)
  except ValueError as error:
    raise ValueError(f"{setting}: found {path!r}, expected a model that can be read: {error}") from error
  dtype = section.dtype or config.model.dtype
  options = dict(dtype=dtype, param_dtype=dtype, remat="none", attention=config.model.attention, head_tokens=config.model.head_tokens)
  options["exact"] = config.numerics.exact
  return Teacher(path, setting, source, run, shape._replace(**options))


def fingerprint(teachers: Mapping[str, Teacher]) -> str | None:
  """Returns a hash that distinguishes sets of teachers; None without any."""
  if set(teachers) <= {""}:
    return teachers[""].fingerprint() if teachers else None
  return " ".join(f"{name}={teacher.fingerprint()}" for name, teacher in sorted(teachers.items()))


def check_self(config: ConfigDict, shape: ModelConfig) -> None:
  """Refuses a policy that cannot be its own teacher. One line."""
  if shape.vision is not None:
    raise ValueError(Problem("config.teacher.path", "'self'", "None for a model with a vision tower, for which it is not implemented"))


def check_teacher(teacher: Teacher, config: ConfigDict, tokenizer: Tokenizer, shape: ModelConfig) -> None:
  """Refuses a teacher that does not read and write the policy's tokens.

  Args:
    teacher: One of the teachers of the config.
    config: Config of the student.
    tokenizer: Tokenizer of the student.
    shape: Shape of the student.

  Raises:
    ValueError: If the vocabularies differ, or one of the two sees pictures. One line, with the fix.
  """
  name, setting = repr(teacher.named), teacher.setting
  if difference := _difference(teacher, tokenizer):
    fix = "a teacher with the policy's tokenizer; one of another family can teach by its texts: imitate them in a warm start"
    raise ValueError(Problem(setting, f"{name}, {difference}", fix))
  if config.teacher.gkd_coef and teacher.shape.vocab_size != shape.vocab_size:
    sizes = f"{teacher.shape.vocab_size:,} ids in the teacher and {shape.vocab_size:,} in the policy"
    rows = f"{config.teacher.gkd_coef} with logits of {sizes}"
    raise ValueError(Problem("config.teacher.gkd_coef", rows, "equal numbers, or 0 and teacher.opd_coef, which reads sampled tokens only"))
  if shape.vision is not None or teacher.shape.vision is not None:
    raise ValueError(Problem(setting, name, "None for a model with a vision tower, for which it is not implemented"))
  if teacher.shape.max_positions is not None and config.rollout.prompt_buckets is not None:
    longest = max(config.rollout.prompt_buckets) + config.rollout.max_new_tokens
    if config.teacher.privileged is None and longest > teacher.shape.max_positions:
      most = f"one with room for sequences of {longest} tokens"
      raise ValueError(Problem(setting, f"{name}, a model of {teacher.shape.max_positions} positions", most))


def _difference(teacher: Teacher, tokenizer: Tokenizer) -> str | None:
  """Returns how the teacher's tokenizer differs from the student's; None if it does not."""
  path = where.resolve(teacher.source.path) if teacher.config is None else None
  if teacher.config is not None and teacher.config.model.path is not None:
    path = where.resolve(teacher.config.model.path)
  if path is not None and path.is_dir() and (is_byte_tokenizer(path) or not (path / "tokenizer.json").exists()):
    # A policy without a tokenizer of its own was exported. Earlier versions wrote none.
    rows = teacher.shape.vocab_size
    differs = rows != tokenizer.vocab_size
    return f"which has no tokenizer.json and logits of {rows} ids, while the policy has {tokenizer.vocab_size}" if differs else None
  theirs = ByteTokenizer() if path is None else load_tokenizer(path, chat=False)
  if not (isinstance(theirs, PretrainedTokenizer) and isinstance(tokenizer, PretrainedTokenizer)):
    return None if theirs == tokenizer else f"whose tokenizer is {_named(theirs)}, while the policy's is {_named(tokenizer)}"
  ours, theirs = ({i: text for text, i in x.backend.get_vocab(with_added_tokens=True).items()} for x in (tokenizer, theirs))
  different = [i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i)]
  if not different:
    return None
  first = different[0]
  return f"in whose vocabulary token {first} is {theirs.get(first)!r}, while it is {ours.get(first)!r} in the policy's"


def _named(tokenizer: Any) -> str:
  return f"that of {tokenizer.path.name}" if isinstance(tokenizer, PretrainedTokenizer) else type(tokenizer).__name__


def load_teacher(teacher: Teacher, model: Model, abstract_params: PyTree) -> Params:
  """Loads the weights of a teacher onto the learner's mesh.

  Args:
    teacher: Teacher whose model this is.
    model: Model of the teacher's shape.
    abstract_params: Params of the model as shapes, dtypes and shardings.

  Raises:
    ValueError: If the weights cannot be read, or are those of another model.
  """
  if teacher.config is None:
    return load_params(teacher.path, model)
  if model.config.lora is None:
    return read_params(teacher.path, abstract_params)[0]
  # A checkpoint of adapters does not hold their base.
  trained = trainable(model.config, model.logical_axes)
  adapters, _ = read_params(teacher.path, partition(abstract_params, trained)[0])
  first = policy.first_params(teacher.config, model, jax.tree.map(lambda x: x.sharding, abstract_params))
  return combine(adapters, partition(first(jax.random.key(0)), trained)[1])
