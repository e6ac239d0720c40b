"""Speed of the decoding engine under clients of mixed lengths, against the batch sampler.

  python -m experiments.benchmarks.service --checkpoint=DIR --clients=64 --requests=256 --json=OUT

Both draw the same requests in one process and take turns, after a run of each that is not counted.
The batch sampler knows all requests in advance and decodes them in as many rows as there are
clients, unless `--slots` says otherwise. The engine gets them from threads: each client submits a
request, waits for its completion, and submits the next one. Prompts have uniform lengths up to
`--prompt_tokens`, and completions log-normal ones. With `--http` the same clients live in another
process on the same cores and call the service over HTTP, as a third. The benchmark prints the
completed tokens per second of each, and the ratios to the batch sampler.
"""

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import multiprocessing
import pathlib
import queue
import statistics
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.engines.job import DTYPES, left_padded
from experiments.benchmarks.reporting import at_least_one, lines, report
from jaxrl_llm.decoding.engine.loop import DecodingEngine
from jaxrl_llm.decoding.engine.make import make_engine
from jaxrl_llm.decoding.engine.requests import Request
from jaxrl_llm.decoding.sampler import make_sampler, seeded
from jaxrl_llm.models import Model, load_params, make_model, read_config
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.serve import server
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
  requests = lambda seed: seeded(jax.random.key(seed), len(work.prompts))._replace(limits=jnp.asarray(work.budgets, jnp.int32))
  compiled = jax.jit(sample).lower(params, *prompts, requests(0)).compile()
  return lambda seed: int(np.sum(jax.device_get(compiled(params, *prompts, requests(seed))).mask))


def by_engine(engine: DecodingEngine, work: Work, *, clients: int) -> Callable[[int], int]:
  """Returns a function `(seed) -> number of tokens` that runs the clients."""

  def run(seed: int) -> int:
    # A salt for each run, so that no run reads the prefixes of an earlier one.
    requests = [
      Request(prompt.tolist(), int(budget), stop_ids=(0,), seed=seed * len(work.budgets) + i, salt=str(seed))
      for i, (prompt, budget) in enumerate(zip(work.prompts, work.budgets, strict=True))
    ]
    return by_clients([lambda i: len(engine.submit(requests[i]).completion.result().tokens)] * clients, len(requests))

  return run


def by_clients(clients: Sequence[Callable[[int], int]], count: int) -> int:
  """Runs each client in a thread; whichever is idle takes the next of `count` requests.

  Returns:
    The sum of what the clients return for their requests.
  """
  waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
  for i in range(count):
    waiting.put(i)

  def work(client: Callable[[int], int]) -> int:
    total = 0
    with contextlib.suppress(queue.Empty):
      while True:
        total += client(waiting.get_nowait())
    return total

  with concurrent.futures.ThreadPoolExecutor(len(clients)) as threads:
    return sum(threads.map(work, clients))


@contextlib.contextmanager
def by_service(engine: DecodingEngine, work: Work, *, clients: int, vocab_size: int) -> Iterator[Callable[[int], int]]:
  """Starts the service; yields a function `(seed) -> number of tokens` that runs the clients."""
  service = server.start(engine, ByteTokenizer(), name="model", vocab_size=vocab_size)
  # A process of their own, since clients would wait for Python's lock, and the engine for theirs.
  context = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process, contextlib.closing(service):

    def run(seed: int) -> int:
      bodies = []
      for i, (prompt, budget) in enumerate(zip(work.prompts, work.budgets, strict=True)):
        sampling = {"max_tokens": int(budget), "seed": seed * len(work.budgets) + i, "logprobs": 1}
        sampling |= {"ignore_eos": True, "stop_token_ids": [0]}
        bodies.append(json.dumps({"token_ids": prompt.tolist(), "sampling_params": sampling, "cache_salt": str(seed)}))
      return process.submit(call_service, service.url, bodies, clients).result()

    yield run


def call_service(url: str, bodies: Sequence[str], clients: int) -> int:
  """Calls the service from so many clients at once; returns the number of tokens of all answers."""

  def client() -> Callable[[int], int]:
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=600)

    def call(i: int) -> int:
      connection.request("POST", "/inference/v1/generate", bodies[i], {"content-type": "application/json"})
      answer = connection.getresponse()
      text = answer.read()
      if answer.status != 200:
        raise OSError(f"the service answered {answer.status}: {text[:200]!r}")
      return len(json.loads(text)["choices"][0]["token_ids"])

    return call

  return by_clients([client() for _ in range(clients)], len(bodies))


def measure(args: argparse.Namespace) -> dict[str, Any]:
  """Runs all in turns and measures them."""
  at_least_one(args, "clients", "requests", "prompt_tokens", "cap", "repeats")
  config = read_config(args.checkpoint)._replace(param_dtype=args.dtype, dtype=args.dtype)
  model = make_model(config)
  params = jax.block_until_ready(load_params(args.checkpoint, model))
  sizes = dict(prompt_tokens=args.prompt_tokens, median=args.median, sigma=args.sigma, cap=args.cap, seed=args.seed)
  work = make_work(requests=args.requests, vocab_size=config.vocab_size, **sizes)
  context = args.prompt_tokens + args.cap
  options = dict(chunk=args.chunk, spans=args.spans, steps=args.steps)
  engine = make_engine(model, params, slots=args.clients, context=context, max_requests=args.clients, **options)
  with contextlib.ExitStack() as opened:
    opened.callback(engine.close)
    runs = {
      "sampler": by_sampler(model, params, work, slots=args.slots or args.clients),
      "engine": by_engine(engine, work, clients=args.clients),
    }
    if args.http:
      runs["service"] = opened.enter_context(by_service(engine, work, clients=args.clients, vocab_size=config.vocab_size))
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(args.repeats + 1):
      for name, run in runs.items():
        started, cpu_started = time.perf_counter(), time.process_time()
        # A seed of its own, so that none reads the prefixes of another.
        tokens = run(repeat * len(runs) + list(runs).index(name))
        if repeat:
          speeds[name].append(tokens / (time.perf_counter() - started))
          cpu_seconds[name].append(time.process_time() - cpu_started)
  ratios = {
    name: [ours / theirs for ours, theirs in zip(own, speeds["sampler"], strict=True)] for name, own in speeds.items() if name != "sampler"
  }
  device = jax.devices()[0]
  return {
    "device": {"kind": device.device_kind, "platform": device.platform, "jax": jax.__version__},
    "settings": {name: str(value) if isinstance(value, pathlib.Path) else value for name, value in vars(args).items()},
    "work": {"prompt_tokens": sum(map(len, work.prompts)), "budget": int(work.budgets.sum())},
    "tokens_per_s": speeds,
    "cpu_s": cpu_seconds,
    "ratio": ratios,
    "median_ratio": {name: statistics.median(own) for name, own in ratios.items()},
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
      "ratio": ", ".join(f"{spread(own, '.2f')} by the {name}" for name, own in result["ratio"].items()),
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
  parser.add_argument("--http", action="store_true", help="also the service over HTTP, from clients in a process of their own")
  parser.add_argument("--repeats", type=int, default=5, help="number of timed runs of each")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--json", type=pathlib.Path, help="file for the results")
  args = parser.parse_args(argv)
  return report(lambda: measure(args), describe, args.json)


if __name__ == "__main__":
  sys.exit(main())
