"""Speed, waste and memory of one update on one batch, and how near it comes to what the machine could do.

  python -m experiments.benchmarks.train_step --checkpoint=DIR --batch=FILE.npz --objective=grpo --json=OUT

The batch is packed with each group's prompt computed once, and learned from `--repeats` times after one update that compiles. Prints, and
writes as JSON, real tokens/s, share of the machine's peak, padding and sharing, compile time, peak memory, and loss and gradient norm of
the first update. `engines/train_job.py` says what a batch is; `random_checkpoint.py` and `random_batch.py` make one where none is at hand.
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
from experiments.benchmarks.reporting import between, lines, megabytes, peak_memory, spread, write_json
from jaxrl_llm import objectives
from jaxrl_llm.devices.compiling import give_back_memory
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.packing import Layout, Trajectory
from jaxrl_llm.learner.train_step import init_state, make_optimizer, make_train_step, policy_outputs
from jaxrl_llm.models import Model, ModelConfig, load, read_config
from jaxrl_llm.models.remat import check_policy
from jaxrl_llm.objectives.settings import did_you_mean
from jaxrl_llm.sampler import make_filter
from jaxrl_llm.types import Metrics, Objective, Params, TrainBatch, TrainState

FURTHER_OPTIMIZERS = {"adafactor": optax.adafactor, "lion": optax.lion, "sgd": optax.sgd}
"""By name, each of a learning rate and after the same clipping; beside "adamw"."""
HAS = frozenset({"old_logprobs", "sampler_logprobs", "entropy"})
"""Scores that a batch has, or that the update makes by itself."""
ROW_MULTIPLE = 64
TRIED_LENGTHS = 16
"""Row lengths that are tried are multiples of the first, about as many as the second for every largest group."""


class Update(NamedTuple):
  """One update, compiled.

  Attributes:
    pack: `() -> batch`, rows on the host.
    step: `(state, batch) -> (state, metrics)`; the state is donated.
    layout: where the responses lie.
    num_micro_batches: pieces of the rows.
    sequences: what is packed.
    compile_seconds: tracing and compiling.
    temp_bytes: temporaries that the program takes, by the compiler; None where it does not say.
  """

  pack: Callable[[], TrainBatch]
  step: Callable[[TrainState, TrainBatch], tuple[TrainState, Metrics]]
  layout: Layout
  num_micro_batches: int
  sequences: list[Trajectory]
  compile_seconds: float
  temp_bytes: int | None


def make_objective(name: str) -> Objective:
  """An objective with its own settings but for the KL penalty, which is off: the batch has no reference to be near to.

  Raises:
    ValueError: an unknown name, or an objective that wants more than a batch has.

  Example:
    >>> sorted(make_objective("grpo").needs)
    ['old_logprobs']
  """
  found = objectives.OBJECTIVES.get(name)
  takes = {} if found is None else inspect.signature(found).parameters
  try:
    objective = objectives.make(name, **({"kl_coef": 0.0} if "kl_coef" in takes else {}))
  except ValueError as error:
    raise ValueError(f"--objective: {error}") from error
  if lacks := objective.needs - HAS:
    raise ValueError(f"--objective: {name} needs {', '.join(sorted(lacks))}, which a batch does not have")
  return objective


def optimizer_of(job: TrainJob) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """The optimizer of a job after global-norm clipping, at a constant rate; and the rate as a schedule.

  Raises:
    ValueError: an unknown name.
  """
  if job.optimizer == "adamw":
    moments = dict(b1=job.b1, b2=job.b2, weight_decay=job.weight_decay)
    return make_optimizer(learning_rate=job.learning_rate, warmup_steps=0, max_grad_norm=job.max_grad_norm, **moments)
  if job.optimizer not in FURTHER_OPTIMIZERS:
    known = ["adamw", *FURTHER_OPTIMIZERS]
    raise ValueError(f"--optimizer: found {job.optimizer!r}{did_you_mean(job.optimizer, known)}; known: {', '.join(known)}")
  inner = FURTHER_OPTIMIZERS[job.optimizer](job.learning_rate)
  return optax.chain(optax.clip_by_global_norm(job.max_grad_norm), inner), optax.constant_schedule(job.learning_rate)


def check(job: TrainJob) -> tuple[ModelConfig, Batch]:
  """A job against its files and our registries, before any weights are read.

  Returns:
    The model's config, and the batch.

  Raises:
    ValueError: one line that names flag or file.
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
    raise ValueError(f"--row_tokens: found {job.row_tokens}, expected at least {longest}, the longest row of {job.batch}, or 0 to choose")
  return config, batch


