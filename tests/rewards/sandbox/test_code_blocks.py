"""The program in a response: forms that models write, and generated ones with a known program."""

import random
import re
import textwrap

import pytest

from jaxrl_llm.rewards.sandbox import extract_code
from jaxrl_llm.rewards.sandbox.unit_tests import AssertTests, CallTests, StdioTests, program_pattern

PROGRAM = "def f(x):\n  return x + 1\n\nprint(f(int(input())))"
BLOCK = f"```python\n{PROGRAM}\n```"
MARKS = (
  "python", "py", "py3", "python3", "python3.11", "Python", "PYTHON 3", "pypy3", " python", 'python title="x.py"',
  "{.python .numberLines}", "{.language-python}", "python:x.py", "python3.12", "{.python}",
)  # fmt: skip


def indented(text, by):
  return textwrap.indent(text, by, lambda line: True)


FORMS = {
  "prose around it": f"Here it is:\n\n{BLOCK}\n\nIt adds one.",
  "no empty lines around it": f"Here it is:\n{BLOCK}\nIt adds one.",
  "the sample output behind it": f"{BLOCK}\nIt prints:\n```\n2\n```",
  "sample input and output behind it": f"{BLOCK}\nInput:\n```\n1\n```\nOutput:\n```\n2\n```",
  "a marked output behind it": f"{BLOCK}\n```text\n2\n```",
  "how to start it behind it": f"{BLOCK}\nRun it:\n```bash\n$ python x.py\n```",
  "how to start it behind it, unmarked": f"{BLOCK}\nRun it:\n```\n$ echo 1 | python x.py\n2\n```",
  "a session behind it": f"{BLOCK}\n```pycon\n>>> f(1)\n2\n```",
  "another language behind it": f"{BLOCK}\nIn C++:\n```cpp\nint main() {{}}\n```",
  "a diff before it": f"```diff\n-x\n+y\n```\n{BLOCK}",
  "a sample before it": f"```\n1\n```\n{BLOCK}",
  "an earlier attempt": f"```python\nprint(0)\n```\nThat is wrong.\n{BLOCK}",
  "unmarked": f"```\n{PROGRAM}\n```",
  **{mark: BLOCK.replace("python", mark) for mark in MARKS},
  "spaces behind the fences": BLOCK.replace("python\n", "python  \n") + "  ",
  "CRLF": f"So:\n{BLOCK}\nDone.".replace("\n", "\r\n"),
  "tildes": BLOCK.replace("```", "~~~"),
  "longer fences": BLOCK.replace("```", "`````"),
  "a longer closing fence": BLOCK + "``",
  "in a list": f"1. Code:\n{indented(BLOCK, '   ')}",
  "on the line of a list": "- " + indented(BLOCK, "  ")[2:],
  "in a nested list": f"- a\n  - b\n\n{indented(BLOCK, '    ')}",
  "in a list whose item it leaves": f"1. Code:\n   ```python\n{PROGRAM}\n   ```",
  "indented by four": indented(BLOCK, "    "),
  "in a quote": indented(BLOCK, "> "),
  "in a tag": f"<answer>\n{BLOCK}\n</answer>",
  "in a part that folds": f"<details><summary>Code</summary>\n{BLOCK}\n</details>",
  "never closed": f"So:\n```python\n{PROGRAM}",
  "never closed, a sample before it": f"```\n1\n```\n```python\n{PROGRAM}\n",
  "closed behind the last line": f"```python\n{PROGRAM}```",
  "closed behind the last line, with a sample": f"```python\n{PROGRAM}```\nIt prints:\n```\n2\n```",
  "closed behind the last line, in a list": f"1. Code:\n   ```python\n{indented(PROGRAM, '   ')}```\n2. Done.",
  "text behind the closing fence": f"{BLOCK} It adds one.\nDone.",
  "never closed before the next": f"```python\n{PROGRAM}\n```text\n2\n```",
  "a stray fence before it": f"```\n{BLOCK}",
  "marked twice": f"```python\n{BLOCK}",
  "in a block of Markdown": f"```markdown\n# Solution\n{BLOCK}\n```",
  "in a longer block of Markdown and again": f"````markdown\n```python\nprint(0)\n```\n````\n{BLOCK}",
  "an empty block behind it": f"{BLOCK}\n```python\n```",
  "reasoning before it": f"<think>\n```python\nprint(0)\n```\n</think>\n{BLOCK}",
  "reasoning with an open block": f"<think>Try\n```python\nprint(0)</think>\n{BLOCK}",
  "code within lines": f"Use ```f``` and `x`:\n{BLOCK}\nwith ```f```.",
}


@pytest.mark.parametrize("form", FORMS)
def test_the_program_is_found(form):
  assert extract_code(FORMS[form]) == PROGRAM


@pytest.mark.parametrize(
  "text",
  ["", "no code", "print(1)", "`print(1)`", "Use ```print(1)``` here.", "```cpp\nint x;\n```", "```text\n1\n```", "```output\n1\n```",
   "```bash\npython x.py\n```", "```pycon\n>>> 1\n1\n```", "```python-repl\n>>> 1\n```", "```json\n{}\n```", "```python\n```", "```\n\n```",
   "<think>\n```python\nprint(1)\n```\n</think>\nNo.", "```" * 10_000, "``\nprint(1)\n``", "```python print(1)```"],
)  # fmt: skip
def test_no_program(text):
  assert extract_code(text) is None


