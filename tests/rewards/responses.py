"""Synthetic responses for tests of rewards; nothing here comes from the graders."""

import json
import random
from collections.abc import Sequence
from typing import NamedTuple


class Response(NamedTuple):
  """A response with its problem."""

  text: str
  answer: str
  question: str = "How many are there?"
  stopped: bool = True


THINGS = ("apples", "people", "dollars", "clips per day", "square feet", "hours in total", "km")
NAMES = ("Natalia", "Mr. Smith", "she", "the farmer", "Weng", "each of them")
LINES = (
  "{name} has {a} {thing} and buys {b} more, so {name} has {a} + {b} = {c} {thing}.",
  "Let me think step by step.", "First, {a} * {b} = {d}.",
  "- {a} {thing}\n- {b} {thing}", "1. Add {a} and {b}.\n2. Divide by {b}.",
  "We get $\\frac{{{a}}}{{{b}}} \\cdot {b} = {a}$.", "Let $x = {a}$, so that $2x = {e}$.",
  "\\[\nx + {a} = {c}\n\\]", "| {thing} | {a} |\n| --- | --- |\n| more | {b} |",
  "```python\nx = {a}\nprint(x + {b})\n```", "It is about {a}% of {b}.",
  "### Step 1: add\n{a} + {b} = {c}", "#### Step 1: add\n{a} + {b} = {c}\n#### Step 2: conclude",
  "#### 1. Add\n{a} + {b} = {c}", "**Step 2:** {a}/{b} of them.",
  "Zuerst addieren wir {a} und {b}.", "\u9996\u5148\uff0c{a} + {b} = {c}\u3002",
  "On calcule {a} \u00d7 {b} = {d}.", "At {a}:30 it is over.", "Options: (A) {a} (B) {b} (C) {c}",
)  # fmt: skip
ENDS = (
  "", "", "", "\n", " ", "\n\nI hope this helps!", "\n\nLet me know if you have any questions.",
  "\nThis is what was asked.",
)  # fmt: skip
# {x} is dressed, {m} is its mathematics.
STATEMENTS = (
  "The answer is {x}.", "So the answer is {x}", "Therefore, the final answer is: {x}",
  "the answer is clearly {x}.", "The correct answer is {x}.",
  "Hence the answer must be {x}.", "The answer to the question is {x}.", "So, the final answer would be {x}.",
  "The answer is, therefore, {x}.",
  "The answer is {x} (see above).", "The answer is {x}, because it was asked.",
  "The answer is {x}, as required.", "The answer is thus {x}!",
  "Answer: {x}", "ANSWER: {x}", "answer: {x}.", "**Answer:** {x}", "**Answer**: {x}", "**Answer: {m}**",
  "*Answer:* {x}", "__Answer:__ {x}",
  "- Answer: {x}", "> **Answer:** {x}", "1. **Answer:** {x}", "### Answer\n{x}", "## Final Answer\n\n{x}",
  "#### Final Answer\n\n{x}", "# Answer: {x}",
  "\u2705 **Final Answer:** {x}", "\U0001f3af Final answer \u2192 {x}", "\U0001f449 Answer: {x} \u2705",
  "Ans: {x}", "Ans.: {x}",
  "Answer - {x}", "Answer \u2013 {x}", "Answer = {x}", "Final Answer:\n\n{x}", "Final Answer\n{x}",
  "**Final Answer**\n\n{x}", "<b>Answer:</b> {x}",
  "The final answer is:\n\n{x}", "**Final Answer:**\n$$\n{m}\n$$", "The final answer is:\n\n$${m}$$",
  "The final answer is\n\\[\n{m}\n\\]",
  "Final answer: \\({m}\\).", "so $\\boxed{{{m}}}$ is it.", "\\boxed{{{m}}}", "\\boxed {{{m}}}.",
  "\\[ \\fbox{{{m}}} \\]", "**Final Answer:** $\\boxed{{{m}}}$",
  "The final answer is $\\boxed{{{m}}}$. I hope it is correct.", "#### {m}", "#### **{m}**", "####{m}",
  "<answer>{m}</answer>", "<answer>\n{x}\n</answer>",
  "<answer>The answer is {x}.</answer>", "Answer\uff1a{x}", "\u7b54\u6848\uff1a{x}",
  "\u7b54\u6848\u662f{x}\u3002", "R\u00e9ponse : {x}", "Antwort: {x}",
  "JSON", "Answer: {x}\n\nThat was easy.", "My answer: {x}", "So the final result is {x}.",
  "Answer (rounded): {x}", "Answer: {x} \u2014 done.",
)  # fmt: skip


def working(rng: random.Random) -> str:
  """Returns a few lines of reasoning, with numbers that are not the answer."""
  lines = []
  for line in rng.sample(LINES, rng.randint(0, 4)):
    a, b = rng.randint(2, 60), rng.randint(2, 60)
    lines.append(line.format(a=a, b=b, c=a + b, d=a * b, e=2 * a, name=rng.choice(NAMES),
        thing=rng.choice(THINGS)))
  return rng.choice(("\n", "\n\n")).join([*lines, ""]) if lines else ""


def thought(rng: random.Random, wrong: str) -> str:
  """Returns reasoning in tags, which states other answers, or nothing."""
  if rng.random() < 0.7:
    return ""
  inner = rng.choice(("Perhaps the answer is {w}?", "\\boxed{{{w}}}", "Answer: {w}\nNo.", "#### {w}",
      "{w}")).format(w=wrong)
  return f"<think>\n{working(rng)}{inner}\n</think>\n\n"


def dressed(rng: random.Random, plain: str, *, mathematical: bool = True) -> str:
  """Returns an answer in the markup of a chat model."""
  forms = ["{}"] * 4 + ["**{}**", "*{}*", "`{}`", "<b>{}</b>", "\\textbf{{{}}}", '"{}"']
  forms += ["${}$", "$${}$$", "\\({}\\)", "$\\mathbf{{{}}}$", "**${}$**",
    "$\\text{{{}}}$"] if mathematical else ["__{}__", "\u201c{}\u201d"]
  return rng.choice(forms).format(plain)


def stated(rng: random.Random, plain: str, *, mathematical: bool = True,
  statements: Sequence[str] = STATEMENTS) -> str:
  """Returns a statement of an answer."""
  statement = rng.choice(statements)
  if statement == "JSON":
    return rng.choice((
      json.dumps({"reasoning": "3 + 4 = 7", "answer": plain}),
      json.dumps({"answer": plain, "steps": 3}, indent=2),
      "```json\n" + json.dumps({"final_answer": plain}) + "\n```",
    ))  # fmt: skip
  return statement.format(x=dressed(rng, plain, mathematical=mathematical), m=plain)


def assembled(rng: random.Random, statement: str, wrong: str) -> str:
  """Returns a whole response around a statement."""
  return thought(rng, wrong) + working(rng) + statement + rng.choice(ENDS)
