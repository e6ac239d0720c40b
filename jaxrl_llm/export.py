"""Export of a run's policy to a folder that transformers and vLLM open, with a model card.

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
from jaxrl_llm.config.recorded import tuples
from jaxrl_llm.devices.absent_tpu import skip_absent_tpu
from jaxrl_llm.messages import MissingPackageError, Problem
from jaxrl_llm.models import DTYPES, save_hf
from jaxrl_llm.models.files.adapters import save_adapter
from jaxrl_llm.pretrained import where
from jaxrl_llm.pretrained.tokenizer_files import files_of
from jaxrl_llm.run.jobs.publish.card import Exported, write_card
from jaxrl_llm.run.jobs.publish.hub import check_push, push
from jaxrl_llm.run.setup.experiment import build_experiment
from jaxrl_llm.run.setup.saved_state import INIT, abstract_arrays, whole_state
from jaxrl_llm.run.setup.source import judged_by_the_verifier
from jaxrl_llm.workdir import checkpoint
from jaxrl_llm.workdir.bucket.copies import localize


def export(workdir: Path, folder: Path, *, dtype: str | None = None, adapter: bool = False, name: str | None = None) -> int:
  """Saves the policy of a run's newest checkpoint, with a model card.

  Args:
    workdir: Folder of the run.
    folder: Folder to write, which is made if necessary and must be empty.
    dtype: Dtype of the saved weights; None keeps the dtypes of the checkpoint.
    adapter: Whether to save only the adapters, in PEFT's format, instead of merging them.
    name: Title of the card; None takes the folder's name.

  Returns:
    The checkpoint's number.

  Raises:
    ValueError: If there is no run or no checkpoint, the run is of another version or has no
      adapters to save, or `folder` is not empty.
  """
  try:
    saved = tuples(json.loads((workdir / "config.json").read_text()))
    config = ConfigDict(renamed.current(saved, updates=False))
  except (OSError, ValueError) as error:
    raise ValueError(f"{workdir / 'config.json'}: found no config of a run ({error}); expected the --workdir of one") from error
  if not (workdir / "checkpoints").is_dir():
    raise ValueError(f"{workdir}: found no checkpoints, expected the folder of a run that has saved one")
  config.update({"numerics": {"exact": False}})  # Nothing is computed with the weights here.
  if "teacher" in config:
    config = judged_by_the_verifier(config)
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
  if adapter and source is None:
    raise ValueError(Problem("--adapter", "a run whose base began at random", "no --adapter: without its base an adapter is of no use"))
  model = experiment.learner.model
  with files_of(experiment.task.tokenizer) as tokenizer_from:
    if adapter:
      base = where.name_of(source) if config.model.path.startswith(where.HUB) else config.model.path
      save_adapter(folder, model, state.params, base=base, dtype=dtype, tokenizer_from=tokenizer_from)
    else:
      save_hf(folder, model, state.params, dtype=dtype, tokenizer_from=tokenizer_from)
  if jax.process_index() == 0:
    for line in write_card(folder, workdir, Exported(restored[1]["rl_steps"], adapter, source), name=name or folder.resolve().name):
      tell(f"note: {line}")
  return restored[1]["warm_steps"] + restored[1]["rl_steps"]


def main(argv: list[str]) -> int:
  """Runs the command and returns its exit status: 2 for bad input."""
  parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.export", description=__doc__, allow_abbrev=False)
  parser.add_argument("workdir", help="folder of the run, which may be in a bucket")
  parser.add_argument("folder", type=Path, help="folder to make")
  parser.add_argument("--dtype", choices=DTYPES, help="dtype of the saved weights; default: those of the checkpoint")
  parser.add_argument("--adapter", action="store_true", help="save only the adapters, in PEFT's format; default: merge them")
  parser.add_argument("--push", metavar="OWNER/NAME", help="then upload the folder to a new, private repository of the Hugging Face Hub")
  args = parser.parse_args(argv)
  try:
    hub = None if args.push is None else check_push(args.push)
    name = args.push and args.push.partition("/")[2]
    skip_absent_tpu()
    step = export(localize(args.workdir), args.folder, dtype=args.dtype, adapter=args.adapter, name=name)
    address = None if hub is None else push(hub, args.folder, args.push)
  except (MissingPackageError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  what = "its adapters alone" if args.adapter else "the whole model"
  print(f"saved {what} of checkpoint {step} of {args.workdir} to {args.folder}, with the tokenizer")
  if address is not None:
    print(f"uploaded to {address}, which is private")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
