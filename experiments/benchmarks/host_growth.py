"""Growth of the host's work with the number of responses of an RL step.

  python -m experiments.benchmarks.host_growth --json=runs/host_growth.json

A batch of random text passes every part of the host's work in the order of a step, at several
sizes. Nothing is drawn and no model is computed: the sampler is a stub that returns the batch, and
a reward returns a number at once. What remains is the bookkeeping, whose time should grow as the
number of responses does. An exponent clearly above 1 is a fault.
"""

import argparse
import gc
import pathlib
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.benchmarks.random_batch import add_flags, lengths
from experiments.benchmarks.reporting import at_least_one, lines, report
from jaxrl_llm.advantages.estimators import make_credit
from jaxrl_llm.devices.mesh import make_mesh
from jaxrl_llm.learner import packing
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rollouts import arrivals, dynamic_sampling, sweeps, trajectories
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts.jobs import Conversation, Draws, Plan, to_completion
from jaxrl_llm.run.observe import garbage
from jaxrl_llm.types import Rollouts, StopReason

SIZES = (1_000, 10_000, 100_000)
_LETTERS = (32, 127)  # Ids of ASCII.


class Shape(NamedTuple):
  """Shape of the batches.

  Attributes:
    group_size: Number of responses per prompt (G).
    prompt_tokens: Length of each prompt (P).
    median: Median of the log-normal response lengths.
    sigma: Standard deviation of their logarithm.
    cap: Maximum length of a response (R).
    row_tokens: Number of slots of a packed row (T).
  """

  group_size: int
  prompt_tokens: int
  median: float
  sigma: float
  cap: int
  row_tokens: int


class Finished(NamedTuple):
  """Conversations that have all finished: a `Playing`.

  Attributes:
    conversations: The conversations.
  """

  conversations: list[Conversation]

  def __iter__(self) -> Iterator[list[Conversation]]:
    """Yields the batch."""
    yield self.conversations

  def wait(self) -> None:
    """Returns at once."""

  def close(self) -> None:
    """Does nothing."""


