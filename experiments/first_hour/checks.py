"""Is this device right? Numbers of two small models, and each kernel against plain JAX."""

import json
import pathlib
from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from experiments.first_hour.results import Row, at_most
from jaxrl_llm import objectives
from jaxrl_llm.decoding.sampler import make_filter, make_sampler, seeded
from jaxrl_llm.kernels.grouped import grouped_matmul_for
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.packing import Trajectory
from jaxrl_llm.learner.train_step import init_state, make_optimizer, make_train_step, policy_outputs
from jaxrl_llm.models import cache as cache_lib
from jaxrl_llm.models import make_model, preset, ragged
from jaxrl_llm.models.attention import BACKENDS, packed, row_attention
from jaxrl_llm.models.experts import Weights, dispatch
from jaxrl_llm.types import StopReason

GOLDENS = pathlib.Path(__file__).with_name("goldens.json")
"""Numbers of two CPU cores in float32, JAX 0.10.2; `python -m experiments.first_hour.checks` makes
them anew."""

MODELS = ("nano", "nano-moe")
_TOLERANCE = 1e-4  # Of values of about 1, between devices that sum in another order.


def measure(name: str) -> dict[str, list]:
  """Computes the numbers of one model: forward pass, samples, and an update.

  Args:
    name: Preset of the model.
  """
  model = make_model(preset(name, vocab_size=264))
  params = jax.jit(model.init)(jax.random.key(0))
  rng = np.random.default_rng(0)
  prompts = rng.integers(5, 200, (2, 6)).astype(np.int32)
  sample = jax.jit(make_sampler(model, group_size=4, max_new_tokens=24, stop_ids=(1, 2), pad_id=0))
  drawn = jax.device_get(sample(params, prompts, np.ones(prompts.shape, bool), seeded(jax.random.key(1), 8)))
  sequences = []
  for i, (prompt, tokens, mask, logprobs) in enumerate(zip(drawn.prompts, drawn.tokens, drawn.mask, drawn.logprobs, strict=True)):
    tokens = np.concatenate([prompt, tokens[mask]])
    counted = np.arange(len(tokens)) >= len(prompt)
    old = np.concatenate([np.zeros(len(prompt)), logprobs[mask]])
    counted = counted.astype(np.float32)
    sequences.append(Trajectory(tokens, counted, advantages=counted * (-1) ** i, sampler_logprobs=old.astype(np.float32)))
  batch = packing.pack(sequences, packing.arrange(sequences, row_tokens=128, row_buckets=[4], share_prompts=True))
  rows = jnp.concatenate([drawn.prompts, drawn.tokens], axis=1)
  positions = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
  logits = jax.jit(model.logits)(params, rows, positions, jnp.ones_like(rows))
  of_drawn = jnp.take_along_axis(jax.nn.log_softmax(logits[:, 5:-1]), jnp.asarray(drawn.tokens)[..., None], axis=2)[..., 0]
  optimizer, schedule = make_optimizer(learning_rate=1e-3, warmup_steps=0, max_grad_norm=1.0, b1=0.9, b2=0.99, weight_decay=0.0)
  outputs = partial(policy_outputs, model.logprobs, make_filter(), learns_entropy=False)
  step = jax.jit(make_train_step(outputs, objectives.make("sapo"), optimizer, learning_rate=schedule))
  state, metrics = step(init_state(params, optimizer), batch)
  _, after = step(state, batch)
  numbers = lambda x: np.asarray(x, np.float64).round(7).ravel().tolist()
  return {
    "logits": numbers(logits[0, :8, :8]),
    "tokens": drawn.tokens.ravel().tolist(),
    "finished": [int(x) for x in np.asarray(drawn.reasons) == StopReason.TOKEN],
    "logprobs": numbers(np.where(drawn.mask, drawn.logprobs, 0)),
    "losses": numbers([metrics["actor/loss"], after["actor/loss"]]),
    "gradient norms": numbers([metrics["actor/grad_norm"], after["actor/grad_norm"]]),
    "sampler against learner": numbers(np.max(np.abs(np.where(drawn.mask, of_drawn - drawn.logprobs, 0)))),
  }


def numerics() -> list[Row]:
  """Compares this device with the recorded numbers of a CPU."""
  rows, recorded = [], json.loads(GOLDENS.read_text())
  for name in MODELS:
    here, there = measure(name), recorded[name]
    for part in ("tokens", "finished"):
      same = float(np.mean(np.array(here[part]) == np.array(there[part])))
      rows.append(Row(f"{name}: {part} drawn equal a CPU's", f"{same:.1%}", "100.0%", same == 1))
    for part in ("logits", "logprobs", "losses", "gradient norms"):
      error = np.max(np.abs(np.array(here[part]) - np.array(there[part])))
      rows.append(at_most(f"{name}: largest difference of {part} from a CPU's", error, _TOLERANCE))
    rows.append(at_most(f"{name}: sampler's log-probabilities from the learner's", here["sampler against learner"][0], 1e-5))
  return rows


def kernels(*, length: int) -> list[Row]:
  """Compares each kernel that runs here with plain JAX, forward and backward.

  Args:
    length: Number of tokens of a row.
  """
  return [*_attention(length), *_grouped(length), *_decoding(length)]


def _attention(length: int) -> list[Row]:
  # The kernels have other tiles for wider heads.
  return [*_attention_of(length, 64, BACKENDS), *_attention_of(length, 128, ("flash",))]


