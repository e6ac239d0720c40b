"""Speed, waste and memory of one update on one batch, and the share of the machine's peak.

  python -m experiments.benchmarks.train_step --checkpoint=DIR --batch=FILE.npz --objective=grpo
    --json=OUT

The batch is packed with each group's prompt computed once, and updated on `--repeats` times after
one update that compiles. The benchmark prints, and writes as JSON, real tokens/s, share of the
machine's peak, padding and sharing, compile time, peak memory, and loss and gradient norm of the
first update. `engines/train_job.py` describes the batch; `random_checkpoint.py` and
`random_batch.py` make one if there is none.
"""

import argparse
import gc
import inspect
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments.benchmarks import roofline
from experiments.benchmarks.engines import worker
from experiments.benchmarks.engines.train_job import Batch, TrainJob, add_flags, job_from, read_batch
from experiments.benchmarks.reporting import between, lines, megabytes, peak_memory, report, spread
from jaxrl_llm import objectives
from jaxrl_llm.decoding.sampler import make_filter
from jaxrl_llm.devices.compilation import give_back_memory
from jaxrl_llm.devices.xla_flags import set_flags
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.packing import Layout, Trajectory
from jaxrl_llm.learner.train_step import init_state, make_optimizer, make_train_step, policy_outputs
from jaxrl_llm.models import Model, ModelConfig, load_params, make_model, read_config
from jaxrl_llm.models.attention import BACKENDS
from jaxrl_llm.models.remat import check_policy
from jaxrl_llm.objectives.settings import did_you_mean
from jaxrl_llm.types import Metrics, Objective, Params, TrainBatch, TrainState

FURTHER_OPTIMIZERS = {"adafactor": optax.adafactor, "lion": optax.lion, "sgd": optax.sgd}
"""Optimizers other than "adamw" by name, each a function of the learning rate.

All follow the same clipping.
"""
HAS = frozenset({"old_logprobs", "sampler_logprobs", "entropy"})
"""Scores that a batch contains, or that the update computes itself."""
ROW_MULTIPLE = 64
"""Divisor of the row lengths that are tried."""
TRIED_LENGTHS = 16
"""Approximate number of row lengths that are tried, per length of the largest group."""


class Update(NamedTuple):
  """Compiled update.

  Attributes:
    pack: Function `() -> batch`, with rows on the host.
    step: Function `(state, batch) -> (state, metrics)`, which donates the state.
    layout: Layout of the responses.
    rows_at_once: Number of rows of a micro-batch; None if the update takes all rows at once.
    sequences: Sequences that are packed.
    compile_seconds: Time of tracing and compiling, in s.
    temp_bytes: Temporaries of the program according to the compiler, in bytes; None if unknown.
  """

  pack: Callable[[], TrainBatch]
  step: Callable[[TrainState, TrainBatch], tuple[TrainState, Metrics]]
  layout: Layout
  rows_at_once: int | None
  sequences: list[Trajectory]
  compile_seconds: float
  temp_bytes: int | None


def make_objective(name: str) -> Objective:
  """Makes an objective with its default settings, but without the KL penalty.

  The penalty is off because the batch has no reference policy.

  Raises:
    ValueError: If the name is unknown, or the objective needs more than a batch contains.

  Example:
    >>> sorted(make_objective("grpo").needs)
    ['old_logprobs']
  """
  make = objectives.OBJECTIVES.get(name)
  takes = {} if make is None else inspect.signature(make).parameters
  try:
    objective = objectives.make(name, **({"kl_coef": 0.0} if "kl_coef" in takes else {}))
  except ValueError as error:
    raise ValueError(f"--objective: {error}") from error
  if lacks := objective.needs - HAS:
    raise ValueError(f"--objective: {name} needs {', '.join(sorted(lacks))}, which a batch does not contain")
  return objective


def optimizer_of(job: TrainJob) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """Makes the optimizer of a job, after global-norm clipping, and its constant rate as a schedule.

  Raises:
    ValueError: If the name is unknown.
  """
  if job.optimizer == "adamw":
    moments = dict(b1=job.b1, b2=job.b2, weight_decay=job.weight_decay)
    return make_optimizer(
      learning_rate=job.learning_rate, warmup_steps=0, max_grad_norm=job.max_grad_norm, **moments
    )
  if job.optimizer not in FURTHER_OPTIMIZERS:
    known = ["adamw", *FURTHER_OPTIMIZERS]
    raise ValueError(
      f"--optimizer: found {job.optimizer!r}{did_you_mean(job.optimizer, known)}; known: {', '.join(known)}"
    )
  inner = FURTHER_OPTIMIZERS[job.optimizer](job.learning_rate)
  return optax.chain(optax.clip_by_global_norm(job.max_grad_norm), inner), optax.constant_schedule(job.learning_rate)


