"""Whole runs on drawn figures, with a frozen tower and with one that is trained."""

import json

import jax
import numpy as np
import pytest

from jaxrl_llm import evaluate, train
from jaxrl_llm.config.check import config_problems
from jaxrl_llm.evaluation import read_samples
from jaxrl_llm.pretrained import png
from jaxrl_llm.rollouts.environments import Environment, Reply
from jaxrl_llm.run.setup.data import load_task
from jaxrl_llm.tasks.sets import figures
from jaxrl_llm.workdir import claim
from jaxrl_llm.workdir.metrics import read_rows
from tests.runs import VARIED, column, quick, run_here, tiny_config

SETTINGS = VARIED | {
  "model.preset": "nano-vl", "task.name": "figures", "task.levels": (1,), "rollout.prompt_buckets": None, "learner.row_tokens": None,
  "learner.row_buckets": None, "warm_start.row_buckets": None, "warm_start.num_steps": 2, "num_steps": 2,
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("train_tower", [False, True], ids=["frozen", "trained"])
def test_a_run_on_pictures(train_tower, tmp_path, monkeypatch):
  """The tower sees each distinct picture once if it is frozen; sampler and learner agree."""
  monkeypatch.setattr(figures, "PROBLEMS_PER_ANSWER", 10)
  config = tiny_config("sapo", SETTINGS | {"model.train_tower": train_tower, "task.data_dir": str(tmp_path / "data")})
  assert not config_problems(config)
  with quick():
    run = train.start_run(config, tmp_path / "run")
    before = jax.tree.map(np.asarray, run.state.params["tower"])
    train.proceed(run)
  changed = jax.tree.map(lambda x, y: bool(np.any(x != np.asarray(y))), before, run.state.params["tower"])
  assert any(jax.tree.leaves(changed)) == train_tower
  gallery, task = run.experiment.drawing.gallery, load_task(config)
  assert 0 < gallery.num_read <= len({row["images"][0] for row in [*task.train, *task.test]})
  read = gallery.num_read
  gallery.pictures([task.test[0]] * 3, run.state.params), gallery.pictures([task.test[0]], run.state.params)
  assert gallery.num_read <= read + 1
  assert (run.config.model.image_tokens, run.config.rollout.prompt_images) == (9, 1)
  gaps = column(tmp_path / "run", "rollout_corr/logprob_abs_diff/max")
  assert len(gaps) == 2 and gaps[0] < 1e-3


@pytest.mark.exhaustive
@pytest.mark.usefixtures("in_the_checkout")
def test_text_among_pictures_and_an_evaluation(tmp_path):
  """Problems with a picture, with two and with none in one file, trained on and evaluated again."""
  rows = [{"question": f"Which of {i}?", "answer": i % 4, "images": [f"{i}.png", f"{i + 1}.png"][: i % 3] or None} for i in range(40)]
  for i in range(41):
    (tmp_path / f"{i}.png").write_bytes(png.encode(np.full((24, 16, 3), 6 * i, np.uint8)))
  (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
  own = {"task.name": "file", "task.path": str(tmp_path / "own.jsonl"), "task.images_column": "images", "task.reward": "final_number"}
  changes = own | {"task.levels": None, "task.data_dir": str(tmp_path / "data"), "warm_start.num_steps": 0, "num_steps": 1}
  changes |= {"eval.num_prompts": 8, "eval.batch_prompts": 4, "rollout.num_prompts": 8, "rollout.max_new_tokens": 8}
  changes |= {"learner.row_tokens": 64, "learner.row_buckets": (16,), "reward.overlong_buffer": 4}
  config = tiny_config("sapo", SETTINGS | changes)
  claim.claim(tmp_path / "run", config.to_dict())
  with quick():
    train.run(config, tmp_path / "run")
    assert evaluate.main(["evaluate", f"--checkpoint={tmp_path / 'run'}", "--metrics=avg@n:n=2"]) == 0
  (gap,) = column(tmp_path / "run", "rollout_corr/logprob_abs_diff/max")
  assert gap < 1e-3
  shown = {len(row.get("images", ())) for row in read_rows(tmp_path / "run" / "samples.jsonl")}
  assert shown == {0, 1, 2}
  (path,) = (tmp_path / "run" / "evaluations").glob("*/samples.jsonl")
  of_problems = [row.example["images"] for row in read_samples(path) if row.example]
  assert all(x.startswith("data:image/png") for images in of_problems for x in images)


def talk() -> Environment:
  """Makes an environment that asks again until it has got three turns."""

  def step(turns, said):
    return turns + 1, Reply("ab", 0.0, done=turns == 2)

  return Environment(lambda example: 0, step)


@pytest.mark.exhaustive
@pytest.mark.parametrize("train_tower", [False, True])
def test_conversations_about_pictures(train_tower, tmp_path, monkeypatch):
  """With a lag, and a trained tower that new weights interrupt."""
  monkeypatch.setattr(figures, "PROBLEMS_PER_ANSWER", 10)
  lag = {"rollout.staleness": 1, "rollout.update_in_flight": "recompute" if train_tower else None}
  talks = {"environment.name": "tests.run.test_pictures:talk", "rollout.stop_strings": tuple("abcdefgh"), "reward.overlong_buffer": 16}
  changes = {"model.train_tower": train_tower, "task.data_dir": str(tmp_path / "data"), "num_steps": 4}
  config = tiny_config("gspo", SETTINGS | talks | lag | changes | {"checkpoint.every": 4, "eval.every": 2})
  assert not config_problems(config)
  run_here(config, tmp_path / "run")
  gaps = column(tmp_path / "run", "rollout_corr/logprob_abs_diff/max")
  assert gaps[0] < 1e-5
  assert column(tmp_path / "run", "conversation/turns/max")[0] == 3
  assert max(column(tmp_path / "run", "rollout/staleness")) == 1


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model.preset": "nano"}, "config.model.train_tower: found True, expected False, because the model has no vision tower"),
    ({"mesh.context": 2}, "config.mesh.context: found 2, expected 1 for a model with a vision tower, for which it is not implemented"),
    ({"mesh.sampler": 1}, "config.mesh.sampler: found 1, expected 0 for a model with a vision tower"),
    ({"rollout.spare_prompts": 4}, "config.rollout.spare_prompts: found 4, expected 0 for a model with a vision tower"),
    ({"model.lora_rank": 2}, "config.model.train_tower: found True, expected False beside model.lora_rank"),
  ],
  ids=["no tower", "context", "own devices", "spare prompts", "adapters"],
)
def test_settings_that_do_nothing_for_pictures_are_refused(changes, message):
  problems = config_problems(tiny_config("sapo", SETTINGS | {"model.train_tower": True} | changes))
  assert any(message in str(problem) for problem in problems), problems


def test_a_language_model_refuses_problems_with_pictures(tmp_path):
  config = tiny_config("sapo", SETTINGS | {"model.preset": "nano", "task.data_dir": str(tmp_path)})
  with pytest.raises(ValueError, match="^task figures: found problems with pictures for a model that reads text alone"):
    load_task(config)
