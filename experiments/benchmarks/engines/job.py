"""What is sampled: the flags that every engine shares, the prompts, and the ids that end a response. Starts no JAX."""

import argparse
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

DTYPES = ("float32", "bfloat16")


class Job(NamedTuple):
  """One job, as it travels to a worker.

  Attributes:
    checkpoint: a folder of transformers', or a `.gguf` file.
    prompts: path of the `.npz`.
    group_size: samples of each prompt (G).
    max_new_tokens: budget of a response.
    temperature: of the draw.
    top_k: 0 keeps all tokens.
    top_p: 1 keeps all tokens.
    slots: responses in progress at a time; 0 is all of them.
    dtype: of weights and activations.
    stop_ids: end a response; empty where nothing does.
    pad_id: fills slots.
    seed: of the draws.
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
  """The flags of a job."""
  parser.add_argument("--checkpoint", required=True, help="a folder that transformers saved, or a .gguf file")
  parser.add_argument("--prompts", required=True, help=".npz with `prompts` int32 [N P], and `lengths` int32 [N] where they are shorter")
  parser.add_argument("--group_size", type=int, default=8, help="samples of each prompt")
  parser.add_argument("--max_new_tokens", type=int, default=128, help="budget of a response, in tokens")
  parser.add_argument("--temperature", type=float, default=1.0)
  parser.add_argument("--top_k", type=int, default=0, help="0 keeps all tokens")
  parser.add_argument("--top_p", type=float, default=1.0, help="1 keeps all tokens")
  parser.add_argument("--slots", type=int, default=0, help="responses in progress at a time; 0 is all of them")
  parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and activations")
  parser.add_argument("--ignore_eos", action="store_true", help="no token ends a response: each has max_new_tokens")
  parser.add_argument("--repeats", type=int, default=5, help="timed runs")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--json", type=pathlib.Path, help="where to write the results")


def job_from(args: argparse.Namespace) -> Job:
  """The job that flags ask for, checked as far as that goes without JAX.

  Raises:
    ValueError: one line that names flag or file.
  """
  smallest = {"group_size": 1, "max_new_tokens": 1, "repeats": 1, "top_k": 0, "slots": 0, "temperature": 0}
  for name, least in smallest.items():
    if not getattr(args, name) >= least:
      raise ValueError(f"--{name}: found {getattr(args, name)}, expected {least} or more")
  if not 0 < args.top_p <= 1:
    raise ValueError(f"--top_p: found {args.top_p}, expected a number above 0 and up to 1")
  path = resolve(args.checkpoint)
  stop_ids, pad_id = token_ids(path)
  if args.ignore_eos:
    stop_ids = ()
  elif not stop_ids:
    raise ValueError(f"--checkpoint: {path} names no stop token (eos_token_id), so every response would run into the budget; "
                     "pass --ignore_eos if that is what you want")  # fmt: skip
  fields = {name: getattr(args, name) for name in Job._fields if hasattr(args, name)}
  prompts = pathlib.Path(args.prompts).expanduser()
  return Job(**fields | dict(checkpoint=str(path), prompts=str(prompts.absolute()), stop_ids=stop_ids, pad_id=pad_id))


def resolve(checkpoint: str) -> pathlib.Path:
  """Where a checkpoint is.

  Raises:
    ValueError: one line that names the flag.
  """
  from jaxrl_llm.pretrained import where

  try:
    return where.resolve(checkpoint).absolute()
  except ValueError as error:
    raise ValueError(str(error).replace("config.model.path", "--checkpoint")) from error


def token_ids(path: pathlib.Path) -> tuple[tuple[int, ...], int]:
  """Stop ids and the pad id of a checkpoint, which needs no tokenizer for that.

  Args:
    path: a folder, whose generation_config.json counts more than its config.json; or a `.gguf` file.

  Returns:
    The stop ids, none where it names none; and a pad id that is not one of them.
  """
  if path.is_dir():
    configs = [_read_object(path / name) for name in ("generation_config.json", "config.json")]
    found = {name: next((c[name] for c in configs if c.get(name) is not None), None) for name in ("eos_token_id", "pad_token_id")}
    eos, pad = found.values()
  elif path.suffix == ".gguf":
    from jaxrl_llm.pretrained.gguf_header import read_header

    metadata = read_header(path).metadata
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "padding")]
    eos, pad = [i for i in named[:2] if i is not None], named[2]
  else:
    raise ValueError(f"--checkpoint: found the file {path}, expected a folder with config.json and safetensors, or a .gguf file")
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
    raise ValueError(f"{file}: found no JSON ({error}), expected a file as transformers writes it") from error
  if not isinstance(content, dict):
    raise ValueError(f"{file}: found a JSON {type(content).__name__}, expected an object")
  return content


def read_prompts(job: Job, *, vocab_size: int, max_positions: int | None) -> list[np.ndarray]:
  """The prompts of a job.

  Args:
    job: with the path.
    vocab_size: of the model.
    max_positions: of the model; None where nobody says.

  Returns:
    Each prompt's ids.

  Raises:
    ValueError: one line that says what is wrong with the file.
  """
  path = job.prompts
  if not pathlib.Path(path).is_file():
    raise ValueError(f"--prompts: found no file {path}, expected an .npz with the array `prompts`, int32 [N P]")
  try:
    with np.load(path, allow_pickle=False) as file:
      arrays = {name: file[name] for name in file.files} if hasattr(file, "files") else {}
  except (ValueError, OSError, EOFError) as error:
    raise ValueError(f"--prompts: {path} is no .npz file that NumPy reads without pickle ({error}); write it with np.savez") from error
  if "prompts" not in arrays:
    raise ValueError(f"--prompts: {path} holds {', '.join(arrays) or 'no named array'}, expected `prompts`, int32 [N P]; write it with "
                     "np.savez(FILE, prompts=ids)")  # fmt: skip
  prompts = _integers(path, "prompts", arrays["prompts"], ndim=2)
  lengths = _integers(path, "lengths", arrays.get("lengths", np.full(len(prompts), prompts.shape[1])), ndim=1)
  if len(lengths) != len(prompts):
    raise ValueError(f"--prompts: {path}: `lengths` has {len(lengths)} entries, expected one for each of the {len(prompts)} prompts")
  if lengths.min() < 1 or lengths.max() > prompts.shape[1]:
    raise ValueError(f"--prompts: {path}: `lengths` from {lengths.min()} to {lengths.max()}, expected 1 to {prompts.shape[1]} tokens")
  rows = [row[:length].astype(np.int32) for row, length in zip(prompts, lengths)]
  low, high = min(int(row.min()) for row in rows), max(int(row.max()) for row in rows)
  if low < 0 or high >= vocab_size:
    raise ValueError(f"--prompts: {path}: token ids from {low} to {high}, expected 0 to {vocab_size - 1}, the vocabulary of the checkpoint")
  if max_positions is not None and lengths.max() + job.max_new_tokens > max_positions:
    raise ValueError(f"--prompts: {path}: the longest prompt has {lengths.max()} tokens, with --max_new_tokens={job.max_new_tokens} more "
                     f"than the {max_positions} positions of the checkpoint; shorten one of the two")  # fmt: skip
  return rows


def _integers(path: str, name: str, array: np.ndarray, *, ndim: int) -> np.ndarray:
  shape = "[N P]" if ndim == 2 else "[N]"
  if array.ndim != ndim or not array.size or not np.issubdtype(array.dtype, np.integer):
    raise ValueError(f"--prompts: {path}: `{name}` is {array.dtype} of shape {list(array.shape)}, expected int32 {shape}, not empty")
  return array


def left_padded(rows: list[np.ndarray], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
  """Prompts as one array with its mask.

  Example:
    >>> left_padded([np.array([5, 6]), np.array([7])], pad_id=0)[0].tolist()
    [[5, 6], [0, 7]]
  """
  width = max(len(row) for row in rows)
  tokens, mask = np.full((len(rows), width), pad_id, np.int32), np.zeros((len(rows), width), bool)
  for i, row in enumerate(rows):
    tokens[i, width - len(row) :], mask[i, width - len(row) :] = row, True
  return tokens, mask
