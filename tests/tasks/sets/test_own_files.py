"""A user's file becomes a task; unusable rows are counted or refused, with their place."""

import json
import shutil

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.chat_template import ChatTemplate
from jaxrl_llm.tasks.files import report as report_lib
from jaxrl_llm.tasks.files import tables
from jaxrl_llm.tasks.files.storage import uniform
from jaxrl_llm.tasks.image_prompts import prompt_ids
from tests.tasks.written import write_lines

ROWS = [
  {"q": f"What is {i} + 1?", "a": i + 1, "hard": f"Level {i % 3}", "hint": "Count.", "work": "so" if i % 2 else None} for i in range(60)
]
BAD = [
  '{"q": "What is 0 + 1?", "a": 1, "hard": 1, "hint": "Count.", "work": ""}',
  '{"q": null, "a": 1, "hard": 1, "hint": "", "work": ""}',
  '{"q": "What is blue?", "a": "blue", "hard": 1, "hint": "", "work": ""}',
  '{"q": "What is ' + "very " * 30 + 'long?", "a": 1, "hard": 1, "hint": "", "work": ""}',
  '{"q": "cut',
]
SETTINGS = {
  "question_column": "q",
  "answer_column": "a",
  "level_column": "hard",
  "response_column": "work",
  "prompt_template": "{hint} {question}",
}
REASONS = {
  "duplicate question": 1,
  "q is null": 1,
  "last line cut short": 1,
  "answer is no number": 1,
  "prompt longer than 23 tokens": 1,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
  path = tmp_path_factory.mktemp("own") / "own.jsonl"
  path.write_text("\n".join([*map(json.dumps, ROWS), *BAD]))
  return path


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def own(file, root):
  # The longest good prompt has 23 tokens.
  return tasks.make("file", path=file, data_dir=root, max_prompt_tokens=23, **SETTINGS)


def questions(rows):
  return [row["question"] for row in rows]


def test_every_row_is_kept_or_counted(own):
  assert own.report.read == len(ROWS) + len(BAD) and own.report.kept == len(ROWS) == len(own.train) + len(own.test)
  assert own.report.dropped == REASONS
  assert own.report.first["answer is no number"] == "own.jsonl:63: 'blue', but the reward final_number needs one"
  assert report_lib.in_words(own.report).startswith("65 problems read, 60 kept; 5 dropped: 1 ")
  assert report_lib.from_json(json.loads(json.dumps(report_lib.to_json(own.report)))) == own.report


def test_rows(own):
  assert own.name == "file" and own.rewards == ("final_number",) and isinstance(own.tokenizer, ByteTokenizer)
  rows = sorted([*own.train, *own.test], key=lambda row: int(row["answer"]))
  assert rows[7] == {
    "question": "What is 7 + 1?",
    "answer": "8",
    "level": 1,
    "response": "",
    "id": "",
    "place": "own.jsonl:8",
    "hint": "Count.",
    "prompt": "Count. What is 7 + 1?",
  }
  assert {row["response"] for row in own.demonstrations} == {"so"}
  assert set(questions(own.demonstrations)) == {row["question"] for row in own.train if int(row["answer"]) % 2 == 0}


def test_the_text_alone_decides_what_is_held_out(own, root, file, tmp_path):
  assert set(questions(own.test)) == {row["q"] for row in ROWS if uniform("split", row["q"]) < 0.1}
  assert 1 <= len(own.test) <= 15
  some = tmp_path / "some.csv"
  some.write_text("q,a\n" + "\n".join(f"{row['q']},{row['a']}" for row in reversed(ROWS[:30])))
  other = tasks.make("file", path=some, data_dir=root, question_column="q", answer_column="a")
  assert set(questions(other.test)) <= set(questions(own.test)) and len(other.test)
  assert questions(other.train)[0] == ROWS[29]["q"]  # In the order of the file.


def test_a_dataset_is_built_once_for_its_bytes_and_columns(file, root, own, tmp_path, monkeypatch):
  monkeypatch.setattr(tables, "_prepare", None)  # Nothing can be built.
  copy = tmp_path / "copy.jsonl"
  shutil.copy(file, copy)
  again = tasks.make("file", path=copy, data_dir=root, levels=(1,), **SETTINGS)
  assert again.fingerprint != own.fingerprint
  assert tasks.make("file", path=copy, data_dir=root, max_prompt_tokens=23, **SETTINGS).fingerprint == own.fingerprint
  assert {row["level"] for row in (*again.train, *again.test)} == {1} and again.report.dropped["level not in task.levels"] == 40
  with pytest.raises(TypeError):
    tasks.make("file", path=file, data_dir=root, **SETTINGS | {"response_column": None})


ERRORS = {
  "bad_rows": ({"bad_rows": "error"}, r"own.jsonl:61: duplicate question \('What is 0 \+ 1\?'\); repair the row, or set task.bad_rows"),
  "policy": ({"bad_rows": "skip"}, "task.bad_rows: found 'skip', expected one of drop, error$"),
  "levels": ({"levels": (5,)}, r"task.levels: found \(5,\), but the problems of task file have 0, 1, 2; None keeps all$"),
  "prompt": ({"max_prompt_tokens": 5}, "task file, train: found no problem that can be used .*61 prompt longer than 5 tokens"),
  "column": ({"question_column": "qq"}, r"own.jsonl: found no column 'qq', but q, a, hard, hint, work; did you mean 'q'\?$"),
  "template": ({"prompt_template": "{hnt}"}, r"own.jsonl: found no column 'hnt', .* did you mean 'hint'\?$"),
  "kept": ({"prompt_template": "{question} {conversation}"}, r"task.prompt_template: found \{conversation\}, expected a column"),
  "braces": ({"prompt_template": "{question} {}"}, "task.prompt_template: found '{}'"),
  "fraction": ({"test_fraction": 0.0}, "task.test_fraction: found 0.0, expected a number between 0 and 1"),
  "both": ({"test_fraction": 0.5, "test_path": "SAME"}, "task.test_fraction: found 0.5 with test problems of their own"),
  "leak": ({"test_path": "SAME"}, r"^duplicate question \(.*own.jsonl:1: .*\); none of the 65 rows can be used"),
  "setting": ({"sorce": "x"}, r"task.sorce: found 'x', expected None, because task file does not read it and takes path, "),
  "remote": ({"data_dir": "gs://bucket"}, "expected a local folder"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_one_line_for_each_invalid_setting(case, file, root):
  change, words = ERRORS[case]
  settings = {"path": file, "data_dir": root} | SETTINGS | {k: file if v == "SAME" else v for k, v in change.items()}
  with pytest.raises(ValueError, match=words) as caught:
    tasks.make("file", **settings)
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.fixture
def make(tmp_path):
  """Makes a task of a file with some rows."""
  return lambda rows, **settings: tasks.make("file", path=write_lines(tmp_path / "rows.jsonl", rows), data_dir=tmp_path, **settings)


def test_very_few_rows(make):
  rows = [{"question": f"{i}?", "answer": i} for i in range(3)]
  with pytest.raises(ValueError, match="found one problem in all, expected one to train on and one to test"):
    make(rows[:1])
  for count in (2, 3):
    task = make(rows[:count])
    assert len(task.test) == 1 and len(task.train) == count - 1


def test_a_problem_of_both_files_stays_held_out(tmp_path):
  for name, numbers in (("train", range(8)), ("test", range(6, 10))):
    write_lines(tmp_path / f"{name}.jsonl", [{"question": f"{i}?", "answer": i} for i in numbers])
  task = tasks.make("file", path=tmp_path / "train.jsonl", test_path=tmp_path / "test.jsonl", data_dir=tmp_path)
  assert questions(task.train) == [f"{i}?" for i in range(6)] and questions(task.test) == [f"{i}?" for i in range(6, 10)]
  assert task.report.dropped == {"duplicate question": 2} and task.report.kept == 10


def test_each_split_has_at_least_one_problem(make):
  low, high = ([str(i) for i in range(400) if (uniform("split", str(i)) < 0.1) == side][:4] for side in (True, False))
  for some, tests in ((low, 3), (high, 1)):
    # The stored rows of the other file must not be reused for this one.
    task = make([{"question": text, "answer": 1} for text in some])
    assert len(task.test) == tests and sorted(questions([*task.train, *task.test])) == sorted(some)


def test_a_demonstration_that_is_too_long_is_not_imitated(make):
  rows = [{"question": f"{i}?", "answer": i, "response": "x" * i} for i in range(10)]
  task = make(rows, response_column="response", max_tokens=10, test_fraction=0.01)
  assert len(task.train) == 9 and {len(row["response"]) for row in task.demonstrations} <= {1, 2, 3, 4, 5, 6}
  assert task.report.kept == 10 and task.report.dropped == {"not imitated: longer than 10 tokens with its prompt": 3}


SHOWN = {  # What tells 40 problems with one question apart, and the template that shows it.
  "choices": (lambda i: [f"{i} men", f"{i} women"], None),
  "options": (lambda i: {"A": f"{i} men", "B": f"{i} women"}, "{question}\n{options}"),
  "context": (lambda i: f"Page {i}.", "{context} {question}"),
  "table": (lambda i: [{"row": i}], "{question} {table}"),
  "info": (lambda i: {"starter_code": f"def f{i}():"}, "{question} {info.starter_code}"),
}


@pytest.mark.parametrize("column", SHOWN)
def test_rows_with_one_question_are_told_apart_by_all_that_their_prompts_show(column, make):
  value, template = SHOWN[column]
  rows = [{"question": "Which is true?", column: value(i), "answer": "AB"[i % 2]} for i in range(40)]
  task = make([*rows, *rows[:3]], prompt_template=template, test_fraction=0.3)
  assert task.report.dropped == {"duplicate question": 3} and len(task.train) + len(task.test) == 40
  prompts = [{row["prompt"] for row in split} for split in (task.train, task.test)]
  assert prompts[0].isdisjoint(prompts[1]) and 3 < len(task.test) < 25
  shown = make(rows, prompt_template=template, shots=2)
  assert len(shown.train) == len(make(rows, prompt_template=template).train) - 2


def test_a_question_of_one_problem_is_held_out_as_ever_beside_shared_ones(make):
  shared = [{"question": "Which?", "choices": [f"{i}", f"{i + 1}"], "answer": "A"} for i in range(40)]
  single = [{"question": f"Which of {i}?", "choices": ["1", "2"], "answer": "B"} for i in range(100)]
  task = make([*shared, *single], prompt_template="{question}\n{choices}")
  held_out = {row["question"] for row in single if uniform("split", row["question"]) < 0.1}
  assert {*questions(task.test)} - {"Which?"} == held_out and 0 < questions(task.test).count("Which?") < 15


def test_another_answer_to_the_same_prompt_is_a_contradiction(make):
  rows = [{"question": f"{i}?", "answer": i} for i in range(9)]
  rows += [{"question": "3?", "answer": 4}, {"question": "4?", "answer": "4"}]
  task = make(rows)
  assert task.report.dropped == {"duplicate question with another answer": 1, "duplicate question": 1}
  assert {row["answer"] for row in (*task.train, *task.test) if row["question"] == "3?"} == {"3"}


SYSTEM = {"role": "system", "content": "Add."}


def chat(i, *first):
  return [*first, {"role": "user", "content": f"{i}+1?"}]


def test_chats_keep_their_messages_and_one_set_of_turns_is_in_one_split(make):
  rows = [{"prompt": chat(i, *extra), "reward_model": {"ground_truth": str(i + 1)}} for i in range(30) for extra in ((), (SYSTEM,))]
  task = make(rows, test_fraction=0.3, prompt_template="{question} Think.")
  train, test = ({row["question"] for row in split} for split in (task.train, task.test))
  assert not task.report.dropped and len(train) + len(test) == 30 and train.isdisjoint(test) and test
  assert task.report.columns.startswith("columns: question 'prompt' (chats), answer 'reward_model.ground_truth'; ")
  with_system = [row for row in task.train if "conversation" in row]
  assert len(with_system) == len(task.train) // 2 and all("system" in row["conversation"] for row in with_system)
  assert all(row["prompt"] == f"{row['question']} Think." for row in task.train)
  assert ByteTokenizer().decode(prompt_ids(with_system[0], ByteTokenizer())) == f"Add.\n{with_system[0]['prompt']}"


def test_the_end_of_a_chat_is_a_demonstration(make):
  replied = lambda i: [*chat(i), {"role": "assistant", "content": f"#### {i + 1}"}]
  rows = [{"messages": replied(i), "gold": {"values": [i + 1]}} for i in range(30)]
  task = make(rows, answer_column="gold.values.0")
  assert task.rewards == ("final_number",) and {row["response"] for row in task.demonstrations} <= {f"#### {i}" for i in range(1, 31)}
  assert "whose last message is the demonstration" in task.report.columns and len(task.demonstrations) == len(task.train)
  alone = make([{"messages": replied(i)} for i in range(30)])
  assert alone.rewards == ("maths",) and alone.train[0]["answer"].startswith("####") and not alone.report.dropped


def test_a_system_message_that_no_prompt_would_get_is_refused(make):
  class WithSystem(ByteTokenizer):
    system = "Be brief."

  rows = [{"prompt": chat(i, SYSTEM), "answer": i + 1} for i in range(9)]
  with pytest.raises(ValueError, match=r"^config.task.system: found 'Be brief.', expected None, because all prompts of the file have"):
    make(rows, tokenizer=WithSystem())
  make([*rows, {"prompt": chat(9), "answer": 10}], tokenizer=WithSystem())


@pytest.mark.parametrize(
  ("source", "words"),
  [
    ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "mine: .* leaves out messages of the role system"),
    ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}", "9 messages that the chat template refuses"),
  ],
)
def test_chats_that_a_chat_template_cannot_write(source, words, make):
  class Templated(ByteTokenizer):
    chat_template = ChatTemplate(source, "mine", {})

  with pytest.raises(ValueError, match=words):
    make([{"prompt": chat(i, SYSTEM), "answer": i} for i in range(9)], tokenizer=Templated())


def test_damage_to_the_stored_copy(own, file, root, tmp_path):
  shutil.copytree(root / "file", tmp_path / "file")
  for report in (tmp_path / "file").rglob("problem_report.json"):
    report.unlink()
  with pytest.raises(ValueError, match=r"found a dataset that cannot be used .* delete .* and run again$"):
    tasks.make("file", path=file, data_dir=tmp_path, **SETTINGS)


def test_stored_rows_are_a_sequence(own):
  rows = list(own.train)
  assert rows[3:9:2] == own.train[3:9:2] and own.train[-1] == rows[-1] and len(rows) == len(own.train)
  with pytest.raises(IndexError):
    own.train[len(rows)]
