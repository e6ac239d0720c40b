"""Training job: the flags of one update that all engines share, and the batch. Starts no JAX.

The batch is an `.npz` file with one row for each response. Consecutive rows with the same prompt
are a group:

| array | | |
| --- | --- | --- |
| `prompt_ids` | int `[B P]` | padded on the left, as for the peers, or anywhere else |
| `prompt_mask` | `[B P]`, optional | 1 if a slot holds a token; by default every slot does |
| `completion_ids` | int `[B C]` | padded on the right |
| `completion_mask` | `[B C]` | ones, then zeros |
| `old_logps` | float `[B C]` | log-probabilities before the updates; read if the mask is 1 |
| `advantages` | float `[B]` | advantage of each response |
"""

import argparse
import pathlib
import zipfile
from typing import NamedTuple

import numpy as np

from experiments.benchmarks.engines.job import DTYPES, resolve

ARRAYS = ("prompt_ids", "completion_ids", "completion_mask", "old_logps", "advantages")
CLIPS = {"grpo": (0.2, 0.2), "dapo": (0.2, 0.28)}
"""Clip ranges below and above 1 of the objectives that all engines have.

They are the project's defaults, which are passed to the peers.
"""


class TrainJob(NamedTuple):
  """Training job, as it is sent to a worker.

  Attributes:
    checkpoint: Folder of transformers, or a `.gguf` file.
    batch: Path of the `.npz` file.
    objective: Name of the objective.
    optimizer: Name of the optimizer.
    microbatch: Number of responses whose gradient is computed at a time; 0 leaves it to the engine.
    row_tokens: Number of slots of a packed row; 0 leaves it to `train_step.lay_out`. It only
      applies to engines that pack.
    share_prompts: Whether a group's prompt is computed once, by engines that can.
    remat: Rematerialisation policy, for engines that have several.
    dtype: Dtype of activations and matrix products. Weights, gradients and moments are float32.
    learning_rate: Constant learning rate.
    b1: Decay of the first moment.
    b2: Decay of the second moment.
    weight_decay: Decoupled weight decay.
    max_grad_norm: Global norm to which larger gradients are scaled down.
    pad_id: Id that fills slots, and that no token of the batch has.
  """

  checkpoint: str
  batch: str
  objective: str = "grpo"
  optimizer: str = "adamw"
  microbatch: int = 0
  row_tokens: int = 0
  share_prompts: bool = True
  remat: str = "none"
  dtype: str = "float32"
  learning_rate: float = 1e-6
  b1: float = 0.9
  b2: float = 0.999
  weight_decay: float = 0.0
  max_grad_norm: float = 1.0
  pad_id: int = 0


