"""The command line: early refusal of bad input in plain lines, and the outcomes of runs."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jaxrl_llm import main
from jaxrl_llm.config import command_line
from jaxrl_llm.config.fields import FIELDS
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.run.observe.progress import Progress
from jaxrl_llm.workdir import nonfinite
from tests.runs import ROOT, VARIED, call, column, environment, flags, quick

pytestmark = pytest.mark.usefixtures("in_the_checkout")
TINY = "--config=configs/gspo.py:tiny"


@pytest.fixture
def errors(capsys, tmp_path):
  """A function that runs the command line, expects a refusal, and returns its lines on stderr."""

  def errors_of(*args: str, devices: int = 1, workdir: pathlib.Path | None = None) -> list[str]:
    workdir = workdir or tmp_path / "run"
    was_there = workdir.exists()
    with quick(devices):
      status = main.main(["main", *args, f"--workdir={workdir}"])
    lines = capsys.readouterr().err.splitlines()
    assert status == 2
    assert lines and all(line.startswith("error: ") and len(line) < 500 for line in lines), lines
    assert workdir.exists() == was_there, "a refused command must leave no folder that would stop the corrected one"
    return [line.removeprefix("error: ") for line in lines]

  return errors_of


# Arguments and required parts of the one line, by case: the field or path, what was found, and what
# was expected or the likely fix.
ONE_LINE = {
  "typo": ([TINY, "--config.learner.learning_rat=3"], ["config.learner.learning_rat", "did you mean config.learner.learning_rate?"]),
  "right leaf, wrong section": ([TINY, "--config.rollout.row_buckets=3"], ["config.learner.row_buckets or config.teacher.row_buckets or"]),
  "no section": ([TINY, "--config.temperature=3"], ["config.rollout.temperature", "config.eval.temperature", "did you mean"]),
  "like nothing": ([TINY, "--config.zzz=3"], ["unknown field config.zzz", "--help_fields lists"]),
  "section as value": ([TINY, "--config.rollout=3"], ["config.rollout is a section", "rollout.group_size"]),
  "unknown objective": ([TINY, "--config.objective.name=gsop"], ["config.objective", "'gsop'", "did you mean 'gspo'", "sapo"]),
  "no effect": ([TINY, "--config.objective.tau_pos=2."], ["config.objective.tau_pos", "gspo does not read it and takes clip_low"]),
  "misspelt setting": ([TINY, "--config.objective.clip_lo=.1"], ["config.objective.clip_lo: found '.1'", "did you mean 'clip_low'?"]),
  "illegal": ([TINY, "--config.objective.clip_low=-2"], ["config.objective", "clip_low", "found -2.0", "from 0 to 1"]),
  "unknown task": ([TINY, "--config.task.name=aritmetic"], ["config.task.name", "'aritmetic'", "did you mean 'arithmetic'"]),
  "unknown preset": ([TINY, "--config.model.preset=nan"], ["config.model.preset", "'nan'", "did you mean 'nano'"]),
  "text for int": ([TINY, "--config.seed=abc"], ["config.seed", "found 'abc'", "expected a whole number", "the file has 0"]),
  "float for int": ([TINY, "--config.num_steps=1.5"], ["config.num_steps", "found '1.5'", "expected a whole number"]),
  "text for float": ([TINY, "--config.learner.b1=x"], ["config.learner.b1", "found 'x'", "expected a number"]),
  "text for bool": ([TINY, "--config.advantage.whiten=perhaps"], ["config.advantage.whiten", "found 'perhaps'", "True or False"]),
  "unknown policy": ([TINY, "--config.model.remat=fll"], ["config.model.remat", "found 'fll'", "full, attention", "did you mean 'full'"]),
  "a switch no more": ([TINY, "--config.model.remat=True"], ["config.model.remat", "found 'True'", "did you mean 'full'"]),
  "text for an optional float": ([TINY, "--config.objective.dual_clip=x"], ["config.objective.dual_clip", "found 'x'", "number > 1"]),
  "text in a tuple": ([TINY, "--config.rollout.prompt_buckets=x"], ["config.rollout.prompt_buckets", "found ('x',)", "whole numbers"]),
  "float in a tuple": ([TINY, "--config.rollout.prompt_buckets=0.3"], ["config.rollout.prompt_buckets", "found (0.3,)", "whole numbers"]),
  "nan": ([TINY, "--config.learner.learning_rate=nan"], ["config.learner.learning_rate", "found nan", "finite number above 0"]),
  "group of one": ([TINY, "--config.rollout.group_size=1"], ["config.rollout.group_size", "found 1", "2 or more"]),
  "updates": ([TINY, "--config.learner.updates_per_rollout=3"], ["config.rollout.num_prompts=8", "config.learner.updates_per_rollout=3"]),
  "no config": ([], ["--config is missing", "--config=configs/gspo.py", "configs/sapo.py"]),
  "no such file": (["--config=configs/gsop.py"], ["no file 'configs/gsop.py'", "configs/gspo.py"]),
  "a folder": (["--config=configs"], ["no file 'configs'", "configs/gspo.py"]),
  "unknown argument": (["--config=configs/gspo.py:tin"], ["configs/gspo.py:tin", "unknown argument 'tin'", "did you mean 'tiny'?"]),
  "unknown flag": ([TINY, "--workdr=x"], ["workdr", "workdir", "--config.FIELD=VALUE"]),
  "no flag": ([TINY, "stray"], ["unknown argument 'stray'", "--config.FIELD=VALUE"]),
  # The following cases require the devices or the dataset.
  "level": ([TINY, "--config.task.levels=9"], ["task.levels", "(9,)", "(1, 2, 3)"]),
  "long prompts": ([TINY, "--config.rollout.prompt_buckets=(4,)"], ["prompt_buckets=(4,)", "7 tokens", "bucket of at least 7"]),
  "short answers": ([TINY, "--config.rollout.max_new_tokens=4"], ["config.rollout.max_new_tokens=4", "demonstration", "raise it to"]),
  "too few devices": ([TINY, "--config.mesh.fsdp=2"], ["mesh.fsdp=2", "needs a multiple of 2 devices, found 1", "lower an axis"]),
  "too few devices for all": ([TINY, "--config.mesh.data=4"], ["mesh.data=4", "needs 4 devices, found 1", "lower an axis"]),
}


@pytest.mark.parametrize("case", ONE_LINE)
def test_bad_input_is_one_line(case, errors):
  args, parts = ONE_LINE[case]
  (line,) = errors(*args)
  for part in parts:
    assert part in line, f"{part!r} is not in {line!r}"


def test_the_rows_that_a_device_takes_must_divide_all_row_buckets(errors):
  lines = errors(TINY, "--config.learner.rows_per_device=3")
  assert ["config.learner.row_buckets: 8" in lines[0], "config.warm_start.row_buckets: 16" in lines[1]] == [True, True]
  assert all("is not a multiple of config.learner.rows_per_device=3" in line for line in lines)


@pytest.mark.parametrize(
  ("args", "parts"),
  [
    (["--config.mesh.tensor=3"], ["mesh.tensor=3", "needs a multiple of 3 devices, found 8"]),
    (["--config.mesh.tensor=4"], ["mesh.tensor=4 does not divide axis 'kv_heads'", "size 2"]),
    (["--config.learner.row_buckets=(6,8)"], ["config.learner.row_buckets: 6", "8 devices", "the next multiple is 8"]),
    (["--config.rollout.num_prompts=4"], ["config.rollout.num_prompts: 4", "8 devices", "the next multiple is 8"]),
  ],
)
def test_meshes_of_eight_devices(args, parts, errors):
  (line,) = errors(TINY, *args, devices=8)
  for part in parts:
    assert part in line, line


def test_all_problems_are_shown_at_once(errors):
  wrong = ["--config.seed=abc", "--config.rollout=1", "--config.lerner.b1=0", "--config.num_steps=1.5"]
  assert [line.split(":")[0].split(" is")[0] for line in errors(TINY, *wrong)] == [
    "config.rollout",
    "unknown field config.lerner.b1; did you mean config.learner.b1?",
    "config.seed",
    "config.num_steps",
  ]
  wrong = {"rollout.group_size": 0, "task.name": "x", "model.preset": "x", "objective.name": "x", "eval.every": 0}
  assert len(errors(TINY, *flags(wrong))) == len(wrong)


BROKEN_FILES = {
  "syntax": ("def get_config(:\n", ["SyntaxError", "line 1"]),
  "exception": ("def get_config():\n  return {}['seed']\n", ["KeyError", "'seed'", "line 2"]),
  "import": ("import no_such_module\n", ["no_such_module", "line 1"]),
  "no get_config": ("x = 1\n", ["get_config"]),
  "no return": ("def get_config():\n  pass\n", ["NoneType", "expected an ml_collections.ConfigDict"]),
  "os error": ("open('/no/such/file')\n", ["FileNotFoundError", "/no/such/file", "line 1"]),
  "typo in the file": (
    "from configs import common\ndef get_config():\n  c = common.laptop('gspo', 'tiny')\n  c.learner.learning_rat = 1.0\n  return c\n",
    ["learning_rat", "Did you mean", "learning_rate", "line 4"],
  ),
  "not from common": (
    "from ml_collections import ConfigDict\ndef get_config():\n  return ConfigDict({'seed': 0})\n",
    ["missing field(s)", "configs.common"],
  ),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_broken_config_files(case, errors, tmp_path):
  text, parts = BROKEN_FILES[case]
  (tmp_path / "mine.py").write_text(text)
  (line,) = errors(f"--config={tmp_path / 'mine.py'}")
  for part in parts:
    assert part in line, line


def test_unusable_workdirs(errors, tmp_path):
  (tmp_path / "file").write_text("")
  (line,) = errors(TINY, workdir=tmp_path / "file" / "run")
  assert f"--workdir={tmp_path / 'file' / 'run'}" in line and "expected a folder that can be written" in line

  (tmp_path / "thesis").mkdir()
  (tmp_path / "thesis" / "chapter.tex").write_text("")
  (line,) = errors(TINY, workdir=tmp_path / "thesis")
  assert "chapter.tex" in line and "choose another" in line
  assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]


def test_a_missing_package_is_one_line(errors, tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))  # Another test may have built the dataset.
  monkeypatch.setitem(sys.modules, "reasoning_gym", None)
  lines = errors("--config=configs/gspo.py", "--config.task.name=gsm_symbolic")
  assert lines == ["task gsm_symbolic needs the package reasoning-gym: pip install 'jaxrl_llm[tasks]'"]


def test_a_damaged_dataset(errors, tmp_path):
  folder = tmp_path / "data" / "arithmetic" / "1.0.0"
  folder.mkdir(parents=True)
  (folder / "dataset_info.json").write_text("{")
  (line,) = errors(TINY, f"--config.task.data_dir={tmp_path / 'data'}")
  assert str(folder) in line and "cannot be used" in line and "delete" in line


PROBE = """
import json, sys
from jaxrl_llm import main
untouched, no_backend = json.loads(sys.argv[1])
for args in untouched:
  assert main.main(["main", *args]) == 2, args
  assert "jax" not in sys.modules, args
