"""Samplers of a run in processes of their own; see `jaxrl_llm.cli.join`."""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree
from ml_collections import ConfigDict

from jaxrl_llm.decoding.apart.crew import Bystander
from jaxrl_llm.decoding.apart.gate import open_crew
from jaxrl_llm.decoding.engine.requests import EngineLimits
from jaxrl_llm.devices import hosts
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import Model, ModelConfig, lower_precision, make_model
from jaxrl_llm.models.decoding import serving_of
from jaxrl_llm.run.setup.drawing import engine_options, sampling_shape
from jaxrl_llm.run.setup.experiment import Experiment

_LOOK_S = 1.0  # Between two looks at how many have joined.


def use_samplers(config: ConfigDict, experiment: Experiment, workdir: Path, *, note: Callable[[str], None]) -> None:
  """Lets sampler processes join the run and draw its rollouts.

  Args:
    config: The experiment's config.
    experiment: Experiment with a queue.
    workdir: Folder of the run, with its `config.json`, in which they find the address.
    note: Function that gets lines for the screen.

  Raises:
    ValueError: If the address cannot be used. One line.
  """
  section, shape = config.rollout, experiment.learner.model.config
  options = engine_options(config, shape, experiment.task.tokenizer)
  limits, dtype = EngineLimits(options["context"], options["max_requests"]), config.model.sampler_dtype or shape.dtype
  if not hosts.is_main():
    experiment.drawing.queue.use(Bystander(limits, dtype), lambda: True)
    return
  of_crew = dict(limits=limits, timeout_s=section.sampler_timeout_s, host=section.sampler_host, vocab_size=shape.vocab_size, dtype=dtype)
  try:
    crew = open_crew(workdir, note=note, **of_crew)
  except OSError as error:
    host = section.sampler_host
    raise ValueError(f"config.rollout.sampler_host: found {host!r}, expected an address of this machine ({error})") from error
  told = -1

  def is_ready() -> bool:
    nonlocal told
    missing = section.samplers - crew.wait_for(section.samplers, _LOOK_S)
    if missing > 0 and missing != told:
      note(f"waiting for {missing} of {section.samplers} samplers: python -m jaxrl_llm.cli.join {workdir}")
    told = missing
    return missing <= 0

  experiment.drawing.queue.use(crew, is_ready)


def mesh_of_sampler(config: ConfigDict, devices: Sequence[jax.Device]) -> Mesh:
  """Returns the mesh of a process of its own.

  Raises:
    ValueError: If the settings of the mesh do not divide the number of devices. One line.
  """
  expert, tensor = config.mesh.sampler_expert, config.mesh.sampler_tensor
  if len(devices) % (expert * tensor):
    raise ValueError(
      f"config.mesh.sampler_expert x sampler_tensor: found {expert} x {tensor}, expected a divisor of {len(devices)}, the number of "
      "devices here"
    )
  return mesh_lib.make_mesh(data=len(devices) // (expert * tensor), expert=expert, tensor=tensor, devices=devices)


def model_of_sampler(config: ConfigDict, shape: ModelConfig, mesh: Mesh) -> tuple[Model, PyTree]:
  """Returns the model that a process of its own draws with, and its abstract weights.

  Args:
    config: The run's config.
    shape: Shape of the learner's model.
    mesh: Devices of the process; see `mesh_of_sampler`. Those that share the experts and the heads
      (`expert` x `tensor`) have all weights together.
  """
  model = make_model(sampling_shape(config, shape), mesh=mesh, serving=serving_of(shape, mesh, layout=config.serving.layout))
  abstract = jax.eval_shape(lambda key: lower_precision(model.init(key), model.config.dtype), jax.random.key(0))
  shardings = mesh_lib.param_shardings(mesh, model.logical_axes, abstract, fields=mesh_lib.SAMPLER_FIELDS)
  return model, jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract, shardings)
