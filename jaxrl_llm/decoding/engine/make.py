"""Makes engines: checks their settings and compiles their programs."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm.decoding.engine.in_hand import Peers
from jaxrl_llm.decoding.engine.loop import IN_FLIGHT, DecodingEngine
from jaxrl_llm.decoding.engine.programs import make_programs
from jaxrl_llm.decoding.engine.requests import EngineLimits
from jaxrl_llm.decoding.stops import Vocabulary, make_vocabulary
from jaxrl_llm.devices.mesh import num_row_shards
from jaxrl_llm.models import CACHE_DTYPES, Model
from jaxrl_llm.models.image_slots import Room
from jaxrl_llm.types import Params


@runtime_checkable
class Tokenizer(Protocol):
  """What the engine needs of a tokenizer, and only for stop strings."""

  def token_bytes(self) -> Sequence[bytes | None]:
    """Returns the bytes of each id; None for ids that occur in no text."""
    ...


def make_engine(model: Model, params: Params, **settings: Any) -> DecodingEngine:
  """Compiles an engine and starts its loop; see `make_twins` for its settings."""
  return make_twins(model, params, 1, **settings)[0]


def make_twins(
  model: Model,
  params: Params,
  count: int,
  *,
  slots: int,
  context: int,
  max_requests: int,
  tokenizer: Tokenizer | None = None,
  chunk: int = 32,
  spans: int = 8,
  steps: int = 8,
  cache_dtype: str | None = None,
  records_routes: bool = False,
  records_kept: bool = False,
  in_flight: str = "keep",
  version: int = 0,
  peers: Peers | None = None,
  room: Room | None = None,
  likeliest: int = 0,
) -> list[DecodingEngine]:
  """Compiles engines, which share programs and weights, and starts their loops.

  - What a request draws depends on its seed and its own tokens, not on what else runs or when.
  - A row whose request has ended keeps its keys and values. A request that continues them computes
    only what is new; requests with a common prefix compute it once. The row that has been idle for
    longest makes room.
  - Nothing compiles after this call.
  - A mesh splits rows over data, fsdp and expert, as everywhere, and weights as `Model.serving` or
    the params do.

  Args:
    model: Model to decode with, on one device or any mesh.
    params: Weights, read once: they may be donated after the call.
    count: Number of engines. All other arguments are those of each by itself.
    slots: Number of rows: requests that decode at once, and sequences that stay in the cache. It is
      rounded up to as many for each of the devices that rows are split over.
    context: Largest number of tokens of a prompt and its completion together.
    max_requests: Largest number of open requests, those that wait included.
    tokenizer: Tokenizer for stop strings; None refuses them.
    chunk: Largest number of consecutive tokens of a prompt that are computed together.
    spans: Number of such chunks, of one or several prompts, in one program; rounded up as well.
    steps: Number of tokens that each row draws before the host looks at them.
    cache_dtype: One of `CACHE_DTYPES`; None means the model's own dtype.
    records_routes: Whether completions have the routes of their tokens, which a learner can replay.
    records_kept: Whether completions have the ids that top-k and top-p left to draw from.
    in_flight: What becomes of open requests when new weights come. "keep": they go on with the keys
      and values that they have. "recompute": they go on, with keys and values of the new weights.
      "wait": the new weights wait until those that have rows have ended, and no other begins.
    version: Version of the weights; see `DecodingEngine.update`.
    peers: Engines of all processes whose devices the mesh has; None in a run of one process.
    room: Room for pictures in a prompt; None for text alone.
    likeliest: Largest number of likeliest tokens in a score; 0 makes no programs for scores.

  Raises:
    ValueError: If a setting is out of range. One line, which names it.

  References:
    Orca, OSDI 2022 (continuous batching); Sarathi-Serve, arXiv:2403.02310, 2024 (chunked prefills).
  """
  numbers = dict(slots=slots, max_requests=max_requests, chunk=chunk, spans=spans, steps=steps)
  for name, value in numbers.items():
    if value < 1:
      raise ValueError(f"{name}: found {value}, expected 1 or more")
  longest = model.config.max_positions
  if not 2 <= context <= (longest or context):
    raise ValueError(f"context: found {context}, expected 2 or more" + (f", at most the model's {longest} positions" if longest else ""))
  dtype = cache_dtype or model.config.dtype
  if dtype not in CACHE_DTYPES:
    raise ValueError(f"cache_dtype: found {dtype!r}, expected one of {', '.join(CACHE_DTYPES)}")
  if in_flight not in IN_FLIGHT:
    raise ValueError(f"in_flight: found {in_flight!r}, expected one of {', '.join(IN_FLIGHT)}")
  if in_flight == "recompute" and records_routes:
    raise ValueError("records_routes: found True, expected False: with in_flight='recompute' tokens visit experts again, of other weights")
  if records_routes and model.config.experts is None:
    raise ValueError("records_routes: found True, expected False: the model has no experts")
  if likeliest < 0:
    raise ValueError(f"likeliest: found {likeliest}, expected 0 or more")
  likeliest = min(likeliest, model.config.vocab_size)
  pieces = 1 if model.mesh is None else num_row_shards(model.mesh)
  slots, spans = (-(-size // pieces) * pieces for size in (slots, spans))
  sizes: dict[str, Any] = dict(slots=slots, chunk=chunk, spans=spans)
  sizes |= dict(records_routes=records_routes, records_kept=records_kept, room=room)
  vocabulary, no_bytes = vocabulary_of(tokenizer)
  others: dict[str, Any] = dict(vocabulary=vocabulary, context=context, steps=steps, cache_dtype=dtype, likeliest=likeliest)
  programs = make_programs(model, params, twins=count, **others, **sizes)
  weights, limits = programs.weights(params), EngineLimits(context, max_requests, likeliest)
  options = dict(no_bytes=no_bytes, version=version, in_flight=in_flight, peers=peers, **sizes)
  return [DecodingEngine(model, programs, weights, limits, **options) for _ in range(count)]


def vocabulary_of(tokenizer: Tokenizer | None) -> tuple[Vocabulary | None, str]:
  """Returns the bytes of a tokenizer's ids; if they have none of their own, None and the reason."""
  try:
    return None if tokenizer is None else make_vocabulary(tokenizer.token_bytes()), ""
  except ValueError as error:
    return None, str(error).replace("rollout.stop_strings", "it")