assert main.main(["main", "--help_fields"]) == 0 and "jax" not in sys.modules
for args in no_backend:
  assert main.main(["main", *args]) == 2, args
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""


def test_bad_input_waits_neither_for_jax_nor_for_a_device():
  """Flags and files are refused before JAX is imported, and values before it looks for devices.

  The objectives check the values, and they import JAX.
  """
  untouched = ["typo", "section as value", "text for int", "text for bool", "no config", "no such file", "unknown argument", "unknown flag"]
  no_backend = ["unknown objective", "unknown task", "unknown preset", "illegal", "group of one", "updates", "nan"]
  cases = [[ONE_LINE[name][0] for name in names] for names in (untouched, no_backend)]
  result = subprocess.run([sys.executable, "-c", PROBE, json.dumps(cases)], cwd=ROOT, env=environment(), capture_output=True, text=True)
  assert result.returncode == 0, result.stderr


def test_the_real_command_line_refuses_with_status_2():
  result = call(TINY, "--config.learner.learning_rat=3", "--config.seed=abc")
  assert result.returncode == 2 and not result.stdout
  assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["error", "error"]


def test_help(capsys):
  assert main.main(["main", "--help"]) == 0
  assert "--config.FIELD" in capsys.readouterr().out


def test_help_on_fields(capsys):
  for argv in (["--help_fields", "rollout"], ["--help_fields=config.rollout."]):
    assert main.main(["main", *argv]) == 0
    out = capsys.readouterr().out
    assert "config.rollout.group_size = 8; expects a whole number of at least 1, below 2**31" in out
    assert "Samples per prompt." in out and "rollout: Sampling" in out and "config.seed" not in out
    assert "config.rollout.slots = None; expects a whole number of at least 1, below 2**31, or None\n" in out
  assert main.main(["main", "--help_fields"]) == 0
  out = capsys.readouterr().out
  assert all(f"  config.{path} = " in out for path in FIELDS)
  assert main.main(["main", "--help_fields", "--config=configs/reward_model.py"]) == 0
  out = capsys.readouterr().out
  assert "config.learner.batch_pairs = 64" in out and "config.rollout" not in out


