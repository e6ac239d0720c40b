"""Tests of reward models: loading and saving as transformers' classifiers, and their rewards."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import load_reward_params, make_model, make_reward_model, preset, read_reward_config, save_hf, save_reward_model
from jaxrl_llm.models.files.loading import open_source
from jaxrl_llm.models.reward_model import is_classifier, pad_id

PAD = 256
# A pad token inside a row counts as a token.
ROWS = np.array([[257, 3, 4, 5, 6, 7], [257, 9, 8, PAD, PAD, PAD], [257, 11, PAD, 12, PAD, PAD]])
LENGTHS = np.array([6, 3, 4])


def random_params(model, seed=0):
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  return jax.tree.map(lambda p: jnp.asarray(0.3 * rng.standard_normal(p.shape), jnp.float32), shapes)


@pytest.fixture
def folder(tmp_path):
  """Folder of a reward model that this framework saved."""
  model = make_reward_model(preset("nano", vocab_size=264))
  save_reward_model(tmp_path / "rm", model, random_params(model), pad_token_id=PAD, notes={"reward_model.json": {"tokenizer": "bytes"}})
  return tmp_path / "rm"


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_logits_are_those_of_transformers(family, tmp_path):
  transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
  sizes = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
  with warnings.catch_warnings(), torch.no_grad():
    warnings.simplefilter("ignore")
    theirs = getattr(transformers, f"{family}Config")(**sizes, head_dim=8, num_labels=1, pad_token_id=PAD)
    theirs = getattr(transformers, f"{family}ForSequenceClassification")(theirs).eval()
    torch.manual_seed(0)
    for weight in theirs.parameters():
      weight.normal_(0, 0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = theirs(torch.tensor(ROWS)).logits[:, 0].numpy()

    model = make_reward_model(read_reward_config(tmp_path / "theirs"))
    params = load_reward_params(tmp_path / "theirs", model)
    rewards = jax.jit(model.rewards)(params, jnp.asarray(ROWS, jnp.int32), jnp.asarray(LENGTHS, jnp.int32))
    np.testing.assert_allclose(rewards, expected, atol=5e-6)

    save_reward_model(tmp_path / "ours", model, params, pad_token_id=PAD)
    ours = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    assert type(ours).__name__ == f"{family}ForSequenceClassification" and ours.config.num_labels == 1
    np.testing.assert_array_equal(ours(torch.tensor(ROWS)).logits[:, 0].numpy(), expected)


def test_saved_params_are_loaded_bit_by_bit(folder):
  model = make_reward_model(read_reward_config(folder))
  loaded, expected = load_reward_params(folder, model), random_params(model)
  assert jax.tree.all(jax.tree.map(np.array_equal, loaded, expected))
  assert pad_id(folder) == PAD and is_classifier(folder)
  assert json.loads((folder / "reward_model.json").read_text()) == {"tokenizer": "bytes"}


def test_the_trunk_of_a_language_model_gets_a_head_of_zeros(tmp_path):
  config = preset("nano", vocab_size=264)._replace(tie_embeddings=False)
  policy = make_model(config)
  weights = policy.init(jax.random.key(1))
  save_hf(tmp_path / "lm", policy, weights)
  model = make_reward_model(config)
  params = load_reward_params(tmp_path / "lm", model)
  assert "head" not in params["trunk"] and not np.any(params["value_head"]) and "value_bias" not in params
  assert all(np.array_equal(params["trunk"]["layers"]["mlp"][x], weights["layers"]["mlp"][x]) for x in ("gate", "up", "down"))


def test_each_sequence_of_a_packed_row_is_rewarded_as_if_alone():
  model = make_reward_model(preset("nano", vocab_size=264))
  params, rng = random_params(model), np.random.default_rng(1)
  one, other = rng.integers(256, size=5), rng.integers(256, size=3)
  tokens, positions = np.concatenate([one, other])[None], np.array([[0, 1, 2, 3, 4, 0, 1, 2]])
  packed = model.token_rewards(params, *(jnp.asarray(x, jnp.int32) for x in (tokens, positions, [[1] * 5 + [2] * 3])))
  padded = np.zeros((2, 5), np.int32)
  padded[0], padded[1, :3] = one, other
  alone = model.rewards(params, jnp.asarray(padded), jnp.array([5, 3]))
  np.testing.assert_allclose(packed[0, [4, 7]], alone, atol=1e-5)


def rewrite(folder, **fields):
  raw = json.loads((folder / "config.json").read_text()) | fields
  (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
  ("fields", "parts"),
  [
    ({"architectures": ["Qwen3ForCausalLM"]}, ["'Qwen3ForCausalLM', a language model without a reward head", "configs/reward_model.py"]),
    ({"id2label": {"0": "bad", "1": "good"}}, ["found 2 labels, expected 1 (num_labels=1)"]),
    ({"id2label": None}, ["found 2 labels, expected 1"]),
    ({"hidden_size": 48}, ["embed_tokens.weight", "has shape (264, 32), expected (264, 48)"]),
    ({"architectures": ["BertForSequenceClassification"]}, ["unknown architecture 'BertForCausalLM'"]),
  ],
)
def test_folders_without_a_reward_model_are_refused(folder, fields, parts):
  rewrite(folder, **fields)
  with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
    read_reward_config(folder)
  for part in parts:
    assert part in str(caught.value), caught.value


def test_a_classifier_without_its_head_is_refused(folder, tmp_path):
  policy = make_model(preset("nano", vocab_size=264))
  save_hf(tmp_path / "lm", policy, policy.init(jax.random.key(0)))
  rewrite(tmp_path / "lm", architectures=["Qwen3ForSequenceClassification"], id2label={"0": "x"})
  with pytest.raises(ValueError, match="found no score.weight, expected it in a reward model"):
    read_reward_config(tmp_path / "lm")
  with pytest.raises(ValueError, match="no/such.*does not exist"):
    read_reward_config("no/such")
  with pytest.raises(ValueError, match="d_model: found 32 in the checkpoint, expected 64"):
    load_reward_params(folder, make_reward_model(preset("nano", vocab_size=264)._replace(d_model=64)))


def test_a_reward_model_is_refused_as_a_policy(folder):
  with pytest.raises(ValueError, match="unknown architecture 'Qwen3ForSequenceClassification'"):
    open_source(folder)
