"""Runs that draw from a queue: how old their tokens are, and that they repeat to the last bit."""

import json
import random
import time

import numpy as np
import pytest

from jaxrl_llm import train
from jaxrl_llm.config.check import config_problems
from jaxrl_llm.config.fields import flatten
from jaxrl_llm.evaluation import read_samples
from jaxrl_llm.main import main
from jaxrl_llm.rollouts import drawing_queue, schedule
from jaxrl_llm.rollouts.drafts import Drafts
from jaxrl_llm.rollouts.schedule import ReplayDiffersError
from jaxrl_llm.run.steps import learn, sample
from jaxrl_llm.tasks.sets import figures
from tests.marks import few
from tests.runs import VARIED, break_at, column, quick, rows, run_here, tiny_config

SHORT = VARIED | {
  "num_steps": 7, "warm_start.num_steps": 0, "checkpoint.every": 4, "eval.every": 5, "eval.num_prompts": 8, "eval.batch_prompts": 8,
  "learner.learning_rate": 1e-2, "log.tensorboard": False, "rollout.update_in_flight": "wait", "rollout.staleness": 2, "rollout.slots": 8,
}  # fmt: skip
TIMES = ("perf/", "timing_s/", "samplers/", "conversation/computed_tokens", "conversation/cached_tokens")


FIGURES = {
  "model.preset": "nano-vl", "task.name": "figures", "task.levels": (1,), "rollout.prompt_buckets": None, "learner.row_tokens": None,
  "learner.row_buckets": None, "warm_start.row_buckets": None,
}  # fmt: skip


def config_of(name="gspo", changes=None):
  """Returns the config of a short run; "figures" are pictures for a frozen tower."""
  pictures = FIGURES if name == "figures" else {}
  config = tiny_config("sapo" if pictures else name, SHORT | pictures | (changes or {}))
  assert config_problems(config) == []
  return config


def results(workdir):
  """Returns all metrics of a run but for times, and for what was still cached."""
  return [{name: x for name, x in row.items() if not name.startswith(TIMES)} for phase in ("rl", "eval") for row in rows(workdir, phase)]


def repeat(config, workdir, replay):
  """Repeats a run in another workdir."""
  workdir.mkdir(parents=True, exist_ok=True)
  with quick():
    return train.proceed(train.start_run(config, workdir, replay=replay))


@pytest.fixture
def slowly(monkeypatch):
  """Makes updates take random times, so that weights change at any time."""
  pauses, update = random.Random(0), learn.update

  def updating(*args):
    time.sleep(pauses.uniform(0, 0.15))
    return update(*args)

  monkeypatch.setattr(learn, "update", updating)


@pytest.mark.parametrize(
  ("name", "in_flight"),
  few([("gspo", "keep"), ("tools", "recompute"), ("tools", "wait"), ("figures", "keep")], 0),
)
def test_a_run_is_repeated_to_the_last_bit(name, in_flight, slowly, tmp_path, monkeypatch):
  monkeypatch.setattr(figures, "PROBLEMS_PER_ANSWER", 10)
  config = config_of(name, {"rollout.update_in_flight": in_flight})
  run_here(config, tmp_path / "first")
  ages = column(tmp_path / "first", "rollout/staleness")
  # The steps behind the checkpoint after step 4 begin anew.
  assert max(ages) == 2 and all(age <= lag for age, lag in zip(ages, [0, 1, 2, 2, 0, 1, 2], strict=True))
  assert len({row["rollout/tokens_sha256"] for row in rows(tmp_path / "first", "rl")}) == 7
  monkeypatch.undo()
  repeat(config, tmp_path / "again", tmp_path / "first")
  assert results(tmp_path / "again") == results(tmp_path / "first")
  assert schedule.read(tmp_path / "again") == schedule.read(tmp_path / "first")