def test_help_on_an_entry_shows_all_of_its_settings(capsys):
  shown = lambda *argv: (main.main(["main", *argv]), capsys.readouterr().out)[1]
  out = shown(TINY, "--help_fields", "objective")
  assert "config.objective.clip_low = 0.0003; expects a number from 0 to 1" in out and "tau_pos" not in out
  out = shown(TINY, "--config.objective.name=sapo", "--config.advantage.estimator=gae", "--help_fields=")
  assert "  config.objective.tau_pos = 1.0; expects a finite number > 0\n      Temperature " in out
  assert "  config.advantage.critic_lam = 1.0; expects a number from 0 to 1\n      Lambda for the critic's targets." in out
  assert "config.correction.terms off_policy_mask:delta = (required); expects a finite number of nats per token >= 0\n" in out
  assert "config.objective.kl_estimator = 'k3'; expects one of 'k1', " in out
  assert "normalize_std" in shown("--help_fields", "advantage") and "clip_low" not in shown("--help_fields", "objective")


def test_help_on_fields_appears_only_on_request():
  for argv in ([], [TINY], [TINY, "--dry_run"]):
    assert command_line.help_text(["main", *argv], main.__doc__) is None


def test_help_on_an_unknown_field_is_refused(errors):
  (line,) = errors("--help_fields=rolout")
  assert line == "--help_fields: found 'rolout', expected the beginning of a field, such as 'rollout'; did you mean 'rollout'?"


