"""The dry run: mesh, model and estimated memory of a run, without running it."""

from ml_collections import ConfigDict

from jaxrl_llm.config import sizes
from jaxrl_llm.config.fields import flatten
from jaxrl_llm.learner import memory
from jaxrl_llm.learner.schedules import unfinished_warm_ups
from jaxrl_llm.rollouts.gallery import KEPT
from jaxrl_llm.run.setup.experiment import build_experiment
from jaxrl_llm.run.setup.out_of_memory import DoesNotFitError, footprint, shortage
from jaxrl_llm.tasks.files import report
from jaxrl_llm.tasks.pipeline import prompt_notes


def describe_run(config: ConfigDict) -> str:
  """Describes mesh, model, chosen sizes and estimated memory of each device, for `--dry_run`.

  It allocates nothing and raises what `build_experiment` raises.

  Raises:
    DoesNotFitError: If the run is predicted not to fit.
  """
  experiment = build_experiment(config)
  open_rows = "learner.row_buckets" in sizes.open_sizes(config)
  chosen, config = [*sizes.describe_sizes(config, experiment.config, experiment.lengths), *experiment.left_out], experiment.config
  rollout, learner, drawing = config.rollout, config.learner, experiment.drawing
  meshes = {"mesh": experiment.mesh} | ({} if drawing.sync is None else {"mesh of the sampler": drawing.mesh})
  model = experiment.learner.model
  estimate = footprint(config, model.config.vocab_size)
  lines = [
    *(f"{name}: {dict(mesh.shape)} over {mesh.size} {mesh.devices.flat[0].device_kind} device(s)" for name, mesh in meshes.items()),
    f"model: {config.model.path or config.model.preset}, {model.num_params:,} parameters",
    f"rollout batch: {rollout.num_prompts} prompts x {rollout.group_size} samples; updates per rollout: {learner.updates_per_rollout}",
    f"verifier: {', '.join(experiment.task.rewards)}",
    *chosen,
    *unfinished_warm_ups(flatten(config)),
    *memory.table(estimate),
  ]
  if (gallery := drawing.gallery) is not None:
    kept = min(KEPT, sum(count for _, count, _ in experiment.lengths.pictures))
    kind = "patches" if model.config.train_tower else "features"
    each = f"up to {config.model.image_tokens} image tokens each, {kind} of {kept:,} in the memory of each process"
    lines.append(f"pictures: {each}, {kept * gallery.bytes_of_picture / 1e6:,.1f} MB")
  if experiment.task.report is not None:
    lines += report.lines(experiment.task.report)
  lines += prompt_notes(experiment.task.train, experiment.task.tokenizer)
  try:
    lines += shortage(config, estimate, experiment.mesh, vocab_size=model.config.vocab_size, open_rows=open_rows)
  except DoesNotFitError as error:
    error.description = "\n".join(lines)
    raise
  return "\n".join(lines)
