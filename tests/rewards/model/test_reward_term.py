"""A reward model as a term of the reward: its tokens, its batches and the use of its rewards."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import check
from jaxrl_llm.models import make_model, make_reward_model, preset, save_hf, save_reward_model
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.rewards import WeightedReward, grade
from jaxrl_llm.rewards import model as model_lib
from jaxrl_llm.rewards.grader import Grader
from jaxrl_llm.rewards.model import judge as judge_lib
from jaxrl_llm.text_types import Completion
from tests.rewards.test_from_config import terms_of
from tests.runs import quick, rows, run_here, tiny_config

PAD = 256
BYTES = {"reward_model.json": {"tokenizer": "bytes"}}


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
  """Folder of a reward model without zero weights, with its model and params."""
  model, rng = make_reward_model(preset("nano", vocab_size=264)), np.random.default_rng(0)
  params = jax.tree.map(
    lambda p: jnp.asarray(0.3 * rng.standard_normal(p.shape), jnp.float32), jax.eval_shape(model.init, jax.random.key(0))
  )
  folder = tmp_path_factory.mktemp("rm") / "rm"
  save_reward_model(folder, model, params, pad_token_id=PAD, notes=BYTES)
  return folder, model, params


def one_by_one(judge, sequences):
  """Computes the rewards by definition, without batches and padding."""
  _, model, params = judge
  rewards = jax.jit(model.token_rewards)  # Otherwise each operation is compiled for each length.
  reward = lambda ids: rewards(params, jnp.array([ids]), jnp.arange(len(ids))[None], jnp.ones((1, len(ids)), jnp.int32))[0, -1]
  return [float(reward(ids)) for ids in sequences]


def completion(text, *, stopped=True, extra=()):
  ids = (*text.encode(), *([258] if stopped else []), *extra)
  return Completion(text=text, token_ids=ids, num_tokens=len(ids), stopped=stopped)


TEXTS = ("1+1=2\n#2", "", "x" * 30, "1+1=3\n#3", "#2")
EXAMPLES = [{"prompt": f"1+{i}\n"} for i in range(len(TEXTS))]


def test_rewards_equal_those_of_each_sequence_alone_and_nothing_recompiles(judge, monkeypatch):
  monkeypatch.setattr(judge_lib, "_MAX_ROWS", 8)
  rng = np.random.default_rng(1)
  sequences = [rng.integers(256, size=n).tolist() for n in (1, 3, 8, 9, 16, 17, 30, 39, 40, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2)]
  expected = one_by_one(judge, sequences)
  with quick(devices=4):
    rewards = judge_lib.make_judge(judge[0], max_tokens=40)
    np.testing.assert_allclose(rewards(sequences), expected, atol=2e-5)
    assert rewards([]).shape == (0,)
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
      patch.setattr(jax.stages.Lowered, "compile", lambda *args: pytest.fail("it compiles again"))
      np.testing.assert_allclose(rewards(sequences[::-1]), expected[::-1], atol=2e-5)


def test_the_policys_own_tokens_are_read_if_the_vocabulary_is_the_same(judge):
  term = model_lib.reward_model_term(judge[0], tokenizer=ByteTokenizer(), max_tokens=40, weight=0.5)
  responses = [completion(text, stopped=i != 3) for i, text in enumerate(TEXTS)]
  expected = one_by_one(judge, [[257, *example["prompt"].encode(), *x.token_ids] for x, example in zip(responses, EXAMPLES, strict=True)])
  verifier = WeightedReward("verifier", lambda x, example: float("#2" in x.text), weight=0.0)
  with quick(), Grader([verifier, term]) as grader:
    graded = grade([verifier, term], responses, EXAMPLES, call=grader)
  np.testing.assert_allclose(graded.parts["reward_model"], expected, atol=2e-5)
  np.testing.assert_allclose(graded.totals, 0.5 * np.array(expected), atol=2e-5)
  assert graded.parts["verifier"].tolist() == [1, 0, 0, 0, 1] and graded.valid.all()
  assert term.fn(responses[0], EXAMPLES[0]) == pytest.approx(expected[0], abs=2e-5)


def test_padding_behind_a_response_is_not_read(judge):
  """Transformers reads the last token that is not padding."""
  term = model_lib.reward_model_term(judge[0], tokenizer=ByteTokenizer(), max_tokens=40)
  outcomes = term.batch_fn(
    [completion("#2", stopped=False), completion("#2", stopped=False, extra=(PAD, PAD))], EXAMPLES[:1] * 2
  )
  assert outcomes[0].value == outcomes[1].value


class Spelling(ByteTokenizer):
  """A tokenizer with another vocabulary, in which each id stands for another byte."""

  def encode(self, text, *, add_bos=False):
    return [255 - i if i < 256 else i for i in super().encode(text, add_bos=add_bos)]


def test_texts_are_read_if_the_vocabulary_differs(judge):
  term = model_lib.reward_model_term(judge[0], tokenizer=Spelling(pad_id=259), max_tokens=40)
  odd = Completion("#2", (*Spelling().encode("#2"), 258), 3, True)
  cut = odd._replace(stopped=False)
  rewards = [x.value for x in term.batch_fn([odd, cut], EXAMPLES[:1] * 2)]
  start = [257, *EXAMPLES[0]["prompt"].encode(), *b"#2"]
  np.testing.assert_allclose(rewards, one_by_one(judge, [[*start, 258], start]), atol=2e-5)


def test_a_missing_reward_has_a_reason(judge, tmp_path):
  _, model, params = judge
  broken = params | {"value_head": params["value_head"] * jnp.nan}
  save_reward_model(tmp_path / "rm", model, broken, pad_token_id=PAD, notes=BYTES)
  term = model_lib.reward_model_term(tmp_path / "rm", tokenizer=ByteTokenizer(), max_tokens=12)
  with quick():
    graded = grade([term], [completion("#2"), completion("x" * 20)], EXAMPLES[:2])
  assert graded.failed.tolist() == ["not_finite", "too_long"] and not graded.valid.any()
  assert "the reward model said nan" in graded.details[0] and "it has 26 tokens with its prompt, expected at most 12" in graded.details[1]


@pytest.mark.slow
def test_a_run_learns_from_the_model_alone_and_is_judged_by_the_verifier(judge, tmp_path):
  overrides = {"num_steps": 2, "warm_start.num_steps": 6, "warm_start.batch_size": 8, "eval.every": 2}
  config = tiny_config("gspo", overrides | {"reward.model_path": str(judge[0]), "reward.model_only": True, "reward.model_weight": 2.0})
  assert check.config_problems(config) == []
  run_here(config, tmp_path)
  for row in rows(tmp_path, "rl"):
    assert row["critic/rewards/mean"] == pytest.approx(2 * row["reward/reward_model/mean"], rel=1e-5)
    assert "reward/final_answer/mean" in row and row["actor/grad_norm"] > 0 and row["rewards/failed"] == 0
  assert all(0 <= row["eval/accuracy"] <= 1 for row in rows(tmp_path, "eval"))


@pytest.mark.slow
def test_the_verifier_counts_too_unless_the_model_is_the_only_reward(judge):
  config = tiny_config("gspo", {"reward.model_path": str(judge[0])})
  assert [(x.name, x.weight) for x in terms_of(config)] == [("final_answer", 1.0), ("reward_model", 1.0)]
  config.reward.model_only = True
  assert [(x.name, x.weight) for x in terms_of(config)] == [("final_answer", 0.0), ("reward_model", 1.0)]


def problems_of(path, **overrides):
  return check.config_problems(tiny_config("gspo", {"reward.model_path": str(path)} | overrides))


def test_unusable_reward_models_are_refused(judge, tmp_path):
  (line,) = problems_of("no/such")
  assert line.startswith("config.reward.model_path: found 'no/such', which does not exist") and "expected hub:no/such" in line
  policy = make_model(preset("nano", vocab_size=264))
  save_hf(tmp_path / "policy", policy, policy.init(jax.random.key(0)))
  (line,) = problems_of(tmp_path / "policy")
  assert "'Qwen3ForCausalLM', a language model without a reward head" in line and "--config=configs/reward_model.py" in line
  _, model, params = judge
  save_reward_model(tmp_path / "bare", model, params, pad_token_id=PAD)
  (line,) = problems_of(tmp_path / "bare")
  assert line.startswith("config.reward.model_path: ") and "tokenizer" in line
  short = make_reward_model(model.config._replace(max_positions=16))
  save_reward_model(tmp_path / "short", short, params, pad_token_id=PAD, notes=BYTES)
  (line,) = problems_of(tmp_path / "short")
  assert "found a reward model of at most 16 tokens, expected one of at least 32" in line
  save_reward_model(tmp_path / "notes", model, params, pad_token_id=PAD, notes={"reward_model.json": {"chat": True}})
  (line,) = problems_of(tmp_path / "notes")
  assert "found no tokenizer, expected one of 'bytes', 'folder' or a path" in line
  raw = json.loads((tmp_path / "notes" / "config.json").read_text()) | {"id2label": {"0": "a", "1": "b"}}
  (tmp_path / "notes" / "config.json").write_text(json.dumps(raw))
  (line,) = problems_of(tmp_path / "notes")
  assert "found 2 labels, expected 1" in line
  (line,) = problems_of(judge[0], **{"environment.name": "calculator"})
  assert "a reward model reads one response, and environment.name is set" in line
  (line,) = problems_of(judge[0], **{"advantage.estimator": "maxrl"})
  assert "expected None: its output can be negative, and advantage.estimator='maxrl' takes rewards of 0 or more" in line
