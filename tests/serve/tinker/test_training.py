"""Training and sampling calls of the Tinker API: what they compute, and the same bits again."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.serve.tinker.learner import Adam, Trained, _adam_step
from tests.serve.tinker.client import Client, Failed, decode_samples

TEXT = np.array([72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 33, 10, 65, 66, 67])
SEEN = (TEXT[:-1], {"target_tokens": TEXT[1:], "weights": np.ones(15)})


def sampled(rng, count=12, mask=True):
  """Returns a datum as RL makes it: a prompt without advantages, and what was drawn."""
  tokens = rng.integers(0, 256, count + 1)
  own = (np.arange(count) >= 4).astype(float)
  old, advantages = rng.normal(-5, 0.1, count) * own, rng.normal() * own
  inputs = {"target_tokens": np.where(own, tokens[1:], 0), "logprobs": old, "advantages": advantages}
  return tokens[:-1], inputs | ({"mask": own} if mask else {})


def without_mask(data):
  return [(tokens, {name: x for name, x in inputs.items() if name != "mask"}) for tokens, inputs in data]


def test_thirty_steps_of_cross_entropy_learn_a_datum(service):
  client = Client(service)
  model = client.create()
  losses = []
  for _ in range(30):
    losses.append(client.compute(model, [SEEN]).loss)
    client.step(model)
  assert losses[0] > 15 * 4 and losses[-1] <= 0.1 * losses[0]


def test_log_probabilities_of_a_sampler_are_those_of_forward_to_the_bit(service):
  client = Client(service)
  model = client.create()
  at_base = client.compute_logprobs(client.sampler(base_model="nano"), TEXT)
  of_new = client.compute(model, [SEEN], forward_only=True).logprobs[0]
  np.testing.assert_array_equal(at_base, np.float32([np.nan, *of_new]))
  for _ in range(3):
    client.compute(model, [SEEN])
    client.step(model)
  of_learner = client.compute(model, [SEEN], forward_only=True).logprobs[0]
  scored = client.compute_logprobs(client.publish(model), TEXT)
  np.testing.assert_array_equal(scored, np.float32([np.nan, *of_learner]))
  assert np.abs(at_base[1:] - of_learner).max() > 0.1


def test_a_row_of_the_table_has_the_loss_of_objectives_value(service):
  client, rng = Client(service), np.random.default_rng(0)
  model = client.create()
  data = [sampled(rng, count) for count in (8, 9, 12)]
  settings = {"clip_low": 0.03, "clip_high": 0.04}
  output = client.compute(model, data, "ppo", {"objective": "gspo", **settings})
  padded = lambda arrays: np.stack([np.pad(x, (0, 12 - len(x))) for x in arrays])
  arrays = [padded([inputs[name] for _, inputs in data]) for name in ("logprobs", "advantages", "mask")]
  value, metrics = objectives.value(objectives.make("gspo", **settings), padded(output.logprobs), *arrays)
  np.testing.assert_allclose(output.loss, value, atol=1e-6)
  assert output.metrics["actor/pg_clipfrac:mean"] == pytest.approx(
    float(metrics["actor/pg_clipfrac"]), abs=1e-6
  )
  assert "grad_norm" in client.step(model)["metrics"]


def by_formula(name, logprobs, inputs):
  """Returns Tinker's losses as its documentation writes them."""
  old, advantages = inputs["logprobs"], inputs["advantages"]
  ratio = np.exp(logprobs - old)
  clipped = np.clip(ratio, 0.9, 1.1)
  inside = inputs.get("sequence_ratio_mask", np.ones(len(old))) != 0
  of_sequence = np.exp((logprobs - old)[inside].mean())
  values = {
    "importance_sampling": ratio * advantages,
    "ppo": np.minimum(ratio * advantages, clipped * advantages),
    "cispo": clipped * logprobs * advantages,
    "dro": logprobs * advantages - 0.5 * 0.2 * (logprobs - old) ** 2,
    "gspo": np.minimum(of_sequence * advantages, np.clip(of_sequence, 0.9, 1.1) * advantages),
  }
  return -values[name].sum()


CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


@pytest.mark.parametrize(
  ("name", "config"),
  [("importance_sampling", {}), ("ppo", CLIP), ("cispo", CLIP), ("dro", {"beta": 0.2}), ("gspo", CLIP)],
)
def test_tinkers_losses_are_sums_of_their_formulas(service, name, config):
  client, rng = Client(service), np.random.default_rng(1)
  model = client.create()
  data = without_mask([sampled(rng, count) for count in (10, 17)])
  if name == "gspo":
    data = [
      (tokens, inputs | {"sequence_ratio_mask": (inputs["logprobs"] != 0).astype(float)})
      for tokens, inputs in data
    ]
  output = client.compute(model, data, name, config, forward_only=True)
  expected = sum(
    by_formula(name, logprobs.astype(float), inputs)
    for logprobs, (_, inputs) in zip(output.logprobs, data, strict=True)
  )
  assert output.loss == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_weights_on_log_probabilities_are_any_loss(service):
  """The SDK makes of a custom loss: forward, then its gradient as weights, negative ones too."""
  client = Client(service)
  models = [client.create(), client.create()]
  ((tokens, inputs),) = without_mask([sampled(np.random.default_rng(2), 14)])
  inputs["advantages"] = np.linspace(-2, 2, 14)
  data = [(tokens, inputs)]
  client.compute(models[0], data, "dro", {"beta": 0.2})
  logprobs = client.compute(
    models[1],
    [(tokens, {"target_tokens": inputs["target_tokens"], "weights": np.zeros(14)})],
    forward_only=True,
  ).logprobs[0]
  weights = inputs["advantages"] - 0.2 * (logprobs - inputs["logprobs"])
  client.compute(models[1], [(tokens, {"target_tokens": inputs["target_tokens"], "weights": weights})])
  norms = [client.step(model)["metrics"]["grad_norm"] for model in models]
  assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_several_targets_of_a_token_have_weights_of_their_own(service):
  client = Client(service)
  model = client.create()
  targets = np.stack([TEXT[1:], TEXT[:-1]], axis=1)
  weights = np.stack([np.full(15, 0.75), np.full(15, 0.25)], axis=1)
  both = client.compute(
    model, [(TEXT[:-1], {"target_tokens": targets, "weights": weights})], forward_only=True
  )
  one = client.compute(
    model, [(TEXT[:-1], {"target_tokens": TEXT[1:], "weights": np.ones(15)})], forward_only=True
  )
  logprobs = both.logprobs[0].reshape(15, 2)
  np.testing.assert_allclose(logprobs[:, 0], one.logprobs[0], atol=1e-6)
  assert both.loss == pytest.approx(-(weights * logprobs).sum(), rel=1e-5)


def course(client, model, steps):
  """Trains an adapter and returns all bytes that it answers with."""
  out = []
  for step in range(steps):
    rng = np.random.default_rng(step)
    output = client.compute(model, without_mask([sampled(rng, 11), sampled(rng, 18)]), "ppo")
    out += [x.tobytes() for x in output.logprobs]
    out.append(client.step(model, grad_clip_norm=1.0)["metrics"]["grad_norm"])
  return out


def test_two_adapters_at_once_are_each_what_it_is_alone_to_the_bit(service):
  alone = [
    course(client := Client(service), client.create(seed=seed, rank=rank), 3)
    for seed, rank in ((1, 16), (2, 4))
  ]
  clients = [Client(service), Client(service)]
  models = [clients[0].create(seed=1, rank=16), clients[1].create(seed=2, rank=4)]
  together = [[], []]
  for step in range(3):
    futures = []
    for client, model in zip(clients, models, strict=True):
      rng = np.random.default_rng(step)
      futures.append(client.submit(model, without_mask([sampled(rng, 11), sampled(rng, 18)]), "ppo"))
    for i, (client, model) in enumerate(zip(clients, models, strict=True)):
      assert client.fetch(futures[i])
      together[i].append(client.step(model, grad_clip_norm=1.0)["metrics"]["grad_norm"])
  assert [[x for x in own if isinstance(x, float)] for own in alone] == together and alone[0] != alone[1]
  again = course(client := Client(service), client.create(seed=1, rank=16), 3)
  assert again == alone[0]


