"""Checkpoint with random weights, as transformers saves it, and prompts for it.

It lets samplers be timed where nothing can be downloaded.

  python -m experiments.benchmarks.random_checkpoint --hidden=256 --layers=4 --vocab=4096
    --prompts=16 --prompt_tokens=64 DIR

The weights have the shapes of Qwen3 and cost as much as trained weights. With `--lengths=lognormal`
responses end by themselves, at log-normal lengths, in every engine, through nothing but the
ordinary stop token at temperature 1.

Tokens fall into classes 0, 1, 2, ..., and each class has its own direction of the residual stream.
Embeddings are large, and layers write only to the other directions. After a token of class t, the
head yields a token of class t + 1, or the stop token with the probability h(t) that a response of t
tokens ends at the next. Prompts end with a token of class 0. Responses therefore have independent
lengths L with P(L = t + 1 | L > t) = h(t), the hazard of the log-normal distribution.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import Experts, ModelConfig, make_model, save_hf
from jaxrl_llm.types import Params

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
NUM_SPECIAL = 3
HEAD_DIM = 64
FAMILIES = ("qwen3",)

SCALE = 16.0  # Root mean square of an embedding; that of the layers' output is about 1.
MARGIN = 16.0  # Logit of the next class above all others.
OWN = 0.25  # Relative size of the part of an embedding that distinguishes the tokens of a class.


def qwen3(
  hidden: int, layers: int, vocab: int, *, experts: int = 0, top_k: int = 2, max_positions: int = 4096
) -> ModelConfig:
  """Makes the config of a small Qwen3.

  The experts that a token visits are together as wide as the dense feed-forward layer.

  Raises:
    ValueError: If the width is no multiple of two heads, or of the experts that a token visits.
  """
  if experts and not (1 <= top_k <= experts and 3 * hidden % top_k == 0):
    raise ValueError(f"--top_k: found {top_k}, expected a divisor of {3 * hidden} up to --experts={experts}")
  if hidden < 2 * HEAD_DIM or hidden % (2 * HEAD_DIM):
    raise ValueError(
      f"--hidden: found {hidden}, expected a multiple of {2 * HEAD_DIM}: two heads share one head of keys and values"
    )
  heads = hidden // HEAD_DIM
  return ModelConfig(
    vocab_size=vocab, num_layers=layers, d_model=hidden, num_heads=heads, num_kv_heads=heads // 2, head_dim=HEAD_DIM, d_ff=3 * hidden,
    rope_theta=1e6, qk_norm=True, tie_embeddings=False, max_positions=max_positions,
    experts=Experts(experts, top_k, 3 * hidden // top_k) if experts else None,
  )  # fmt: skip


def lognormal_hazard(cap: int, *, median: float, sigma: float) -> np.ndarray:
  """Computes h(t) for t = 0 to cap - 1, the hazard of the log-normal distribution.

  It is the probability that a response longer than t has t + 1 tokens.

  Example:
    >>> survival = np.cumprod(1 - lognormal_hazard(128, median=36, sigma=1.0))
    >>> bool(survival[34] > 0.5 > survival[36])
    True
  """
  normal = statistics.NormalDist(math.log(median), sigma)
  survival = np.array([1.0, *(1 - normal.cdf(math.log(t)) for t in range(1, cap + 1))])
  return 1 - survival[1:] / survival[:-1]


def with_lengths(params: Params, hazard: np.ndarray, *, rng: np.random.Generator) -> tuple[Params, np.ndarray]:
  """Changes weights so that responses end by a given hazard.

  Args:
    params: Parameters of a model with an untied head.
    hazard: Hazard of each length.
    rng: Generator of the classes and directions.

  Returns:
    The parameters, and the class of each id, which is -1 for special ids.

  Raises:
    ValueError: If half of the model's width, or its vocabulary, is too small for the lengths.
  """
  (vocab, width), count = params["embedding"].shape, len(hazard)
  if 2 * count > width:
    raise ValueError(
      f"--cap: found {count}, expected at most half of --hidden={width}: "
      "each takes a direction, layers need the others"
    )
  if (vocab - NUM_SPECIAL) < 2 * count:
    raise ValueError(
      f"--vocab: found {vocab}, expected at least {2 * count + NUM_SPECIAL}: "
      "two tokens for each length, and the special tokens"
    )
  basis = np.linalg.qr(rng.normal(size=(width, width)))[0]
  directions, spare = basis[:count], basis[count:]
  classes = np.full(vocab, -1)
  classes[NUM_SPECIAL:] = rng.permutation(np.arange(vocab - NUM_SPECIAL) % count)
  ordinary = classes >= 0
  own = rng.normal(size=(vocab, len(spare))) @ spare * math.sqrt(width / len(spare))
  embedding = SCALE * own
  embedding[ordinary] = SCALE * (math.sqrt(width) * directions[classes[ordinary]] + OWN * own[ordinary])
  # The final norm maps a token of class t to √width · directions[t], shortened by the other parts.
  shortened = 1 / math.sqrt(1 + OWN**2)
  read = directions / (math.sqrt(width) * shortened)
  sizes = np.bincount(classes[ordinary], minlength=count)
  head = np.zeros((width, vocab))
  last = count - 1
  for t in range(count):
    following = np.flatnonzero(classes == min(t + 1, last))
    head[:, following] += MARGIN * read[t][:, None]
    odds = math.log(max(hazard[t], 1e-9) / (1 - hazard[t])) + math.log(sizes[min(t + 1, last)])
    head[:, EOS_ID] += (MARGIN + odds) * read[t]
  confined = lambda x: x @ (spare.T @ spare)
  changes = {("embedding",): lambda x: embedding, ("head",): lambda x: head}
  changes |= dict.fromkeys([("layers", "attention", "o"), ("layers", "mlp", "down")], confined)

  def change(path, x):
    return jnp.asarray(changes.get(tuple(part.key for part in path), lambda x: x)(np.asarray(x)), x.dtype)

  return jax.tree_util.tree_map_with_path(change, params), classes


def write(
  folder: pathlib.Path,
  config: ModelConfig,
  *,
  num_prompts: int,
  prompt_tokens: int,
  hazard: np.ndarray | None = None,
  seed: int = 0,
) -> pathlib.Path:
  """Writes a checkpoint and prompts.

  Args:
    folder: Folder of the checkpoint, which must be empty.
    config: Config of the model.
    num_prompts: Number of prompts (N).
    prompt_tokens: Length of each prompt (P).
    hazard: Hazard of the response lengths. None keeps the weights as they are initialised, with one
      stop token in the vocabulary.
    seed: Seed of the weights and prompts.

  Returns:
    The path of the prompts, a file in the folder.
  """
  rng = np.random.default_rng(seed)
  model = make_model(config)
  params = jax.jit(model.init)(jax.random.key(seed))
  prompts = rng.integers(NUM_SPECIAL, config.vocab_size, (num_prompts, prompt_tokens), dtype=np.int32)
  if hazard is not None:
    params, classes = with_lengths(params, hazard, rng=rng)
    prompts[:, -1] = rng.choice(np.flatnonzero(classes == 0), num_prompts)
  save_hf(folder, model, params)
  ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
  raw = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(raw | ids, indent=2, sort_keys=True) + "\n")
  (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
  np.savez(folder / "prompts.npz", prompts=prompts)
  return folder / "prompts.npz"


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m experiments.benchmarks.random_checkpoint", description=__doc__.splitlines()[0]
  )
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--family", choices=FAMILIES, default="qwen3")
  parser.add_argument(
    "--hidden",
    type=int,
    default=256,
    help="width; heads have 64 dimensions, keys and values half as many heads, feed-forward layers 3 times the width",
  )
  parser.add_argument("--layers", type=int, default=4)
  parser.add_argument("--vocab", type=int, default=4096)
  parser.add_argument("--experts", type=int, default=0, help="number of experts per layer; 0 for dense layers")
  parser.add_argument("--top_k", type=int, default=2, help="number of experts that each token visits")
  parser.add_argument("--prompts", type=int, default=16)
  parser.add_argument("--prompt_tokens", type=int, default=64)
  parser.add_argument(
    "--lengths", choices=("none", "lognormal"), default="none", help="distribution of the response lengths"
  )
  parser.add_argument("--median", type=float, default=36, help="median of the log-normal lengths")
  parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of their logarithm")
  parser.add_argument("--cap", type=int, default=128, help="length up to which they follow the distribution")
  parser.add_argument("--max_positions", type=int, default=4096, help="number of positions of the model")
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args(argv)
  try:
    if args.experts and args.lengths != "none":
      raise ValueError(
        f"--lengths: found {args.lengths!r}, expected 'none' with --experts, whose output is not confined"
      )
    config = qwen3(args.hidden, args.layers, args.vocab, experts=args.experts, top_k=args.top_k, max_positions=args.max_positions)
    hazard = (
      lognormal_hazard(args.cap, median=args.median, sigma=args.sigma) if args.lengths == "lognormal" else None
    )
    settings = dict(num_prompts=args.prompts, prompt_tokens=args.prompt_tokens, hazard=hazard, seed=args.seed)
    print(write(args.folder, config, **settings))
  except (ValueError, OSError) as error:
    print(error, file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
