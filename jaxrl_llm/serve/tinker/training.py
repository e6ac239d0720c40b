"""The work of training calls: adapters, gradients, optimizer steps and checkpoints."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.messages import shown
from jaxrl_llm.models import Lora, Model
from jaxrl_llm.serve import fields
from jaxrl_llm.serve.refusals import Refusal, busy, hint, wrong
from jaxrl_llm.serve.tinker import states, wire
from jaxrl_llm.serve.tinker.data import TrainingCall, check_data
from jaxrl_llm.serve.tinker.learner import ALPHA, Adam, Learner, Trained
from jaxrl_llm.serve.tinker.losses import make_loss
from jaxrl_llm.serve.tinker.sampler import Sampler, Weights
from jaxrl_llm.serve.tinker.sessions import Adapter, ClientSession, Outcome, SamplerRef
from jaxrl_llm.text_types import Tokenizer
from jaxrl_llm.types import Params

TARGETS = {"train_attn": "attention/.*", "train_mlp": "mlp/.*", "train_unembed": "head"}
"""Linear maps that each flag of a LoRA config adapts; a head that is the embedding has none."""

MOST_ADAPTERS = 64
_MOST_SHAPES, _MOST_RANK, _MOST_SNAPSHOTS = 16, 1024, 16
_LEAST_TTL_S, _MOST_TTL_S = 3600, 10 * 366 * 86400
_HIGH = 3e38  # Almost the largest float32.


class Base(NamedTuple):
  """A model that adapters are trained on.

  Attributes:
    name: Name by which clients ask for it.
    model: Model.
    params: Params, which never change.
    tokenizer: Tokenizer.
    tokenizer_id: What the SDK loads a tokenizer by; None for the name.
    context: Largest number of tokens of a sequence.
    sampler: Draws from the model and its adapters.
    weights: The model's own weights for it.
  """

  name: str
  model: Model
  params: Params
  tokenizer: Tokenizer
  tokenizer_id: str | None
  context: int
  sampler: Sampler
  weights: Weights


class Trainer:
  """All models, and the folder of checkpoints. Its methods run in the thread that trains.

  Args:
    bases: Models by name.
    folder: Folder of all checkpoints.
  """

  def __init__(self, bases: Mapping[str, Base], folder: Path):
    self.bases, self.folder = bases, folder
    self._learners: OrderedDict[Any, Learner] = OrderedDict()

  def base(self, name: Any, field: str = "base_model") -> Base:
    """Returns a model.

    Raises:
      Refusal: If there is none of this name.
    """
    if not isinstance(name, str) or name not in self.bases:
      message = (
        f"{field}: found {shown(name)}, expected one of {', '.join(self.bases)}{hint(str(name), self.bases)}"
      )
      raise Refusal(404, message, field=field, code="model_not_found")
    return self.bases[name]

  def learner(self, base: Base, rank: int, targets: tuple[str, ...]) -> Learner:
    """Returns the programs of adapters of a shape, which are made once."""
    key = base.name, rank, targets
    if key not in self._learners:
      try:
        self._learners[key] = Learner(base.model, base.params, Lora(rank=rank, alpha=ALPHA, targets=targets))
      except ValueError as error:
        raise Refusal(
          400, f"lora_config: {str(error).removeprefix('model.')}", field="lora_config"
        ) from error
    self._learners.move_to_end(key)
    if len(self._learners) > _MOST_SHAPES:
      self._learners.popitem(last=False)
    return self._learners[key]

  def create(self, session: ClientSession, model_id: str, values: Mapping[str, Any]) -> Outcome:
    """Creates an adapter."""
    base, config = self.base(values.get("base_model")), values.get("lora_config")
    check_optimizer(values.get("optimizer_config"))
    if not isinstance(config, dict):
      raise wrong("lora_config", config, "a LoRA config: all weights of a model are not trained")
    fields.check_names(config, ("rank", "seed", *TARGETS), inside="lora_config.", neutral={}, ignored=())
    rank = fields.whole(config, "rank", 32, low=1, high=_MOST_RANK, inside="lora_config.")
    # The same calls give the same bits, so that no seed is one too.
    seed = fields.whole(config, "seed", 0, low=-(2**63), high=2**63 - 1, inside="lora_config.")
    flags = {name: fields.flag(config, name, True, inside="lora_config.") for name in TARGETS}
    targets = tuple(target for name, target in TARGETS.items() if flags[name])
    learner = self.learner(base, rank, targets)
    about = {"base_model": base.name, "rank": rank, "alpha": ALPHA, "targets": list(targets)}
    session.adapters[model_id] = Adapter(model_id, base.name, learner, learner.begin(seed % 2**32), about)
    return Outcome({"model_id": model_id, "type": "create_model"})

  def compute(self, adapter: Adapter, call: TrainingCall) -> Outcome:
    """Computes a loss, and adds its gradient to that of the calls before."""
    base, loss = self.bases[adapter.base], make_loss(call.loss_fn, call.config)
    data = check_data(call, loss, vocab_size=base.model.config.vocab_size, context=base.context)
    outputs = adapter.learner.compute(adapter.trained.weights, data, loss, forward_only=call.forward_only)
    if outputs.gradients is not None:
      before = adapter.gradients
      adapter.gradients = (
        outputs.gradients if before is None else adapter.learner.add(before, outputs.gradients)
      )
    is_flat = call.data[0][1]["target_tokens"].ndim == 1
    trailing = () if is_flat else (data[0].targets.shape[1],)
    logprobs = [np.ascontiguousarray(x, "<f4").tobytes() for x in outputs.logprobs]
    offsets = np.cumsum([0, *map(len, logprobs)]).astype("<i8").tobytes()
    of_all = wire.encode((1, b"".join(logprobs)), (2, offsets), (3, wire.FLOAT32), (4, wire.packed(trailing)))
    record = wire.encode((2, wire.encode((1, "logprobs"), (2, of_all))), (3, len(data)))
    metrics = [(3, wire.encode((1, name), (2, value))) for name, value in outputs.metrics.items()]
    return Outcome(message=wire.encode((1, "ArrayRecord"), (2, record), *metrics))

  def step(self, adapter: Adapter, values: Mapping[str, Any]) -> Outcome:
    """Takes an optimizer step with the gradient of all calls since the last one."""
    settings = values.get("adam_params")
    if values.get("optimizer_params") is not None or not isinstance(settings, dict):
      raise wrong("adam_params", settings, "AdamParams, the only optimizer of this server")
    fields.check_names(settings, Adam._fields, inside="adam_params.", neutral={}, ignored=())
    number = lambda name, high: fields.number(
      settings, name, Adam._field_defaults[name], low=0, high=high, inside="adam_params."
    )
    limits = {name: 0.9999999 if name.startswith("beta") else _HIGH for name in Adam._fields}
    adam = Adam(**{name: number(name, high) for name, high in limits.items()})
    if adapter.gradients is None:
      raise Refusal(
        400, "optim_step: found no gradient, expected a forward_backward before it that did not fail"
      )
    gradients, adapter.gradients = adapter.gradients, None
    adapter.trained, norm = adapter.learner.step(adapter.trained, gradients, adam)
    return Outcome(
      {"metrics": {"grad_norm": norm, "learning_rate": adam.learning_rate}, "type": "optim_step"}
    )

  def save(self, adapter: Adapter, values: Mapping[str, Any]) -> Outcome:
    """Saves weights and moments."""
    place = states.Place(adapter.model_id, "weights", states.check_name(values.get("path")))
    self._write(adapter, place, adapter.trained, values, overwrite=fields.flag(values, "overwrite", False))
    return Outcome({"path": place.path, "type": "save_weights"})

  def save_for_sampler(self, session: ClientSession, adapter: Adapter, values: Mapping[str, Any]) -> Outcome:
    """Saves weights to sample from, or keeps them in memory for a sampler without a name."""
    if values.get("path") is not None:
      place = states.Place(adapter.model_id, "sampler_weights", states.check_name(values["path"]))
      self._write(adapter, place, adapter.trained._replace(moments=()), values, overwrite=True)
      return Outcome({"path": place.path, "type": "save_weights_for_sampler"})
    number = fields.whole(values, "sampling_session_seq_id", None, low=0, high=2**31)
    kind = values.get("kind") or "snapshot"
    if number is None or kind not in ("snapshot", "inflight"):
      raise wrong("kind", kind, "snapshot or inflight, with a sampling_session_seq_id")
    adapter.published = weights = adapter.weights()
    # Samplers in flight follow the adapter to what it publishes next.
    of_now: Callable[[], Weights] = (lambda: weights) if kind == "snapshot" else (lambda: adapter.published)
    sampler_id = f"{session.session_id}:sample:{number}"
    session.samplers[sampler_id] = SamplerRef(adapter.base, None, of_now, number)
    adapter.snapshots.append(sampler_id)
    while len(adapter.snapshots) > _MOST_SNAPSHOTS:
      session.samplers.pop(adapter.snapshots.pop(0), None)
    return Outcome({"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})

  def _write(
    self,
    adapter: Adapter,
    place: states.Place,
    trained: Trained,
    values: Mapping[str, Any],
    *,
    overwrite: bool,
  ) -> None:
    ttl = fields.whole(values, "ttl_seconds", None, low=_LEAST_TTL_S, high=_MOST_TTL_S)
    metadata = values.get("user_metadata")
    if metadata is not None and not (
      isinstance(metadata, dict) and all(isinstance(x, str) for x in metadata.values())
    ):
      raise wrong("user_metadata", metadata, "texts by name")
    record = {
      **adapter.about,
      "user_metadata": metadata,
      "expires": None if ttl is None else time.time() + ttl,
    }
    states.save(self.folder, place, trained, record, overwrite=overwrite)

  def load(self, adapter: Adapter, values: Mapping[str, Any]) -> Outcome:
    """Loads saved weights, and the moments if asked to; without them Adam begins anew."""
    place, with_moments = _loadable(values)
    about = about_of(states.read_record(self.folder, place))
    if about != adapter.about:
      raise wrong("path", about, f"{adapter.about}, the shape of the adapter")
    fresh = adapter.learner.begin(0)
    like = fresh if with_moments else fresh._replace(moments=())
    loaded = adapter.learner.placed(states.load(self.folder, place, like))
    adapter.trained = loaded if with_moments else fresh._replace(weights=loaded.weights)
    adapter.gradients = None
    return Outcome({"path": place.path, "model_id": adapter.model_id, "type": "load_weights"})

  def create_from(self, session: ClientSession, model_id: str, values: Mapping[str, Any]) -> Outcome:
    """Creates an adapter of the shape of a saved one, with its weights."""
    place, _ = _loadable(values)
    base, learner, about = self.saved(place)
    if values.get("base_model") not in (None, base.name):
      raise wrong("base_model", values["base_model"], f"{base.name!r}, the model of the checkpoint")
    check_optimizer(values.get("optimizer_config"))
    adapter = Adapter(model_id, base.name, learner, learner.begin(0), about)
    outcome = self.load(adapter, values)
    session.adapters[model_id] = adapter
    return outcome

  def saved(self, place: states.Place) -> tuple[Base, Learner, dict[str, Any]]:
    """Returns the model of a saved adapter, the programs of its shape and what describes it."""
    about = about_of(states.read_record(self.folder, place))
    base = self.base(about["base_model"])
    return base, self.learner(base, about["rank"], tuple(about["targets"])), about

  def sampler(self, base_model: Any, path: Any, number: int) -> SamplerRef:
    """Returns weights to sample from: those of a saved adapter, or of a model."""
    if path is None:
      base = self.base(base_model)
      return SamplerRef(base.name, None, lambda: base.weights, number)
    place = states.place_of(path, "model_path")
    base, learner, _ = self.saved(place)
    like = learner.begin(0)._replace(moments=())
    states.load(self.folder, place, like)  # A broken file is refused now.
    # Read anew at each turn: a client may open many of them.
    read = lambda: learner.placed(states.load(self.folder, place, like)).weights
    weights = Weights(lambda: learner.merged(read()), lambda ids: learner.score(read(), ids))
    return SamplerRef(base.name, place.path, lambda: weights, number)


def about_of(record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what describes the shape of a saved adapter."""
  return {key: record[key] for key in ("base_model", "rank", "alpha", "targets")}


def check_adapters(count: int) -> None:
  """Refuses one adapter too many."""
  if count >= MOST_ADAPTERS:
    raise busy(f"{MOST_ADAPTERS} adapters are in memory, expected fewer; end a session")


def check_optimizer(config: Any) -> None:
  """Refuses any optimizer but Adam."""
  if config is not None and config != {"type": "adamw"}:
    raise wrong("optimizer_config", config, "{'type': 'adamw'}")


def _loadable(values: Mapping[str, Any]) -> tuple[states.Place, bool]:
  """Returns what is to be loaded, and whether its moments are."""
  place, with_moments = states.place_of(values.get("path")), fields.flag(values, "optimizer", False)
  if values.get("weights_access_token") is not None:
    raise wrong("weights_access_token", "a token", "none: this server has one account")
  if with_moments and place.kind != "weights":
    raise wrong("optimizer", True, "false: weights for samplers are saved without the state of the optimizer")
  return place, with_moments
