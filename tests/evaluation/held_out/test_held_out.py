"""Evaluation on held-out problems: counting, logged metrics, failures and regrading."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.evaluation import Answer, read_samples, write_samples
from jaxrl_llm.evaluation.held_out import (
  Evaluated,
  eval_metrics,
  evaluate_policy,
  regrade,
  sample_rows,
)
from jaxrl_llm.pretrained import png
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.thumbnails import thumbnail
from jaxrl_llm.rewards import Outcome, WeightedReward, answer_key, call_here, final_answer, grade
from jaxrl_llm.rewards.outcome import NoRewardError, refuse_failures, weigh
from jaxrl_llm.text_types import Completion, Turn
from jaxrl_llm.types import Rollouts
from tests.rollouts.players import swept, with_reasons

TOKENIZER = ByteTokenizer()
FINAL_ANSWER = WeightedReward("final_answer", final_answer)


def evaluated(correct, *, lengths=None, levels=None, answers=None):
  """Makes an evaluation with the given rewards."""
  problems = [{"level": 1 if levels is None else levels[i]} for i in range(len(correct))]
  lengths = np.ones(np.shape(correct), int) if lengths is None else np.array(lengths)
  responses = [Completion("", (), n, stopped=n < 8) for n in lengths.flatten().tolist()]
  outcomes = [Outcome(None, "timeout", "slow") if np.isnan(x) else Outcome(x) for x in np.ravel(correct)]
  graded = grade([FINAL_ANSWER], responses, [{}] * len(responses), call=lambda *_: outcomes)
  return Evaluated(problems, [()] * len(problems), responses, graded, answers and [Answer(x, answer_key(x)) for x in answers])


def test_metrics_by_hand():
  evaluation = evaluated([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], lengths=[[2, 4], [6, 8], [1, 3]], levels=[1, 3, 1])
  row = eval_metrics(evaluation)
  low, high = row.pop("eval/accuracy_low"), row.pop("eval/accuracy_high")
  assert 0 <= low < 0.5 < high <= 1
  expected = {
    "eval/accuracy": 0.5,
    "eval/pass@2": 2 / 3,
    "eval/response_length/mean": 4.0,
    "eval/truncated": 1 / 6,
    "eval/accuracy/level_1": 0.75,
    "eval/accuracy/level_3": 0.0,
  }
  assert row.keys() == expected.keys()
  np.testing.assert_allclose([row[name] for name in expected], list(expected.values()))


def test_further_metrics_are_logged_with_their_intervals():
  evaluation = evaluated([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]], answers=["1", "2", "2.0", "5", "5", "6"])
  plain, row = eval_metrics(evaluation), eval_metrics(evaluation, ["maj@n:n=3", "pass@k:k=1&n=2", "pass@k:k=3&n=3"])
  assert {name: row[name] for name in plain} == plain
  assert (row["eval/maj@3"], row["eval/pass@1:n=2"], row["eval/pass@3"]) == (0.5, 0.75, 1.0)
  for name in ("maj@3", "pass@1:n=2", "pass@3"):
    assert row[f"eval/{name}/low"] <= row[f"eval/{name}"] <= row[f"eval/{name}/high"]


def test_failures_are_counted_by_cause_and_an_unknown_metric_is_left_out():
  row = eval_metrics(evaluated([[np.nan, 1.0], [np.nan, 0.0]]), ["pass@k:k=2&n=2", "avg@n:n=2"])
  assert (row["eval/failed"], row["eval/failed/timeout"], row["eval/avg@2"], row["eval/pass@2"]) == (2, 2, 0.5, 0.0)
  assert "eval/pass@2/low" not in row


@pytest.mark.parametrize("causes, limit, stops", [
  ([None, "timeout"], 0.5, False), ([None, "timeout"], 0.49, True), ([None] * 9 + ["raised"], 0.0, True), ([None], 0.0, False),
  (["timeout"] * 4, 1.0, True),  # All of them: there is nothing left to learn from.
])  # fmt: skip
def test_too_many_failures_stop(causes, limit, stops):
  failures = {i: (cause, "the first") for i, cause in enumerate(causes) if cause}
  try:
    refuse_failures("rewards", weigh([FINAL_ANSWER], {"final_answer": np.zeros(len(causes))}, failures), limit=limit)
  except NoRewardError as error:
    assert stops and "the first" in str(error) and "timeout" in str(error) + "timeout" * ("raised" in str(error))
  else:
    assert not stops


def run(problems, *, batch_prompts, num_samples, verifier=FINAL_ANSWER):
  """Evaluates a sampler that answers every prompt with the prompt itself.

  The first sample of a problem has a line before the answer.
  """
  keys, widths = [], []

  def sample(params, prompts, prompt_mask, requests):
    keys.append(np.asarray(requests.seeds).ravel().tolist())
    widths.append(prompts.shape)
    answers = ["#" + TOKENIZER.decode(row[mask]) for row, mask in zip(np.asarray(prompts), np.asarray(prompt_mask), strict=True)]
    responses = [answer if n else f"x\n{answer}" for answer in answers for n in range(num_samples)]
    tokens = np.full((len(responses), 9), TOKENIZER.pad_id, np.int32)
    for row, response in enumerate(responses):
      ids = [*TOKENIZER.encode(response), TOKENIZER.eos_id]
      tokens[row, : len(ids)] = ids
    mask = tokens != TOKENIZER.pad_id
    repeat = lambda x: np.repeat(np.asarray(x), num_samples, axis=0)
    return with_reasons(Rollouts(repeat(prompts), repeat(prompt_mask), tokens, mask, -1.0 * mask, np.ones(len(responses), bool)))

  mesh = Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(mesh_lib.AXES)), mesh_lib.AXES)
  common = dict(mesh=mesh, tokenizer=TOKENIZER, prompt_buckets=(4,), group_size=num_samples, new_tokens=9)
  draw = lambda examples, key: swept(sample, None, examples, key, **common)
  evaluation = evaluate_policy(draw, problems, jax.random.key(0), batch_prompts=batch_prompts, verifier=verifier)
  return eval_metrics(evaluation), keys, widths, evaluation


# Only the last problem, number 3, is wrong. It also fills up a last batch.
PROBLEMS = [{"prompt": str(n), "answer": str(n if n < 3 else 0), "level": n // 2} for n in range(4)]


@pytest.mark.parametrize("batch_prompts", [1, 2, 3, 4, 6, 8])
def test_the_filling_of_the_last_batch_is_not_counted(batch_prompts):
  row, keys, widths, _ = run(PROBLEMS, batch_prompts=batch_prompts, num_samples=3)
  assert row["eval/accuracy"] == row["eval/pass@3"] == 0.75
  assert (row["eval/accuracy/level_0"], row["eval/accuracy/level_1"]) == (1.0, 0.5)
  # "#n" and the end token; two more for one sample of three.
  np.testing.assert_allclose(row["eval/response_length/mean"], 3 + 2 / 3)
  # All batches share a program, and no two share their noise.
  assert set(widths) == {(batch_prompts, 4)} and len(keys) == -(-4 // batch_prompts)
  assert len({tuple(key) for key in keys}) == len(keys)


def test_answers_meet_their_own_problems():
  shuffled = [PROBLEMS[i] for i in (3, 1, 0, 2)]
  row, _, _, _ = run(shuffled, batch_prompts=3, num_samples=2)
  assert (row["eval/accuracy/level_0"], row["eval/accuracy/level_1"]) == (1.0, 0.5)


def test_the_tasks_own_verifier_grades():
  starts_with_x = WeightedReward("x", lambda response, problem: float(response.text.startswith("x")))
  row, _, _, _ = run(PROBLEMS, batch_prompts=2, num_samples=2, verifier=starts_with_x)
  # The first sample of each problem gets the reward.
  assert row["eval/accuracy"] == 0.5 and row["eval/pass@2"] == 1.0


def test_samples_that_the_verifier_cannot_judge_are_dropped_and_counted():
  """The verifier fails on each first sample. The second samples of problems 0 to 2 are right."""

  def judge(response, problem):
    return 1 / 0 if response.text.startswith("x") else float(response.text == f"#{problem['answer']}")

  fails = WeightedReward("fails", judge)
  row, _, _, _ = run(PROBLEMS, batch_prompts=2, num_samples=2, verifier=fails)
  assert row["eval/accuracy"] == 0.75 and row["eval/failed"] == 4


def test_partial_credit_is_not_a_pass():
  row = eval_metrics(evaluated([[0.5, 0.5], [1.0, 0.0]]))
  assert (row["eval/accuracy"], row["eval/pass@2"]) == (0.5, 0.5)


def test_a_verifier_that_fails_on_everything_stops_the_evaluation_at_the_end():
  asked = []

  def judge(response, problem):
    asked.append(problem)
    raise RuntimeError("broken")

  with pytest.raises(NoRewardError, match=r"reward 'fails': found none for any of 8 responses \(raised 8\).*RuntimeError: broken"):
    run(PROBLEMS, batch_prompts=2, num_samples=2, verifier=WeightedReward("fails", judge))
  assert len(asked) == 8


def test_samples_on_disk_are_graded_again_to_the_same_rewards(tmp_path):
  _, _, _, evaluation = run(PROBLEMS, batch_prompts=3, num_samples=2)
  rows = list(sample_rows(evaluation, verifier="final_answer", decode=TOKENIZER.decode, seed=0, model="m", step=7))
  assert [row.prompt for row in rows[::2]] == ["0", "1", "2", "3"] and rows[1].answer == "0" and rows[0].response == "x\n#0"
  # Each problem's full row is stored once.
  assert [bool(row.example) for row in rows] == [True, False] * 4
  write_samples(tmp_path / "samples.jsonl", rows)
  again = regrade(read_samples(tmp_path / "samples.jsonl"), verifier=FINAL_ANSWER, call=call_here)
  assert eval_metrics(again) == eval_metrics(evaluation) and np.array_equal(again.rewards, evaluation.rewards)
  corrected = [row._replace(gold="3") if row.id == "3" else row for row in read_samples(tmp_path / "samples.jsonl")]
  assert regrade(corrected, verifier=FINAL_ANSWER, call=call_here).rewards.all()
  with pytest.raises(ValueError, match=r"problem '1': found the samples \[1\], expected 0 to 1"):
    regrade([row for row in rows if (row.id, row.sample) != ("1", 0)], verifier=FINAL_ANSWER, call=call_here)


def test_pictures_are_stored_as_small_copies(tmp_path):
  pytest.importorskip("PIL")
  picture = png.encode(np.zeros((9, 9, 3), np.uint8))
  _, _, _, evaluation = run(PROBLEMS, batch_prompts=4, num_samples=1)
  evaluation = evaluation._replace(problems=[dict(problem, images=(picture,)) for problem in PROBLEMS])
  write_samples(tmp_path / "s.jsonl", sample_rows(evaluation, verifier="v", decode=TOKENIZER.decode, seed=0, model="m", step=None))
  assert [row.example["images"] for row in read_samples(tmp_path / "s.jsonl")] == [[thumbnail(picture)]] * len(PROBLEMS)


def test_conversations_are_kept_whole(tmp_path):
  turns = (Turn("<<2*3=", "6>>", 0.5, 5), Turn("#6", (1, 2), 0.0, 11))
  talk = Completion("#6", (), 8, stopped=True, turns=turns)
  lost = Completion("", (), 3, stopped=False, failed=("environment", "it broke"))
  graded = grade([WeightedReward("v", lambda completion, example: 1.0)], [talk, lost], [{}] * 2)
  evaluation = Evaluated([{"answer": "6", "level": 1}], [(50,)], [talk, lost], graded, [Answer("6", "6"), None])
  write_samples(
    tmp_path / "s.jsonl", sample_rows(evaluation, verifier="v", decode=TOKENIZER.decode, seed=0, model="m", step=None)
  )
  seen = []
  judge = WeightedReward("v", lambda completion, example: float(seen.append(completion.turns) is None))
  again = regrade(read_samples(tmp_path / "s.jsonl"), verifier=judge, call=call_here)
  assert seen == [turns] and again.graded.failed.tolist() == [None, "environment"]
