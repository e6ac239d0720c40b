"""Random batch for a checkpoint with random weights: the work of an update without any sampling.

  python -m experiments.benchmarks.random_batch --checkpoint=DIR FILE.npz

Prompts and responses are random ids, because their content costs nothing. Responses have log-normal
lengths up to a cap, as reasoning responses have. `old_logps` are the checkpoint's own
log-probabilities with a little noise, so that ratios are near 1 but not 1. The advantages are those
of random rewards, normalised by group. `engines/train_job.py` describes the arrays.
"""

import argparse
import math
import pathlib
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.engines.job import resolve, token_ids
from experiments.benchmarks.random_checkpoint import EOS_ID, NUM_SPECIAL
from jaxrl_llm.advantages import group_advantages
from jaxrl_llm.models import Model, load
from jaxrl_llm.types import Params

ROWS_AT_A_TIME = 8


def lengths(count: int, *, median: float, sigma: float, cap: int, rng: np.random.Generator) -> np.ndarray:
  """Draws log-normal lengths from 1 to a cap, in random order.

  They are evenly spaced quantiles, so that even a few lengths follow the distribution.

  Example:
    >>> drawn = lengths(128, median=36, sigma=1.0, cap=128, rng=np.random.default_rng(0))
    >>> int(np.median(drawn)), int(drawn.min()), int(drawn.max())
    (36, 3, 128)
  """
  normal = statistics.NormalDist(math.log(median), sigma)
  quantiles = [math.exp(normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
  return rng.permutation(np.clip(np.rint(quantiles), 1, cap).astype(np.int64))


def logprobs(
  model: Model, params: Params, tokens: np.ndarray, positions: np.ndarray, segments: np.ndarray
) -> np.ndarray:
  """Computes log π(token) of every token; it is 0 for the first token of a row.

  A few rows are computed at a time, so that the logits stay small.
  """

  @jax.jit
  def score(params, *rows):
    scores = jax.nn.log_softmax(model.logits(params, *rows))
    return jnp.pad(jnp.take_along_axis(scores[:, :-1], rows[0][:, 1:, None], axis=-1)[..., 0], ((0, 0), (1, 0)))

  pieces = [slice(start, start + ROWS_AT_A_TIME) for start in range(0, len(tokens), ROWS_AT_A_TIME)]
  return np.concatenate(
    [
      np.asarray(score(params, *(jnp.asarray(x[piece], jnp.int32) for x in (tokens, positions, segments))))
      for piece in pieces
    ]
  )


def make(
  model: Model, params: Params, *, rows: int, group_size: int, prompt_tokens: int, median: float, sigma: float, cap: int, noise: float,
  seed: int, eos_id: int = EOS_ID,
) -> dict[str, np.ndarray]:  # fmt: skip
  """Makes the arrays of a batch.

  Args:
    model: Model of the checkpoint.
    params: Weights of the model.
    rows: Number of responses (B).
    group_size: Number of responses to each prompt (G); a divisor of `rows`.
    prompt_tokens: Length of each prompt (P).
    median: Median of the response lengths.
    sigma: Standard deviation of the logarithm of the response lengths.
    cap: Maximum length of a response (C); a shorter response ends with `eos_id`.
    noise: Standard deviation of the noise of the old log-probabilities, in nats.
    seed: Seed of all random numbers.
    eos_id: Id that ends a response.
  """
  if rows % group_size:
    raise ValueError(f"--group_size: found {group_size}, expected a divisor of --rows={rows}")
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.integers(NUM_SPECIAL, model.config.vocab_size, shape, dtype=np.int32)
  prompts = np.repeat(draw(rows // group_size, prompt_tokens), group_size, axis=0)
  completions, counts = draw(rows, cap), lengths(rows, median=median, sigma=sigma, cap=cap, rng=rng)
  mask = np.arange(cap) < counts[:, None]
  completions[(np.arange(cap) == counts[:, None] - 1) & (counts[:, None] < cap)] = eos_id
  completions[~mask] = 0
  tokens = np.concatenate([prompts, completions], axis=1)
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  scores = logprobs(model, params, tokens, positions, np.ones_like(tokens))[:, prompt_tokens:]
  old = np.minimum(scores + noise * rng.normal(size=scores.shape), 0)
  advantages = group_advantages(jnp.asarray(rng.normal(size=rows), jnp.float32), group_size)
  return dict(
    prompt_ids=prompts,
    completion_ids=completions,
    completion_mask=mask.astype(np.int32),
    old_logps=np.where(mask, old, 0).astype(np.float32),
    advantages=np.asarray(advantages, np.float32),
  )


def add_flags(parser: argparse.ArgumentParser, *, prompt_tokens: int) -> None:
  """Adds the flags of a random batch; `prompt_tokens` is a default."""
  parser.add_argument("--group_size", type=int, default=8, help="number of responses to each prompt")
  parser.add_argument("--prompt_tokens", type=int, default=prompt_tokens)
  parser.add_argument("--median", type=float, default=36, help="median of the log-normal response lengths")
  parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of their logarithm")
  parser.add_argument("--cap", type=int, default=128, help="maximum length of a response")
  parser.add_argument("--seed", type=int, default=0)


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m experiments.benchmarks.random_batch", description=__doc__.splitlines()[0]
  )
  parser.add_argument("file", type=pathlib.Path)
  parser.add_argument("--checkpoint", required=True, help="a folder that transformers saved, or a .gguf file")
  parser.add_argument("--rows", type=int, default=128, help="number of responses")
  add_flags(parser, prompt_tokens=64)
  parser.add_argument("--noise", type=float, default=0.02, help="noise of the old log-probabilities, in nats")
  args = parser.parse_args(argv)
  try:
    path = resolve(args.checkpoint)
    eos_ids, _ = token_ids(path)
    model, params = load(path)
    settings = {name: value for name, value in vars(args).items() if name not in ("file", "checkpoint")}
    arrays = make(model, params, **settings, eos_id=eos_ids[0] if eos_ids else EOS_ID)
    args.file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(args.file, **arrays)
  except (ValueError, OSError) as error:
    print(error, file=sys.stderr)
    return 2
  counts = arrays["completion_mask"].sum(axis=1)
  total = counts.sum() + args.rows * args.prompt_tokens
  print(f"{args.file}: {args.rows} responses of {counts.min()} to {counts.max()} tokens, median {np.median(counts):g}, "
        f"mean {counts.mean():.1f}; {total:,} tokens with their prompts")  # fmt: skip
  return 0


if __name__ == "__main__":
  sys.exit(main())
