"""The policy's programs run in the sandbox, and the policy reads what they print."""

import sys

import pytest

from jaxrl_llm.rewards.sandbox import Execution, ProgramRefused, Sandbox, probe
from jaxrl_llm.rollouts.environments import make
from jaxrl_llm.text_types import Completion


@pytest.fixture(scope="module")
def tool():
  if reason := probe(Sandbox("namespaces")):
    pytest.skip(reason)
  return make("python", backend="namespaces", timeout_s=5.0)


def said(tool, text):
  return tool.step(tool.reset({}), Completion(text, (), 1, True))[1]


def test_a_program_prints(tool):
  assert said(tool, "Let me see.\n<code>\n```python\nprint(6 * 7)\n```\n</code>").text == "\n<interpreter>\n42\n</interpreter>\n"
  assert said(tool, "<code>print(6 * 7)</code>").text == "\n<interpreter>\n42\n</interpreter>\n"


def test_an_error_is_shown_and_the_conversation_continues(tool):
  reply = said(tool, "<code>print(1)\n1 / 0</code>")
  assert "1\n" in reply.text and "ZeroDivisionError" in reply.text and not reply.done
  assert "[timeout]" in said(make("python", backend="namespaces", timeout_s=0.5), "<code>while True: pass</code>").text


def test_a_program_sees_neither_our_environment_nor_our_files(tool, monkeypatch, tmp_path):
  monkeypatch.setenv("A_SECRET_TOKEN", "hunter2")
  (tmp_path / "canary").write_text("alive")
  text = said(tool, f"<code>import os; print(dict(os.environ)); open({str(tmp_path / 'canary')!r}, 'w').write('dead')</code>").text
  assert "hunter2" not in text and (tmp_path / "canary").read_text() == "alive"


def test_long_output_is_cut(tool):
  assert len(said(tool, "<code>print('x' * 100000)</code>").text) < 1100


def test_a_turn_without_a_program_ends_the_conversation(tool):
  assert said(tool, "The answer is 42.").done
  assert not said(tool, "stray </code>").done


def test_programs_need_a_sandbox():
  with pytest.raises(ValueError, match="running programs is switched off"):
    make("python", backend="off")


def test_a_refused_program_has_no_reply(tool, monkeypatch):
  module = sys.modules["jaxrl_llm.rollouts.environments.python_tool"]
  monkeypatch.setattr(module, "execute", lambda program, sandbox: Execution("refused", cause="no more processes"))
  with pytest.raises(ProgramRefused, match="no more processes"):
    said(tool, "<code>print(1)</code>")
