"""A reference and a critic, which only some runs have, survive a kill bit for bit.

`tests/experiments/test_storm.py` kills runs at random.
"""

import json
import pathlib
import signal

import jax
import numpy as np
import pytest

from jaxrl_llm.run.setup import experiment
from jaxrl_llm.workdir import checkpoint
from tests.runs import VARIED, flags, lines_of, quick, reach, rows, start, succeed, tiny_config

OVERRIDES = VARIED | {
  "num_steps": 16, "warm_start.num_steps": 16, "warm_start.batch_size": 8, "checkpoint.every": 8, "checkpoint.warm_start_every": 8,
  "eval.every": 8, "log.num_table_rows": 0, "log.tensorboard": False,
}  # fmt: skip


def final_arrays(workdir: pathlib.Path, name: str, changes: dict) -> list[np.ndarray]:
  with quick():
    built = experiment.build_experiment(tiny_config(name, OVERRIDES | changes))
  abstract = {"state": built.learner.abstract_state}
  if "ref_logprobs" in built.needs:
    abstract["reference"] = built.learner.abstract_state.params
  if built.learner.critic is not None:
    abstract["critic"] = built.learner.critic.abstract_state
  arrays, record = checkpoint.restore_latest(checkpoint.open_checkpoints(workdir / "checkpoints", keep=2), abstract)
  assert (record["warm_steps"], record["rl_steps"]) == (16, 16)
  return [np.asarray(leaf) for leaf in jax.tree.leaves(arrays)]


def assert_equal_runs(golden: pathlib.Path, killed: pathlib.Path, name: str, changes: dict) -> None:
  assert lines_of(killed) == lines_of(golden)
  norms = [row.get("actor/grad_norm", row.get("critic/grad_norm")) for row in rows(golden, "rl")]
  assert len(norms) == 16 and min(norms) > 0, "without gradients the test would prove little"
  summaries = [json.loads((workdir / "summary.json").read_text()) for workdir in (golden, killed)]
  for field in ("status", "accuracy_start", "accuracy_final", "num_steps", "warm_start_steps", "tokens", "skipped_steps"):
    assert summaries[0][field] == summaries[1][field], field
  for one, other in zip(final_arrays(golden, name, changes), final_arrays(killed, name, changes), strict=True):
    assert one.dtype == other.dtype and np.array_equal(one, other)
  samples = [(workdir / "samples.jsonl").read_bytes() for workdir in (golden, killed)]
  assert samples[0] == samples[1]


@pytest.mark.parametrize("name", [pytest.param("grpo", marks=pytest.mark.exhaustive), pytest.param("ppo", marks=pytest.mark.slow)])
def test_the_reference_and_the_critic_are_kept(name, tmp_path):
  """The losses depend on all that the checkpoint holds.

  It holds GRPO's frozen reference, PPO's critic with its optimizer, and an adaptive coefficient.
  """
  adaptive = {"reward.kl_coef": 0.1, "kl.target": 0.01, "kl.horizon": 500} if name == "ppo" else {}
  args = [f"--config=configs/{name}.py:tiny", *flags(OVERRIDES | adaptive)]
  succeed(*args, f"--workdir={tmp_path / 'golden'}")
  args_killed = [*args, f"--workdir={tmp_path / 'killed'}"]
  process = start(*args_killed)
  reach(tmp_path / "killed", "rl", 10, process)
  process.send_signal(signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL and 10 <= rows(tmp_path / "killed", "rl")[-1]["step"] < 16
  assert "resumed" in succeed(*args_killed)
  assert json.loads((tmp_path / "killed" / "summary.json").read_text())["attempts"] == 2
  assert_equal_runs(tmp_path / "golden", tmp_path / "killed", name, adaptive)
