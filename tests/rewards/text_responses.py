"""Synthetic responses that state a text, right and wrong."""

import random

from tests.rewards.responses import ENDS, STATEMENTS, Response, stated

PLACES_AND_PEOPLE = (
  "Paris", "New York", "Mount Everest", "photosynthesis", "the Eiffel Tower", "Gone with the Wind", "oxygen",
  "a red fox", "Marie Curie", "Jane Eyre", "went", "yes",
  "1984", "Caf\u00e9 de Flore", "St. Louis", "Harry Potter and the Goblet of Fire", "\u6771\u4eac",
  "\u041c\u043e\u0441\u043a\u0432\u0430", "O'Brien", "left because of rain", "B-tree", "x-ray",
)  # fmt: skip
TEXT_LINES = (
  "Let me think about it.", "There are several candidates, such as {a} and {b}.", "- {a}\n- {b}",
  "1. {a} is one.\n2. {b} is another.", "### Step 1: candidates\n{a}, {b}",
  "Some say {a}.", "It could be {a}, but that is not what is asked.", "Zuerst betrachten wir {a}.",
  "| {a} | {b} |", "#### Step 1: candidates\n{a}",
)  # fmt: skip
TEXT_STATEMENTS = (
  *(x for x in STATEMENTS if not any(part in x for part in ("boxed", "fbox", "$$", "\\[", "\\("))),
  "\\boxed{{{m}}}", "\\boxed{{\\text{{{m}}}}}", "$\\boxed{{\\text{{{m}}}}}$.",
)  # fmt: skip


def text_working(rng: random.Random) -> str:
  """Returns a few lines that name other answers."""
  lines = [line.format(a=rng.choice(("Rome", "Oslo")),
      b=rng.choice(("Lima", "Cairo"))) for line in rng.sample(TEXT_LINES, rng.randint(0, 3))]
  return "\n".join([*lines, ""])


def right_text(rng: random.Random) -> Response:
  """Returns a response that states the text, or ends with it on a line of its own."""
  answer = rng.choice(PLACES_AND_PEOPLE)
  shown = rng.choice((answer, answer, answer.upper() if answer.isascii() else answer,
      answer.replace(" ", "  ")))
  if rng.random() < 0.2:
    statement = rng.choice((
      f"The answer is {shown}, because it is known.", f"The answer is {shown} (as everyone knows).",
      f"Answer: {shown}, since it is known.", f"The answer is {shown}; that is all.",
      f"Answer: {shown} (the only one)", f"#### {shown}", f"**{shown}**", f"{shown}.", f"{shown}\n",
      f'"{shown}"', f"Answer: {shown} \u2014 as everyone knows.",
    ))  # fmt: skip
    return Response(text_working(rng) + statement, answer, "What is it?")
  thinking = "<think>Perhaps the answer is Rome.\nAnswer: Oslo</think>\n" if rng.random() < 0.3 else ""
  statement = stated(rng, shown, mathematical=False, statements=TEXT_STATEMENTS)
  # Words with text below are a heading.
  end = "" if statement.startswith("####") else rng.choice(ENDS)
  return Response(thinking + text_working(rng) + statement + end, answer, "What is it?")


def wrong_text(rng: random.Random) -> Response:
  """Returns a response that states another text, several or none, and may mention the right one."""
  answer, other = rng.sample([x for x in PLACES_AND_PEOPLE if x != "yes"], 2)
  if rng.random() < 0.5:
    statement = rng.choice((
      f"Answer: {answer} or {other}", f"Answer: {answer}\nAnswer: {other}",
      f"Answer: {other}\nAnswer: {answer}", f"#### {answer}\n#### {other}",
      f"#### {other}\n#### {answer}",
      f"\\boxed{{{answer}}} or \\boxed{{{other}}}", f"The answer is {answer} or {other}.", f"The answer is not {answer}.",
      f"Answer: not {answer}", f"<think>The answer is {answer}.</think>\n{other}", f"<think>\n{answer}",
      f"<think>\\boxed{{{answer}}}", f"\\boxed{{{answer}}}. No: \\boxed{{",
      f"It is {answer} I think", f"{answer}\n{other}", f"{answer}, {other}",
      f"The answer is {answer} and {other}.", f"Answer: {other} ({answer} is wrong)",
      f"Answer: {other}, not {answer}", f"<answer>{answer}</answer><answer>{other}</answer>",
      f'{{"guess": "{answer}", "answer": "{other}"}}', f"Answer: un{answer}", f"Answer: {answer}x",
    ))  # fmt: skip
    return Response(text_working(rng) + statement, answer, "What is it?")
  return Response(f"{text_working(rng)}Some say {answer}.\n" + stated(rng, other, mathematical=False,
      statements=TEXT_STATEMENTS) + rng.choice(ENDS), answer, "What is it?")


def at_place(rng: random.Random, place: str, right: bool) -> Response:
  """Returns a response with a text at a location, spelt as in the row, and another elsewhere."""
  answer, other = rng.sample(PLACES_AND_PEOPLE, 2)
  given, elsewhere = (answer, other) if right else (other, answer)
  lines = text_working(rng)
  if place == "whole":
    return Response(rng.choice((given, f" {given}\n", f"\n{given}") if right else (given, f"{answer} {other}",
          f"{answer}.", f"It is {answer}", f"{answer}\n{answer}")), answer)
  if place == "last_line":
    return Response(f"{lines}{elsewhere}\n" + rng.choice((given, f"{given}\n\n",
          f" {given} ") if right else (given, f"{answer}!", f"It is {answer}", f"{answer}, {other}",
          f"<think>\n{answer}\n</think>\n{other}")), answer)
  if place == "tag":
    inner = rng.choice(("<answer>{}</answer>", "<answer>\n{}\n</answer>",
        "<ANSWER> {} </ANSWER>")).format(given)
    hedge = "" if right else rng.choice(("", f"<answer>{answer}</answer>\n", f"<answer>{answer}\n"))
    thought = f"<think>{lines}<answer>{elsewhere}</answer></think>\n"
    return Response(f"{thought}{hedge}{elsewhere} is mentioned.\n{inner}", answer)
  if place == "after =>":
    return Response(f"{lines}=> {elsewhere}\n=> {given}" + rng.choice(("", "\nThat is all.")), answer)
  if right:
    statement = stated(rng, given, mathematical=False, statements=TEXT_STATEMENTS)
    return Response(lines + statement + ("" if statement.startswith("####") else rng.choice(ENDS)), answer)
  return wrong_text(rng)