def _attention_of(length: int, width: int, backends: Iterable[str]) -> list[Row]:
  rows, rng = [], np.random.default_rng(0)
  q = rng.standard_normal((1, length, 4, width)) / 2
  k, v, ct = (rng.standard_normal((1, length, heads, width)) / 2 for heads in (2, 2, 4))
  segments = np.repeat([1, 2, 3, 4], length // 4)[None].astype(np.int32)
  packed_rows = packed(jnp.asarray(segments), jnp.asarray(np.where(segments == 3, 2, 0).astype(np.int32)))

  @partial(jax.jit, static_argnums=0)
  def run(backend, *arrays):
    attend = lambda q, k, v: row_attention(q, k, v, packed_rows, backend=backend, mesh=None)
    out, back = jax.vjp(attend, *arrays[:3])
    return out, *back(arrays[3].astype(out.dtype))

  for dtype, limit in (("float32", 1e-4), ("bfloat16", 5e-2)):
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v, ct)]
    with jax.default_matmul_precision("highest"):
      expected = run("xla", *[x.astype(jnp.float32) for x in arrays])
    for backend in backends:
      what = f"attention {backend}, {dtype}, heads of {width}, {length} tokens: largest difference of output and gradients"
      try:
        errors = [float(jnp.max(jnp.abs(x.astype(jnp.float32) - y))) for x, y in zip(run(backend, *arrays), expected, strict=True)]
      except ValueError:  # This platform or dtype has no such backend.
        rows.append(Row(what, "does not run here"))
      else:
        rows.append(at_most(what, max(errors), limit))
  return rows


def _grouped(length: int) -> list[Row]:
  # A GPU has kernels even for so few rows.
  rng, product = np.random.default_rng(0), grouped_matmul_for(jax.default_backend(), dense_bytes=0)
  x, ct = (rng.standard_normal((length, 192)) for _ in range(2))
  gates, experts = jnp.asarray(rng.random((length, 2)), jnp.float32), jnp.asarray(rng.integers(0, 7, (length, 2)), jnp.int32)
  weights = [rng.standard_normal(shape) / 12 for shape in ((8, 192, 128), (8, 192, 128), (8, 128, 192))]

  def dense(x, weights):
    gate, up = (jnp.einsum("nd,edf->enf", x, weight) for weight in (weights.gate, weights.up))
    y = jnp.einsum("enf,efd->end", jax.nn.silu(gate) * up, weights.down)
    return jnp.einsum("end,ne->nd", y, jnp.sum(jax.nn.one_hot(experts, 8) * gates[..., None], axis=1))

  grouped = lambda x, weights: dispatch(x, gates, experts, weights, product=product)

  @partial(jax.jit, static_argnums=0)
  def run(apply, x, weights):
    out, back = jax.vjp(apply, x, weights)
    return jax.tree.leaves((out, back(jnp.asarray(ct, out.dtype))))

  rows = []
  for dtype, limit in (("float32", _TOLERANCE), ("bfloat16", 5e-2)):
    arrays = jnp.asarray(x, dtype), Weights(*(jnp.asarray(weight, dtype) for weight in weights))
    with jax.default_matmul_precision("highest"):
      expected = run(dense, *jax.tree.map(lambda a: a.astype(jnp.float32), arrays))
    pairs = zip(run(grouped, *arrays), expected, strict=True)
    error = max(float(jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)
    what = f"experts' grouped products, {dtype}, {length} tokens: largest relative difference of output and gradients"
    rows.append(at_most(what, error, limit))
  return rows


def _decoding(length: int) -> list[Row]:
  rows, rng, columns = [], np.random.default_rng(0), max(256, length)
  q = jnp.asarray(rng.standard_normal((8, 2, 4, 128)), jnp.float32)
  k, v = (jnp.asarray(rng.standard_normal((8, columns, 2, 128)), jnp.float32) for _ in range(2))
  ages = jnp.asarray(np.roll(np.arange(columns)[::-1], 17), jnp.int32)
  lengths = jnp.asarray([0, 1, 17, 64, 100, 128, 200, columns], jnp.int32)
  platform = jax.default_backend()
  for dtype in cache_lib.CACHE_DTYPES:
    what = f"decoding kernel, {dtype} cache, {columns} columns: largest difference"
    held = cache_lib.key_values(k, v, dtype, cache_lib.layout_of(None))
    try:
      ragged.is_used("ragged", platform, 128, columns)
    except ValueError:
      rows.append(Row(what, "does not run here"))
      continue
    read = ragged.visits(ages, lengths, rows=ragged.rows_per_group(8, platform), columns=ragged.block_columns(columns, platform))
    part = ragged.attend_block(q, held, cache_lib.View(jnp.int32(0), (ages,), lengths, (read,), None), 0, mesh=None)
    plain = cache_lib.attend(q, held, ages < lengths[:, None])
    # The first row sees nothing.
    mixed = [np.asarray(x.mix / x.total[..., None])[1:] for x in (part, plain)]
    rows.append(at_most(what, float(np.max(np.abs(mixed[0] - mixed[1]))), 1e-5 if dtype == "float32" else 2e-2))
  return rows


if __name__ == "__main__":
  GOLDENS.write_text(json.dumps({name: measure(name) for name in MODELS}) + "\n")
