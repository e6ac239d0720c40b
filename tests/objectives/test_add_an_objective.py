"""The objective that experiments/README.md adds: its code runs and is DRPO (arXiv:2606.09821)."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objectives import make, value
from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.corrected import corrected
from jaxrl_llm.objectives.gate_statistics import gate_metrics
from jaxrl_llm.objectives.ratios import token_ratio

README = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "README.md"


@functools.cache
def scope():
  (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
  names = {"jnp": jnp, "algorithm": algorithm, "Slots": Slots, "token_ratio": token_ratio, "gate_metrics": gate_metrics}
  exec(code, names)
  return names


@pytest.mark.parametrize("width", [12.5, 0.4])
def test_its_weight_is_one_minus_the_scaled_shift_of_probability(x64, make_batch, width):
  """C/r = 1 − sign(A·(r − 1))·|π − μ|/width, for README's objective and its gate in `custom`."""
  batch = {key: make_batch()[key] for key in ("logprobs", "old_logprobs", "advantages", "mask")}
  logprobs = batch.pop("logprobs")
  for objective in (scope()["drpo"](width=width), make("custom", gate=scope()["quadratic_pull"](width))):
    grad = jax.jit(jax.grad(lambda x, o=objective: value(o, x, **batch)[0]))(logprobs)
    ratio, mask = np.exp(logprobs - batch["old_logprobs"]), batch["mask"]
    shift = np.abs(np.exp(logprobs) - np.exp(batch["old_logprobs"]))
    weight = 1 - np.sign(batch["advantages"] * (ratio - 1)) * shift / width
    np.testing.assert_allclose(grad, -mask / mask.sum() * ratio * weight * batch["advantages"], rtol=1e-10, atol=1e-16)


def test_it_has_what_every_objective_has(make_batch):
  drpo = scope()["drpo"]
  assert drpo(kl_coef=0.1).needs == {"old_logprobs", "ref_logprobs"}
  assert corrected(drpo(), ["tis:cap=2.0"]).needs == {"old_logprobs", "sampler_logprobs"}
  with pytest.raises(ValueError, match=r"^drpo: width: found -1, expected a number > 0$"):
    drpo(width=-1)
  with pytest.raises(ValueError, match=r"^drpo: unknown hyper-parameter 'widht' \(did you mean 'width'\?\)"):
    drpo(widht=1)
  _, metrics = value(drpo(), **make_batch())
  assert {"gate/mean", "ratio/ess", "actor/pg_loss"} <= metrics.keys()


@pytest.mark.slow
def test_a_response_cut_by_the_budget_can_be_left_out(x64, make_batch):
  """With mask 0 on all tokens its gradient is 0 and the denominators exclude it.

  The loss is that of the batch without its row.
  """
  batch = {key: make_batch()[key] for key in ("logprobs", "old_logprobs", "advantages", "mask")}
  filtered = batch | {"mask": batch["mask"] * (np.arange(4) != 3)[:, None]}
  for name in ("grpo", "dapo", "gspo", "dr_grpo"):
    objective = make(name, **({"kl_coef": 0.0} if name == "grpo" else {}))
    loss = lambda x, o=objective, b=filtered: value(o, **(b | {"logprobs": x}))[0]
    actual, grad = jax.jit(jax.value_and_grad(loss))(filtered["logprobs"])
    expected, _ = value(objective, **{key: x[:3] for key, x in batch.items()})
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    assert not np.any(grad[3]) and np.any(grad[:3])
