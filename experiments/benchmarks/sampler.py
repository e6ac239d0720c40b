"""Speed, latency and memory of the sampler on one job, and the share of the machine's roofline.

  python -m experiments.benchmarks.sampler --checkpoint=DIR --prompts=FILE.npz --group_size=8
    --max_new_tokens=128 --json=OUT

The job is generated `--repeats` times with different seeds, after one run that is not counted. The
benchmark prints, and writes as JSON, tokens/s, time to first token (prefill and first draw, in a
separate program), compile time, peak memory, and the roofline of `roofline.py` for the lengths that
were drawn. `random_checkpoint.py` makes a checkpoint and prompts if there are none.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import roofline
from experiments.benchmarks.engines import worker
from experiments.benchmarks.engines.job import Job, add_flags, job_from, left_padded, read_prompts
from experiments.benchmarks.reporting import between, lines, megabytes, peak_memory, spread, write_json
from jaxrl_llm.decoding.sampler import make_sampler, seeded
from jaxrl_llm.devices.xla_flags import set_flags
from jaxrl_llm.models import Model, load_params, make_model, read_config
from jaxrl_llm.types import Params, Rollouts

TEMP = "temp_size_in_bytes"


class Generation(NamedTuple):
  """Compiled job.

  Attributes:
    run: Function `(seed) -> rollouts`, with the rollouts on the host.
    prompt_lengths: Length of each prompt, in tokens.
    compile_seconds: Time of tracing and compiling, in s.
    temp_bytes: Temporaries of the program according to the compiler, in bytes; None if unknown.
  """

  run: Callable[[int], Rollouts]
  prompt_lengths: list[int]
  compile_seconds: float
  temp_bytes: int | None


def generate_fn(model: Model, job: Job, *, max_new_tokens: int, slots: int | None) -> Callable[..., Rollouts]:
  """Makes the sampler of a job, `(params, prompts, prompt_mask, requests) -> rollouts`.

  This is the only call that depends on the signature of `make_sampler`.
  """
  return make_sampler(
    model,
    group_size=job.group_size,
    max_new_tokens=max_new_tokens,
    stop_ids=job.stop_ids,
    pad_id=job.pad_id,
    temperature=job.temperature,
    top_k=job.top_k,
    top_p=job.top_p,
    slots=slots,
  )


def load_model(job: Job, **changes: Any) -> tuple[Model, Params]:
  """Loads the model and its weights, in the dtype of the job.

  Args:
    job: Job with the checkpoint.
    **changes: Fields of `ModelConfig` to set.
  """
  config = read_config(job.checkpoint)._replace(param_dtype=job.dtype, dtype=job.dtype, **changes)
  model = make_model(config)
  return model, jax.block_until_ready(load_params(job.checkpoint, model))


def prepare(job: Job, model: Model, params: Params, *, max_new_tokens: int | None = None) -> Generation:
  """Compiles a job.

  Args:
    job: Job to compile.
    model: Model of the checkpoint.
    params: Weights of the model.
    max_new_tokens: Budget that replaces the job's; with 1, the program is the prefill and the first
      draw, and needs no slots.
  """
  rows = read_prompts(job, vocab_size=model.config.vocab_size, max_positions=model.config.max_positions)
  prompts = [jnp.asarray(x) for x in left_padded(rows, job.pad_id)]
  slots = None if max_new_tokens == 1 else job.slots or None
  sample = generate_fn(model, job, max_new_tokens=max_new_tokens or job.max_new_tokens, slots=slots)
  started = time.perf_counter()
  requests = lambda seed: seeded(jax.random.fold_in(jax.random.key(job.seed), seed), len(rows) * job.group_size)
  compiled = jax.jit(sample).lower(params, *prompts, requests(0)).compile()
  seconds = time.perf_counter() - started
  run = lambda seed: jax.device_get(compiled(params, *prompts, requests(seed)))
  return Generation(run, [len(row) for row in rows], seconds, getattr(compiled.memory_analysis(), TEMP, None))


def measure(job: Job, *, repeats: int, **changes: Any) -> dict[str, Any]:
  """Runs a job and measures it.

  Args:
    job: Job to run.
    repeats: Number of timed runs.
    **changes: Fields of `ModelConfig` to set.
  """
  started = time.perf_counter()
  model, params = load_model(job, **changes)
  load_seconds, loaded_bytes = time.perf_counter() - started, worker.resident_bytes()
  device, weight_bytes = jax.devices()[0], sum(x.nbytes for x in jax.tree.leaves(params))
  generation = prepare(job, model, params)
  generation.run(repeats)  # The first run allocates memory and is not timed.

  gc.collect()
  worker.reset_peak()
  seconds, runs = [], []
  for repeat in range(repeats):
    started = time.perf_counter()
    runs.append(generation.run(repeat))
    seconds.append(time.perf_counter() - started)
  memory = peak_memory(
    device, loaded_bytes=loaded_bytes, weight_bytes=weight_bytes, temp_bytes=generation.temp_bytes
  )

  first = prepare(job, model, params, max_new_tokens=1)
  first_seconds = []
  for repeat in range(repeats + 1):
    started = time.perf_counter()
    first.run(repeat)
    first_seconds.append(time.perf_counter() - started)

  machine = roofline.find_machine(device, weight_bytes)
  lengths = [np.sum(run.mask, axis=1) for run in runs]
  itemsize, slots = jnp.dtype(job.dtype).itemsize, job.slots or None
  works = [
    roofline.rollout(model.config, generation.prompt_lengths, x, slots=slots, itemsize=itemsize) for x in lengths
  ]
  bounds = [roofline.bound(work, machine) for work in works]
  first_bound = roofline.bound(roofline.prefill(model.config, generation.prompt_lengths, itemsize=itemsize), machine)
  every = np.concatenate(lengths)
  middle = int(np.argsort(seconds)[len(seconds) // 2])
  return {
    "job": job._asdict()
    | {"num_prompts": len(generation.prompt_lengths), "prompt_tokens": sum(generation.prompt_lengths)},
    "device": {"kind": device.device_kind, "platform": device.platform, "jax": jax.__version__},
    "model": {"parameters": model.num_params, "weight_bytes": weight_bytes},
    "tokens_per_s": spread([float(np.sum(x)) / s for x, s in zip(lengths, seconds)]),
    "seconds": spread(seconds),
    "generated_tokens": [int(np.sum(x)) for x in lengths],
    "response_length": {
      "mean": float(np.mean(every)),
      "median": float(np.median(every)),
      "max": int(np.max(every)),
    },
    "stopped_fraction": float(np.mean([run.stopped for run in runs])),
    "mean_logprob": float(sum(np.sum(run.logprobs) for run in runs) / np.sum(every)),
    "time_to_first_token_s": spread(first_seconds[1:]),
    "load_s": load_seconds,
    "compile_s": generation.compile_seconds,
    "memory": memory,
    "roofline": {
      "machine": machine._asdict(),
      "of_median_run": bounds[middle]._asdict(),
      "tokens_per_s": float(np.sum(lengths[middle])) / bounds[middle].seconds,
      "fraction": spread([bound.seconds / s for bound, s in zip(bounds, seconds)]),
      "first_token_s": first_bound.seconds,
      "first_token_fraction": first_bound.seconds / statistics.median(first_seconds[1:]),
    },
  }


def describe(result: dict[str, Any]) -> str:
  """Formats the results as lines of text."""
  job, roof, memory, lengths = result["job"], result["roofline"], result["memory"], result["response_length"]
  machine, bound = roof["machine"], roof["of_median_run"]
  rows = {
    "job": f"{job['num_prompts']} prompts ({job['prompt_tokens']} tokens) x {job['group_size']} samples, "
    f"up to {job['max_new_tokens']} new tokens, {job['dtype']}, slots {job['slots'] or 'all'}, "
    f"{result['model']['parameters']:,} parameters",
    "device": f"{result['device']['kind']}, JAX {result['device']['jax']}",
    "tokens/s": between(result["tokens_per_s"], ",.0f"),
    "seconds": between(result["seconds"], ".3f"),
    "tokens": f"{statistics.median(result['generated_tokens']):,.0f} per run; length mean {lengths['mean']:.1f}, "
    f"median {lengths['median']:.0f}, max {lengths['max']}; {result['stopped_fraction']:.0%} ended by a stop token; "
    f"mean log-probability {result['mean_logprob']:.4f}",
    "first token": f"{between(result['time_to_first_token_s'], ',.1f', 1e3)} ms, "
    f"{roof['first_token_fraction']:.0%} of the bound's speed",
    "compile": f"{result['compile_s']:.1f} s; weights loaded in {result['load_s']:.1f} s",
    "memory": f"{megabytes(memory['peak_bytes'])} ({memory['source']}), "
    f"{megabytes(memory['increase_bytes'])} over the loaded weights; "
    f"temporaries of the program {megabytes(memory['program_temp_bytes'])}",
    "machine": f"{machine['flops_per_s'] / 1e9:,.0f} GFLOP/s, {machine['bytes_per_s'] / 1e9:,.1f} GB/s "
    f"({machine['source']})",
    "roofline": f"{bound['seconds']:.4f} s in {bound['steps']} steps ({roof['tokens_per_s']:,.0f} tokens/s): "
    f"{bound['flops'] / 1e9:,.1f} GFLOP take {bound['compute_seconds']:.4f} s, "
    f"{bound['num_bytes'] / 1e9:,.2f} GB {bound['memory_seconds']:.4f} s",
    "reached": f"{between(roof['fraction'], '.1%')} of the roofline",
  }
  return lines(rows)


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> tuple[argparse.Namespace, Job]:
  """Parses the flags and the job, and checks everything that needs no weights.

  Raises:
    ValueError: If something is wrong. One line that names the flag or the file.
  """
  args = parser.parse_args(argv)
  job = job_from(args)
  config = read_config(job.checkpoint)
  read_prompts(job, vocab_size=config.vocab_size, max_positions=config.max_positions)
  return args, job


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m experiments.benchmarks.sampler", description=__doc__.splitlines()[0]
  )
  add_flags(parser)
  parser.add_argument("--attention", choices=("auto", "xla", "ragged"), default="auto", help="attention of a decoding step")
  parser.add_argument("--exact", action="store_true", help="compute as with config.numerics.exact")
  try:
    args, job = parse(parser, argv)
    if args.exact:
      set_flags(exact=True)
    result = measure(job, repeats=args.repeats, decode_attention=args.attention, exact=args.exact)
  except (ValueError, OSError, ImportError) as error:
    print(str(error).replace("rollout.", "--"), file=sys.stderr)
    return 2
  print(describe(result))
  write_json(args.json, result)
  return 0


if __name__ == "__main__":
  sys.exit(main())
