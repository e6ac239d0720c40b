"""New objectives and estimators: registry entries that other rooms know by their traits."""

import ast
import functools
import pathlib

import jax.numpy as jnp
import pytest

from jaxrl_llm.advantages.estimators import ESTIMATORS, Credit, Estimator, Evidence, make_credit
from jaxrl_llm.config import check
from jaxrl_llm.config.policy import make_objective
from jaxrl_llm.objectives import OBJECTIVES, make
from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.base import policy_objective
from jaxrl_llm.objectives.corrections import bypass, geometric_rejection, icepop, mis, off_policy_mask, tis
from jaxrl_llm.objectives.gates import hard_clip, unclipped
from jaxrl_llm.objectives.penalties import value_loss
from jaxrl_llm.objectives.ratios import RATIOS, no_ratio, product_ratio, sequence_ratio, token_ratio
from jaxrl_llm.segments import token_mean
from tests.runs import tiny_config

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "jaxrl_llm"


def new_objective(ratio, **slots):
  """Makes a factory with the settings of the clip and `width`, which no config has."""

  @algorithm(weights="token_mean", rules={"width": (lambda x: x > 0, "a number > 0")})
  def fresh(*, clip_low: float = 0.01, clip_high: float = 0.01, width: float = 1.0) -> Slots:
    return Slots(ratio=ratio, gate=hard_clip(clip_low * width, clip_high * width), **slots)

  return fresh


NEW_OBJECTIVES = {
  "of_tokens": new_objective(token_ratio),
  "of_sequences": new_objective(sequence_ratio),
  "of_products": new_objective(product_ratio),
  "of_nothing": new_objective(no_ratio, anchor=None),
  "with_correction": new_objective(sequence_ratio, correction=functools.partial(tis, cap=2.0)),
  "with_critic": new_objective(token_ratio, value_loss=value_loss(0.5)),
  "imitation": lambda *, clip_low=0.0, clip_high=0.0: make("sft"),
}


def compare(evidence, group_size):
  del group_size
  return Credit(evidence.rewards - jnp.mean(evidence.rewards))


NEW_ESTIMATORS = {
  "of_groups": Estimator(compare, {"gamma": 1.0}),
  "of_one": Estimator(compare, {}, compares_groups=False, takes_kl=False),
  "of_values": Estimator(compare, {}, frozenset({"values"}), compares_groups=False),
}

STALE = {"rollout.staleness": 1}
LEARNER = {"learner.old_logprobs": "learner"}
SAMPLER = {"learner.old_logprobs": "sampler"}
CRITIC = {"critic.init": "scratch"}

CASES = [
  # Objective, estimator, further settings, and refused fields.
  ("of_sequences", "group", {}, ()),
  ("of_sequences", "group", {"objective.clip_high": 0.2}, ("objective.clip_high",)),
  ("of_sequences", "group", {"objective.clip_low": 0.2}, ("objective.clip_high",)),
  ("with_correction", "group", LEARNER | {"objective.clip_high": 0.2}, ("objective.clip_high",)),
  ("of_tokens", "group", {"objective.clip_high": 0.2}, ()),
  ("of_products", "group", {"objective.clip_high": 0.2}, ()),
  ("with_correction", "group", SAMPLER, ("learner.old_logprobs",)),
  ("of_sequences", "group", SAMPLER, ()),
  ("with_correction", "group", LEARNER | STALE, ()),
  ("of_sequences", "group", LEARNER | STALE, ("learner.old_logprobs",)),
  ("of_nothing", "group", SAMPLER | STALE, ("rollout.staleness",)),
  ("of_nothing", "group", SAMPLER | {"rollout.spare_prompts": 2}, ("rollout.spare_prompts",)),
  ("of_nothing", "group", LEARNER | STALE | {"correction.tis": 2.0}, ()),
  ("of_nothing", "group", LEARNER, ("learner.old_logprobs",)),
  ("imitation", "group", SAMPLER, ("num_steps",)),
  ("with_critic", "group", {}, ("advantage.estimator",)),
  ("with_critic", "of_groups", {}, ("advantage.estimator",)),
  ("with_critic", "of_values", CRITIC, ()),
  ("of_sequences", "of_values", CRITIC, ("advantage.estimator",)),
  ("of_sequences", "of_groups", CRITIC, ("critic.init",)),
  ("of_sequences", "of_groups", {"rollout.max_refills": 2}, ()),
  ("of_sequences", "of_one", {"rollout.max_refills": 2}, ("rollout.max_refills",)),
  ("with_critic", "of_values", CRITIC | {"rollout.max_refills": 2}, ("rollout.max_refills",)),
  ("of_sequences", "of_groups", {"reward.kl_coef": 0.1, "learner.old_logprobs": "learner"}, ()),
  ("of_sequences", "of_one", {"reward.kl_coef": 0.1, "learner.old_logprobs": "learner"}, ("reward.kl_coef",)),
  ("of_sequences", "of_groups", {"advantage.gamma": 0.9}, ()),
  ("of_sequences", "of_one", {"advantage.gamma": 0.9}, ("advantage.gamma",)),
]  # fmt: skip


