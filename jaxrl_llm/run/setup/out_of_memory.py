"""Out-of-memory errors: what the run was doing, what takes the memory, and how to lower it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm.config import check, policy, sizes
from jaxrl_llm.decoding.sampler.begin import num_rows
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner import memory
from jaxrl_llm.learner.needs import fields_needed
from jaxrl_llm.messages import Problem
from jaxrl_llm.models.head import chunk_tokens
from jaxrl_llm.models.remat import CHEAPEST
from jaxrl_llm.rollouts.samplers import engine_columns, limit_of
from jaxrl_llm.run.observe.phases import PHASES, Phase
from jaxrl_llm.run.setup.drawing import by_engine
from jaxrl_llm.run.setup.experiment import build_experiment
from jaxrl_llm.run.setup.teacher import find_teachers

NUM_SETTINGS = 3


class OutOfMemoryError(RuntimeError):
  """Failure of a run that exceeds a device's memory; the message holds the lines to show."""


class DoesNotFitError(ValueError):
  """Refusal of a run whose predicted peak exceeds a device's memory.

  Attributes:
    description: Lines that describe the run, for `--dry_run`.
  """

  description: str = ""


def shortage(config: ConfigDict, estimate: memory.Footprint, mesh: Mesh, *, vocab_size: int, open_rows: bool) -> list[str]:
  """Returns that a run is predicted not to fit, and what would help, as lines; empty if it fits.

  Args:
    config: Config whose sizes are set.
    estimate: Prediction for it.
    mesh: Mesh of the learner.
    vocab_size: Number of ids of the model.
    open_rows: Whether the buckets of rows were chosen; see `advice`.

  Raises:
    DoesNotFitError: If the prediction is so far above the memory that it would have to be wrong by
      more than it has been where it was measured. One line.
  """
  limit, needed = limit_of(config, mesh), max((estimate.peak, estimate.largest), (sum(estimate.of_sampler.values()), "sampling"))
  if limit is None or needed[0] <= limit:
    return []
  needed, program = needed
  peak, fixes = f"a predicted peak of {needed / 1e9:,.1f} GB in {program}", advice(config, vocab_size, open_rows=open_rows)
  if needed > memory.OVERESTIMATE * limit:
    helps = "; ".join(line.strip() for line in fixes)
    start = f"--config.memory_gb={needed / 1e9 + 0.1:.1f} starts the run in spite of it"
    raise DoesNotFitError(
      str(Problem("config.memory_gb", f"{peak} on a device of {limit / 1e9:,.1f} GB", f"a run that fits: {helps}; {start}"))
    )
  return [f"careful: {peak} exceeds the {limit / 1e9:,.1f} GB of a device, if it is right; what would lower it most:", *fixes]


@contextlib.contextmanager
def explained(config: ConfigDict, phase: Callable[[], str]) -> Iterator[None]:
  """Turns out-of-memory errors of JAX and Python into an `OutOfMemoryError` with advice.

  They may arise from compiling or from running a program.

  Args:
    config: Config of the run inside the block.
    phase: Function that returns the run's current phase, one of `phases.PHASES`.
  """
  try:
    yield
  except (jax.errors.JaxRuntimeError, MemoryError) as error:
    if not is_out_of_memory(error):
      raise
    raise OutOfMemoryError("\n".join(explanation(error, config, PHASES[phase()]))) from error


def is_out_of_memory(error: BaseException) -> bool:
  """Returns whether an exception means that memory ran out.

  Example:
    >>> is_out_of_memory(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")), is_out_of_memory(ValueError("8 bytes"))
    (True, False)
  """
  if isinstance(error, jax.errors.JaxRuntimeError):
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()
  return isinstance(error, MemoryError)


def explanation(error: BaseException, config: ConfigDict, phase: Phase) -> list[str]:
  """Returns the lines that explain why a run ran out of memory in a phase."""
  first = " ".join(str(error).split()) or type(error).__name__
  experiment = build_experiment(config)
  config, vocab_size = experiment.config, experiment.learner.model.config.vocab_size
  estimate = footprint(config, vocab_size)
  program = phase.program if phase.program in estimate.programs else None
  lines = [f"out of memory in {phase.doing}: {first if len(first) <= 200 else first[:200] + ' ...'}", *memory.table(estimate)]
  return [*lines, "what would lower it most:", *advice(config, vocab_size, program=program)]


def footprint(config: ConfigDict, vocab_size: int) -> memory.Footprint:
  """Estimates what each available device holds for a run of a checked config with set sizes."""
  mesh, sampler_mesh = mesh_lib.make_meshes(**config.mesh)
  shape = policy.model_config(config, vocab_size=vocab_size)
  objective = policy.make_objective(config)
  columns = engine_columns(config, sampler_mesh) if by_engine(config) else None
  teachers = {name: teacher.shape for name, teacher in find_teachers(config).items()}
  options = dict(needs=fields_needed(config, objective), engine_columns=columns, teachers=teachers)
  return memory.footprint(config, shape, mesh, sampler_mesh, objective, **options)