@pytest.mark.slow
def test_without_lag_a_run_is_the_same_whenever(tmp_path, monkeypatch):
  config = config_of(changes={"rollout.staleness": 0, "rollout.update_in_flight": None, "rollout.driver": "loop", "num_steps": 3})
  run_here(config, tmp_path / "first")
  monkeypatch.setattr(learn, "update", lambda *args, update=learn.update: (time.sleep(0.2), update(*args))[1])
  run_here(config, tmp_path / "again")
  assert results(tmp_path / "again") == results(tmp_path / "first")
  assert column(tmp_path / "first", "rollout/staleness") == [0, 0, 0]


@pytest.mark.slow
def test_an_interrupted_run_does_again_what_it_had_done(slowly, tmp_path, monkeypatch):
  """It stops twice, before and behind its checkpoint; what it had learned by then stays."""
  config, seen = config_of(changes={"rollout.update_in_flight": "keep"}), []
  for step in (3, 6):
    break_at(config, tmp_path / "first", step)
    seen.append(schedule.read(tmp_path / "first"))
    assert len(seen[-1]) >= step
  run_here(config, tmp_path / "first")
  last = schedule.read(tmp_path / "first")
  assert all(last[: len(batches)] == batches for batches in seen) and len(last) == 7
  monkeypatch.undo()
  repeat(config, tmp_path / "again", tmp_path / "first")
  assert results(tmp_path / "again") == results(tmp_path / "first")


@pytest.mark.exhaustive
def test_what_a_run_did_with_other_settings_is_not_repeated(tmp_path):
  break_at(config_of(), tmp_path, 5)
  before = schedule.read(tmp_path)
  run_here(config_of(changes={"learner.learning_rate": 2e-2}), tmp_path)
  after = schedule.read(tmp_path)
  assert len(after) == 7 and after[:4] == before[:4] and {batch.settings for batch in after[4:]} != {before[4].settings}


@pytest.mark.slow
def test_a_replay_that_differs_is_an_error(tmp_path):
  config = config_of(changes={"num_steps": 2})
  run_here(config, tmp_path / "first")
  lines = [batch._replace(tokens=1) if batch.step else batch for batch in schedule.read(tmp_path / "first")]
  (tmp_path / "first" / schedule.FILE).write_text("".join(f"{schedule.to_line(batch)}\n" for batch in lines))
  with pytest.raises(ReplayDiffersError, match="replay: the rollouts of step 2"):
    repeat(config, tmp_path / "again", tmp_path / "first")


@pytest.mark.exhaustive
def test_a_schedule_in_the_fields_of_an_earlier_version_is_repeated(tmp_path):
  config = config_of(changes={"num_steps": 2, "rollout.driver": "loop"})
  run_here(config, tmp_path / "first")
  saved = json.loads(json.dumps(config.to_dict()))
  saved["rollout"] |= {"queue": True, "report_every": 0, "update_in_flight": None}
  del saved["rollout"]["driver"]
  (tmp_path / "first" / "config.json").write_text(json.dumps(saved))
  lines = [batch._replace(settings=schedule.checksum_of(flatten(saved))) for batch in schedule.read(tmp_path / "first")]
  (tmp_path / "first" / schedule.FILE).write_text("".join(f"{schedule.to_line(batch)}\n" for batch in lines))
  repeat(config, tmp_path / "again", tmp_path / "first")
  assert results(tmp_path / "again") == results(tmp_path / "first")
  with pytest.raises(ValueError, match="--replay: found another config in"):
    repeat(config_of(changes={"num_steps": 2, "rollout.driver": "loop", "seed": 7}), tmp_path / "other", tmp_path / "first")


