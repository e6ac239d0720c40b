"""Speed of the decoding engine under clients of mixed lengths, against the batch sampler.

  python -m experiments.benchmarks.service --checkpoint=DIR --clients=64 --requests=256 --json=OUT

Both draw the same requests in one process and take turns, after a run of each that is not counted.
The batch sampler knows all requests in advance and decodes them in as many rows as there are
clients, unless `--slots` says otherwise. The engine gets them from threads: each client submits a
request, waits for its completion, and submits the next one. Prompts have uniform lengths up to
`--prompt_tokens`, and completions log-normal ones. The benchmark prints the completed tokens per
second of both, and their ratio.
"""

import argparse
import json
import pathlib
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.engines.job import DTYPES, left_padded
from experiments.benchmarks.reporting import lines, write_json
from jaxrl_llm.models import Model, load_params, make_model, read_config
from jaxrl_llm.sampler import Requests, make_sampler
from jaxrl_llm.serve.engine import DecodingEngine, make_engine
from jaxrl_llm.serve.requests import Request
from jaxrl_llm.types import Params


class Work(NamedTuple):
  """Requests of the benchmark.

  Attributes:
    prompts: Ids of each prompt.
    budgets: Number of tokens of each completion, which nothing ends earlier.
  """

  prompts: list[np.ndarray]
  budgets: np.ndarray


def make_work(*, requests: int, vocab_size: int, prompt_tokens: int, median: float, sigma: float, cap: int, seed: int) -> Work:
  """Draws prompts of uniform lengths and budgets of log-normal ones.

  Example:
    >>> work = make_work(requests=4, vocab_size=64, prompt_tokens=8, median=36, sigma=1, cap=128, seed=0)
    >>> [len(x) for x in work.prompts], work.budgets.tolist()
    ([7, 6, 5, 3], [69, 40, 22, 52])
  """
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, prompt_tokens + 1, requests)
  budgets = np.clip(np.ceil(rng.lognormal(np.log(median), sigma, requests)), 1, cap).astype(int)
  return Work([rng.integers(3, vocab_size, length) for length in lengths], budgets)


def by_sampler(model: Model, params: Params, work: Work, *, slots: int) -> Callable[[int], int]:
  """Compiles the batch sampler; returns a function `(seed) -> number of tokens`."""
  sample = make_sampler(model, group_size=1, max_new_tokens=int(work.budgets.max()), stop_ids=(0,), pad_id=0, slots=slots)
  # Id 0 makes the sampler refill its rows, and is drawn too rarely to matter.
  prompts = [jnp.asarray(x) for x in left_padded(work.prompts, 0)]
  requests = Requests(limits=jnp.asarray(work.budgets, jnp.int32))
  compiled = jax.jit(sample).lower(params, *prompts, jax.random.key(0), requests).compile()
  return lambda seed: int(np.sum(jax.device_get(compiled(params, *prompts, jax.random.key(seed), requests)).mask))


def by_engine(engine: DecodingEngine, work: Work, *, clients: int) -> Callable[[int], int]:
  """Returns a function `(seed) -> number of tokens` that runs the clients."""

  def run(seed: int) -> int:
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in range(len(work.budgets)):
      waiting.put(i)
    counts: list[int] = []

    def client() -> None:
      while True:
        try:
          i = waiting.get_nowait()
        except queue.Empty:
          return
        # A salt for each run, so that no run reads the prefixes of an earlier one.
        request = Request(work.prompts[i].tolist(), int(work.budgets[i]), stop_ids=(0,), seed=seed * len(work.budgets) + i, salt=str(seed))
        counts.append(len(engine.submit(request).completion.result().tokens))

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    return sum(counts)

  return run


