"""A bundle made ready to run: its learner's programs, its state and its batches, all checked."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm.config import check, command_line, entries, policy
from jaxrl_llm.config.fields import FIELDS, base, flatten, nested
from jaxrl_llm.config.recorded import tuples
from jaxrl_llm.devices.mesh import make_meshes, place_tokens
from jaxrl_llm.learner.needs import abstract_batch, needed_by_step
from jaxrl_llm.learner.programs import Programs, make_programs, replayed_routes, room_in_rows, step_options
from jaxrl_llm.messages import UsageError, one_line, shown
from jaxrl_llm.models import DTYPES, ModelConfig
from jaxrl_llm.models.params import combine, partition
from jaxrl_llm.objectives.corrected import parse_term
from jaxrl_llm.run.jobs.bundle.box import AGAIN, Box, BoxError
from jaxrl_llm.run.jobs.bundle.contents import ABOUT, FORMAT, RESPONSES, digest, from_json, named
from jaxrl_llm.run.setup.checkpoint_params import read_state
from jaxrl_llm.run.setup.saved_state import INIT
from jaxrl_llm.types import TrainBatch, TrainState

READ = (
  "seed", "num_steps", "objective.", "correction.", "kl.", "entropy.", "critic.value_warmup_steps", "model.", "moe.", "mesh.", "learner.",
  "rollout.temperature", "rollout.top_k", "rollout.top_p", "rollout.num_prompts", "rollout.group_size",
)  # fmt: skip
"""Fields of the run's config that the updates read; a final dot marks a section.

All others have their defaults here, so that a bundle names no task, reward or estimator to import.
"""

HONOURED = (
  "objective.", "correction.", "num_steps", "learner.learning_rate", "learner.warmup_steps", "learner.schedule", "learner.weight_decay",
  "learner.b1", "learner.b2", "learner.max_grad_norm", "learner.rows_per_device", "moe.balance_coef", "moe.z_coef", "mesh.",
  "model.dtype", "model.attention", "model.remat", "model.head_tokens",
)  # fmt: skip
"""Fields that a repetition may change: what advantages, rows and state do not depend on."""

_OF_SHAPE = ("dtype", "attention", "remat", "head_tokens")
_MOST_LAYERS = 10_000


class OpenBundle(NamedTuple):
  """A bundle that is ready to run.

  Attributes:
    about: The entry `about.json`.
    config: The learner's part of the config, with the changes of the command line.
    changed: Fields that differ from those of the run, each with its old and its new value.
    mesh: Devices of the learner.
    programs: The learner's programs.
    state: State before the update, on the devices.
    batches: Batch of each update on the host, as `rl_step` reads it.
    responses: The entry `responses.json`.
    update: Number of the next update, from 0.
  """

  about: dict[str, Any]
  config: ConfigDict
  changed: dict[str, tuple[Any, Any]]
  mesh: Mesh
  programs: Programs
  state: TrainState
  batches: list[TrainBatch]
  responses: list[dict[str, Any]]
  update: int = 0

  @property
  def taken(self) -> list[dict[str, Any]]:
    """The responses that the next update is made of."""
    return [x for x in self.responses if x["place"] is not None and x["place"][0] == self.update]


def open_bundle(path: Path, overrides: Mapping[str, list[str]] | None = None) -> OpenBundle:
  """Reads a bundle, and builds the learner that it describes.

  Args:
    path: File that `capture` wrote.
    overrides: Values of the command line by field.

  Raises:
    BoxError: If the file is damaged, or holds something else than a bundle. One line.
    UsageError: If a field cannot be changed, or the learner cannot be built. One line for each.
  """
  box, overrides = Box(path), overrides or {}
  about, responses = _about(box), _responses(box)
  own = _config(box, about["config"])
  if refused := [field for field in overrides if not _is_one_of(field, HONOURED)]:
    raise UsageError("\n".join(_refusal(field, overrides[field][-1]) for field in refused))
  _refuse_imports(path, own, overrides)
  config = command_line.override(own.copy_and_resolve_references(), dict(overrides))
  problems = [*check.field_problems(config, FIELDS, "a bundle of this version")[0], *entries.problems(config)]
  if problems:
    raise UsageError("\n".join(f"{path}: {problem}" for problem in map(str, problems)))
  changes = flatten(config)
  changed = {field: (was, changes[field]) for field, was in flatten(own).items() if field in changes and changes[field] != was}
  changed |= {field: (None, x) for field, x in changes.items() if field not in flatten(own)}
  mesh, programs = _programs(box, about, config, [name for name in _OF_SHAPE if f"model.{name}" in overrides])
  names, batches = {ABOUT, RESPONSES}, []
  for number, rows in enumerate(about["rows"]):
    batch, there = _batch(box, number, rows, config, mesh, programs)
    names |= {f"{name}.npy" for name in there}
    batches.append(batch)
  state = _state(box, about, config, programs)
  if strange := sorted(set(box.names) - names - {f"{name}.npy" for name in named(state, "state")}):
    raise box.error(f"the entry {strange[0]}", "entries of a bundle only")
  return OpenBundle(about, config, changed, mesh, programs, state, batches, responses)


def placed(opened: OpenBundle, batch: Any) -> Any:
  """Places a batch, or arrays of some of its rows, on the learner's devices."""
  return place_tokens(opened.mesh, batch)