@pytest.mark.parametrize(
  "program",
  ["s = '''\n~~~\n'''", 'def f():\n    """Example:\n\n    ```python\n    f()\n    ```\n    """', "s = 'a &lt; b &amp; c'", "if 1:\n\tx = 1",
   "s = '''<b>\n</answer>'''", "# 1. a\n# - b\n> x", "- 1", 'def f():\n  """Returns ```x```"""', "x = 1\n\n\n\ny = 2", "s = '```'"],
)  # fmt: skip
def test_the_content_is_not_touched(program):
  for text in (f"```python\n{program}\n```", f"So:\n\n```\n{program}\n```\nDone."):
    assert extract_code(text) == program
  assert extract_code("````python\n```\nx\n```\n````") == "```\nx\n```"


@pytest.mark.parametrize(
  "tests",
  [
    CallTests("add", [([1], 2)]),
    AssertTests("assert candidate(1) == 2", "add"),
    AssertTests("assert add(1) == 2\nassert add(2)"),
  ],
)
def test_the_block_that_tests_can_run_is_preferred(tests):
  usage = "```python\nprint(add(3))\nassert add(1) == 2\n```"
  for program in (
    "def add(x):\n  return x",
    "class Solution:\n  async def add(self, x):\n    return x",
    "add = lambda x: x",
  ):
    for text in (
      f"```python\n{program}\n```\nUse it:\n{usage}",
      f"```\n{program}\n```\nIt prints\n```\n4\n```\n{usage}",
    ):
      assert extract_code(text, wanted=program_pattern(tests)) == program
  body = "```python\n  return x + 1\n```"  # It completes the prompt of the problem.
  assert extract_code(body, wanted=program_pattern(tests)) == "  return x + 1"


@pytest.mark.parametrize(
  "program",
  [
    "print(input())",
    "import sys\nprint(sys.stdin.read())",
    "read = input\nprint(read())",
    "for x in open(0): print(x)",
  ],
)
def test_a_program_that_reads_its_input_is_preferred(program):
  wanted = program_pattern(StdioTests([("1", "1")]))
  for behind in (
    "```python\nprint(f(3))\n```",
    "```\n1\n```",
    "```\ninput\n3\n```",
    "```\n$ python x.py\n```",
  ):
    assert extract_code(f"```\n{program}\n```\n{behind}", wanted=wanted) == program
  assert extract_code("```python\nprint(1)\n```\n```python\nprint(2)\n```", wanted=wanted) == "print(2)"


# A writer of responses, which shares nothing with the reader: it knows the program.
WORDS = "so the sum of all x is then 3 and we print it * 1. - > # `n` ~ | 2) <b> &amp; a_b [c](d)".split()
OTHERS = "text bash cpp java output json pycon javascript c console plaintext pseudocode".split()


def line_of_code(rng):
  code = ["x = 1", "print(x)", "s = '`'", "# ~~ note", "y = [1, 2]", "s = '``'", "z = x > 1", "- x"]
  return rng.choice(["", "    ", "  "]) + rng.choice(code)


def response_with(rng, program):
  """Returns a response around a program, or around none if the program is None."""
  prose = lambda: (
    " ".join(rng.choices(WORDS, k=rng.randrange(1, 9))).replace("1. ", "x ").lstrip("*-> #~|123.)")
  )
  fence = lambda: rng.choice("`~") * rng.randrange(3, 6)
  block = lambda mark, code, marker: f"{marker}{mark}\n{code}\n{marker}{rng.choice(['', ' ', marker[0]])}"
  other = lambda: block(
    rng.choice(OTHERS), "\n".join(line_of_code(rng) for _ in range(rng.randrange(1, 4))), fence()
  )
  parts = [rng.choice([prose, other])() for _ in range(rng.randrange(3))]
  if program is not None:
    marked, has_samples = rng.random() < 0.8, rng.random() < 0.5
    own = block(rng.choice(MARKS) if marked else "", program, fence())
    own = rng.choice(
      [own, own, f"1. Code:\n{textwrap.indent(own, '   ')}", textwrap.indent(own, "> ", lambda line: True)]
    )
    if marked and has_samples:
      parts += [block("", rng.choice(["1", "YES", "3 4\n5"]), fence()) for _ in range(rng.randrange(1, 3))]
    parts.insert(rng.randrange(len(parts) + 1), own)
  think = (
    [f"<think>{prose()}\n{block('python', 'print(0)', fence())}\n</think>"] if rng.random() < 0.2 else []
  )
  return ("\n\n" if rng.random() < 0.7 else "\n").join([*think, *parts, prose()])


def generated_mistakes(count):
  rng, missed, invented = random.Random(0), [], []
  for _ in range(count):
    program = "\n".join(["x = 0", *(line_of_code(rng) for _ in range(rng.randrange(5))), "print(x)"])
    if extract_code(text := response_with(rng, program)) != program:
      missed.append(text)
    if extract_code(text := response_with(rng, None)) is not None:
      invented.append(text)
  return missed, invented


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_generated_responses(count):
  missed, invented = generated_mistakes(count)
  assert not missed, (len(missed), missed[0])
  assert not invented, (len(invented), invented[0])


@pytest.mark.parametrize(
  "text",
  ["```\nx```\n" * 300, "- ```\n" * 500, "> " * 3000 + "```", "```a\n" * 500, "`" * 9999, "~~~ `\n" * 500],
)
def test_hostile_texts_end(text):
  for _ in range(2):
    code = extract_code(text, wanted=re.compile("never"))
    assert code is None or code in text or "```" in text