def trajectories(batch: Batch) -> list[Trajectory]:
  """The responses that have a token, each after its prompt, unpadded."""
  found = []
  for prompt, inside, completion, mask, old, advantage in zip(*batch, strict=True):
    if not mask.any():  # It would take room and change nothing.
      continue
    before = np.zeros(inside.sum(), np.float32)
    tokens = np.concatenate([prompt[inside], completion[mask]])
    counted = np.concatenate([before, np.ones(mask.sum(), np.float32)])
    found.append(Trajectory(tokens, counted, advantages=counted * advantage, sampler_logprobs=np.concatenate([before, old[mask]])))
  return found


def lay_out(job: TrainJob, batch: Batch, *, alone: bool = False) -> tuple[list[Trajectory], Layout, int]:
  """The sequences of a batch, their places, and into how many micro-batches the rows are split.

  Rows are as long as the job says, else of the length with the fewest slots in all, from that of the longest sequence to three times the
  largest group. Micro-batches have equally many rows.

  Args:
    job: how to lay them.
    batch: what to lay.
    alone: one sequence in each row, as loops do that do not pack; `job.row_tokens` is wanted then.
  """
  sequences = trajectories(batch)
  if alone:
    rows = range(len(sequences))
    places = [np.arange(len(sequence.tokens)) for sequence in sequences]
    return sequences, Layout((len(rows), job.row_tokens), list(rows), places, [(1, 0, 0)] * len(rows), shares=False), 1
  num_micro_batches = len(batch.advantages) // job.microbatch if job.microbatch else 1
  buckets = [num_micro_batches * rows for rows in range(1, len(sequences) + 1)]
  lay = lambda row_tokens: packing.arrange(sequences, row_tokens=row_tokens, row_buckets=buckets, share_prompts=job.share_prompts)
  if job.row_tokens:
    return sequences, lay(job.row_tokens), num_micro_batches
  longest = max(len(sequence.tokens) for sequence in sequences)
  largest = max(unit.size for unit in packing.units_of(sequences, share_prompts=job.share_prompts))
  step = ROW_MULTIPLE * -(-largest // (ROW_MULTIPLE * TRIED_LENGTHS))
  candidates = map(lay, range(-(-longest // step) * step, 3 * largest + step, step))
  layout = min(candidates, key=lambda layout: (layout.shape[0] * layout.shape[1], layout.shape[1]))
  # On a CPU a row at a time is as fast as all of them, and takes a fraction of the memory.
  at_a_time = layout.shape[0] if not job.microbatch and jax.default_backend() == "cpu" else num_micro_batches
  return sequences, layout, at_a_time


def load_model(job: TrainJob) -> tuple[Model, Params]:
  """The model with its weights, which are float32 whatever is computed with."""
  model, params = load(job.checkpoint, dtype="float32", compute_dtype=job.dtype, remat=job.remat)
  return model, jax.block_until_ready(params)


def compiled(job: TrainJob, model: Model, state: TrainState, rows: TrainBatch, *, num_micro_batches: int = 1, donate: bool = True):
  """`(state, batch) -> (state, metrics)` of a job, compiled for rows like these.

  Args:
    job: what to do.
    model: of the checkpoint.
    state: like those that come.
    rows: like those that come.
    num_micro_batches: pieces of the rows.
    donate: whether the state given is used up.
  """
  objective = make_objective(job.objective)
  optimizer, schedule = optimizer_of(job)
  outputs_fn = partial(policy_outputs, model.logprobs, make_filter(), learns_entropy="entropy" in objective.needs)
  step = make_train_step(outputs_fn, objective, optimizer, learning_rate=schedule, num_micro_batches=num_micro_batches)
  program = jax.jit(step, donate_argnums=0 if donate else ()).lower(state, rows).compile()
  give_back_memory()
  return program


def prepare(job: TrainJob, batch: Batch, model: Model, state: TrainState) -> Update:
  """Compiles a job.

  Args:
    job: what to do.
    batch: of the job.
    model: of the checkpoint.
    state: to begin with; it is not changed.
  """
  sequences, layout, num_micro_batches = lay_out(job, batch)
  pack = partial(packing.pack, sequences, layout)
  started = time.perf_counter()
  step = compiled(job, model, state, pack(), num_micro_batches=num_micro_batches)
  seconds = time.perf_counter() - started
  return Update(pack, step, layout, num_micro_batches, sequences, seconds, getattr(step.memory_analysis(), "temp_size_in_bytes", None))


def fresh_state(job: TrainJob, params: Params) -> TrainState:
  """The train state before the first update."""
  return init_state(params, optimizer_of(job)[0])


def attended_pairs(sequences: list[Trajectory], layout: Layout | None = None) -> int:
  """Pairs of query and key: those of a prompt once for all responses that share it there, or for each where there is no layout."""
  triangle = lambda length: length * (length + 1) // 2
  if layout is None:
    return sum(triangle(len(sequence.tokens)) for sequence in sequences)
  prompts = {(row, prefix): shared for row, (_, prefix, shared) in zip(layout.rows, layout.segments) if shared}
  own = [triangle(len(slots)) - triangle(shared) for slots, (_, _, shared) in zip(layout.slots, layout.segments)]
  return sum(map(triangle, prompts.values())) + sum(own)


def measure(job: TrainJob, *, repeats: int) -> dict[str, Any]:
  """Does a job and says how it went.

  Args:
    job: what to do.
    repeats: timed updates.
  """
  started = time.perf_counter()
  model, params = load_model(job)
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
    "tokens": {"responses": len(batch.advantages), "real": batch.num_tokens, "completion": batch.num_completion_tokens},
    "tokens_per_s": rates(batch.num_tokens),
    "completion_tokens_per_s": rates(batch.num_completion_tokens),
    "seconds": spread(seconds),
    "pack_seconds": spread(pack_seconds),
    "rows": {"rows": rows.segments.shape[0], "row_tokens": rows.segments.shape[1], "used": used,
             "micro_batches": update.num_micro_batches},
    "waste": {"padding": 1 - used / slots, "prompts_saved": packing.prompts_saved(update.sequences, [rows])},
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
  """The results as lines of text."""
  job, rows, tokens, roof, memory = (result[name] for name in ("job", "rows", "tokens", "roofline", "memory"))
  machine, waste = roof["machine"], result["waste"]
  source = "the peak measured here, by float32 products" if machine["source"].startswith("measured") else machine["source"]
  return lines({
    "job": f"{job['objective']}, {job['optimizer']}, {tokens['responses']} responses, {tokens['real']:,} tokens with their prompts, "
    f"{tokens['completion']:,} without; {job['dtype']}, {result['model']['parameters']:,} parameters",
    "device": f"{result['device']['kind']}, JAX {result['device']['jax']}",
    "tokens/s": f"{between(result['tokens_per_s'], ',.0f')} real ones, {between(result['completion_tokens_per_s'], ',.0f')} of responses",
    "seconds": f"{between(result['seconds'], '.3f')} an update; packing takes {1e3 * result['pack_seconds']['median']:.1f} ms more",
    "MFU": f"{between(roof['mfu'], '.1%')} of {machine['flops_per_s'] / 1e9:,.0f} GFLOP/s "
    f"({source}), for {roof['flops'] / 1e9:,.1f} GFLOP; "
    f"{roof['unshared_flops'] / 1e9:,.1f} if nothing were shared",
    "rows": f"{rows['rows']} of {rows['row_tokens']} slots, in {rows['micro_batches']} micro-batches",
    "waste": f"{waste['padding']:.1%} of the slots are padding; sharing prompts saves {waste['prompts_saved']:.1%} of the tokens",
    "compile": f"{result['compile_s']:.1f} s; weights loaded in {result['load_s']:.1f} s",
    "memory": f"{megabytes(memory['peak_bytes'])} ({memory['source']}), {megabytes(memory['increase_bytes'])} over the loaded weights; "
    f"temporaries of the program {megabytes(memory['program_temp_bytes'])}",
    "first update": f"loss {result['first']['loss']:.8f}, gradient norm {result['first']['grad_norm']:.8f}",
  })  # fmt: skip


def main(argv: list[str] | None = None) -> int:
  """The command; its exit status."""
  parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.train_step", description=__doc__.splitlines()[0])
  add_flags(parser)
  args = parser.parse_args(argv)
  try:
    job = job_from(args)
    check(job)
    result = measure(job, repeats=args.repeats)
  except (ValueError, OSError, ImportError) as error:
    print(error, file=sys.stderr)
    return 2
  print(describe(result))
  write_json(args.json, result)
  return 0


if __name__ == "__main__":
  sys.exit(main())
