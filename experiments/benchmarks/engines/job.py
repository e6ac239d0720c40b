"""Sampling job: the flags that all engines share, the prompts, and the stop ids. Starts no JAX."""

import argparse
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

DTYPES = ("float32", "bfloat16")


class Job(NamedTuple):
  """Sampling job, as it is sent to a worker.

  Attributes:
    checkpoint: Folder of transformers, or a `.gguf` file.
    prompts: Path of the `.npz` file.
    group_size: Number of samples per prompt (G).
    max_new_tokens: Budget of a response, in tokens.
    temperature: Temperature of the draw.
    top_k: Number of likeliest tokens to keep; 0 keeps all.
    top_p: Probability mass of likeliest tokens to keep; 1 keeps all.
    slots: Number of responses in progress at a time; 0 means all of them.
    dtype: Dtype of weights and activations.
    stop_ids: Ids that end a response; empty if none does.
    pad_id: Id that fills slots.
    seed: Seed of the draws.
  """

  checkpoint: str
  prompts: str
  group_size: int = 8
  max_new_tokens: int = 128
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  slots: int = 0
  dtype: str = "float32"
  stop_ids: tuple[int, ...] = ()
  pad_id: int = 0
  seed: int = 0


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of a job."""
  parser.add_argument("--checkpoint", required=True, help="a folder that transformers saved, or a .gguf file")
  parser.add_argument(
    "--prompts",
    required=True,
    help=".npz with `prompts` int32 [N P], and `lengths` int32 [N] if some prompts are shorter",
  )
  parser.add_argument("--group_size", type=int, default=8, help="number of samples per prompt")
  parser.add_argument("--max_new_tokens", type=int, default=128, help="budget of a response, in tokens")
  parser.add_argument("--temperature", type=float, default=1.0)
  parser.add_argument("--top_k", type=int, default=0, help="0 keeps all tokens")
  parser.add_argument("--top_p", type=float, default=1.0, help="1 keeps all tokens")
  parser.add_argument("--slots", type=int, default=0, help="responses in progress at a time; 0 means all of them")
  parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of weights and activations")
  parser.add_argument(
    "--ignore_eos", action="store_true", help="let no token end a response, so that each has max_new_tokens"
  )
  parser.add_argument("--repeats", type=int, default=5, help="number of timed runs")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--json", type=pathlib.Path, help="file for the results")


def job_from(args: argparse.Namespace) -> Job:
  """Makes the job from the flags, and checks what can be checked without JAX.

  Raises:
    ValueError: If something is wrong. One line that names the flag or the file.
  """
  smallest = {"group_size": 1, "max_new_tokens": 1, "repeats": 1, "top_k": 0, "slots": 0, "temperature": 0}
  for name, least in smallest.items():
    if not getattr(args, name) >= least:
      raise ValueError(f"--{name}: found {getattr(args, name)}, expected {least} or more")
  if not 0 < args.top_p <= 1:
    raise ValueError(f"--top_p: found {args.top_p}, expected a number above 0 and at most 1")
  path = resolve(args.checkpoint)
  stop_ids, pad_id = token_ids(path)
  if args.ignore_eos:
    stop_ids = ()
  elif not stop_ids:
    raise ValueError(
      f"--checkpoint: {path} names no stop token (eos_token_id), so that every response would use up the budget; "
      "pass --ignore_eos to allow that"
    )
  fields = {name: getattr(args, name) for name in Job._fields if hasattr(args, name)}
  prompts = pathlib.Path(args.prompts).expanduser()
  return Job(**fields | dict(checkpoint=str(path), prompts=str(prompts.absolute()), stop_ids=stop_ids, pad_id=pad_id))


def resolve(checkpoint: str) -> pathlib.Path:
  """Finds a checkpoint.

  Raises:
    ValueError: If there is none. One line that names the flag.
  """
  from jaxrl_llm.pretrained import where

  try:
    return where.resolve(checkpoint).absolute()
  except ValueError as error:
    raise ValueError(str(error).replace("config.model.path", "--checkpoint")) from error


def token_ids(path: pathlib.Path) -> tuple[tuple[int, ...], int]:
  """Reads the stop ids and the pad id of a checkpoint, without a tokenizer.

  Args:
    path: Folder whose generation_config.json takes precedence over its config.json, or a `.gguf`
      file.

  Returns:
    The stop ids, empty if it names none, and a pad id that is not one of them.
  """
  if path.is_dir():
    configs = [_read_object(path / name) for name in ("generation_config.json", "config.json")]
    ids = {
      name: next((c[name] for c in configs if c.get(name) is not None), None)
      for name in ("eos_token_id", "pad_token_id")
    }
    eos, pad = ids.values()
  elif path.suffix == ".gguf":
    from jaxrl_llm.pretrained.gguf_header import read_header

    metadata = read_header(path).metadata
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "padding")]
    eos, pad = [i for i in named[:2] if i is not None], named[2]
  else:
    raise ValueError(
      f"--checkpoint: found the file {path}, expected a folder with config.json and safetensors, or a .gguf file"
    )
  listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
  stop_ids = tuple(dict.fromkeys(int(i) for i in listed))
  if pad is None or pad in stop_ids:
    pad = next(i for i in range(len(stop_ids) + 1) if i not in stop_ids)
  return stop_ids, int(pad)


def _read_object(file: pathlib.Path) -> dict[str, Any]:
  if not file.is_file():
    return {}
  try:
    content = json.loads(file.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(f"{file}: found no JSON ({error}), expected a file as written by transformers") from error
  if not isinstance(content, dict):
    raise ValueError(f"{file}: found a JSON {type(content).__name__}, expected an object")
  return content


def read_prompts(job: Job, *, vocab_size: int, max_positions: int | None) -> list[np.ndarray]:
  """Reads the prompts of a job.

  Args:
    job: Job with the path.
    vocab_size: Vocabulary size of the model.
    max_positions: Number of positions of the model; None if unknown.

  Returns:
    The ids of each prompt.

  Raises:
    ValueError: If something is wrong with the file. One line.
  """
  path = job.prompts
  if not pathlib.Path(path).is_file():
    raise ValueError(f"--prompts: found no file {path}, expected an .npz with the array `prompts`, int32 [N P]")
  try:
    with np.load(path, allow_pickle=False) as file:
      arrays = {name: file[name] for name in file.files} if hasattr(file, "files") else {}
  except (ValueError, OSError, EOFError) as error:
    raise ValueError(
      f"--prompts: {path} is not an .npz file that NumPy reads without pickle ({error}); write it with np.savez"
    ) from error
  if "prompts" not in arrays:
    raise ValueError(
      f"--prompts: found {', '.join(arrays) or 'no named array'} in {path}, expected `prompts`, int32 [N P]; "
      "write it with np.savez(FILE, prompts=ids)"
    )
  prompts = _integers(path, "prompts", arrays["prompts"], ndim=2)
  lengths = _integers(path, "lengths", arrays.get("lengths", np.full(len(prompts), prompts.shape[1])), ndim=1)
  if len(lengths) != len(prompts):
    raise ValueError(
      f"--prompts: {path}: `lengths` has {len(lengths)} entries, expected one for each of the {len(prompts)} prompts"
    )
  if lengths.min() < 1 or lengths.max() > prompts.shape[1]:
    raise ValueError(
      f"--prompts: {path}: found `lengths` from {lengths.min()} to {lengths.max()}, "
      f"expected 1 to {prompts.shape[1]} tokens"
    )
  rows = [row[:length].astype(np.int32) for row, length in zip(prompts, lengths)]
  low, high = min(int(row.min()) for row in rows), max(int(row.max()) for row in rows)
  if low < 0 or high >= vocab_size:
    raise ValueError(
      f"--prompts: {path}: found token ids from {low} to {high}, expected 0 to {vocab_size - 1}, "
      "the vocabulary of the checkpoint"
    )
  if max_positions is not None and lengths.max() + job.max_new_tokens > max_positions:
    raise ValueError(
      f"--prompts: {path}: the longest prompt has {lengths.max()} tokens, which with --max_new_tokens={job.max_new_tokens} "
      f"exceeds the {max_positions} positions of the checkpoint; shorten one of the two"
    )
  return rows


def _integers(path: str, name: str, array: np.ndarray, *, ndim: int) -> np.ndarray:
  shape = "[N P]" if ndim == 2 else "[N]"
  if array.ndim != ndim or not array.size or not np.issubdtype(array.dtype, np.integer):
    raise ValueError(
      f"--prompts: {path}: `{name}` is {array.dtype} of shape {list(array.shape)}, expected int32 {shape}, not empty"
    )
  return array


def left_padded(rows: list[np.ndarray], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
  """Pads prompts on the left, and returns one array and its mask.

  Example:
    >>> left_padded([np.array([5, 6]), np.array([7])], pad_id=0)[0].tolist()
    [[5, 6], [0, 7]]
  """
  width = max(len(row) for row in rows)
  tokens, mask = np.full((len(rows), width), pad_id, np.int32), np.zeros((len(rows), width), bool)
  for i, row in enumerate(rows):
    tokens[i, width - len(row) :], mask[i, width - len(row) :] = row, True
  return tokens, mask