def test_gradients_add_up_until_a_step(service):
  client = Client(service)
  models = [client.create(), client.create()]
  data = [SEEN, (TEXT[3:-1], {"target_tokens": TEXT[4:], "weights": np.ones(12)})]
  client.compute(models[0], data)
  for each in data:
    client.compute(models[1], [each])
  norms = [client.step(model)["metrics"]["grad_norm"] for model in models]
  assert norms[0] == pytest.approx(norms[1], rel=1e-5)
  with pytest.raises(Failed, match="found no gradient"):
    client.step(models[0])


def test_a_step_is_that_of_adamw(service):
  """Of torch's AdamW, by hand: decoupled decay, corrected moments, the epsilon outside the root."""
  weights, gradient = {"a": jnp.array([1.0, -2.0])}, {"a": jnp.array([3.0, 4.0])}
  trained, settings = (
    Trained(weights, optax.scale_by_adam().init(weights)),
    Adam(0.1, 0.8, 0.9, 1e-3, 0.5, 1.0),
  )
  moments, w = np.zeros((2, 2)), np.array([1.0, -2.0])
  for t in (1, 2):
    trained, norm, _ = _adam_step(trained, gradient, settings)
    g = np.array([0.6, 0.8])
    moments = np.stack([0.8 * moments[0] + 0.2 * g, 0.9 * moments[1] + 0.1 * g**2])
    corrected = moments / (1 - np.array([0.8, 0.9])[:, None] ** t)
    w = w - 0.1 * 0.5 * w - 0.1 * corrected[0] / (np.sqrt(corrected[1]) + 1e-3)
  assert float(norm) == 5.0
  np.testing.assert_allclose(trained.weights["a"], w, rtol=1e-5)


def test_samples_are_the_same_again_and_follow_their_weights(service):
  client = Client(service)
  model = client.create()
  params = {"max_tokens": 8, "stop": [], "seed": 3}
  first = client.sample(base := client.sampler(base_model="nano"), TEXT[:4], count=2, params=params)
  for _ in range(20):
    client.compute(model, [SEEN])
    client.step(model)
  trained = client.publish(model)
  greedy = client.sample(
    trained, TEXT[:4], params={"max_tokens": 6, "temperature": 0, "stop": []}, topk_sample_logprobs=2
  )
  assert greedy.sequences[0][0] == TEXT[4:10].tolist() and greedy.sequences[0][2] == 1
  assert greedy.topk[0][:, 0].tolist() == greedy.sequences[0][0]
  np.testing.assert_array_equal(greedy.topk[1][:, 0], greedy.sequences[0][1])
  again = client.sample(base, TEXT[:4], count=2, params=params)
  assert [x[0] for x in again.sequences] == [x[0] for x in first.sequences] and first.sequences[0][
    0
  ] != first.sequences[1][0]
  # What is drawn has the log-probability that the learner computes.
  drawn = client.sample(trained, TEXT[:4], params=params).sequences[0]
  whole = np.array([*TEXT[:4], *drawn[0]])
  scored = client.compute(
    model, [(whole[:-1], {"target_tokens": whole[1:], "weights": np.ones(11)})], forward_only=True
  )
  np.testing.assert_allclose(drawn[1], scored.logprobs[0][3:], atol=1e-5)
  # A stop is kept, and only those that are asked for end a sample.
  stopped = client.sample(
    trained, TEXT[:4], params={"max_tokens": 9, "temperature": 0, "stop": [int(TEXT[6])]}
  )
  assert (stopped.sequences[0][0], stopped.sequences[0][2]) == (TEXT[4:7].tolist(), 0)
  last = client.sample(
    trained,
    TEXT,
    params={"max_tokens": 1},
    prompt_logprobs=True,
    prompt_logprobs_last_n=3,
    topk_prompt_logprobs=2,
  )
  assert np.isnan(last.prompt[:13]).all() and np.isfinite(last.prompt[13:]).all()
  assert (last.topk_prompt[1][:13] == -99999).all() and (last.topk_prompt[1][13:] > -99).all()


