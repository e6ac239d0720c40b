"""What a teacher reads beside the policy's prompt, and which columns it can name."""

import json

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.tasks.privileged import check_names, privileged_prompts
from jaxrl_llm.tasks.task import Task

ROWS = [{"question": q, "prompt": f"{q}=", "answer": a, "response": ""} for q, a in (("1+2", "3"), ("2+2", "4"))]


def task_of(demonstrations=(), rows=ROWS):
  return Task("sums", ByteTokenizer(), rows, (), demonstrations, ("final_number",))


def test_the_first_demonstration_of_a_problem_can_be_told():
  shown = [{"question": q, "response": r} for q, r in (("2+2", "four"), ("1+2", "three"), ("1+2", "tree"))]
  encode = privileged_prompts(task_of(shown), "{response} ({answer}) {prompt}")
  assert [ByteTokenizer().decode(encode(row)) for row in ROWS] == ["three (3) 1+2=", "four (4) 2+2="]


@pytest.mark.parametrize(
  ("task", "template", "message"),
  [
    (task_of(), "{anser}", "found {anser}, expected one of the columns answer, prompt, question, response; did you mean {answer}?"),
    (task_of([{"question": "1+2", "response": "3"}]), "{response}", "found {response}, expected a column that every problem of task sums"),
    (task_of(rows=[ROWS[0] | {"images": (b"",)}]), "{answer}", "found '{answer}', expected None for task sums, whose prompts have pict"),
    (task_of(rows=[ROWS[0] | {"prompt_ids": [1]}]), "{answer}", "found '{answer}', expected None for task sums, whose prompts have mes"),
  ],
)
def test_what_cannot_be_told_is_refused_in_one_line(task, template, message):
  with pytest.raises(ValueError) as error:
    privileged_prompts(task, template)
  assert str(error.value).startswith(f"config.teacher.privileged: {message}") and "\n" not in str(error.value)


def test_a_teacher_can_read_a_column_of_a_file_that_the_policy_does_not(tmp_path):
  path = tmp_path / "mine.jsonl"
  path.write_text("".join(json.dumps({"q": f"{n}+1", "gold": str(n + 1), "hint": f"after {n}"}) + "\n" for n in range(20)))
  columns = {"path": path, "question_column": "q", "answer_column": "gold", "data_dir": tmp_path}
  plain, told = tasks.make("file", **columns), tasks.make("file", columns=("hint",), **columns)
  assert [row["prompt"] for row in plain.train] == [row["prompt"] for row in told.train] and plain.fingerprint == told.fingerprint
  row = told.train[0]
  text = ByteTokenizer().decode(privileged_prompts(told, "{prompt} ({hint})")(row))
  assert text == f"{row['question']} (after {row['question'].split('+')[0]})"
  with pytest.raises(ValueError, match="found no column 'hnt', but .*; did you mean 'hint'"):
    tasks.make("file", columns=("hnt",), **columns)


def test_every_problem_has_a_teacher_and_every_teacher_a_problem():
  rows = [{"task": "math"}, {"task": "code"}]
  check_names(rows, "task", ["math", "code"])
  for column, names, message in (
    ("tsk", ["math", "code"], "config.teacher.column: found 'tsk', expected one of the columns task; did you mean 'task'?"),
    ("task", ["math", "cod"], "config.teacher.column: found 'code' in column 'task' of a problem, expected one of the names in"),
    ("task", ["math", "code", "art"], "config.teacher.paths: found 'art', expected only names that a problem has in column 'task'"),
  ):
    with pytest.raises(ValueError) as error:
      check_names(rows, column, names)
    assert str(error.value).startswith(message)
