"""The pilot: its measurements and its advice, and that it leaves nothing behind."""

import json
import re
from types import SimpleNamespace

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.evaluation import Spread
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.rewards import RewardSpec, WeightedReward, call_here, weighted
from jaxrl_llm.rewards.from_config import make_rewards
from jaxrl_llm.rewards.grader import Grader
from jaxrl_llm.run.jobs import pilot
from jaxrl_llm.run.jobs.reward_probe import probe_lines
from jaxrl_llm.run.setup import experiment
from tests.runs import call, quick, tiny_config

SHORT = {
  "warm_start.num_steps": 3, "rollout.num_prompts": 32, "learner.row_buckets": None, "learner.row_tokens": None,
  "warm_start.row_buckets": None,
}  # fmt: skip
GOOD = pilot.Findings(
  passed=(0.4, 0.3, 0.5), num_groups=64, mixed=0.9, solved=0.02, hopeless=0.08, stated=0.99, truncated=0.01, failed=0.0,
  response_tokens=9.0, sampling=2.0, learning=3.0, compiling=10.0, decoding=100.0, memory_gb=1.5,
  spread=Spread(between=0.1, within=0.15), held_out=256,
)  # fmt: skip


@pytest.mark.exhaustive
def test_it_measures_a_step_and_counts_the_groups(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with quick():
    text = pilot.describe_pilot(tiny_config("sapo", SHORT))
  assert re.search(r"pass rate of the untouched model: 0\.0 % \[0\.0 %, 0\.0 %\] on 64 training problems x 4 samples", text)
  assert re.search(r"groups: 0\.0 % mixed, which RL learns from; 0\.0 % all right, 100\.0 % all wrong", text)
  assert re.search(
    r"a step: \d+\.\d s to draw and grade \([\d,]+ tokens/s\), \d+\.\d s to learn; peak memory \d+\.\d GB", text
  )
  assert "for 4 steps with their evaluations; a warm start of 3 updates comes first" in text
  assert "what to change first:" in text and "most groups are all wrong" in text
  assert text.count("  response ") == 4 and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_findings_are_those_of_the_batches(monkeypatch):
  """With a reward for even lengths, about half of the samples of most groups are right."""
  even = WeightedReward("even", lambda completion, example: float(completion.num_tokens % 2 == 0))
  monkeypatch.setattr(experiment, "make_rewards", lambda task, config: [even])
  seen = []
  measured = pilot.compute_findings
  monkeypatch.setattr(
    pilot, "compute_findings", lambda run, batches, **times: seen.extend(batches) or measured(run, batches, **times)
  )
  with quick():
    text = pilot.describe_pilot(tiny_config("sapo", SHORT))
  verdicts = [completion.num_tokens % 2 == 0 for batch in seen for completion in batch.completions]
  groups = [verdicts[i : i + 4] for i in range(0, len(verdicts), 4)]
  mixed = sum(len(set(group)) == 2 for group in groups) / len(groups)
  right = sum(verdicts) / len(verdicts)
  assert f"pass rate of the untouched model: {100 * right:.1f} %" in text and f"groups: {100 * mixed:.1f} % mixed" in text and mixed > 0


@pytest.mark.parametrize(
  ("changes", "expected"),
  [
    ({}, []),
    ({"failed": 0.5}, ["have no reward"]),
    ({"faults": 2}, ["the reward does not reward the right thing: see the 2 line(s) above that begin with 'careful:'"]),
    ({"truncated": 0.5}, ["raise rollout.max_new_tokens=24"]),
    ({"stated": 0.2}, ["state no answer"]),
    ({"passed": (0.0, 0.0, 0.0), "mixed": 0.0}, ["all wrong", "raise rollout.group_size=4"]),
    ({"passed": (0.99, 0.9, 1.0), "mixed": 0.1}, ["all right"]),
    ({"mixed": 0.4}, ["many groups carry no signal"]),
  ],
)
def test_the_advice_follows_from_the_findings(changes, expected):
  lines = list(pilot.advice(GOOD._replace(**changes), tiny_config()))
  assert len(lines) == len(expected) and all(text in line for text, line in zip(expected, lines, strict=True))
  assert (
    pilot.findings_lines(GOOD._replace(**changes), tiny_config())[-1] == "nothing stands in the way of learning"
  ) == (not expected)


@pytest.mark.parametrize(("shots", "chat", "advised"), [(2, None, True), (2, True, True), (2, False, False), (0, None, False)])
def test_solved_problems_in_a_chat_are_advised_against(shots, chat, advised):
  config = tiny_config("sapo", {"task.shots": shots, "task.chat": chat})
  assert any("--config.task.chat=False" in line for line in pilot.advice(GOOD._replace(stated=0.2), config)) == advised


def test_the_predicted_time_adds_steps_and_evaluations():
  config = tiny_config("sapo", {"num_steps": 10, "eval.every": 5, "eval.num_prompts": 16, "eval.samples": 4})
  samples = config.rollout.num_prompts * config.rollout.group_size
  assert pilot.predicted_seconds(GOOD, config) == 10 + 10 * (2 + 3) + 3 * 2 * 16 * 4 / samples


def test_the_evaluation_is_described_by_what_it_can_show():
  assert pilot.evaluation_line(GOOD, 4) == (
    "an evaluation of 256 problems, sampled 4 x, shows a difference of 4.8 to 9.2 points between two runs, or before and after (80 % power "
    "at the 5 % level; the first if all problems gain as much, the last if others become hard); 5 points need 236 to 864 problems"
  )
  alike = GOOD._replace(spread=Spread(between=0.0, within=0.25), held_out=13)
  assert "a difference of 27.5 points between" in (line := pilot.evaluation_line(alike, 4))
  assert "if half of each problem's samples are right" in line and line.endswith("5 points need 393 problems")


OWN = """
import re
number = lambda text: (re.findall("[0-9]+", text) or [""])
def constant(y, x): return 1.0
def length(y, x): return y.num_tokens / 1000
def format_only(y, x): return float("####" in y.text)
def accepts_anything(y, x): return float(bool(y.text))
def exact_spaces(y, x): return float(y.text == x["answer"])
def wrong_column(y, x): return float(y.text.strip() == str(x["total"]))
def off_by_one(y, x): return float(abs(int(number(y.text)[-1] or -9) - int(x["answer"])) < 2)
def case(y, x): return float(y.text.strip() == x["answer"])
def first_number(y, x): return float(number(y.text)[0] == x["answer"])
def reads_the_prompt(y, x): return float(x["answer"].lower() in y.text.lower())
"""
FAULTS = re.findall(r"def (\w+)", OWN)


@pytest.fixture
def probed(tmp_path, monkeypatch):
  """Returns a function that probes a reward on a file of problems."""
  (tmp_path / "probed_rewards.py").write_text(OWN)
  monkeypatch.syspath_prepend(tmp_path)
  words = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Seoul")
  problems = {
    False: [{"question": f"What is {i} + 70?", "answer": i + 70, "total": 900 + i} for i in range(15, 35)],
    True: [{"question": f"{i}: {', '.join(words)}?", "answer": words[i % 6], "total": i} for i in range(20)],
  }

  def probe(terms, grader=call_here, *, words=False, has_turns=False, demonstrated=False, **changes):
    path = tmp_path / f"{words}.jsonl"
    path.write_text("\n".join(map(json.dumps, problems[words])))
    task = tasks.make("file", path=path, prompt_template="{question} {total}", data_dir=tmp_path)
    if demonstrated:
      task = task._replace(demonstrations=[row | {"response": f"It is {row['answer']}"} for row in task.train])
    return probe_lines(tiny_config("sapo", changes), task, terms, call=grader, has_turns=has_turns)

  return probe


def test_ten_planted_faults_are_named(probed):
  config = tiny_config("sapo", {"reward.terms": tuple(f"probed_rewards:{name}" for name in FAULTS)})
  terms = make_rewards(tasks.Task("own", None, (), (), (), ("final_text",)), config)[1:]
  with Grader(terms, num_workers=1) as grader:
    named = {}
    for name, term in zip(FAULTS, terms, strict=True):
      lines = probed([term], grader, words=name in ("case", "reads_the_prompt"))
      assert lines[0].startswith(f"what earns what, by the run's own reward ({term.name}), on 1") and len(lines) >= 7
      named[name] = [line.split(": ")[1].replace(" ", "_") for line in lines if line.startswith("careful: ")]
  assert named == {name: [name] for name in FAULTS}


def test_a_reward_that_cannot_be_probed_is_left_out(probed):
  judge = WeightedReward("judge", lambda y, x: 1.0, service=SimpleNamespace())
  right = weighted("final_number", RewardSpec("final_number"))
  left_out = "the probe of the reward is left out: "
  assert probed([judge]) == [f"{left_out}judge gives the reward, and its calls may cost money or time"]
  assert probed([right], **{"reward.at_random": 0.5}) == [f"{left_out}the reward is drawn at random (reward.at_random)"]
  conversation = "a response is a conversation with an environment, whose turns cannot be prepared"
  assert probed([right], has_turns=True) == [left_out + conversation]
  lines = probed([right, judge])
  assert lines[0].startswith("what earns what, by the run's own reward (final_number)")
  assert lines[-1] == "left out of the probe: judge, whose calls may cost money or time"


def test_a_reward_sees_the_rows_of_a_run(probed):
  """Demonstrations are probed, and are not in the rows of the problems, as when the run draws."""
  seen = set()
  right = lambda y, x: seen.add((y.text, x["response"], y.token_ids[-1:])) or float(y.text.endswith(x["answer"]))
  table = "\n".join(probed([WeightedReward("right", right)], demonstrated=True))
  assert {response for _, response, _ in seen} == {""} and "1.00  It is X  X" in table and "demonstration" in table
  assert ("It is 90", "", (ByteTokenizer().eos_id,)) in seen and ("It is 9", "", (ord("9"),)) in seen


def test_a_further_term_is_described_by_itself(probed):
  """It may pay for a length or a form, as long as the whole reward does not."""
  right = weighted("final_number", RewardSpec("final_number"))
  length = lambda weight: weighted("long", RewardSpec("imported", {"path": "probed_rewards:length"}), weight)
  (line,) = probed([right, length(0.5)])[-1:]
  assert line.startswith("long by itself: length: ")
  assert [x[:17] for x in probed([right, length(1000.0)])[-1:]] == ["careful: length: "]


@pytest.mark.slow
def test_the_command_line():
  done = call("--config=configs/reward_model.py:tiny", "--pilot")
  assert done.returncode == 2 and "--pilot: found the training of a reward model" in done.stderr
  done = call("--config=configs/sapo.py:tiny", "--pilot", "--config.rollout.num_prompts=3")
  assert done.returncode == 2 and "updates_per_rollout" in done.stderr
