"""Three layouts of a batch: shared prompts, packed rows, and one sequence per padded row.

  python -m experiments.benchmarks.packing --checkpoint=DIR --batch=FILE.npz

The layouts alternate in one process. All of them compute the same loss, which is printed as a
check. The flags and the batch are those of `train_step.py`.
"""

import argparse
import sys
import time

import jax

from experiments.benchmarks import train_step
from experiments.benchmarks.engines.train_job import TrainJob, add_flags, job_from, read_batch
from experiments.benchmarks.reporting import between, spread, write_json
from jaxrl_llm.learner import packing

FIRST = "shared"


def jobs(job: TrainJob, longest: int) -> dict[str, TrainJob]:
  """Makes the jobs of the three layouts, which differ only in their rows.

  Args:
    job: Job with the common settings.
    longest: Length of the longest sequence, in tokens. A packed row of this length may hold several
      short sequences, whereas a padded row holds only one.
  """
  return {
    FIRST: job._replace(share_prompts=True),
    "packed": job._replace(share_prompts=False),
    "padded": job._replace(share_prompts=False, row_tokens=longest),
  }


def measure(job: TrainJob, *, repeats: int) -> dict[str, dict]:
  """Times the three layouts in turn.

  Args:
    job: Job with the common settings.
    repeats: Number of timed updates of each layout.
  """
  model, params = train_step.load_model(job)
  batch = read_batch(job, vocab_size=model.config.vocab_size, max_positions=model.config.max_positions)
  longest = max(len(sequence.tokens) for sequence in train_step.trajectories(batch))
  # Nothing is learned: all layouts see the same weights, however often they run.
  state = train_step.fresh_state(job, params)
  steps, rows, layouts, losses, seconds = {}, {}, {}, {}, {}
  for name, each in jobs(job, longest).items():
    sequences, layouts[name], _ = train_step.lay_out(each, batch, alone=name == "padded")
    rows[name] = packing.pack(sequences, layouts[name])
    steps[name] = train_step.compiled(each, model, state, rows[name], donate=False)
    losses[name], seconds[name] = float(steps[name](state, rows[name])[1]["actor/loss"]), []
  for _ in range(repeats):
    for name, step in steps.items():
      started = time.perf_counter()
      jax.block_until_ready(step(state, rows[name]))
      seconds[name].append(time.perf_counter() - started)
  return {
    name: {
      "rows": list(rows[name].segments.shape),
      "padding": packing.packing_waste([layouts[name]]),
      "prompts_saved": packing.prompts_saved([layouts[name]]),
      "loss": losses[name],
      "seconds": spread(seconds[name]),
      "times_as_long": spread([each / first for each, first in zip(seconds[name], seconds[FIRST], strict=True)]),
    }
    for name in steps
  }


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit status."""
  parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.packing", description=__doc__.splitlines()[0])
  add_flags(parser)
  args = parser.parse_args(argv)
  try:
    job = job_from(args)
    train_step.check(job)
    result = measure(job, repeats=args.repeats)
  except (ValueError, OSError) as error:
    print(error, file=sys.stderr)
    return 2
  for name, x in result.items():
    shape, times = "{} rows of {} slots".format(*x["rows"]), between(x["times_as_long"], ".2f")
    print(f"{name}: {shape}, {x['padding']:.1%} padding, {x['prompts_saved']:.1%} shared, loss {x['loss']:.8f}")
    print(f"  {between(x['seconds'], '.3f')} s, {times} times as long as {FIRST}")
  write_json(args.json, result)
  return 0


if __name__ == "__main__":
  sys.exit(main())
