"""Tests that run the ratio lab and the objective shapes from end to end, on one tiny bed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.ablations.objective_shapes import __main__ as objective_shapes
from experiments.ablations.objective_shapes import studies
from experiments.ablations.objective_shapes.coefficients import policy_term
from experiments.ablations.ratio_lab import __main__ as ratio_lab
from experiments.ablations.ratio_lab import bed as beds
from experiments.ablations.ratio_lab import rules


@pytest.mark.exhaustive
def test_snapshots_start_on_policy_and_move():
  bed = beds.make_bed(beds.SMOKE)
  language = beds.make_language(beds.SMOKE.vocab_size, np.random.default_rng(0))
  params = bed.init(jax.random.key(0))
  settings = dict(num_tokens=8, learning_rate=rules.LEARNING_RATE, measure_at=(0, 2), key=jax.random.key(1))
  before, after = beds.snapshots(bed, language, params, **settings)
  assert before.log_ratio.shape == (16, 8)
  np.testing.assert_array_equal(before.log_ratio, 0)
  assert 1e-5 < np.std(after.log_ratio) < 0.1
  assert after.sampler_gap < 1e-4
  np.testing.assert_array_equal(before.batch.old_logprobs, after.batch.old_logprobs)

  # The gradient through log-probabilities and then the model equals the gradient in one pass.
  objective = policy_term("sapo")
  batch = jax.tree.map(jnp.asarray, after.batch)

  @jax.jit
  @jax.grad
  def gradient(params):
    return jnp.sum(objective.weigh(batch.mask, batch.segments) * objective.token_loss(bed.outputs(params, batch), batch)[0])

  expected = np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradient(after.params))])
  np.testing.assert_allclose(studies.weight_gradient(bed, objective, after), expected, atol=2e-6)
  assert np.max(np.abs(expected)) > 1e-3


@pytest.mark.exhaustive
def test_the_ratio_lab_runs(tmp_path, capsys):
  ratio_lab.main(["--smoke", "--folder", str(tmp_path)])
  assert "E4, std(log s): " in capsys.readouterr().out
  results = ratio_lab.from_json((tmp_path / "results.json").read_text())
  assert len(results["runs"]) == 4
  assert {path.name for path in (tmp_path / "figures").iterdir()} == {"ratio_spread.png", "clip_fraction.png"}


# Tracing takes ten seconds. Each study has its own test, and only the figures have none.
@pytest.mark.exhaustive
def test_the_shapes_run(tmp_path, capsys):
  objective_shapes.main(["--smoke", "--folder", str(tmp_path)])
  assert "E2: identity verified" in capsys.readouterr().out
  names = {path.name for path in (tmp_path / "figures").iterdir()}
  assert names == {f"{name}.png" for name in ("coefficients", "zero_mass", "token_weights", "smooth_limit", "outliers")}