def test_dry_run_shows_everything_and_writes_nothing(capsys, tmp_path):
  with quick():
    status = main.main(["main", "--config=configs/grpo.py:tiny", "--dry_run", "--config.seed=7", f"--workdir={tmp_path / 'run'}"])
  out = capsys.readouterr().out
  assert status == 0 and not list(tmp_path.iterdir())
  for part in ("config.seed = 7\n", "config.mesh.data = -1\n", "'tensor': 1", "27,072 parameters", "frozen reference", "no problem found"):
    assert part in out, part


def test_dry_run_says_what_is_left_out_of_a_file(capsys, tmp_path):
  chat = lambda i: [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{i}+1="}]
  rows = [{"prompt": chat(i), "reward_model": {"ground_truth": str(i + 1) if i % 9 else None}} for i in range(30)]
  (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
  args = ["task.name=file", "task.levels=None", "warm_start.num_steps=0", "rollout.prompt_buckets=(16,)"]
  with quick():
    status = main.main(["main", TINY, "--dry_run", *(f"--config.{x}" for x in (*args, f"task.path={tmp_path}/rows.jsonl"))])
  out = capsys.readouterr().out
  assert status == 0 and "no problem found" not in out and "look at 1 line(s) above" in out
  columns = "columns: question 'prompt' (chats), answer 'reward_model.ground_truth'; the prompt is '{question}'\n"
  assert "data: 30 problems read, 26 kept; 4 dropped: 4 reward_model.ground_truth is null\n" in out and columns in out
  assert f"ground_truth is null: {tmp_path / 'rows.jsonl'}:1\n" in out and "careful: 4 of 30 rows are left out\n" in out


@pytest.mark.parametrize(
  ("args", "count"), [(["--config.rollout.group_size=0", "--config.task.name=x"], 2), (["--config.rollout.prompt_buckets=(4,)"], 1)]
)
def test_dry_run_with_problems(args, count, capsys, tmp_path):
  with quick():
    status = main.main(["main", TINY, "--dry_run", f"--workdir={tmp_path / 'run'}", *args])
  out, err = capsys.readouterr()
  assert status == 2 and not list(tmp_path.iterdir())
  assert len(err.splitlines()) == count and f"{count} problem(s) found" in out and "config.seed = 0" in out


def parsed(*args: str):
  return command_line.parse(["main", *args])[:3]


def test_values_may_follow_an_equals_sign_or_a_space():
  config, workdir, only_print = parsed(
    "--config", "configs/gspo.py:tiny", "--config.seed", "3", "-workdir", "here", "--config.advantage.whiten", "--dry_run"
  )
  assert (config.seed, config.advantage.whiten, str(workdir), only_print) == (3, True, "here", True)
  config, _, _ = parsed("--config.learner.weight_decay=0.5", TINY, "--noconfig.log.tensorboard", "--config.seed=1", "--config.seed=2")
  assert (config.learner.weight_decay, config.log.tensorboard, config.seed) == (0.5, False, 2)
  config, _, _ = parsed(TINY, "--config.learner.row_buckets=8", "--config.learner.row_buckets=16")
  assert config.learner.row_buckets == (8, 16)


def test_the_default_workdir_distinguishes_runs():
  assert str(parsed("--config=configs/gspo.py")[1]) == "runs/gspo"
  assert str(parsed(TINY)[1]) == "runs/gspo-tiny"
  assert str(parsed(TINY, "--config.seed=3")[1]) == "runs/gspo-tiny-seed=3"


def test_another_objective_drops_the_settings_of_the_files(capsys):
  config, _, _ = parsed(TINY, "--config.objective.name=sapo")
  assert capsys.readouterr().out == "objective.name=sapo: dropped this config's clip_high=0.008, clip_low=0.006\n"
  assert config.objective.to_dict() == {"name": "sapo"}
  config, _, _ = parsed("--config.objective.clip_low=0.1", TINY, "--config.objective.name=grpo")
  assert capsys.readouterr().out == "objective.name=grpo: dropped this config's clip_high=0.008\n"
  assert config.objective.to_dict() == {"name": "grpo", "clip_low": 0.1}
  config, _, _ = parsed(TINY, "--config.objective.name=gspo", "--config.objective.clip_low=0.1")
  assert capsys.readouterr().out == "" and (config.objective.clip_low, config.objective.clip_high) == (0.1, 0.008)


SHORT = flags(VARIED | {"num_steps": 4, "warm_start.num_steps": 2, "eval.every": 4, "log.num_table_rows": 0})


def run_main(workdir: pathlib.Path, *args: str) -> int:
  with quick():
    return main.main(["main", TINY, *SHORT, *args, f"--workdir={workdir}"])


def summary_of(workdir: pathlib.Path) -> dict:
  return json.loads((workdir / "summary.json").read_text())


@pytest.mark.slow
def test_a_run_a_finished_run_and_a_changed_config(tmp_path, capsys, errors):
  workdir = tmp_path / "run"
  assert run_main(workdir) == 0
  assert f"report: {workdir / 'report.html'}" in capsys.readouterr().out.splitlines()[-1]
  assert summary_of(workdir)["command"].startswith("python -m jaxrl_llm.main --config=configs/gspo.py:tiny --config.")

  rows = (workdir / "metrics.jsonl").read_bytes()
  assert run_main(workdir) == 0
  assert "finished run" in capsys.readouterr().out and (workdir / "metrics.jsonl").read_bytes() == rows

  (workdir / "summary.json").unlink()  # As if the run had been killed.
  (line,) = errors(TINY, *SHORT, "--config.seed=5", "--config.rollout.temperature=0.5", workdir=workdir)
  assert (
    "seed: 0 -> 5" in line
    and "rollout.temperature: 1.0 -> 0.5" in line
    and "choose another --workdir, restore these values" in line
  )

  (workdir / "config.json").write_text("{")
  (line,) = errors(TINY, *SHORT, workdir=workdir)
  assert f"{workdir / 'config.json'} is not the config of a run" in line


def watch_close(monkeypatch) -> list[Progress]:
  closed, close = [], Progress.close
  monkeypatch.setattr(Progress, "close", lambda self: (closed.append(self), close(self))[0])
  return closed


@pytest.mark.exhaustive
def test_a_run_with_non_finite_updates_stops(tmp_path, capsys, monkeypatch):
  workdir, assess, calls = tmp_path / "run", batch_lib.assess, []

  def poisoned(*args, **kwargs):
    batch = assess(*args, **kwargs)
    calls.append(len(calls))
    totals = batch.graded.totals * np.float32("nan" if len(calls) > 2 else 1)
    return batch._replace(graded=batch.graded._replace(totals=totals))

  with monkeypatch.context() as patch:
    patch.setattr(batch_lib, "assess", poisoned)
    patch.setattr(nonfinite, "MAX_DUMPS", 1)
    closed = watch_close(patch)
    assert run_main(workdir, "--config.num_steps=6", "--config.learner.max_skipped=3") == 1
  (line,) = capsys.readouterr().err.splitlines()
  checkpoint = workdir / "checkpoints" / "4"  # 2 steps of warm start, 2 of RL.
  assert line.startswith("error: ") and "3 updates in a row" in line and "learner.max_skipped=3" in line and str(checkpoint) in line
  assert checkpoint.is_dir() and closed
  assert summary_of(workdir)["status"] == "stopped: not finite" and summary_of(workdir)["skipped_steps"] == 3
  assert column(workdir, "train/skipped_steps") == [0, 0, 2, 2]
  assert [path.name for path in (workdir / "nonfinite").iterdir()] == ["step_3.npz"], "the number of dumps is limited"

  assert run_main(workdir, "--config.num_steps=6", "--config.learner.max_skipped=3") == 0, (
    "the same command resumes once the cause is gone"
  )
  assert column(workdir, "train/skipped_steps") == [0] * 6 and summary_of(workdir)["status"] == "finished"


@pytest.mark.exhaustive
def test_an_interrupted_run_can_be_resumed(tmp_path, capsys, monkeypatch):
  def interrupt(*args, **kwargs):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(batch_lib, "assess", interrupt)
    closed = watch_close(patch)
    assert run_main(tmp_path / "run") == 130
  assert closed and "the same command resumes" in capsys.readouterr().err
  assert run_main(tmp_path / "run") == 0