def test_tokens_beyond_the_bound_are_never_learned_from(tmp_path, monkeypatch):
  """An engine that ignores `Request.oldest` is found out."""
  config = config_of(changes={"num_steps": 3, "checkpoint.every": 2, "rollout.staleness": 1})
  monkeypatch.setattr(drawing_queue, "versions_of", lambda *of: [max(version - 2, 0) for version in schedule.versions_of(*of)])
  with pytest.raises(sample.StaleError, match="step 3: found tokens of the weights after 0 steps, expected 1 or later"):
    run_here(config, tmp_path)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ((), "--replay: found a config with rollout.update_in_flight=None"),
    (("--config.rollout.update_in_flight=wait", "--config.rollout.staleness=1"), "--replay: found no schedule.jsonl in"),
  ],
)
def test_a_replay_of_nothing_is_refused(arguments, message, tmp_path, capsys):
  argv = ["main", "--config=configs/gspo.py:tiny", f"--workdir={tmp_path / 'again'}", f"--replay={tmp_path}", *arguments]
  assert main(argv) == 2
  assert message in capsys.readouterr().err
  assert main(argv[:2] + argv[3:]) == 2
  assert "--replay: found no --workdir" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_over_200_steps_no_token_is_too_old_and_no_length_is_preferred(tmp_path, monkeypatch):
  """Both sides pause at random; the run is stopped and resumed three times."""
  pauses, drawn, learned = random.Random(1), [], []
  changes = {"num_steps": 200, "checkpoint.every": 25, "eval.every": 200, "rollout.staleness": 4, "rollout.update_in_flight": "keep"}
  config, update, learn_from, take = config_of(changes=changes), learn.update, train.learn_from, Drafts.take

  def learning(run, batch, step, *args, **options):
    learned.extend((step, int(size)) for size in batch.rollouts.mask.sum(axis=1))
    return learn_from(run, batch, step, *args, **options)

  def noting(self, draft, future):
    time.sleep(0.02 * (pauses.random() < 0.05))  # In the engine's own thread.
    if self.job.draws.temperature == config.rollout.temperature and self.job.group_size == config.rollout.group_size:
      drawn.append(len(future.result().tokens))
    return take(self, draft, future)

  monkeypatch.setattr(learn, "update", lambda *args: (time.sleep(pauses.uniform(0, 0.1)), update(*args))[1])
  monkeypatch.setattr(train, "learn_from", learning)
  monkeypatch.setattr(Drafts, "take", noting)
  for step in (30, 95, 160):
    break_at(config, tmp_path, step)
  run_here(config, tmp_path)
  batches = schedule.read(tmp_path)
  ages = [batch.step - version for batch in batches for turns in batch.turns for turn in turns for version, _ in turn]
  assert [batch.step for batch in batches] == list(range(200)) and min(ages) >= 0 and max(ages) == 4
  assert max(column(tmp_path, "rollout/staleness")) == 4
  assert {step for step, _ in learned} == set(range(200))
  ordered = np.sort(drawn), np.sort([size for _, size in learned])
  grid = np.arange(1, 33)
  distance = max(abs(np.searchsorted(ordered[0], grid, "right") / len(drawn) - np.searchsorted(ordered[1], grid, "right") / len(learned)))
  # Kolmogorov and Smirnov's 95 % bound for two samples of these sizes.
  assert distance < 1.36 * np.sqrt((len(drawn) + len(learned)) / (len(drawn) * len(learned)))


@pytest.mark.exhaustive
def test_the_engine_and_the_sampler_draw_the_same_tokens_for_pictures(tmp_path, monkeypatch):
  """Responses of training and of evaluations, at a temperature above 0."""
  monkeypatch.setattr(figures, "PROBLEMS_PER_ANSWER", 10)
  changes = {"eval.temperature": 0.7, "eval.samples": 2, "eval.num_prompts": 16, "eval.batch_prompts": 16, "eval.save_samples": True}
  changes |= {"num_steps": 1, "warm_start.num_steps": 40, "checkpoint.every": 1, "rollout.staleness": 0}
  changes |= {"rollout.update_in_flight": None}
  responses = lambda path: [(row.response, row.turns, row.num_tokens, row.score) for row in read_samples(path / "evaluations/step-0.jsonl")]
  for driver in ("loop", "drain"):
    run_here(config_of("figures", changes | {"rollout.driver": driver}), tmp_path / driver)
  evaluated, drawn = ([read(tmp_path / driver) for driver in ("loop", "drain")] for read in (responses, hashes))
  assert evaluated[0] == evaluated[1] and len({row[0] for row in evaluated[0]}) > 1
  assert drawn[0] == drawn[1]


def hashes(path):
  return column(path, "rollout/tokens_sha256")
