"""The layout of a run over devices changes neither what it samples nor what it learns."""

import numpy as np
import pytest

from tests.runs import VARIED, column, flags, rows, run_here, succeed, tiny_config

SHORT = VARIED | {"num_steps": 2, "warm_start.num_steps": 4, "eval.every": 2, "log.num_table_rows": 0, "log.tensorboard": False}


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("one")
  run_here(tiny_config("grpo", SHORT), workdir)
  return workdir


def assert_same(workdir, on_one_device) -> None:
  for name in ("actor/loss", "actor/grad_norm"):
    np.testing.assert_allclose(column(workdir, name, "warm_start"), column(on_one_device, name, "warm_start"), rtol=1e-4, err_msg=name)
  one, many = rows(on_one_device, "rl")[0], rows(workdir, "rl")[0]
  assert many["rollout/tokens_sha256"] == one["rollout/tokens_sha256"]
  for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/ref_kl", "critic/rewards/mean", "critic/advantages/max"):
    np.testing.assert_allclose(many[name], one[name], rtol=1e-5, atol=1e-5, err_msg=name)
  one_later, many_later = rows(on_one_device, "rl")[1], rows(workdir, "rl")[1]
  # Rounding may have decided a near tie by then.
  if many_later["rollout/tokens_sha256"] == one_later["rollout/tokens_sha256"]:
    for name in ("actor/loss", "actor/grad_norm", "ratio/max"):
      np.testing.assert_allclose(many_later[name], one_later[name], rtol=1e-4, atol=1e-5, err_msg=name)
  assert one["actor/grad_norm"] > 0 and many["rollout_corr/logprob_abs_diff/max"] <= 1e-5
  assert rows(workdir, "eval")[0]["eval/response_length/mean"] == rows(on_one_device, "eval")[0]["eval/response_length/mean"]


@pytest.mark.parametrize(
  "mesh",
  [
    pytest.param({"mesh.data": 8}, marks=pytest.mark.exhaustive),
    pytest.param({"mesh.fsdp": 4, "mesh.tensor": 2}, marks=pytest.mark.slow),
    pytest.param({"mesh.fsdp": 2, "mesh.context": 4}, marks=pytest.mark.exhaustive),
  ],
)
def test_eight_devices_equal_one(mesh, on_one_device, tmp_path):
  run_here(tiny_config("grpo", SHORT | mesh), tmp_path, devices=8)
  assert_same(tmp_path, on_one_device)


@pytest.mark.exhaustive
def test_the_command_line_runs_on_eight_devices(on_one_device, tmp_path):
  """A separate process, as a user starts it, finds the programs of the test above in the cache."""
  mesh = {"mesh.fsdp": 4, "mesh.tensor": 2}
  succeed("--config=configs/grpo.py:tiny", *flags(SHORT | mesh), f"--workdir={tmp_path}", devices=8)
  assert_same(tmp_path, on_one_device)
