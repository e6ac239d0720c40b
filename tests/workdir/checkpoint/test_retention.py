"""The retention of checkpoints."""

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import reward_model
from jaxrl_llm import train
from jaxrl_llm.run.jobs.reward_model import training
from jaxrl_llm.workdir import checkpoint
from jaxrl_llm.workdir.checkpoint.retention import Save, kept
from tests.runs import VARIED, quick, tiny_config

HOUR = 3600.0
SAVES = [
  Save(10, 0 * HOUR, 0.1),
  Save(20, 1 * HOUR, 0.9),
  Save(30, 2.5 * HOUR, None),
  Save(40, 3 * HOUR, 0.9),
  Save(50, 5 * HOUR, 0.3),
  Save(55, 5.5 * HOUR, None, temporary=True),
]


@pytest.mark.parametrize(
  ("saves", "options", "expected"),
  [
    ([], {"newest": 2, "best": 3, "every_hours": 1.0}, set()),
    (SAVES, {"newest": 1}, {50, 55}),  # A temporary one is the newest of all and does not count.
    (SAVES, {"newest": 2}, {40, 50, 55}),
    (SAVES, {"newest": 9}, {10, 20, 30, 40, 50, 55}),
    ([*SAVES, Save(60, 6 * HOUR)], {"newest": 1}, {60}),  # The next regular one replaces it.
    # So does the next temporary one.
    ([*SAVES, Save(57, 6 * HOUR, temporary=True)], {"newest": 1}, {50, 57}),
    (SAVES, {"newest": 1, "best": 1}, {40, 50, 55}),  # The newer of two equally good ones.
    (SAVES, {"newest": 1, "best": 2}, {20, 40, 50, 55}),
    # Unmeasured ones are not among the best.
    (SAVES, {"newest": 1, "best": 9}, {10, 20, 40, 50, 55}),
    # 0 h, 2.5 h, 5 h: each at least two hours after the last.
    (SAVES, {"newest": 1, "every_hours": 2.0}, {10, 30, 50, 55}),
    (SAVES, {"newest": 1, "every_hours": 100.0}, {10, 50, 55}),
    ([Save(10, 0, float("nan")), Save(20, 1, 0.0), Save(30, 2)], {"newest": 1, "best": 1}, {20, 30}),
    # The clock was set back.
    ([Save(10, 9 * HOUR), Save(20, 1 * HOUR), Save(30, 2 * HOUR)], {"newest": 1, "every_hours": 1.0}, {10, 30}),
    # Temporary ones do not stay even as the best.
    ([Save(10, 0, 0.9, temporary=True), Save(20, 0, 0.1)], {"newest": 1, "best": 1}, {20}),
  ],
)  # fmt: skip
def test_golden_cases(saves, options, expected):
  assert kept(saves, **options) == kept(saves[::-1], **options) == expected


RUNS = st.lists(st.tuples(st.floats(0, 3), st.none() | st.floats(0, 1), st.booleans()), min_size=1, max_size=25)


@given(RUNS, st.integers(1, 4), st.integers(0, 3), st.none() | st.floats(0.1, 5))
def test_deletion_after_each_save_keeps_what_is_promised(run, newest, best, every_hours):
  """A run deletes after each save, and the next selection does not see what was deleted."""
  saves, there, hours = [], [], 0.0
  for step, (later, accuracy, temporary) in enumerate(run):
    hours += later
    saves.append(Save(step, hours * HOUR, accuracy, temporary))
    there.append(saves[-1])
    stay = kept(there, newest=newest, best=best, every_hours=every_hours)
    assert step in stay, "the newest stays"
    there = [save for save in there if save.step in stay]
    assert kept(there, newest=newest, best=best, every_hours=every_hours) == stay, "a second selection is the same"
  regular = [save for save in saves if not save.temporary]
  assert {save.step for save in regular[-newest:]} <= stay
  measured = sorted((save for save in regular if save.accuracy is not None), key=lambda save: (save.accuracy, save.step), reverse=True)
  assert {save.step for save in measured[:best]} <= stay
  assert {save.step for save in saves if save.temporary} & stay <= {saves[-1].step}
  if every_hours is not None and regular:
    times = [save.time for save in regular if save.step in stay]
    assert times[0] == regular[0].time
    # Every save of the run has a kept one at most that long before it.
    for save in regular:
      assert any(0 <= save.time - time < (every_hours + 1e-9) * HOUR for time in times)


SMALL = VARIED | {"num_steps": 3, "warm_start.num_steps": 3, "warm_start.batch_size": 8, "checkpoint.warm_start_every": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "job", "overrides", "expected"),
  [
    # In the warm start, before the RL loop, and within it. Steps 3 and 6 are measured.
    ("gspo", train, SMALL | {"eval.every": 3}, [(1, True), (2, False), (3, False), (4, True), (5, False), (6, False)]),
    ("reward_model", training, {"num_steps": 4}, [(1, True), (2, False), (3, True), (4, False)]),
  ],
)
def test_time_makes_temporary_checkpoints(name, job, overrides, expected, tmp_path):
  config = tiny_config(name) if name == "gspo" else reward_model.get_config("tiny")
  common = {"checkpoint.every": 2, "checkpoint.every_minutes": 1e-9, "checkpoint.keep": 1, "checkpoint.keep_best": 1}
  config.update_from_flattened_dict(overrides | common | {"log.tensorboard": False})
  made, save = [], checkpoint.save

  def watched(checkpoints, step, *args, **options):
    made.append((step, options["temporary"]))
    save(checkpoints, step, *args, **options)

  with quick(1), mock.patch.object(checkpoint, "save", watched):
    summary = job.proceed(job.start_run(config, tmp_path))
  assert made == expected and summary["failed_saves"] == 0
  assert expected[-1][0] in checkpoint.whole_steps(tmp_path / "checkpoints")
  assert not {step for step, temporary in expected if temporary} & set(checkpoint.whole_steps(tmp_path / "checkpoints"))