@pytest.fixture
def registered(monkeypatch):
  for name, entry in NEW_OBJECTIVES.items():
    monkeypatch.setitem(OBJECTIVES, name, entry)
  for name, entry in NEW_ESTIMATORS.items():
    monkeypatch.setitem(ESTIMATORS, name, entry)


def config_of(objective, estimator, overrides):
  config = tiny_config("gspo", {"objective.name": objective, "objective.clip_low": 0.01, "objective.clip_high": 0.01})
  config.update_from_flattened_dict({"advantage.estimator": estimator} | overrides)
  return config


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("objective", "estimator", "overrides", "fields"), CASES)
def test_every_refusal_treats_a_new_entry_by_its_traits(objective, estimator, overrides, fields):
  lines = check.config_problems(config_of(objective, estimator, overrides))
  assert [line.partition(":")[0] for line in lines] == [f"config.{field}" for field in fields], lines


@pytest.mark.usefixtures("registered")
def test_refusals_name_the_existing_entries():
  (line,) = check.config_problems(config_of("with_critic", "group", {}))
  assert "expected 'gae' or 'of_values', because this objective trains a critic" in line
  (line,) = check.config_problems(config_of("of_sequences", "of_values", {}))
  assert "an objective with a critic (ppo or custom, with objective.value_coef)" in line


@pytest.mark.usefixtures("registered")
def test_a_new_estimator_gives_credit():
  evidence = Evidence(jnp.array([1.0, 0.0]), jnp.ones((1, 2)), jnp.array([[1.0, 1.0], [1.0, 0.0]]))
  assert make_credit("of_one", 2)(evidence).advantages.tolist() == [[0.5, 0.5], [-0.5, 0.0]]


@pytest.mark.usefixtures("registered")
def test_a_config_need_not_list_the_settings_of_a_new_objective():
  """If a config has a field of that name, it reaches the objective."""
  config = config_of("of_sequences", "of_groups", {})
  assert check.config_problems(config) == [] and make_objective(config).ratio_level == "sequence"
  config.objective.width = -1.0
  (line,) = check.config_problems(config)
  assert line == "config.objective.width: found -1.0, expected a number > 0"


TRAITS = {
  "ppo": "token", "dapo": "token", "gmpo": "token", "sapo": "token", "minirl": "token", "dppo_kl": "token", "minpro": "token",
  "gspo": "sequence", "gspo_token": "sequence", "luspo": "sequence", "rloo": "product", "vespo": "product", "reinforce": None, "sft": None,
  "dro": "token", "clip_cov": "token",
}  # fmt: skip


@pytest.mark.parametrize("name", TRAITS)
def test_the_level_of_the_ratio_follows_from_the_ratio(name):
  assert make(name).ratio_level == TRAITS[name]
  assert (make(name).value_loss is not None) == (name == "ppo")
  assert make(name).imitates == (name == "sft")


@pytest.mark.parametrize("name", RATIOS)
def test_every_ratio_has_its_level(name):
  expected = {"none": None, "product": "product", "sequence": "sequence", "sequence_token_gradient": "sequence"}.get(name, "token")
  assert make("custom", ratio=name).ratio_level == RATIOS[name].level == expected
  silent = policy_objective(ratio=lambda *args: RATIOS[name](*args), gate=unclipped(), weigh=token_mean)
  assert silent.ratio_level == "token"


def test_traits_survive_corrections():
  """Only corrections that weigh by π_old/μ correct the mismatch."""
  assert make("minirl").corrects_mismatch and not make("gspo").corrects_mismatch
  for correct in (tis, mis, icepop):
    assert correct(make("gspo")).corrects_mismatch and bypass(correct(make("gspo"))).corrects_mismatch
  for correct in (bypass, geometric_rejection, functools.partial(off_policy_mask, delta=0.1)):
    assert not correct(make("gspo")).corrects_mismatch
    assert correct(make("gspo")).ratio_level == "sequence"


# Other meanings of the same words: fields of a batch and of a data set, metrics, a function of the
# training loop, and the samples of one prompt. The table of fields and the config of a new project
# hold names as defaults, and are left out below. So are the names of another API, with formulas of
# their own.
HOMONYMS = {"returns", "steps", "pass_at_k", "reinforce", "group"}


def test_no_other_room_knows_an_entry_by_name():
  names = {*OBJECTIVES, *ESTIMATORS} - HOMONYMS
  homes = {"objectives", "advantages", "config/fields.py", "cli/template", "serve/tinker/losses.py"}
  homes = {PACKAGE / home for home in homes}
  problems, looked_at = [], 0
  for path in sorted(PACKAGE.rglob("*.py")):
    if homes & {path, *path.parents}:
      continue
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        looked_at += 1
        if node.value in names:
          problems.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value}")
  assert looked_at > 1000 and not problems, problems
