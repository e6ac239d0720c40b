"""Drawn figures: what is drawn is what is asked, and only the picture tells the answer."""

from collections import Counter

import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.pretrained import pictures
from jaxrl_llm.pretrained.pictures import PictureConfig
from jaxrl_llm.rewards.final_answer import final_answer
from jaxrl_llm.tasks import pipeline, shots
from jaxrl_llm.tasks.sets import figures
from jaxrl_llm.text_types import Completion

SMALL = PictureConfig(patch_size=8, min_pixels=256, max_pixels=4096)


PROBLEMS = 20
"""Problems of each question and answer, fewer than in the task, whose building takes 20 s."""


@pytest.fixture(scope="module", autouse=True)
def fewer():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(figures, "PROBLEMS_PER_ANSWER", PROBLEMS)
    yield


@pytest.fixture(scope="module")
def task(tmp_path_factory):
  return tasks.make("figures", data_dir=tmp_path_factory.mktemp("figures"), pictures=SMALL)


def measured(row):
  """Returns the answer as measured in the pixels, by other means than those that drew them."""
  picture = pictures.open_picture(row["images"][0])
  question, ink = row["question"], (picture != 255).any(axis=2)
  if "dot" in question:
    colours = {"red": (220, 30, 30), "green": (20, 150, 40), "blue": (30, 60, 220)}
    named = [colour for name, colour in colours.items() if name in question]
    if "How many" in question:
      return ((picture == named[0]).all(axis=2) if named else ink).sum() // 16
    return np.flatnonzero(ink.any(axis=1 if "Row" in question else 0))[0] // 8 + 1
  heights = dict(zip("ABC", (ink[:, 16 * i + 5 : 16 * i + 11].any(axis=1).sum() // 5 for i in range(3)), strict=True))
  if "tallest" in question:
    return max(heights.values())
  names = [word.rstrip("?") for word in question.split() if word.rstrip("?") in heights]
  return heights[names[0]] - (heights[names[1]] if len(names) > 1 else 0)


def test_answers_are_what_is_drawn(task):
  rows = [*task.test, *task.train[::7]]
  assert {row["level"] for row in rows} == set(figures.LEVELS)
  for row in rows:
    assert str(measured(row)) == row["answer"], row["id"]


def test_the_question_does_not_tell_the_answer(task):
  """All answers to a question are equally frequent, so that a constant is right by chance."""
  for split, count in {"train": 18, "test": 2}.items():
    frequencies = Counter((row["question"], row["answer"]) for row in getattr(task, split))
    assert set(frequencies.values()) == {count} and len(frequencies) == sum(len(question.answers) for question in figures.QUESTIONS)
  assert {row["prompt"] for row in task.train} == {f"<image>{question.text}\n" for question in figures.QUESTIONS}


def test_no_picture_occurs_twice(task):
  digests = [pictures.open_picture(row["images"][0]).tobytes() for split in (task.train, task.test) for row in split]
  assert len(set(digests)) == len(digests) == PROBLEMS * sum(len(question.answers) for question in figures.QUESTIONS)
  assert {row["images"] for row in task.demonstrations} == {row["images"] for row in task.train}


def test_the_teacher_is_careless(task):
  right = {level: [] for level in figures.LEVELS}
  for row in task.demonstrations:
    right[row["level"]].append(final_answer(Completion(row["response"], (), 9, True), row))
  means = {level: np.mean(values) for level, values in right.items()}
  assert 0.42 < means[1] < 0.48 and 0.3 < means[2] < 0.41 and 0.42 < means[3] < 0.48
  row = next(row for row, _ in figures._problems(PROBLEMS) if row["level"] == 2)
  assert final_answer(Completion(row["response"], (), 9, True), row) == 1


def test_prompts_hold_one_token_for_each_merged_square(task):
  ids, _ = pipeline.encode_prompts(task.train[:2], task.tokenizer, buckets=(64,), pictures=SMALL)
  assert [(row == 259).sum() for row in ids] == [9, 9]
  (shown,) = pipeline.encode_demonstrations(task.demonstrations[:1], task.tokenizer, pictures=SMALL)
  assert shown.prompt[:11] == [257, *[259] * 9, *task.demonstrations[0]["prompt"][7:8].encode()]
  assert pipeline.prompt_lengths(task.demonstrations[:1], task.tokenizer, pictures=SMALL) == [len(shown.prompt)]
  white = figures.blank(task.train[0])
  assert (pictures.open_picture(white["images"][0]) == 255).all() and white["prompt"] == task.train[0]["prompt"]


@pytest.mark.exhaustive
def test_the_control_has_the_same_problems_with_white_pictures(task, tmp_path):
  control = tasks.make("blank_figures", data_dir=tmp_path, pictures=SMALL)
  for split in ("train", "test", "demonstrations"):
    same = lambda row: tuple(value for name, value in sorted(row.items()) if name not in ("images", "index"))
    assert sorted(map(same, getattr(control, split))) == sorted(map(same, getattr(task, split)))
  pictures_of = {picture for row in (*control.train, *control.test, *control.demonstrations) for picture in row["images"]}
  assert [bool((pictures.open_picture(picture) == 255).all()) for picture in pictures_of] == [True]


@pytest.mark.slow
def test_the_same_problems_are_drawn_each_time(task, tmp_path):
  figures._problems.cache_clear()
  again = tasks.make("figures", data_dir=tmp_path, levels=(2,), pictures=SMALL)
  assert list(again.test) == [row for row in task.test if row["level"] == 2]


def test_a_policy_that_reads_text_alone_is_refused(task, tmp_path):
  with pytest.raises(ValueError, match="^task figures: found problems with pictures for a model that reads text alone"):
    tasks.make("figures", data_dir=tmp_path)
  with pytest.raises(ValueError, match="^config.task.shots: found 2 for task figures"):
    shots.with_shots(task, 2, "{prompt}{solution}")
