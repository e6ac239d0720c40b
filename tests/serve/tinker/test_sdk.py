"""The unmodified SDK, where it is installed: it brings transformers, which tests do not have."""

import re

import numpy as np
import pytest

from tests.runs import ROOT

tinker = pytest.importorskip("tinker")

from tests.serve.tinker.test_training import TEXT, sampled, without_mask  # noqa: E402


@pytest.fixture
def sdk(service):
  with tinker.ServiceClient(base_url=service.url, api_key="tml-none") as client:
    yield client


def datum(tokens, inputs):
  arrays = {
    name: np.asarray(x, np.int64 if name == "target_tokens" else np.float32) for name, x in inputs.items()
  }
  return tinker.Datum(
    model_input=tinker.ModelInput.from_ints([int(x) for x in tokens]), loss_fn_inputs=arrays
  )


def test_the_sdk_trains_saves_and_samples(sdk):
  seen = datum(TEXT[:-1], {"target_tokens": TEXT[1:], "weights": np.ones(15)})
  trainer = sdk.create_lora_training_client(base_model="nano", rank=16, seed=1).result()
  assert trainer.get_info().lora_rank == 16
  losses = []
  for _ in range(30):
    output, step = (
      trainer.forward_backward([seen], "cross_entropy"),
      trainer.optim_step(tinker.AdamParams(learning_rate=0.01)),
    )
    losses.append(output.result().metrics["loss:sum"])
    assert step.result().metrics["grad_norm"] > 0
  assert losses[-1] <= 0.1 * losses[0]

  of_learner = trainer.forward([seen], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
  sampler = trainer.save_weights_and_get_sampling_client().result()
  prompt = tinker.ModelInput.from_ints([int(x) for x in TEXT])
  scored = sampler.compute_logprobs(prompt).result()
  assert scored[0] is None
  np.testing.assert_allclose(scored[1:], of_learner, atol=1e-5)
  params = tinker.SamplingParams(max_tokens=5, temperature=0.0, stop=[])
  answer = sampler.sample(
    tinker.ModelInput.from_ints([int(x) for x in TEXT[:6]]), 2, params, topk_sample_logprobs=3
  ).result()
  assert [list(x.tokens) for x in answer.sequences] == [TEXT[6:11].tolist()] * 2 and answer.sequences[
    0
  ].stop_reason == "length"

  path = trainer.save_state("thirty", overwrite=True).result().path
  again = sdk.create_training_client_from_state_with_optimizer(path).result()
  for each in (trainer, again):
    each.forward_backward([seen], "cross_entropy").result()
    each.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
  logprobs = [
    each.forward([seen], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    for each in (trainer, again)
  ]
  np.testing.assert_array_equal(*logprobs)
  named = trainer.save_weights_for_sampler("thirty").result().path
  other = sdk.create_sampling_client(model_path=named).result()
  np.testing.assert_allclose(other.compute_logprobs(prompt).result()[1:], logprobs[0], atol=1e-5)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_the_sdk_sends_every_loss(sdk, loss):
  trainer = sdk.create_lora_training_client(base_model="nano", rank=16, seed=1).result()
  data = [datum(*each) for each in without_mask([sampled(np.random.default_rng(0), 9)])]
  if loss == "gspo":
    data = [
      datum(tokens, inputs | {"sequence_ratio_mask": inputs["logprobs"] != 0})
      for tokens, inputs in without_mask([sampled(np.random.default_rng(0), 9)])
    ]
  assert np.isfinite(trainer.forward_backward(data, loss).result().metrics["loss:sum"])
  row = [datum(*sampled(np.random.default_rng(0), 9))]
  assert np.isfinite(
    trainer.forward_backward(row, "ppo", {"objective": "gspo", "clip_low": 0.03}).result().metrics["loss:sum"]
  )


def test_an_error_of_the_user_is_one(sdk):
  trainer = sdk.create_lora_training_client(base_model="nano", rank=16).result()
  bad = datum(TEXT[:-1], {"target_tokens": TEXT[1:], "weights": np.full(15, np.nan)})
  with pytest.raises(tinker.RequestFailedError, match="found NaN") as caught:
    trainer.forward_backward([bad], "cross_entropy").result()
  assert caught.value.category == "user"
  with pytest.raises(tinker.NotFoundError, match="found 'nono'"):
    sdk.create_lora_training_client(base_model="nono").result()


def test_the_example_of_the_guide_runs(service, capsys):
  (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tinker.md").read_text(), re.DOTALL)
  exec(code.replace("http://127.0.0.1:8000", service.url).replace('"smol"', '"nano"'), {})
  losses = [float(line) for line in capsys.readouterr().out.splitlines()[:10]]
  assert losses[-1] < losses[0]
