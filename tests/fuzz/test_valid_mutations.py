"""Configs that pass the checks: a dry run or a short run succeeds or ends with a clear message."""

import contextlib
import io
import itertools
import random
import traceback

import pytest

from jaxrl_llm import main
from jaxrl_llm.config import fields
from tests.fuzz import mutations
from tests.marks import few
from tests.runs import flags, quick

pytestmark = pytest.mark.usefixtures("in_the_checkout")
# Small enough for a run on the CPU.
SHORT = {
  "num_steps": 2, "warm_start.num_steps": 1, "eval.every": 2, "eval.num_prompts": 8, "log.num_table_rows": 0, "log.tensorboard": False,
}  # fmt: skip
RUNS = ("gspo", "grpo", "ppo", "dapo", "sapo", "own_data")
NUMBERS = (
  "1", "2", "3", "7", "16", "64", "0.5", "1e-4", "0", "-1", "True", "False", "None", "1e300", "1e-300", "'a'", "(16,)", "(8,16)",
  "2147483647",
)  # fmt: skip


def valid(name: str, count: int, base: tuple[mutations.Edit, ...] = (), numbers: tuple[str, ...] = NUMBERS):
  """Returns arguments of mutations that no check refuses, the same ones every time."""
  draw, config = random.Random(name), mutations.load(name)
  paths = sorted(fields.flatten(config))

  def drawn():
    while True:
      edits = [mutations.Edit("set", draw.choice(paths), draw.choice(numbers)) for _ in range(draw.randint(1, 3))]
      before = [one for one in base if one.path not in [edit.path for edit in edits]]
      changed, lines = mutations.refusal_on_the_command_line(config, [*before, *edits])
      if changed is not None and not lines and fields.flatten(changed) != fields.flatten(config):
        yield mutations.on_the_command_line(config, [*before, *edits])

  with contextlib.redirect_stdout(io.StringIO()):
    return list(itertools.islice(drawn(), count))


def outcome(*args: str) -> tuple[int, str]:
  """Returns the exit status of a command line and its output on stderr."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), quick():
    try:
      status = main.main(["main", *args])
    except BaseException:
      return -1, traceback.format_exc()
  return status, err.getvalue()


def check(args, status: int, err: str) -> None:
  lines = err.splitlines()
  assert status == 0 or (status in (1, 2) and lines and all(line.startswith("error: ") for line in lines)), (args, status, err[-1500:])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", mutations.CONFIGS)
def test_dry_runs(name, tmp_path):
  failed = []
  for args in valid(name, 3):
    try:
      check(args, *outcome(f"--config=configs/{name}.py:tiny", *args, "--dry_run", f"--workdir={tmp_path / 'run'}"))
    except AssertionError as error:
      failed.append(str(error))
  assert not failed, "\n\n".join(failed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", few(RUNS, "own_data"))
def test_short_runs(name, tmp_path):
  """The fields that determine the length of a run are reset."""
  (args,) = valid(name, 1, tuple(mutations.Edit("set", *item) for item in SHORT.items()), NUMBERS[:-1])
  check(args, *outcome(f"--config=configs/{name}.py:tiny", *args, *flags(SHORT), f"--workdir={tmp_path / 'run'}"))
