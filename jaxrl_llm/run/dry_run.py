"""The dry run: mesh, model and estimated memory of a run, without running it."""

from ml_collections import ConfigDict

from jaxrl_llm.config import sizes
from jaxrl_llm.config.fields import flatten
from jaxrl_llm.learner import memory
from jaxrl_llm.learner.schedules import unfinished_warm_ups
from jaxrl_llm.rollouts.gallery import KEPT
from jaxrl_llm.rollouts.samplers import memory_limit
from jaxrl_llm.run.experiment import build_experiment
from jaxrl_llm.run.out_of_memory import advice, footprint
from jaxrl_llm.tasks.files import report


def describe_run(config: ConfigDict) -> str:
  """Describes mesh, model, chosen sizes and estimated memory of each device, for `--dry_run`.

  It allocates nothing and raises what `build_experiment` raises.
  """
  experiment = build_experiment(config)
  open_rows = "learner.row_buckets" in sizes.open_sizes(config)
  chosen, config = sizes.describe_sizes(config, experiment.config, experiment.lengths), experiment.config
  rollout, learner, sampler_mesh = config.rollout, config.learner, experiment.sampler_mesh
  meshes = {"mesh": experiment.mesh} | ({} if experiment.sync is None else {"mesh of the sampler": sampler_mesh})
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
  if (gallery := experiment.gallery) is not None:
    kept = min(KEPT, sum(count for _, count, _ in experiment.lengths.pictures))
    kind = "patches" if model.config.train_tower else "features"
    each = f"up to {config.model.image_tokens} image tokens each, {kind} of {kept:,} in the memory of each process"
    lines.append(f"pictures: {each}, {kept * gallery.bytes_of_picture / 1e6:,.1f} MB")
  if experiment.task.report is not None:
    lines.append(f"data: {report.in_words(experiment.task.report)}")
  limit = memory_limit(experiment.mesh.local_devices[0], experiment.mesh.local_mesh.size)
  if limit is not None and estimate.peak > limit:
    lines += [f"the peak exceeds the {limit / 1e9:,.2f} GB of a device; what would lower it most:"]
    lines += advice(config, model.config.vocab_size, open_rows=open_rows)
  return "\n".join(lines)