def drawn(size: int, shape: Shape, rng: np.random.Generator) -> Rollouts:
  """Makes the output of a sampler: N responses of letters, to prompts of letters."""
  tokenizer, (_, prompt_tokens, median, sigma, cap, _) = ByteTokenizer(), shape
  prompts = np.repeat(rng.integers(*_LETTERS, (size // shape.group_size, prompt_tokens), dtype=np.int32), shape.group_size, axis=0)
  prompts[:, 0] = tokenizer.bos_id
  counts = lengths(size, median=median, sigma=sigma, cap=cap, rng=rng)[:, None]
  mask = np.arange(cap) < counts
  tokens = np.where(mask, rng.integers(*_LETTERS, mask.shape, dtype=np.int32), tokenizer.pad_id).astype(np.int32)
  stopped = counts[:, 0] < cap
  tokens[(np.arange(cap) == counts - 1) & stopped[:, None]] = tokenizer.eos_id
  logprobs = np.where(mask, -rng.random(mask.shape), 0).astype(np.float32)
  reasons = np.where(stopped, StopReason.TOKEN, StopReason.LENGTH).astype(np.int8)
  return Rollouts(prompts, np.ones(prompts.shape, bool), tokens, mask, logprobs, stopped, raw_logprobs=logprobs, reasons=reasons)


def timed(do: Callable[[], Any], repeats: int) -> tuple[Any, dict[str, float]]:
  """Calls a part of the work, and returns its result with the CPU seconds of the fastest call."""
  seconds = []
  for _ in range(repeats):
    gc.collect()
    started = time.process_time()
    result = do()
    seconds.append(time.process_time() - started)
  return result, dict(cpu_seconds=min(seconds))


def counted(do: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
  """Calls a part of the work, and returns its result with its bytes, at the peak and in the result.

  Bytes are those of NumPy and Python.
  """
  gc.collect()
  tracemalloc.start()
  try:
    result = do()
    kept, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  return result, dict(peak_bytes=peak, kept_bytes=kept)


def parts(size: int, shape: Shape, cost_of: Callable[..., tuple[Any, dict[str, float]]], *, seed: int) -> dict[str, dict[str, float]]:
  """Measures each part of the host's work on a batch.

  Args:
    size: Number of responses (N), a multiple of the group size.
    shape: Shape of the batch.
    cost_of: Function `(part) -> (result, costs)` that calls a part: `timed` or `counted`.
    seed: Seed of the batch.
  """
  rng, tokenizer, key = np.random.default_rng(seed), ByteTokenizer(), jax.random.key(seed)
  rollouts, costs = drawn(size, shape, rng), {}
  examples = [{"prompt": tokenizer.decode(x[1:]), "answer": "", "level": 0} for x in rollouts.prompts[:: shape.group_size]]
  buckets, mesh, group_size = (shape.prompt_tokens,), make_mesh(devices=jax.devices()[:1]), shape.group_size
  rewards = [WeightedReward("even", lambda completion, example: float(completion.num_tokens % 2))]
  credit_of = make_credit("group", group_size)

  def measure(name: str, do: Callable[[], Any]) -> Any:
    result, costs[name] = cost_of(do)
    return result

  draws = dict(sample=lambda *_: rollouts, mesh=mesh, tokenizer=tokenizer, prompt_buckets=buckets)
  play = lambda params, job: sweeps.Sweep(params, job, **draws)
  plan = Plan(play, Draws(shape.cap, shape.prompt_tokens, stop_ids=tokenizer.stop_ids), group_size)
  job = measure("seeds", lambda: plan.job(examples, key, {}))
  sweep = measure("prompts", lambda: plan.play({}, job))
  (conversations,) = measure("responses", lambda: list(sweep))
  gathered, _ = measure("gather", lambda: arrivals.gather(Finished(conversations), job, tokenizer, prompt_buckets=buckets))
  measure("text", lambda: [to_completion(conversation) for conversation in conversations])
  list(gathered.responses)  # So that grading is measured without decoding.
  batch = measure("grading", lambda: batch_lib.assess(gathered.rollouts, gathered.responses, gathered.examples, rewards=rewards))
  evidence = measure("evidence", lambda: trajectories.evidence(batch, rewards=rewards))
  credit_of(evidence)  # Compiles.
  credit = measure("advantages", lambda: jax.device_get(credit_of(evidence)))
  signal = measure("signal", lambda: dynamic_sampling.with_signal(batch, credit_of, shaped=True, rewards=rewards))
  batch = batch._replace(advantages=credit.advantages, signal=signal)
  sequences = measure("trajectories", lambda: trajectories.trajectories(batch.rollouts, batch.counted, group_size=group_size))
  places = dict(row_tokens=shape.row_tokens, row_buckets=(size,), share_prompts=True, group_size=group_size)
  units = measure("units", lambda: [packing.units_of(sequences, share_prompts=share, group_size=group_size) for share in (False, True)])
  rows = measure("rows", lambda: packing.fewest_rows(*units, shape.row_tokens))
  layout = measure("arrange", lambda: packing.arrange(sequences, **places | {"row_buckets": (len(rows),)}))
  packed = measure("pack", lambda: packing.pack(sequences, layout))
  measure("lift", lambda: packing.lift(packed.old_logprobs, layout))
  measure("lay", lambda: packing.lay(trajectories.whole_sequences(credit.advantages, batch.rollouts), layout))
  measure("metrics", lambda: batch_lib.metrics(batch))
  measure("samples", lambda: batch_lib.sample_rows(batch, num_rows=64, token_text=tokenizer.decode))
  return costs


def exponent(sizes: list[int], values: list[float]) -> float:
  """Returns the slope of a line through log(value) over log(size), by least squares.

  Example:
    >>> round(exponent([10, 100, 1000], [2.0, 200.0, 20_000.0]), 6)
    2.0
  """
  return float(np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-9)), 1)[0])


def measure(sizes: list[int], shape: Shape, *, repeats: int, seed: int) -> dict[str, Any]:
  """Measures all parts at all sizes, and the exponents of their growth.

  Args:
    sizes: Numbers of responses, ascending; each is rounded down to whole groups.
    shape: Shape of the batches.
    repeats: Number of timed calls of each part.
    seed: Seed of the batches.

  Returns:
    By part: seconds of CPU and bytes at each size, their exponents, and the exponent of the time
    between the two largest sizes alone, where constant costs matter least.
  """
  sizes = [size // shape.group_size * shape.group_size for size in sizes]
  if len(sizes) < 2 or sizes != sorted(set(sizes)) or not sizes[0]:
    raise ValueError(f"--sizes: found {sizes} in whole groups of --group_size={shape.group_size}, expected two or more, ascending")
  if (longest := shape.prompt_tokens + shape.cap) > shape.row_tokens:
    raise ValueError(f"--row_tokens: found {shape.row_tokens}, expected at least {longest} (--prompt_tokens + --cap)")
  with garbage.exemption() as exempt:  # As in a run.
    exempt()
    seconds = [parts(size, shape, partial(timed, repeats=repeats), seed=seed) for size in sizes]
    # Counting leaves scattered memory behind, in which the same work takes longer.
    sizes_in_bytes = [parts(size, shape, counted, seed=seed) for size in sizes]
  by_part = {}
  for name in seconds[0]:
    costs = [x[name] | y[name] for x, y in zip(seconds, sizes_in_bytes, strict=True)]
    own = {kind: [cost[kind] for cost in costs] for kind in costs[0]}
    exponents = dict(exponent=exponent(sizes, own["cpu_seconds"]), last_exponent=exponent(sizes[-2:], own["cpu_seconds"][-2:]))
    by_part[name] = own | exponents | dict(peak_exponent=exponent(sizes, own["peak_bytes"]))
  return dict(sizes=sizes, shape=shape._asdict(), parts=by_part)


def describe(result: dict[str, Any]) -> str:
  """Formats the results as lines of text."""
  sizes, by_part = result["sizes"], result["parts"]
  per_response = lambda own, kind, scale: [scale * x / size for x, size in zip(own[kind], sizes, strict=True)]
  head = f"{'CPU us a response at':>34}{'exponent':>{12 * len(sizes) - 12}}{'the last':>10}{'peak B a response':>20}{'exponent':>10}"
  rows = {"": head, "part": "".join(f"{size:>12,}" for size in sizes)}
  for name, own in by_part.items():
    times = "".join(f"{x:>12.2f}" for x in per_response(own, "cpu_seconds", 1e6))
    bytes_each = per_response(own, "peak_bytes", 1)[-1]
    rows[name] = f"{times}{own['exponent']:>10.2f}{own['last_exponent']:>10.2f}{bytes_each:>20,.0f}{own['peak_exponent']:>10.2f}"
  total = [sum(own["cpu_seconds"][i] for own in by_part.values()) for i in range(len(sizes))]
  rows["all, s"] = "".join(f"{x:>12.2f}" for x in total) + f"{exponent(sizes, total):>10.2f}"
  return lines(rows)


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit status."""
  parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.host_growth", description=__doc__.splitlines()[0])
  parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of responses, ascending")
  add_flags(parser, prompt_tokens=32)
  parser.add_argument("--row_tokens", type=int, default=1024, help="slots of a packed row")
  parser.add_argument("--repeats", type=int, default=2, help="timed calls of each part, of which the fastest counts")
  parser.add_argument("--json", type=pathlib.Path, help="file for the results")
  args = parser.parse_args(argv)

  def run() -> dict[str, Any]:
    at_least_one(args, "group_size", "prompt_tokens", "cap", "repeats")
    shape = Shape(**{name: getattr(args, name) for name in Shape._fields})
    return measure([int(size) for size in args.sizes.split(",")], shape, repeats=args.repeats, seed=args.seed)

  return report(run, describe, args.json)


if __name__ == "__main__":
  sys.exit(main())