def check(job: TrainJob) -> tuple[ModelConfig, Batch]:
  """Checks a job against its files and the project's registries, before any weights are read.

  Returns:
    The model's config, and the batch.

  Raises:
    ValueError: If something is wrong. One line that names the flag or the file.
  """
  make_objective(job.objective)
  optimizer_of(job)
  try:
    check_policy(job.remat)
  except ValueError as error:
    raise ValueError(str(error).replace("model.remat", "--remat")) from error
  config = read_config(job.checkpoint)
  batch = read_batch(job, vocab_size=config.vocab_size, max_positions=config.max_positions)
  sequences = trajectories(batch)
  longest = max(len(sequence.tokens) for sequence in sequences)
  if job.row_tokens and job.row_tokens < longest:
    raise ValueError(
      f"--row_tokens: found {job.row_tokens}, expected at least {longest}, the longest row of {job.batch}, "
      "or 0 to choose"
    )
  return config, batch


def trajectories(batch: Batch) -> list[Trajectory]:
  """Returns the responses that have a token, each after its prompt, without padding."""
  sequences = []
  for prompt, inside, completion, mask, old, advantage in zip(*batch, strict=True):
    if not mask.any():  # An empty response would take room and change nothing.
      continue
    before = np.zeros(inside.sum(), np.float32)
    tokens = np.concatenate([prompt[inside], completion[mask]])
    counted = np.concatenate([before, np.ones(mask.sum(), np.float32)])
    sequences.append(
      Trajectory(
        tokens,
        counted,
        advantages=counted * advantage,
        sampler_logprobs=np.concatenate([before, old[mask]]),
      )
    )
  return sequences


