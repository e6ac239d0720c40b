"""Verifiers of reasoning-gym: its answers are right, others wrong, and no answer is executed."""

import json
import warnings

import pytest

from jaxrl_llm.rewards import gym
from jaxrl_llm.rewards.gym import REFUSED, read_entry, verifier
from jaxrl_llm.text_types import Completion

reasoning_gym = pytest.importorskip("reasoning_gym")
from reasoning_gym.factory import DATASETS  # noqa: E402

# Problems with many right answers, for which the datasets store None.
NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
SLOW = {
  "arc_agi", "codeio", "figlet_font", "futoshiki", "group_anagrams", "intermediate_integration", "knight_swap", "quantum_lock",
  "simple_integration", "spell_backward", "sudoku", "word_ladder", "zebra_puzzles",
}  # fmt: skip
CONSTANTS = ("", "no idea", "None", "[]", "((", "0", "1", "nan", "inf", "True", "import os", "\u2603")
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in sorted(set(DATASETS) - set(REFUSED))]


def reward(answer, entry, dataset=None, stopped=True, **settings):
  completion = Completion(text=f"<answer>{answer}</answer>", token_ids=(), num_tokens=3, stopped=stopped)
  return gym(dataset, **settings)(completion, {"entry": entry})


@pytest.mark.parametrize("name", NAMES)
def test_its_own_answer_is_right_and_no_constant_is_always_right(name):
  """The entries are read from JSON, the form in which the rows of a dataset are stored."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    dataset = reasoning_gym.create_dataset(name, size=3, seed=7)
    entries = [dataset[i] for i in range(3)]
    stored = [json.dumps(entry) for entry in entries]
    for constant in CONSTANTS:
      if {entry["answer"] for entry in entries} != {constant}:
        assert min(reward(constant, entry) for entry in stored) < 1.0, constant
    for entry, text in zip(entries, stored, strict=True):
      if name not in NO_ANSWER:
        whole = Completion(text=entry["answer"], token_ids=(), num_tokens=3, stopped=True)
        assert gym(answer_in="whole")(whole, {"entry": text}) == dataset.score_answer(entry["answer"], entry) == 1.0


def test_every_dataset_exists_or_is_refused():
  assert set(REFUSED) < set(DATASETS) and set(DATASETS) > NO_ANSWER | SLOW
  for name in REFUSED:
    with pytest.raises(ValueError, match=f"gym: found the dataset '{name}', expected another: it"):
      gym(name)


def test_refused_verifiers_do_accept_wrong_answers():
  """If a newer reasoning-gym fixes these verifiers, they need not be refused any more."""
  halting = reasoning_gym.create_dataset("game_of_life_halting", size=8, seed=0)
  assert all(halting.score_answer("no idea", entry) == 1.0 for entry in halting)
  coins = reasoning_gym.create_dataset("coin_flip", size=8, seed=0)
  assert sum(coins.score_answer("0", entry) == 1.0 for entry in coins) >= 6
  puzzles = reasoning_gym.create_dataset("puzzle24", size=2, seed=0)
  assert all(puzzles.score_answer("6*4+1-1", entry) == 1.0 for entry in puzzles)


@pytest.mark.parametrize("name", ["binary_matrix", "n_queens", "spiral_matrix", "string_insertion"])
def test_verifiers_that_evaluate_answers_run_no_program(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  entry = reasoning_gym.create_dataset(name, size=1, seed=0)[0]
  assert reward("[open('pwned', 'w')]", entry) < 1.0 and reward("__import__('os').mkdir('pwned')", entry) < 1.0
  assert not list(tmp_path.iterdir())
  if name == "string_insertion":
    # The verifier is meant to evaluate lists.
    assert reward(str(list(entry["answer"])), entry) == 0.1


@pytest.mark.parametrize("name", ["countdown", "intermediate_integration", "polynomial_multiplication", "simple_integration"])
def test_verifiers_that_parse_answers_get_only_arithmetic(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  entry = reasoning_gym.create_dataset(name, size=1, seed=0)[0]
  # The parser of these verifiers knows Python's built-in functions.
  w = "+".join(f"chr({ord(char)})" for char in "pwned")
  programs = (f"open({w},chr(119))", "open('pwned', 'w')", "__import__('os').mkdir('pwned')", "x.__class__", "x . a", "\uff4fpen(1)")
  for answer in (*programs, "9**9**9**9"):
    assert reward(answer, entry) == 0.0
  assert not list(tmp_path.iterdir())


def test_settings_reach_the_verifier():
  entry = reasoning_gym.create_dataset("decimal_arithmetic", size=1, seed=0)[0]
  assert reward(entry["answer"], entry, "decimal_arithmetic", settings={"precision": 20}) == 1.0
  with pytest.raises(ValueError, match="gym: found settings .*prcision.* for 'decimal_arithmetic', expected those it takes: .*prcision"):
    gym("decimal_arithmetic", settings={"prcision": 4})
  with pytest.raises(ValueError, match="gym: found settings without a dataset"):
    gym(settings={"precision": 4})
  with pytest.raises(ValueError, match="did you mean 'gsm_symbolic'"):
    gym("gsm_symbolc")


def test_locations_of_the_answer():
  entry = {"question": "", "answer": "5", "metadata": {"source_dataset": "chain_sum"}}
  assert reward("5", entry) == 1.0 and reward("5", entry, stopped=False) == 0.0 and reward("5</answer><answer>6", entry) == 0.0
  boxed = Completion(text=r"\boxed{5}", token_ids=(), num_tokens=3, stopped=True)
  assert gym(answer_in="stated")(boxed, {"entry": entry}) == 1.0 and gym()(boxed, {"entry": entry}) == 0.0


@pytest.mark.parametrize("entry, message", [
  (None, "found NoneType in the field 'entry', expected an entry"), ("{", "found no JSON in the field 'entry'"), ([], "found list"),
  ({"question": ""}, "found dict"), ({"answer": "5", "metadata": {}}, "found the dataset 'None'"),
  ({"answer": "5"}, "found the dataset 'None'"),
  ({"answer": "5", "metadata": {"source_dataset": "rearc"}}, r"found an entry that 'rearc' cannot read \(KeyError\('output'\)\)"),
])  # fmt: skip
def test_a_row_without_an_entry_is_refused(entry, message):
  with pytest.raises(ValueError, match=f"^gym: {message}"):
    reward("5 + 1", entry)


def test_stored_entries_get_their_tuples_back():
  entry = reasoning_gym.create_dataset("rearc", size=1, seed=0)[0]

  def packed(value):
    if isinstance(value, dict):
      return {"items": [[packed(key), packed(item)] for key, item in value.items()]}
    items = [packed(item) for item in value] if isinstance(value, list | tuple) else value
    return {"tuple": items} if isinstance(value, tuple) else items

  stored = json.dumps(packed(entry))
  assert reward(entry["answer"], stored) == 1.0
  assert read_entry({"entry": stored}, "entry") == entry != json.loads(json.dumps(entry))


def test_a_verifier_that_raises_because_of_the_answer():
  entry = reasoning_gym.create_dataset("prime_factorization", size=1, seed=0)[0]
  with pytest.raises(ValueError):
    reasoning_gym.get_score_answer_fn("prime_factorization")("no idea", entry)
  assert reward("no idea", entry) == 0.0


def test_verifiers_are_made_once():
  assert verifier("chain_sum") is verifier("chain_sum")
