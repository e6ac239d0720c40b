"""A template names columns and can do nothing else."""

import pytest

from jaxrl_llm.tasks import prompt_template


def test_columns_and_braces():
  template = "{question} or {question}? {{{answer}}} \\boxed{{}}"
  assert prompt_template.fields(template) == ("question", "answer")
  assert prompt_template.render(template, {"question": "{x} %s", "answer": 3}) == "{x} %s or {x} %s? {3} \\boxed{}"


@pytest.mark.parametrize(
  "template", ["{question", "question}", "{}", "{0}", "{question.__class__}", "{question[0]}", "{question!r}", "{question:>9}", "none", ""]
)
def test_anything_else_is_refused(template):
  with pytest.raises(ValueError, match="^task.prompt_template: found .*expected") as caught:
    prompt_template.fields(template)
  assert "\n" not in str(caught.value)


def test_an_unknown_column_is_refused():
  with pytest.raises(ValueError, match=r"found \{quesion\}, expected one of the columns answer, question; did you mean \{question\}\?"):
    prompt_template.check_template("{quesion}", ["question", "answer"])