def _is_one_of(field: str, names: tuple[str, ...]) -> bool:
  return any(field.startswith(name) if name.endswith(".") else field == name for name in names)


def _refusal(field: str, text: str) -> str:
  names = ", ".join(f"{name}*" if name.endswith(".") else name for name in HONOURED)
  return f"config.{field}: found {shown(text)}, expected a field that a learner alone can honour: {names}"


_ABOUT = {
  "format": int, "run": str, "step": int, "config": dict, "model": dict, "keys": dict, "rows": list[int], "weights": dict,
  "updates": list[dict], "weights_after": str, "stack": dict,
}  # fmt: skip


_ORIGINS = (set(), {"base"}, {"workdir", "checkpoint", "state_sha256"})


def _about(box: Box) -> dict[str, Any]:
  about = box.read_json(ABOUT)
  if not isinstance(about, dict) or about.get("format") != FORMAT:
    version = about.get("format") if isinstance(about, dict) else None
    raise box.error(f"format {shown(version)} in {ABOUT}", f"{FORMAT}, that of this version")
  for name, kind in _ABOUT.items():
    value, outer = about.get(name), getattr(kind, "__origin__", kind)
    if not isinstance(value, outer) or (outer is list and not all(isinstance(x, kind.__args__[0]) for x in value)):
      raise box.error(f"{name}={shown(value)} in {ABOUT}", f"{getattr(kind, '__name__', kind)}")
  of_weights = about["weights"]
  if not isinstance(of_weights.get("sha256"), str) or set(of_weights) - {"sha256"} not in _ORIGINS:
    raise box.error(f"weights={shown(of_weights)} in {ABOUT}", "their sha256, and where they came from if the bundle lacks them")
  if not about["rows"] or len(about["rows"]) != len(about["updates"]):
    raise box.error(f"{len(about['rows'])} batches and the metrics of {len(about['updates'])} updates", "one of each for each update")
  if not all(isinstance(x, int | float) for update in about["updates"] for x in update.values()):
    raise box.error(f"metrics in {ABOUT} that are no numbers", "numbers")
  return about


_OF_RESPONSE = {"response": int, "group": int, "reward": float, "advantage": float, "text": str, "tokens": list}


def _responses(box: Box) -> list[dict[str, Any]]:
  responses = box.read_json(RESPONSES)
  if not isinstance(responses, list):
    raise box.error(f"{RESPONSES} without a list", "a list of responses")
  for x in responses:
    is_placed = isinstance(x, dict) and (place := x.get("place")) is not None
    right = isinstance(x, dict) and all(isinstance(x.get(name), kind) for name, kind in _OF_RESPONSE.items())
    if not right or (is_placed and not (isinstance(place, list) and [type(each) for each in place] == [int] * 3)):
      raise box.error(f"a response {shown(x)}", f"an object with place and {', '.join(_OF_RESPONSE)}")
  return responses


def _config(box: Box, saved: dict[str, Any]) -> ConfigDict:
  config = base()
  fields = {field: x for field, x in flatten(tuples(saved)).items() if _is_one_of(field, READ)}
  try:
    config.update(nested(fields))
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise box.error(f"a config that this version does not know ({one_line(error)})", "one of this version") from error
  return config


def _refuse_imports(path: Path, config: ConfigDict, overrides: Mapping[str, list[str]]) -> None:
  """Refuses to import what a bundle names and the command line does not: it would run."""
  imported = {"objective.name": ":" in str(config.objective.name)}
  imported["correction.terms"] = any(":" in parse_term(str(term))[0] for term in config.correction.terms)
  for field, is_imported in imported.items():
    if is_imported and field not in overrides:
      name = config.objective.name if field == "objective.name" else config.correction.terms
      raise UsageError(
        f"{path}: found config.{field}={shown(name)}, code of the run's own; if you trust it, name it: --config.{field}={shown(name)}"
      )