def lay_out(job: TrainJob, batch: Batch, *, alone: bool = False) -> tuple[list[Trajectory], Layout, int | None]:
  """Lays out the sequences of a batch in rows.

  Rows have the length that the job gives, or else the length with the fewest slots in all, from
  that of the longest sequence to three times the largest group. All micro-batches have the same
  number of rows.

  Args:
    job: Job with the settings of the layout.
    batch: Batch to lay out.
    alone: Whether each row holds one sequence, as in training loops without packing; requires
      `job.row_tokens`.

  Returns:
    The sequences, their layout, and the number of rows of a micro-batch; None for all rows at once.
  """
  sequences = trajectories(batch)
  if alone:
    rows = range(len(sequences))
    places = [np.arange(len(sequence.tokens)) for sequence in sequences]
    segments, held = [(1, 0, 0)] * len(rows), np.arange(len(rows))
    return sequences, Layout((len(rows), job.row_tokens), list(rows), places, segments, shares=False, held=held), None
  num_micro_batches = len(batch.advantages) // job.microbatch if job.microbatch else 1
  buckets = [num_micro_batches * rows for rows in range(1, len(sequences) + 1)]
  lay = lambda row_tokens: packing.arrange(
    sequences, row_tokens=row_tokens, row_buckets=buckets, share_prompts=job.share_prompts
  )
  if job.row_tokens:
    layout = lay(job.row_tokens)
    return sequences, layout, layout.shape[0] // num_micro_batches
  longest = max(len(sequence.tokens) for sequence in sequences)
  largest = max(unit.size for unit in packing.units_of(sequences, share_prompts=job.share_prompts))
  step = ROW_MULTIPLE * -(-largest // (ROW_MULTIPLE * TRIED_LENGTHS))
  candidates = map(lay, range(-(-longest // step) * step, 3 * largest + step, step))
  layout = min(candidates, key=lambda layout: (layout.shape[0] * layout.shape[1], layout.shape[1]))
  # On a CPU one row at a time is as fast as all of them, and takes a fraction of the memory.
  one_by_one = not job.microbatch and jax.default_backend() == "cpu"
  return sequences, layout, 1 if one_by_one else layout.shape[0] // num_micro_batches


def load_model(job: TrainJob, **changes: Any) -> tuple[Model, Params]:
  """Loads the model and its weights, which are float32 whatever the compute dtype.

  Args:
    job: Job with the checkpoint.
    **changes: Fields of `ModelConfig` to set.
  """
  config = read_config(job.checkpoint)._replace(dtype=job.dtype, remat=job.remat, param_dtype="float32", **changes)
  model = make_model(config)
  return model, jax.block_until_ready(load_params(job.checkpoint, model))


def compiled(
  job: TrainJob,
  model: Model,
  state: TrainState,
  rows: TrainBatch,
  *,
  rows_at_once: int | None = None,
  donate: bool = True,
):
  """Compiles `(state, batch) -> (state, metrics)` of a job for rows of one shape.

  Args:
    job: Job to compile.
    model: Model of the checkpoint.
    state: State with the shapes of the program's states.
    rows: Batch with the shapes of the program's batches.
    rows_at_once: Number of rows of a micro-batch; None takes all rows at once.
    donate: Whether the program donates the state.
  """
  objective = make_objective(job.objective)
  optimizer, schedule = optimizer_of(job)
  outputs_fn = partial(policy_outputs, model.logprobs, make_filter(), learns_entropy="entropy" in objective.needs)
  step = make_train_step(outputs_fn, objective, optimizer, learning_rate=schedule, rows_at_once=rows_at_once)
  program = jax.jit(step, donate_argnums=0 if donate else ()).lower(state, rows).compile()
  give_back_memory()
  return program


def prepare(job: TrainJob, batch: Batch, model: Model, state: TrainState) -> Update:
  """Compiles a job.

  Args:
    job: Job to compile.
    batch: Batch of the job.
    model: Model of the checkpoint.
    state: State with the shapes of the program's states; it is not changed.
  """
  sequences, layout, rows_at_once = lay_out(job, batch)
  pack = partial(packing.pack, sequences, layout)
  started = time.perf_counter()
  step = compiled(job, model, state, pack(), rows_at_once=rows_at_once)
  seconds = time.perf_counter() - started
  return Update(
    pack,
    step,
    layout,
    rows_at_once,
    sequences,
    seconds,
    getattr(step.memory_analysis(), "temp_size_in_bytes", None),
  )


def fresh_state(job: TrainJob, params: Params) -> TrainState:
  """Returns the train state before the first update."""
  return init_state(params, optimizer_of(job)[0])


def attended_pairs(sequences: list[Trajectory], layout: Layout | None = None) -> int:
  """Counts the pairs of query and key.

  With a layout, those of a prompt count once for all responses that share it there, and without one
  they count for each response.
  """
  triangle = lambda length: length * (length + 1) // 2
  if layout is None:
    return sum(triangle(len(sequence.tokens)) for sequence in sequences)
  prompts = {(row, prefix): shared for row, (_, prefix, shared) in zip(layout.rows, layout.segments) if shared}
  own = [triangle(len(slots)) - triangle(shared) for slots, (_, _, shared) in zip(layout.slots, layout.segments)]
  return sum(map(triangle, prompts.values())) + sum(own)


def measure(job: TrainJob, *, repeats: int, **changes: Any) -> dict[str, Any]:
  """Runs a job and measures it.

  Args:
    job: Job to run.
    repeats: Number of timed updates.
    **changes: Fields of `ModelConfig` to set.
  """
  started = time.perf_counter()
  model, params = load_model(job, **changes)
  load_seconds, loaded_bytes = time.perf_counter() - started, worker.resident_bytes()
  device, weight_bytes = jax.devices()[0], sum(x.nbytes for x in jax.tree.leaves(params))
  batch = read_batch(job, vocab_size=model.config.vocab_size, max_positions=model.config.max_positions)
  state = fresh_state(job, params)
  update = prepare(job, batch, model, state)
  state, metrics = update.step(state, update.pack())
  first = {name: float(metrics[f"actor/{name}"]) for name in ("loss", "grad_norm")}

  gc.collect()
  worker.reset_peak()
  seconds, pack_seconds = [], []
  for _ in range(repeats):
    started = time.perf_counter()
    rows = update.pack()
    packed = time.perf_counter()
    state, metrics = jax.block_until_ready(update.step(state, rows))
    pack_seconds.append(packed - started)
    seconds.append(time.perf_counter() - packed)
  memory = peak_memory(device, loaded_bytes=loaded_bytes, weight_bytes=weight_bytes, temp_bytes=update.temp_bytes)

  machine = roofline.find_machine(device, weight_bytes)
  slots, used = rows.segments.size, int(np.count_nonzero(rows.segments))
  count = partial(roofline.update_flops, model.config, scored=batch.num_completion_tokens)
  flops = count(tokens=used, pairs=attended_pairs(update.sequences, update.layout))
  rates = lambda tokens: spread([tokens / s for s in seconds])
  return {
    "job": job._asdict(),
    "device": {"kind": device.device_kind, "platform": device.platform, "jax": jax.__version__},
    "model": {"parameters": model.num_params, "weight_bytes": weight_bytes},
    "tokens": {
      "responses": len(batch.advantages),
      "real": batch.num_tokens,
      "completion": batch.num_completion_tokens,
    },
    "tokens_per_s": rates(batch.num_tokens),
    "completion_tokens_per_s": rates(batch.num_completion_tokens),
    "seconds": spread(seconds),
    "pack_seconds": spread(pack_seconds),
    "rows": {
      "rows": rows.segments.shape[0],
      "row_tokens": rows.segments.shape[1],
      "used": used,
      "rows_at_once": update.rows_at_once or rows.segments.shape[0],
    },
    "waste": {"padding": 1 - used / slots, "prompts_saved": packing.prompts_saved([update.layout])},
    "compile_s": update.compile_seconds,
    "load_s": load_seconds,
    "memory": memory,
    "first": first,
    "roofline": {
      "machine": machine._asdict(),
      "flops": flops,
      "unshared_flops": count(tokens=batch.num_tokens, pairs=attended_pairs(update.sequences)),
      "mfu": spread([flops / machine.flops_per_s / s for s in seconds]),
    },
  }


def describe(result: dict[str, Any]) -> str:
  """Formats the results as lines of text."""
  job, rows, tokens, roof, memory = (result[name] for name in ("job", "rows", "tokens", "roofline", "memory"))
  machine, waste = roof["machine"], result["waste"]
  source = "the peak measured here, by float32 products" if machine["source"].startswith("measured") else machine["source"]
  return lines({
    "job": f"{job['objective']}, {job['optimizer']}, {tokens['responses']} responses, {tokens['real']:,} tokens with "
    f"their prompts, {tokens['completion']:,} without; {job['dtype']}, {result['model']['parameters']:,} parameters",
    "device": f"{result['device']['kind']}, JAX {result['device']['jax']}",
    "tokens/s": f"{between(result['tokens_per_s'], ',.0f')} real tokens, "
    f"{between(result['completion_tokens_per_s'], ',.0f')} response tokens",
    "seconds": f"{between(result['seconds'], '.3f')} per update; "
    f"packing takes {1e3 * result['pack_seconds']['median']:.1f} ms more",
    "MFU": f"{between(roof['mfu'], '.1%')} of {machine['flops_per_s'] / 1e9:,.0f} GFLOP/s "
    f"({source}), for {roof['flops'] / 1e9:,.1f} GFLOP; "
    f"{roof['unshared_flops'] / 1e9:,.1f} without sharing",
    "rows": f"{rows['rows']} of {rows['row_tokens']} slots, {rows['rows_at_once']} at a time",
    "waste": f"{waste['padding']:.1%} of the slots are padding; "
    f"sharing prompts saves {waste['prompts_saved']:.1%} of the tokens",
    "compile": f"{result['compile_s']:.1f} s; weights loaded in {result['load_s']:.1f} s",
    "memory": f"{megabytes(memory['peak_bytes'])} ({memory['source']}), "
    f"{megabytes(memory['increase_bytes'])} over the loaded weights; "
    f"temporaries of the program {megabytes(memory['program_temp_bytes'])}",
    "first update": f"loss {result['first']['loss']:.8f}, gradient norm {result['first']['grad_norm']:.8f}",
  })  # fmt: skip


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m experiments.benchmarks.train_step", description=__doc__.splitlines()[0]
  )
  add_flags(parser)
  parser.add_argument("--attention", choices=("auto", *BACKENDS), default="auto", help="attention of the model")
  parser.add_argument("--exact", action="store_true", help="compute as with config.numerics.exact")
  args = parser.parse_args(argv)

  def run() -> dict[str, Any]:
    job = job_from(args)
    check(job)
    if args.exact:
      set_flags(exact=True)
    return measure(job, repeats=args.repeats, attention=args.attention, exact=args.exact)

  return report(run, describe, args.json)


if __name__ == "__main__":
  sys.exit(main())
