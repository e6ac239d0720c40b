"""Files with a few texts that are much longer than the others: left out, counted, never shown."""

import json

import pytest

from configs import own_data
from jaxrl_llm.run.setup.data import load_measured
from jaxrl_llm.tasks.files.storage import split_of

SUMS = [{"question": f"{a}+{b}?", "answer": str(a + b), "why": f"#### {a + b}"} for a in range(13) for b in range(10)]
LONG = {"question": "x" * 5000, "answer": "5", "why": "#### 5"}


def measured(tmp_path, rows, **changes):
  path = tmp_path / "mine.jsonl"
  path.write_text("\n".join(map(json.dumps, rows)) + "\n")
  config = own_data.get_config("scratch")
  columns = {"task.path": str(path), "task.response_column": "why", "task.data_dir": str(tmp_path / "data")}
  config.update_from_flattened_dict(columns | {name.replace("__", "."): value for name, value in changes.items()})
  return load_measured(config)


@pytest.mark.parametrize("shots", [0, 3])
@pytest.mark.parametrize("vary", [False, True])
def test_a_long_question_is_left_out_and_in_no_other_prompt(shots, vary, tmp_path):
  task, lengths, (line,) = measured(tmp_path, [*SUMS, LONG], task__shots=shots, task__vary_shots=vary and bool(shots))
  assert max(*lengths.prompts, *lengths.held_out) < 100 and task.report.kept == 130
  (reason,) = task.report.dropped.items()
  assert reason[0].startswith("prompt longer than ") and reason[1] == 1
  assert line.startswith("  1 problem(s) with prompts above") and "prompt_buckets='(5001,)'" in line


def test_a_long_problem_of_the_test_alone_is_left_out(tmp_path):
  marks = (f"{i} " + "x" * 5000 for i in range(100))
  question = next(text for text in marks if split_of(text) == "test")
  _, lengths, lines = measured(tmp_path, [*SUMS, LONG | {"question": question}])
  assert max(lengths.held_out) < 100 and len(lines) == 1


def test_a_long_demonstration_is_not_imitated_and_shown_nowhere(tmp_path):
  question = next(text for text in map(str, range(100)) if split_of(text) == "train")
  rows = [*SUMS, {"question": question, "answer": "7", "why": "y" * 5000 + "#### 7"}]
  task, lengths, (line,) = measured(tmp_path, rows, warm_start__num_steps=4)
  assert max(lengths.demonstrations) < 100 and task.report.kept == 131 and "1 demonstration(s)" in line
  task, lengths, (line,) = measured(tmp_path, rows, task__shots=3, task__vary_shots=True)
  assert max(lengths.prompts) < 100 and task.report.kept == 131 and "1 demonstration(s)" in line


@pytest.mark.parametrize(
  ("rows", "changes"),
  [
    ([*SUMS, *(LONG | {"question": f"{i} {LONG['question']}"} for i in range(130))], {}),
    ([*SUMS, LONG], {"rollout__prompt_buckets": (16, 5008)}),
    ([*SUMS, LONG], {"task__prompt_template": "z" * 5000 + "{question}"}),
  ],
  ids=["half of them", "sizes that are set", "all, by their template"],
)
def test_what_is_no_rare_tail_is_kept(rows, changes, tmp_path):
  task, lengths, lines = measured(tmp_path, rows, **changes)
  assert task.report.kept == len(rows) and not task.report.dropped and not lines
  assert max(*lengths.prompts, *lengths.held_out) > 5000


def test_under_the_policy_error_the_row_is_named(tmp_path):
  with pytest.raises(ValueError, match="mine.jsonl:131: prompt longer than .* tokens .*see rollout.prompt_buckets"):
    measured(tmp_path, [*SUMS, LONG], task__bad_rows="error")
