"""Time of a rollout batch of conversations: the decoding engine against the batch sampler.

  python -m experiments.benchmarks.conversations --config=configs/tools.py --warm_steps=150

Both hold conversations on the same problems with the same weights, after a short warm start that
makes them realistic, in one process and in turns; a batch of each is not counted. Both draw the
same conversations. The batch sampler is called once per turn for all of them, and the engine as
they go. The benchmark prints the seconds of both and the tokens that pass through the model,
padding included.
"""

import argparse
import importlib
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.reporting import at_least_one, lines, report
from jaxrl_llm import train
from jaxrl_llm.decoding.sampler import Requests
from jaxrl_llm.devices import hosts
from jaxrl_llm.rollouts.arrivals import gather
from jaxrl_llm.rollouts.jobs import Examples
from jaxrl_llm.rollouts.sweeps import Sweeps
from jaxrl_llm.run.setup.start import Run, start_run
from jaxrl_llm.run.steps.sample import move_weights
from jaxrl_llm.types import Params, Rollouts


def by_sampler(run: Run) -> Callable[[Examples, jax.Array], dict[str, float]]:
  """Returns a function `(problems, key) -> measurements` that calls the sampler once per turn."""
  drawing = run.experiment.drawing
  width, placing = max(drawing.prompt_buckets), dict(mesh=drawing.mesh, prompt_buckets=drawing.prompt_buckets)

  def draw(examples: Examples, key: jax.Array) -> dict[str, float]:
    computed = 0

    def sample(params: Params, prompts: jax.Array, mask: jax.Array, requests: Requests) -> Rollouts:
      nonlocal computed
      drawn = hosts.to_host(drawing.programs.sample(params, prompts, mask, requests))
      new = drawn.mask.sum(axis=1) - np.asarray(requests.partial.lengths)
      # All budgets are prefilled, and all rows decode until the last one has ended its turn.
      computed += len(examples) * width + drawn.mask.size + int(new.max()) * len(new)
      return drawn

    job = drawing.train.job(examples, key, run.state.params)
    playing = Sweeps(move_weights(run), job, sample=sample, tokenizer=drawing.tokenizer, rules=drawing.rules, **placing)
    drawn, metrics = gather(playing, job, drawing.tokenizer, prompt_buckets=drawing.prompt_buckets)
    return metrics | {"tokens": float(drawn.rollouts.mask.sum()), "computed": float(computed)}

  return draw


def by_engine(run: Run) -> Callable[[Examples, jax.Array], dict[str, float]]:
  """Returns a function `(problems, key) -> measurements` that uses the engine."""
  drawing = run.experiment.drawing

  def draw(examples: Examples, key: jax.Array) -> dict[str, float]:
    job = drawing.train.job(examples, key, run.state.params)
    drawing.queue.publish(move_weights(run), run.record.rl_steps)
    playing = drawing.queue.begin(drawing.train.play, job)
    drawn, metrics = gather(playing, job, drawing.tokenizer, prompt_buckets=drawing.prompt_buckets)
    return metrics | {"tokens": float(drawn.rollouts.mask.sum()), "computed": metrics["conversation/computed_tokens"]}

  return draw


def measure(args: argparse.Namespace) -> dict[str, Any]:
  """Runs both in turns and measures them."""
  at_least_one(args, "warm_steps", "repeats")
  module, _, argument = args.config.partition(":")
  config = importlib.import_module(module.removesuffix(".py").replace("/", ".")).get_config(argument)
  config.log.tensorboard, config.log.num_table_rows = False, 0
  config.warm_start.num_steps = args.warm_steps
  if args.slots:
    config.rollout.slots = args.slots
  with tempfile.TemporaryDirectory() as folder:
    run = start_run(config, pathlib.Path(folder))
    if run.experiment.drawing.rules is None or run.experiment.drawing.why_drain is not None:
      raise ValueError(f"--config={args.config}: found no conversations that the engine can draw, expected some")
    with run.phases, run.experiment.drawing.queue, run.grader, run.progress, run.writer, run.samples:
      train.warm_start(run)
      run.phases.begin("rollout")
      move_weights(run)
      ways = {"sampler": by_sampler(run), "engine": by_engine(run)}
      results: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
      for repeat in range(args.repeats + 1):
        examples, key = next(run.prompts), jax.random.fold_in(jax.random.key(args.seed), repeat)
        for name, draw in ways.items():
          started, cpu_started = time.perf_counter(), time.process_time()
          result = draw(examples, key)
          result |= {"s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu_started}
          if repeat:
            results[name].append(result)
  ratios = [theirs["s"] / ours["s"] for ours, theirs in zip(results["engine"], results["sampler"], strict=True)]
  device = jax.devices()[0]
  return {
    "device": {"kind": device.device_kind, "platform": device.platform, "jax": jax.__version__},
    "settings": {name: str(value) if isinstance(value, pathlib.Path) else value for name, value in vars(args).items()},
    "results": results,
    "ratio": ratios,
    "median_ratio": statistics.median(ratios),
  }


def describe(result: dict[str, Any]) -> str:
  """Formats the results as lines of text."""
  spread = lambda values, form: f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"

  def line(rows: list[dict[str, float]]) -> str:
    mean = lambda name: np.mean([row[name] for row in rows])
    of = lambda name: [row[name] for row in rows]
    return (
      f"{spread(of('s'), '.3f')} s, {spread(of('cpu_s'), '.3f')} s of the CPU; {mean('computed'):,.0f} tokens computed for "
      f"{mean('tokens'):,.0f}, {mean('conversation/turns/mean'):.2f} turns"
    )

  return lines(
    {
      "job": f"{result['settings']['config']} after {result['settings']['warm_steps']} steps of imitation",
      "device": f"{result['device']['kind']}, JAX {result['device']['jax']}",
      **{name: line(rows) for name, rows in result["results"].items()},
      "times as fast": spread(result["ratio"], ".2f"),
    }
  )


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit status."""
  parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.conversations", description=__doc__.splitlines()[0])
  parser.add_argument("--config", default="configs/tools.py", help="a file of configs/ with an environment, and :ARGUMENT")
  parser.add_argument("--warm_steps", type=int, default=150, help="number of imitation steps before")
  parser.add_argument("--slots", type=int, default=0, help="rows of both; 0 means those of the config")
  parser.add_argument("--repeats", type=int, default=5, help="number of timed batches of each")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--json", type=pathlib.Path, help="file for the results")
  args = parser.parse_args(argv)
  return report(lambda: measure(args), describe, args.json)


if __name__ == "__main__":
  sys.exit(main())
