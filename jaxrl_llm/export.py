"""Export of a run's policy to a folder that transformers and vLLM open.

`python -m jaxrl_llm.export WORKDIR FOLDER`
"""

import argparse
import json
import sys
from pathlib import Path

import jax
from ml_collections import ConfigDict

from jaxrl_llm.config import renamed
from jaxrl_llm.config.check import config_problems
from jaxrl_llm.config.fields import without_teacher
from jaxrl_llm.messages import MissingPackageError
from jaxrl_llm.models import DTYPES, save_hf
from jaxrl_llm.pretrained import where
from jaxrl_llm.run.evaluate.source import tuples
from jaxrl_llm.run.experiment import build_experiment
from jaxrl_llm.run.saved_state import INIT, abstract_arrays, whole_state
from jaxrl_llm.workdir import checkpoint
from jaxrl_llm.workdir.bucket.reading import localize


def export(workdir: Path, folder: Path, *, dtype: str | None = None) -> int:
  """Saves the policy of a run's newest checkpoint, with its adapters merged.

  Args:
    workdir: Folder of the run.
    folder: Folder to write, which is made if necessary and must be empty.
    dtype: Dtype of the saved weights; None keeps the dtypes of the checkpoint.

  Returns:
    The checkpoint's number.

  Raises:
    ValueError: If there is no run or no checkpoint, the run is of another version, or `folder` is
      not empty.
  """
  try:
    saved = tuples(json.loads((workdir / "config.json").read_text()))
    config = ConfigDict(renamed.current(saved, updates=False))
  except (OSError, ValueError) as error:
    raise ValueError(f"{workdir / 'config.json'}: found no config of a run ({error}); expected the --workdir of one") from error
  if not (workdir / "checkpoints").is_dir():
    raise ValueError(f"{workdir}: found no checkpoints, expected the folder of a run that has saved one")
  if "teacher" in config:
    config = without_teacher(config)
  if messages := config_problems(config):
    raise ValueError("\n".join(messages))
  experiment = build_experiment(config)
  checkpoints = checkpoint.open_checkpoints(workdir / "checkpoints")
  tell = lambda line: print(line, file=sys.stderr)
  restored = checkpoint.restore_latest(checkpoints, abstract_arrays(experiment), tell=tell, moves=False)
  if restored is None:
    raise ValueError(f"{workdir / 'checkpoints'}: found no checkpoint, expected one; the run has not saved any yet")
  state = whole_state(experiment, restored[0]["state"], jax.random.fold_in(jax.random.key(config.seed), INIT))
  source = None if config.model.path is None else where.resolve(config.model.path)
  save_hf(folder, experiment.learner.model, state.params, dtype=dtype, tokenizer_from=source if source and source.is_dir() else None)
  return restored[1]["warm_steps"] + restored[1]["rl_steps"]


def main(argv: list[str]) -> int:
  """Runs the command and returns its exit status: 2 for bad input."""
  parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.export", description=__doc__, allow_abbrev=False)
  parser.add_argument("workdir", help="folder of the run, which may be in a bucket")
  parser.add_argument("folder", type=Path, help="folder to make")
  parser.add_argument("--dtype", choices=DTYPES, help="dtype of the saved weights; default: those of the checkpoint")
  args = parser.parse_args(argv)
  try:
    step = export(localize(args.workdir), args.folder, dtype=args.dtype)
  except (MissingPackageError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  has_tokenizer = (args.folder / "tokenizer.json").exists()
  tokenizer = "with its tokenizer" if has_tokenizer else "without a tokenizer: the run has no folder to copy it from"
  print(f"saved checkpoint {step} of {args.workdir} to {args.folder}, {tokenizer}")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