def _programs(box: Box, about: dict[str, Any], config: ConfigDict, of_shape: list[str]) -> tuple[Mesh, Programs]:
  try:
    shape = from_json(ModelConfig, about["model"], "model")
    if not 0 < shape.num_layers <= _MOST_LAYERS or shape.param_dtype not in DTYPES:
      raise ValueError(f"model: found {shape.num_layers} layers in {shown(shape.param_dtype)}, expected at most {_MOST_LAYERS} in {DTYPES}")
    shape = shape._replace(**{name: config.model[name] for name in of_shape})
    mesh, _ = make_meshes(**config.mesh)
    objective = policy.make_objective(config)
    programs = make_programs(config, mesh, shape, objective, needs=objective.needs)
  except (ArithmeticError, AttributeError, KeyError, LookupError, TypeError, ValueError) as error:
    reason = one_line(error, typed=not isinstance(error, ValueError), limit=400)
    raise BoxError(f"{box.path}: its learner cannot be built: {reason}") from error
  return mesh, programs


def _batch(
  box: Box, number: int, rows: int, config: ConfigDict, mesh: Mesh, programs: Programs
) -> tuple[TrainBatch, Collection[str]]:
  """Reads a batch, of whatever the run's objective needed, and keeps what this objective reads.

  Returns:
    The batch in the form of the update's own argument, and the names of the arrays in the bundle.
  """
  learner, shape = config.learner, programs.model.config
  if rows not in (learner.row_buckets or ()) or rows * learner.row_tokens > box.path.stat().st_size:
    raise box.error(f"{rows} rows of {learner.row_tokens} slots in batch {number}", f"as many rows as in row_buckets={learner.row_buckets}")
  options = dict(routes=replayed_routes(config, shape), shares=learner.share_prompts, room=room_in_rows(config, shape))
  full = abstract_batch(mesh, rows, learner.row_tokens, **options)
  full = full._replace(importance=full.mask)
  abstract = named(full, f"batch/{number}")
  there = {name: box.read_array(name, x.shape, x.dtype) for name, x in abstract.items() if f"{name}.npy" in box.names}
  names = iter(abstract)
  batch = jax.tree.map(lambda _: there.get(next(names)), full)
  batch = TrainBatch(*(x if jax.tree.leaves(x) else None for x in batch))
  if lacking := [field for field in TrainBatch._fields if field not in TrainBatch._field_defaults and getattr(batch, field) is None]:
    raise box.error(f"batch/{number} without {lacking[0]}", f"one; {AGAIN}")
  batch = needed_by_step(batch, policy.make_objective(config).needs, **step_options(config))
  signature = next(signature[1] for signature in programs.rl_step.signatures if len(signature[1].mask) == rows)
  wanted, has = (set(named(x, "")) for x in (signature, batch))
  if lacking := sorted(wanted - has):
    what = f"{config.objective.name!r}, which reads {lacking[0].strip('/')}"
    holds = ", ".join(sorted(name.strip("/") for name in has))
    raise UsageError(f"config.objective.name: found {what}, expected one that reads what the bundle holds: {holds}")
  return TrainBatch(*(None if y is None else x for x, y in zip(batch, signature, strict=True))), there


def _state(box: Box, about: dict[str, Any], config: ConfigDict, programs: Programs) -> TrainState:
  """Reads the state before the first update, and places it."""
  abstract, of_weights = programs.abstract_state, about["weights"]
  adapters = programs.model.config.lora is not None and set(of_weights) > {"sha256"}
  saved = abstract._replace(params=partition(abstract.params, programs.trainable)[0]) if adapters else abstract
  where = f" with the frozen ones of config.model.path={config.model.path!r}" if adapters else ""
  try:
    if "workdir" in of_weights:
      path = Path(str(of_weights["workdir"])) / "checkpoints" / str(of_weights["checkpoint"])
      if not path.is_dir():
        raise box.error(f"no {path}, which has the weights of this bundle", "that checkpoint, or a bundle made without --weights=reference")
      state, where = read_state(path, saved), f" in {path}"
    else:
      leaves = [box.read_array(name, x.shape, x.dtype) for name, x in named(saved, "state").items()]
      state = jax.tree.unflatten(jax.tree.structure(saved), leaves)
      state = jax.tree.map(lambda x, at: jax.device_put(np.asarray(x), at.sharding), state, saved)
    if adapters:
      first = policy.first_params(config, programs.model, jax.tree.map(lambda x: x.sharding, abstract.params))
      frozen = partition(first(jax.random.fold_in(jax.random.key(config.seed), INIT)), programs.trainable)[1]
      state = state._replace(params=combine(state.params, frozen))
  except BoxError:
    raise
  except ValueError as error:
    raise UsageError(f"{box.path}: {error}") from error
  for what, tree, name in (("weights", state.params, "sha256"), ("a state", state, "state_sha256")):
    if (expected := of_weights.get(name)) not in (None, own := digest(tree)):
      kind = what.removeprefix("a ")
      raise box.error(f"{what}{where} with the SHA-256 {own[:12]}", f"{str(expected)[:12]}, that of the {kind} before the step")
  return state