def test_samplers_of_other_weights_take_turns(service):
  client = Client(service)
  model = client.create()
  samplers = [client.sampler(base_model="nano")]
  for _ in range(2):
    client.compute(model, [SEEN])
    client.step(model)
    samplers.append(client.publish(model))
  alone = [client.compute_logprobs(sampler, TEXT) for sampler in samplers]
  params = {"max_tokens": 1}
  futures = [
    (i, client.submit_sample(samplers[i], TEXT, params=params, prompt_logprobs=True))
    for i in (0, 1, 2, 0, 2, 1, 0)
  ]
  for i, future in futures:
    np.testing.assert_array_equal(decode_samples(client.fetch(future)).prompt, alone[i])
  in_flight = client.publish(model, "inflight")
  before = client.compute_logprobs(in_flight, TEXT)
  client.compute(model, [SEEN])
  client.step(model)
  client.publish(model, "inflight")
  np.testing.assert_array_equal(before, alone[2])
  assert (client.compute_logprobs(in_flight, TEXT)[1:] != before[1:]).any()
  np.testing.assert_array_equal(client.compute_logprobs(samplers[2], TEXT), alone[2])


def test_saved_weights_come_back_with_and_without_moments(service):
  client = Client(service)
  model = client.create()
  client.compute(model, [SEEN])
  client.step(model)
  path = client.on("save_weights", model, path="one")["path"]
  sampler_path = client.on("save_weights_for_sampler", model, path="one")["path"]
  now = client.compute(model, [SEEN]).logprobs[0]
  client.step(model)
  after = client.compute(model, [SEEN], forward_only=True).logprobs[0]
  value = {
    "session_id": client.session,
    "model_seq_id": client.next("model"),
    "path": path,
    "optimizer": True,
  }
  other = client.fetch(client.ask("load_weights", value))["model_id"]
  assert client.ask("get_info", {"model_id": other})["lora_rank"] == 16
  np.testing.assert_array_equal(client.compute(other, [SEEN]).logprobs[0], now)
  client.step(other)
  np.testing.assert_array_equal(client.compute(other, [SEEN], forward_only=True).logprobs[0], after)
  client.on("load_weights", other, path=sampler_path, optimizer=False)
  np.testing.assert_array_equal(client.compute(other, [SEEN]).logprobs[0], now)
  client.step(other)  # By an Adam that began anew.
  assert (client.compute(other, [SEEN], forward_only=True).logprobs[0] != after).any()
  np.testing.assert_allclose(
    client.compute_logprobs(client.sampler(model_path=sampler_path), TEXT)[1:], now, atol=1e-5
  )
  info = client.ask("weights_info", {"tinker_path": path})
  assert (info["base_model"], info["lora_rank"], info["train_mlp"]) == ("nano", 16, True)
  cards = client.ask(f"training_runs/{model}/checkpoints")["checkpoints"]
  assert [card["tinker_path"] for card in cards] == [path, sampler_path]
  assert client.ask(f"training_runs/{model}")["base_model"] == "nano"
  client.ask(f"training_runs/{model}/checkpoints/weights/one", method="DELETE")
  assert "found no checkpoint" in client.ask("weights_info", {"tinker_path": path}, status=404)