class Batch(NamedTuple):
  """Checked arrays of a batch.

  Attributes:
    prompt_ids: Ids of the prompts, int32 [B, P].
    prompt_mask: Whether a slot holds a token, [B, P].
    completion_ids: Ids of the responses, int32 [B, C].
    completion_mask: Whether a slot holds a token, [B, C].
    old_logps: Log-probabilities before the updates, float32 [B, C]; 0 outside the mask.
    advantages: Advantages of the responses, float32 [B].
  """

  prompt_ids: np.ndarray
  prompt_mask: np.ndarray
  completion_ids: np.ndarray
  completion_mask: np.ndarray
  old_logps: np.ndarray
  advantages: np.ndarray

  @property
  def num_tokens(self) -> int:
    """Number of tokens of all prompts and responses, for the tokens/s of every engine.

    A prompt counts once for each of its responses.
    """
    return int(self.prompt_mask.sum() + self.completion_mask.sum())

  @property
  def num_completion_tokens(self) -> int:
    """Number of tokens of all responses."""
    return int(self.completion_mask.sum())


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of a job."""
  defaults = TrainJob("", "")
  parser.add_argument("--checkpoint", required=True, help="a folder that transformers saved, or a .gguf file")
  parser.add_argument("--batch", required=True, help=f".npz with {', '.join(ARRAYS)}; see engines/train_job.py")
  parser.add_argument(
    "--objective",
    default=defaults.objective,
    help="name of the objective; without a KL penalty, because the batch has no reference",
  )
  parser.add_argument("--optimizer", default=defaults.optimizer)
  parser.add_argument("--learning_rate", type=float, default=defaults.learning_rate)
  parser.add_argument("--b1", type=float, default=defaults.b1)
  parser.add_argument("--b2", type=float, default=defaults.b2)
  parser.add_argument("--weight_decay", type=float, default=defaults.weight_decay)
  parser.add_argument("--max_grad_norm", type=float, default=defaults.max_grad_norm)
  parser.add_argument(
    "--microbatch", type=int, default=0, help="responses whose gradient is computed at a time; 0 chooses"
  )
  parser.add_argument("--row_tokens", type=int, default=0, help="slots of a packed row; 0 chooses")
  parser.add_argument(
    "--share_prompts", action=argparse.BooleanOptionalAction, default=True, help="compute a group's prompt once"
  )
  parser.add_argument(
    "--remat", default=defaults.remat, help="what the backward pass recomputes: none, full, dots, ..."
  )
  parser.add_argument(
    "--dtype", choices=DTYPES, default=defaults.dtype, help="dtype of activations; weights and moments are float32"
  )
  parser.add_argument("--repeats", type=int, default=5, help="number of timed updates")
  parser.add_argument("--json", type=pathlib.Path, help="file for the results")


def job_from(args: argparse.Namespace) -> TrainJob:
  """Makes the job from the flags, and checks what can be checked without JAX and the batch.

  Raises:
    ValueError: If something is wrong. One line that names the flag.
  """
  smallest = {"repeats": 1, "microbatch": 0, "row_tokens": 0, "learning_rate": 0, "weight_decay": 0, "max_grad_norm": 0}
  for name, least in smallest.items():
    if not getattr(args, name) >= least:
      raise ValueError(f"--{name}: found {getattr(args, name)}, expected {least} or more")
  for name in ("b1", "b2"):
    if not 0 <= getattr(args, name) < 1:
      raise ValueError(f"--{name}: found {getattr(args, name)}, expected a number from 0 to below 1")
  fields = {name: getattr(args, name) for name in TrainJob._fields if hasattr(args, name)}
  batch = pathlib.Path(args.batch).expanduser().absolute()
  return TrainJob(**fields | dict(checkpoint=str(resolve(args.checkpoint)), batch=str(batch)))


def read_batch(job: TrainJob, *, vocab_size: int, max_positions: int | None) -> Batch:
  """Reads the batch of a job.

  Args:
    job: Job with the path.
    vocab_size: Vocabulary size of the model.
    max_positions: Number of positions of the model; None if unknown.

  Raises:
    ValueError: If something is wrong with the file. One line.
  """
  arrays = _read_arrays(job.batch)
  try:
    batch = _batch(arrays)
    _check_values(batch, vocab_size=vocab_size, max_positions=max_positions)
  except ValueError as error:
    raise ValueError(f"--batch: {job.batch}: {error}") from error
  rows = len(batch.advantages)
  if job.microbatch and rows % job.microbatch:
    raise ValueError(
      f"--microbatch: found {job.microbatch}, expected a divisor of the {rows} rows of {job.batch}, or 0"
    )
  return batch


def _read_arrays(path: str) -> dict[str, np.ndarray]:
  if not pathlib.Path(path).is_file():
    raise ValueError(f"--batch: found no file {path}, expected an .npz file with the arrays {', '.join(ARRAYS)}")
  try:
    with np.load(path, allow_pickle=False) as file:
      arrays = {name: file[name] for name in file.files} if hasattr(file, "files") else {}
  except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
    raise ValueError(
      f"--batch: {path} is not an .npz file that NumPy reads without pickle ({error}); write it with np.savez"
    ) from error
  if missing := [name for name in ARRAYS if name not in arrays]:
    raise ValueError(
      f"--batch: found {', '.join(arrays) or 'no named array'} in {path}, which lacks {', '.join(missing)}; "
      f"write it with np.savez(FILE, {', '.join(f'{name}=...' for name in ARRAYS)})"
    )
  return arrays


def _batch(arrays: dict[str, np.ndarray]) -> Batch:
  """Checks the shapes and types of the arrays against each other."""
  prompts = arrays["prompt_ids"]
  if prompts.ndim != 2 or not prompts.size:
    raise ValueError(f"`prompt_ids` has the shape {list(prompts.shape)}, expected [B P], not empty")
  rows, width = prompts.shape
  columns = arrays["completion_ids"].shape[-1] if arrays["completion_ids"].ndim == 2 else 0
  arrays = {"prompt_mask": np.ones(prompts.shape, bool)} | arrays
  shapes = {"prompt_mask": (rows, width), "completion_ids": (rows, columns), "completion_mask": (rows, columns),
            "old_logps": (rows, columns), "advantages": (rows,)}  # fmt: skip
  for name, shape in shapes.items():
    if arrays[name].shape != shape or not arrays[name].size:
      expected = f"[{rows} C]" if name == "completion_ids" else list(shape)
      others = {other: list(arrays[other].shape) for other in ("prompt_ids", "completion_ids") if other != name}
      raise ValueError(f"`{name}` has the shape {list(arrays[name].shape)}, expected {expected} for "
                       + " and ".join(f"`{other}` {shape}" for other, shape in others.items()))  # fmt: skip
  for name in ("prompt_ids", "completion_ids"):
    if not np.issubdtype(arrays[name].dtype, np.integer):
      raise ValueError(f"`{name}` is {arrays[name].dtype}, expected int32")
  for name in ("old_logps", "advantages"):
    if not np.issubdtype(arrays[name].dtype, np.floating):
      raise ValueError(f"`{name}` is {arrays[name].dtype}, expected float32")
  for name in ("prompt_mask", "completion_mask"):
    if not np.isin(arrays[name], (0, 1)).all():
      raise ValueError(f"`{name}` contains {np.setdiff1d(arrays[name], (0, 1))[0]}, expected only 0 and 1")
  mask = arrays["completion_mask"].astype(bool)
  return Batch(
    prompt_ids=prompts.astype(np.int32),
    prompt_mask=arrays["prompt_mask"].astype(bool),
    completion_ids=arrays["completion_ids"].astype(np.int32),
    completion_mask=mask,
    old_logps=np.where(mask, arrays["old_logps"], 0).astype(np.float32),
    advantages=arrays["advantages"].astype(np.float32),
  )


def _check_values(batch: Batch, *, vocab_size: int, max_positions: int | None) -> None:
  mask = batch.completion_mask
  if len(holes := np.flatnonzero((mask[:, 1:] & ~mask[:, :-1]).any(axis=1))):
    raise ValueError(
      f"`completion_mask` of row {holes[0]} has a 1 after a 0, expected ones and then zeros: padding is on the right"
    )
  if not mask.any():
    raise ValueError("`completion_mask` is 0 everywhere, expected at least one token to learn from")
  if len(empty := np.flatnonzero(~batch.prompt_mask.any(axis=1))):
    raise ValueError(
      f"`prompt_mask` of row {empty[0]} is 0 everywhere, expected at least one token for the response to follow"
    )
  for name in ("old_logps", "advantages"):
    if not np.isfinite(getattr(batch, name)).all():
      raise ValueError(f"`{name}` contains a non-finite number, expected finite numbers")
  if batch.old_logps.max() > 1e-3:
    raise ValueError(
      f"`old_logps` reaches {batch.old_logps.max():.3g} inside the mask, "
      "expected log-probabilities, which are at most 0"
    )
  for ids, inside, name in (
    (batch.prompt_ids, batch.prompt_mask, "prompt_ids"),
    (batch.completion_ids, mask, "completion_ids"),
  ):
    low, high = int(ids[inside].min()), int(ids[inside].max())
    if low < 0 or high >= vocab_size:
      raise ValueError(
        f"`{name}` has ids from {low} to {high}, expected 0 to {vocab_size - 1}, the vocabulary of the checkpoint"
      )
  longest = int(np.max(batch.prompt_mask.sum(axis=1) + mask.sum(axis=1)))
  if max_positions is not None and longest > max_positions:
    raise ValueError(
      f"the longest row has {longest} tokens, expected at most the {max_positions} positions of the checkpoint"
    )


def with_pad_id(job: TrainJob, batch: Batch, vocab_size: int) -> TrainJob:
  """Gives the job a pad id that no token has, because peers recognise padding by it.

  Raises:
    ValueError: If every id of the vocabulary is in the batch.
  """
  used = np.union1d(batch.prompt_ids[batch.prompt_mask], batch.completion_ids[batch.completion_mask])
  free = np.setdiff1d(np.arange(vocab_size), used)
  if not len(free):
    raise ValueError(
      f"--batch: {job.batch} uses all {vocab_size} ids of the vocabulary, "
      "expected an unused one for the peers' padding"
    )
  return job._replace(pad_id=int(free[0]))


def padded(batch: Batch, pad_id: int) -> Batch:
  """Converts the batch to the form that peers need.

  Prompts are moved to the right end of their slots, `pad_id` fills all slots without a token, and
  empty columns are dropped.

  Example:
    >>> ids, mask = np.array([[5, 6, 0]]), np.array([[True, True, False]])
    >>> batch = Batch(ids, mask, ids, mask, np.zeros((1, 3), np.float32), np.ones(1, np.float32))
    >>> padded(batch, 9).prompt_ids.tolist(), padded(batch, 9).completion_ids.tolist()
    ([[5, 6]], [[5, 6]])
  """
  # False comes before True, and the tokens keep their order.
  order = np.argsort(batch.prompt_mask, axis=1, kind="stable")
  prompts, inside = (np.take_along_axis(x, order, axis=1) for x in (batch.prompt_ids, batch.prompt_mask))
  first, columns = int(np.argmax(inside.any(axis=0))), int(batch.completion_mask.sum(axis=1).max())
  mask = batch.completion_mask[:, :columns]
  return Batch(
    prompt_ids=np.where(inside, prompts, pad_id)[:, first:].astype(np.int32),
    prompt_mask=inside[:, first:],
    completion_ids=np.where(mask, batch.completion_ids[:, :columns], pad_id).astype(np.int32),
    completion_mask=mask,
    old_logps=batch.old_logps[:, :columns],
    advantages=batch.advantages,
  )