def measure(args: argparse.Namespace) -> dict[str, Any]:
  """Runs both in turns and measures them."""
  config = read_config(args.checkpoint)._replace(param_dtype=args.dtype, dtype=args.dtype)
  model = make_model(config)
  params = jax.block_until_ready(load_params(args.checkpoint, model))
  sizes = dict(prompt_tokens=args.prompt_tokens, median=args.median, sigma=args.sigma, cap=args.cap, seed=args.seed)
  work = make_work(requests=args.requests, vocab_size=config.vocab_size, **sizes)
  context = args.prompt_tokens + args.cap
  options = dict(chunk=args.chunk, spans=args.spans, steps=args.steps)
  engine = make_engine(model, params, slots=args.clients, context=context, max_requests=args.clients, **options)
  runs = {
    "sampler": by_sampler(model, params, work, slots=args.slots or args.clients),
    "engine": by_engine(engine, work, clients=args.clients),
  }
  speeds: dict[str, list[float]] = {name: [] for name in runs}
  cpu_seconds: dict[str, list[float]] = {name: [] for name in runs}
  for repeat in range(args.repeats + 1):
    for name, run in runs.items():
      started, cpu_started = time.perf_counter(), time.process_time()
      tokens = run(repeat)
      if repeat:
        speeds[name].append(tokens / (time.perf_counter() - started))
        cpu_seconds[name].append(time.process_time() - cpu_started)
  engine.close()
  ratios = [ours / theirs for ours, theirs in zip(speeds["engine"], speeds["sampler"], strict=True)]
  device = jax.devices()[0]
  return {
    "device": {"kind": device.device_kind, "platform": device.platform, "jax": jax.__version__},
    "settings": {name: str(value) if isinstance(value, pathlib.Path) else value for name, value in vars(args).items()},
    "work": {"prompt_tokens": sum(map(len, work.prompts)), "budget": int(work.budgets.sum())},
    "tokens_per_s": speeds,
    "cpu_s": cpu_seconds,
    "ratio": ratios,
    "median_ratio": statistics.median(ratios),
  }


def describe(result: dict[str, Any]) -> str:
  """Formats the results as lines of text."""
  settings, work = result["settings"], result["work"]
  spread = lambda values, form: f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"
  return lines(
    {
      "job": f"{settings['requests']} requests of {settings['clients']} clients: {work['prompt_tokens']:,} tokens of prompts, "
      f"up to {work['budget']:,} of completions, {settings['dtype']}",
      "device": f"{result['device']['kind']}, JAX {result['device']['jax']}",
      **{
        name: f"{spread(values, ',.0f')} tokens/s, {spread(result['cpu_s'][name], '.1f')} s of the CPU"
        for name, values in result["tokens_per_s"].items()
      },
      "ratio": spread(result["ratio"], ".2f"),
    }
  )


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit status."""
  parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.service", description=__doc__.splitlines()[0])
  parser.add_argument("--checkpoint", required=True, help="a folder that transformers saved, or a .gguf file")
  parser.add_argument("--clients", type=int, default=64, help="number of threads that submit requests, and of rows")
  parser.add_argument("--requests", type=int, default=256, help="number of requests of all clients together")
  parser.add_argument("--prompt_tokens", type=int, default=64, help="largest number of tokens of a prompt")
  parser.add_argument("--median", type=float, default=36, help="median length of a completion")
  parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the logarithm of the lengths")
  parser.add_argument("--cap", type=int, default=128, help="largest length of a completion")
  parser.add_argument("--slots", type=int, default=0, help="rows of the batch sampler; 0 means as many as clients")
  parser.add_argument("--chunk", type=int, default=32, help="see make_engine")
  parser.add_argument("--spans", type=int, default=8, help="see make_engine")
  parser.add_argument("--steps", type=int, default=8, help="see make_engine")
  parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of weights and activations")
  parser.add_argument("--repeats", type=int, default=5, help="number of timed runs of each")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--json", type=pathlib.Path, help="file for the results")
  args = parser.parse_args(argv)
  try:
    for name in ("clients", "requests", "prompt_tokens", "cap", "repeats"):
      if getattr(args, name) < 1:
        raise ValueError(f"--{name}: found {getattr(args, name)}, expected 1 or more")
    result = measure(args)
  except (ValueError, OSError, ImportError, json.JSONDecodeError) as error:
    print(error, file=sys.stderr)
    return 2
  print(describe(result))
  write_json(args.json, result)
  return 0


if __name__ == "__main__":
  sys.exit(main())
