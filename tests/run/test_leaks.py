"""A long run holds no more host memory and no more device arrays than a short one."""

import gc
import os
import pathlib

import jax
import numpy as np
import pytest

from jaxrl_llm import train
from jaxrl_llm.devices.compilation import give_back_memory
from tests.runs import VARIED, quick, tiny_config

STATM = pathlib.Path("/proc/self/statm")


@pytest.mark.slow
@pytest.mark.skipif(not STATM.exists(), reason="needs /proc")
@pytest.mark.usefixtures("little_garbage")
def test_five_hundred_steps_leave_no_memory_behind(tmp_path, monkeypatch):
  """Compares the medians of stretches of 100 steps after the first 100.

  The steps include evaluations, checkpoints and reports.
  """
  settings = {
    "warm_start.num_steps": 0, "num_steps": 500, "eval.every": 50, "eval.num_prompts": 8, "eval.batch_prompts": 8, "checkpoint.every": 50,
    "rollout.num_prompts": 2, "rollout.group_size": 2, "rollout.max_new_tokens": 8, "reward.overlong_buffer": 4, "eval.samples": 1,
    "learner.updates_per_rollout": 1, "learner.row_buckets": (4,), "learner.row_tokens": 32, "log.samples_every": 50,
  }  # fmt: skip
  sizes, arrays, adapt_coefficients = [], [], train.adapt_coefficients

  def measured(run, row):
    if run.phases.step % 10 == 0:
      gc.collect()
      # glibc keeps freed memory of the reports, which grow with the run; it must not be counted.
      give_back_memory()
      sizes.append(int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
      arrays.append(len(jax.live_arrays()))
    return adapt_coefficients(run, row)

  monkeypatch.setattr(train, "adapt_coefficients", measured)
  with quick():
    train.run(tiny_config(overrides=VARIED | settings), tmp_path)
  warm = np.array(sizes[10:])
  stretches = np.median(warm.reshape(4, -1), axis=1)  # Of 100 steps each.
  print(f"MiB at every 10th step: {np.round(sizes, 1).tolist()}; live arrays: {arrays}")
  assert set(arrays[10:]) == {arrays[10]}, arrays
  assert stretches[-1] - stretches[0] < MAX_GROWTH_MB, stretches


# 3 MiB were measured between 200 and 500 steps; a leak of 20 KiB per step would be 6.
MAX_GROWTH_MB = 6.0