def advice(config: ConfigDict, vocab_size: int, *, program: str | None = None, open_rows: bool = False) -> list[str]:
  """Returns the settings that lower the peak memory of a checked config most, one per line.

  The peak is that of `program`, or of the largest one. With `open_rows` the buckets of rows were
  chosen, and will be chosen anew for another number of rows at a time.
  """

  def peak(config: ConfigDict) -> float:
    estimate = footprint(config, vocab_size)
    return sum(estimate.held.values()) + sum(estimate.programs[program or estimate.largest].values())

  before, savings = peak(config), {}
  for field, value in _candidates(config, vocab_size, open_rows=open_rows):
    changed = ConfigDict(config.to_dict())
    changed.update_from_flattened_dict({field: value} | ({"mesh.data": 1} if field == "mesh.fsdp" else {}))
    if field == "learner.rows_per_device" and open_rows:
      step = value * mesh_lib.num_row_shards(mesh_lib.make_meshes(**config.mesh)[0])
      changed.learner.row_buckets = sizes.multiples(config.learner.row_buckets, step)
    lenient = ConfigDict(changed.to_dict())
    # Demonstrations may be shorter than a check of the config alone can know.
    lenient.warm_start.row_buckets = None
    if check.config_problems(lenient):
      continue
    with contextlib.suppress(ValueError):  # Impossible on these devices.
      savings.setdefault(field, []).append((before - peak(changed), value))
  # For each setting, the mildest value that saves at least half of what the setting can.
  best = {
    field: next(x for x in values if 2 * x[0] >= max(values, key=lambda y: y[0])[0])
    for field, values in savings.items()
  }
  ranked = sorted(((saving, field, value) for field, (saving, value) in best.items() if saving > 0), key=lambda x: -x[0])
  data = " --config.mesh.data=1"
  return [
    f"  --config.{field}={value}{data if field == 'mesh.fsdp' else ''}: "
    f"saves {saving / 1e6:,.1f} of {before / 1e6:,.1f} MB"
    for saving, field, value in ranked[:NUM_SETTINGS]
  ] or ["  no setting helps; use a smaller model or more devices"]


def _candidates(config: ConfigDict, vocab_size: int, *, open_rows: bool) -> Iterator[tuple[str, Any]]:
  """Yields settings that may need less memory; the milder values of a field come first."""
  mesh, sampler_mesh = mesh_lib.make_meshes(**config.mesh)
  shards, platform = mesh_lib.num_row_shards(mesh), mesh_lib.platform_of(mesh)
  fixed = (*(() if open_rows else config.learner.row_buckets), *(config.warm_start.row_buckets or ()))
  at_once = config.learner.rows_per_device or max((*config.learner.row_buckets, *fixed)) // shards
  divides = lambda rows: all(x % (shards * rows) == 0 for x in fixed)
  fewer = (next(filter(divides, range(at_once // factor, 0, -1)), None) for factor in (2, 4, 8, 16))
  yield from (("learner.rows_per_device", rows) for rows in dict.fromkeys(fewer) if rows)
  if config.model.remat in CHEAPEST:
    yield from (("model.remat", name) for name in CHEAPEST[CHEAPEST.index(config.model.remat) + 1 :])
  chunk = config.model.head_tokens or chunk_tokens(vocab_size, mesh)
  yield from (("model.head_tokens", chunk // part) for part in (2, 4) if chunk // part >= 128)
  if config.model.dtype == "float32":
    yield "model.dtype", "bfloat16"
  if config.learner.moments_dtype == "float32":
    yield "learner.moments_dtype", "bfloat16"
  if platform != "cpu" and not config.learner.offload_optimizer:
    yield "learner.offload_optimizer", True
  if mesh.shape["data"] > 1 and config.mesh.slices in (None, 1):
    yield "mesh.fsdp", mesh.shape["data"] * mesh.shape["fsdp"]
  shards, section = mesh_lib.num_row_shards(sampler_mesh), config.rollout
  slots = num_rows(sampler_mesh, (section.num_prompts + section.spare_prompts) * section.group_size, section.slots)
  yield from (("rollout.slots", slots // part) for part in (2, 4) if slots % (part * shards) == 0)
  if (config.eval.batch_prompts // 2) % shards == 0 and config.eval.batch_prompts > 1:
    yield "eval.batch_prompts", config.eval.batch_prompts // 2
  held = section.cache_dtype or config.model.sampler_dtype or config.model.dtype
  order = ["float32", "bfloat16", "int8"]
  yield from (("rollout.cache_dtype", dtype) for dtype in order[order.index(held) + 1 :])
