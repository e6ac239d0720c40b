"""Process rewards of the arithmetic task, which judge each line of a working independently."""

import pytest

from jaxrl_llm.tasks.sets import arithmetic

EOS = 258


def rewards_of(question, text, *, stopped=True):
  return arithmetic.step_rewards({"question": question}, [*text.encode(), *[EOS] * stopped])


@pytest.mark.parametrize("question", ["7+8-5", "0-9", "9-9+0-0"])
def test_a_right_working_earns_every_step(question):
  text = arithmetic.working(question)
  rewards = rewards_of(question, text)
  assert [reward for _, reward in rewards] == [1.0] * len(text.split("\n"))
  # The last token is the stop token.
  assert [end for end, _ in rewards] == [i for i, c in enumerate(text) if c == "\n"] + [len(text)]


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("7+8=14\n14-5=9\n#9", [0, 1, 1]),  # One slip, carried forward.
    ("7+8=15\n14-5=9\n#9", [1, 0, 1]),  # Starts from a result that was never reached.
    ("7+8=15\n15-5=10\n#11", [1, 1, 0]),
    ("7+8=15\n15-4=11\n#11", [1, 0, 1]),  # Not the problem's term.
    ("7+8=15\n#15", [1, 0]),  # A step is missing.
    ("7+8=15\n15-5=10\n10+0=10\n#10", [1, 1, 0, 0]),  # One too many.
    ("7+8=015\n15-5=10\n#10", [0, 1, 1]),  # Another spelling.
    # Without any result, the next line may start from the right one.
    ("7+8=x\n15-5=10\n#10", [0, 1, 1]),
    ("", [0]),
    ("\n\n\n", [0, 0, 0, 0]),
    ("7+8=" + "9" * 400, [0]),
  ],
)
def test_rewards_computed_by_hand(text, expected):
  assert [reward for _, reward in rewards_of("7+8-5", text)] == expected


def test_a_truncated_response_is_judged_as_far_as_it_goes():
  assert rewards_of("7+8-5", "7+8=15\n15-", stopped=False) == [(6, 1.0), (9, 0.0)]
  assert arithmetic.step_rewards({"question": "1+1"}, []) == []


def test_other_ids_than_bytes_never_make_a_line_right():
  ids = [*b"7+8=1", 256, *b"5\n"]
  assert arithmetic.step_rewards({"question": "7+8"}, ids)[0][1] == 0.0
