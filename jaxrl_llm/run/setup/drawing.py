"""How a run draws: by the decoding engine, request by request, or by sweeps of the sampler."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray
from ml_collections import ConfigDict

from jaxrl_llm.decoding.engine.fleet import make_engines
from jaxrl_llm.decoding.engine.lockstep import LockStep
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.evaluation.held_out import DrawFn
from jaxrl_llm.learner.programs import Programs, pictures_at_once, records_routes, room_in_rows
from jaxrl_llm.models import ModelConfig, make_model
from jaxrl_llm.models.decoding import serving_of
from jaxrl_llm.pretrained.pictures import PictureConfig
from jaxrl_llm.rollouts.arrivals import gather
from jaxrl_llm.rollouts.drawing_queue import DrawingQueue
from jaxrl_llm.rollouts.gallery import Gallery
from jaxrl_llm.rollouts.jobs import Draws, Examples, Plan, PlayFn
from jaxrl_llm.rollouts.rules import Rules
from jaxrl_llm.rollouts.samplers import Samplers, engine_sizes, make_samplers, room_in_prompts
from jaxrl_llm.rollouts.shared_queue import SharedQueue
from jaxrl_llm.rollouts.singles import play_singles
from jaxrl_llm.rollouts.sweeps import Sweep, SweepQueue
from jaxrl_llm.rollouts.turns import play_turns
from jaxrl_llm.rollouts.weight_sync import WeightSync, make_weight_sync
from jaxrl_llm.tasks.image_prompts import prompt_ids
from jaxrl_llm.text_types import Completion, Tokenizer
from jaxrl_llm.types import Params, Rollouts


class Drawing(NamedTuple):
  """How a run draws its rollouts and the samples of its evaluations.

  Attributes:
    mesh: Devices that draw: the learner's, or others.
    sync: Transfer of weights from the learner's devices to `mesh`; None if they are the same.
    queue: The batches that are open.
    train, evaluate: Plans of the batches of training and of those of evaluations.
    programs: Programs of the sampler; they never compile if the decoding engine draws.
    tokenizer: The task's tokenizer.
    prompt_buckets: Numbers of prompt slots to choose from.
    rules: Rules of conversations with an environment; None for single-turn responses.
    gallery: Pictures of the problems; None if they show none.
  """

  mesh: Mesh
  sync: WeightSync | None
  queue: DrawingQueue | SharedQueue | SweepQueue
  train: Plan
  evaluate: Plan
  programs: Samplers
  tokenizer: Tokenizer
  prompt_buckets: tuple[int, ...]
  rules: Rules | None = None
  gallery: Gallery | None = None

  def samples(self, params: Params, version: int) -> DrawFn:
    """Returns the function that draws the samples of an evaluation.

    Args:
      params: Weights on `mesh`.
      version: Number of RL steps that they were trained for.
    """

    def draw(examples: Examples, key: PRNGKeyArray) -> tuple[Rollouts, Sequence[Completion]]:
      job = self.evaluate.job(examples, key, params)
      self.queue.publish(params, version)
      playing = self.queue.begin(self.evaluate.play, job)
      drawn, _ = gather(playing, job, self.tokenizer, prompt_buckets=self.prompt_buckets)
      return drawn.rollouts, drawn.responses

    return draw


def by_engine(config: ConfigDict) -> bool:
  """Returns whether the decoding engine draws, and not the sampler."""
  section = config.rollout
  needs = config.environment.name is not None or section.update_in_flight is not None or section.samplers > 0
  return section.driver == "loop" or (section.driver == "auto" and needs)


def check_processes(config: ConfigDict, num_processes: int) -> None:
  """Refuses a lag if the engine shares several processes with the learner.

  Raises:
    ValueError: If it has one. One line.
  """
  section = config.rollout
  if num_processes > 1 and section.staleness and by_engine(config) and not section.samplers:
    raise ValueError(
      f"config.rollout.staleness: found {section.staleness} in a run of {num_processes} processes that draw by the decoding engine, "
      "expected 0: programs must begin in the same order everywhere; set rollout.samplers, so that other processes draw, or "
      "rollout.driver='drain'"
    )


def make_drawing(
  config: ConfigDict, learner: Programs, mesh: Mesh, tokenizer: Tokenizer, *, rules: Rules | None
) -> Drawing:
  """Makes the queue and the players of a run; compiles nothing yet.

  Args:
    config: The experiment's config.
    learner: Programs of the learner.
    mesh: Devices that draw. The decoding engine has an engine for each of them, or for each
      `tensor` of them.
    tokenizer: The task's tokenizer.
    rules: Rules of the conversations; None for responses of a single turn.
  """
  shape, params = learner.model.config, learner.abstract_state.params
  model = make_model(sampling_shape(config, shape), mesh=mesh, serving=serving_of(shape, mesh, layout=config.serving.layout))
  sync = None
  if mesh != learner.model.mesh:
    options = dict(dtype=model.config.dtype, trainable=learner.trainable)
    sync = make_weight_sync(params, learner.model.logical_axes, learner=learner.model.mesh, sampler=mesh, **options)
    params = sync.arrived
  records = records_routes(config, shape)
  programs = make_samplers(config, model, tokenizer, params, records_routes=records)
  gallery = make_gallery(config, tokenizer, learner, shape)
  section = config.rollout
  common = dict(
    max_new_tokens=section.max_new_tokens,
    prompt_tokens=max(section.prompt_buckets),
    stop_ids=tokenizer.stop_ids,
    stops=(*section.stop_strings, *(() if rules is None else rules.environment.stops)),
  )
  routes = (model.config.num_layers, model.config.experts.top_k) if records else None
  train = Draws(temperature=section.temperature, top_k=section.top_k, top_p=section.top_p, routes=routes, **common)
  evaluate = Draws(temperature=config.eval.temperature, **common)
  if by_engine(config):
    options = engine_options(config, model.config, tokenizer)
    is_alone = jax.process_count() == 1
    peers = (lambda: None) if is_alone else LockStep
    make = lambda params, version: make_engines(model, params, version=version, peers=peers(), **options)
    queue = DrawingQueue(make, waits=section.update_in_flight is None, patience_s=10 * section.sampler_timeout_s)
    queue = queue if is_alone else SharedQueue(queue)
    players, at_once = [player_of(rules, tokenizer, gallery and gallery.settings)] * 2, options["slots"]
  else:
    sweep = partial(Sweep, tokenizer=tokenizer, mesh=model.mesh, prompt_buckets=section.prompt_buckets, gallery=gallery)
    queue, at_once = SweepQueue(), None
    players = [partial(sweep, sample=sample) for sample in (programs.sample, programs.eval_sample)]
  return Drawing(
    mesh=model.mesh,
    sync=sync,
    queue=queue,
    train=Plan(players[0], train, section.group_size, at_once, gallery),
    evaluate=Plan(players[1], evaluate, config.eval.samples, at_once, gallery),
    programs=programs,
    tokenizer=tokenizer,
    prompt_buckets=section.prompt_buckets,
    rules=rules,
    gallery=gallery,
  )


def sampling_shape(config: ConfigDict, shape: ModelConfig) -> ModelConfig:
  """Returns the shape of a learner's model as it draws, in the sampler's dtype."""
  return shape._replace(
    dtype=config.model.sampler_dtype or shape.dtype,
    decode_attention=config.serving.attention,
    decode_weights=config.serving.weights,
  )


def player_of(rules: Rules | None, tokenizer: Tokenizer, pictures: PictureConfig | None = None) -> PlayFn:
  """Returns the player that draws over the decoding engine.

  Args:
    rules: Rules of the conversations; None for responses of a single turn.
    tokenizer: The task's tokenizer.
    pictures: Settings of the checkpoint's pictures; None if prompts show none.
  """
  if rules is None:
    return partial(play_singles, tokenizer=tokenizer, pictures=pictures)
  if rules.environment.player is None:
    return partial(play_turns, rules=rules, tokenizer=tokenizer, pictures=pictures)
  return rules.environment.player(rules, tokenizer)


def engine_options(config: ConfigDict, shape: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
  """Returns the options of the decoding engine of a run, as `make_engines` takes them.

  Args:
    config: The experiment's config.
    shape: Shape of the model, in the sampler's dtype.
    tokenizer: The task's tokenizer.
  """
  section = config.rollout
  of_step = (section.num_prompts + section.spare_prompts) * section.group_size
  most = max(of_step, config.eval.batch_prompts * config.eval.samples) + section.staleness * of_step
  options = dict(max_requests=2 * most, cache_dtype=section.cache_dtype, tokenizer=tokenizer, records_routes=records_routes(config, shape))
  options |= dict(in_flight=section.update_in_flight or "wait", room=room_in_prompts(config, shape))
  return engine_sizes(config) | options


def make_gallery(config: ConfigDict, tokenizer: Tokenizer, learner: Programs, shape: ModelConfig) -> Gallery | None:
  """Returns the pictures of a task's problems; None if they show none."""
  rows, prompts = room_in_rows(config, shape), room_in_prompts(config, shape)
  if rows is None:
    return None
  if tokenizer.image_id != shape.vision.image_token:
    ids = f"image token {tokenizer.image_id} in the tokenizer, expected {shape.vision.image_token}, as in the model's config"
    raise ValueError(f"config.model.path: found {ids}; use the tokenizer of the checkpoint")
  ids = lambda example: prompt_ids(example, tokenizer, shape.vision.pictures)
  mesh, features = learner.model.mesh, learner.features
  placed = features and (lambda params, patches: features(params, mesh_lib.place_rows(mesh, patches)))
  return Gallery(prompts, rows, prompt_ids=ids, features=placed, at_once=pictures_at_once(rows, mesh))
