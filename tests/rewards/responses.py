"""Synthetic responses, right and wrong, for tests of rewards; nothing here comes from the graders."""

import json
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
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
  "{name} has {a} {thing} and buys {b} more, so {name} has {a} + {b} = {c} {thing}.", "Let me think step by step.", "First, {a} * {b} = {d}.",
  "- {a} {thing}\n- {b} {thing}", "1. Add {a} and {b}.\n2. Divide by {b}.", "We get $\\frac{{{a}}}{{{b}}} \\cdot {b} = {a}$.", "Let $x = {a}$, so that $2x = {e}$.",
  "\\[\nx + {a} = {c}\n\\]", "| {thing} | {a} |\n| --- | --- |\n| more | {b} |", "```python\nx = {a}\nprint(x + {b})\n```", "It is about {a}% of {b}.",
  "### Step 1: add\n{a} + {b} = {c}", "#### Step 1: add\n{a} + {b} = {c}\n#### Step 2: conclude", "#### 1. Add\n{a} + {b} = {c}", "**Step 2:** {a}/{b} of them.",
  "Zuerst addieren wir {a} und {b}.", "\u9996\u5148\uff0c{a} + {b} = {c}\u3002", "On calcule {a} \u00d7 {b} = {d}.", "At {a}:30 it is over.", "Options: (A) {a} (B) {b} (C) {c}",
)  # fmt: skip
ENDS = (
  "", "", "", "\n", " ", "\n\nI hope this helps!", "\n\nLet me know if you have any questions.", "\nThis is what was asked.",
)  # fmt: skip
# {x} is dressed, {m} is its mathematics.
STATEMENTS = (
  "The answer is {x}.", "So the answer is {x}", "Therefore, the final answer is: {x}", "the answer is clearly {x}.", "The correct answer is {x}.",
  "Hence the answer must be {x}.", "The answer to the question is {x}.", "So, the final answer would be {x}.", "The answer is, therefore, {x}.",
  "The answer is {x} (see above).", "The answer is {x}, because it was asked.", "The answer is {x}, as required.", "The answer is thus {x}!",
  "Answer: {x}", "ANSWER: {x}", "answer: {x}.", "**Answer:** {x}", "**Answer**: {x}", "**Answer: {m}**", "*Answer:* {x}", "__Answer:__ {x}",
  "- Answer: {x}", "> **Answer:** {x}", "1. **Answer:** {x}", "### Answer\n{x}", "## Final Answer\n\n{x}", "#### Final Answer\n\n{x}", "# Answer: {x}",
  "\u2705 **Final Answer:** {x}", "\U0001f3af Final answer \u2192 {x}", "\U0001f449 Answer: {x} \u2705", "Ans: {x}", "Ans.: {x}",
  "Answer - {x}", "Answer \u2013 {x}", "Answer = {x}", "Final Answer:\n\n{x}", "Final Answer\n{x}", "**Final Answer**\n\n{x}", "<b>Answer:</b> {x}",
  "The final answer is:\n\n{x}", "**Final Answer:**\n$$\n{m}\n$$", "The final answer is:\n\n$${m}$$", "The final answer is\n\\[\n{m}\n\\]",
  "Final answer: \\({m}\\).", "so $\\boxed{{{m}}}$ is it.", "\\boxed{{{m}}}", "\\boxed {{{m}}}.", "\\[ \\fbox{{{m}}} \\]", "**Final Answer:** $\\boxed{{{m}}}$",
  "The final answer is $\\boxed{{{m}}}$. I hope it is correct.", "#### {m}", "#### **{m}**", "####{m}", "<answer>{m}</answer>", "<answer>\n{x}\n</answer>",
  "<answer>The answer is {x}.</answer>", "Answer\uff1a{x}", "\u7b54\u6848\uff1a{x}", "\u7b54\u6848\u662f{x}\u3002", "R\u00e9ponse : {x}", "Antwort: {x}",
  "JSON", "Answer: {x}\n\nThat was easy.", "My answer: {x}", "So the final result is {x}.", "Answer (rounded): {x}", "Answer: {x} \u2014 done.",
)  # fmt: skip


def working(rng: random.Random) -> str:
  """Returns a few lines of reasoning, with numbers that are not the answer."""
  lines = []
  for line in rng.sample(LINES, rng.randint(0, 4)):
    a, b = rng.randint(2, 60), rng.randint(2, 60)
    lines.append(line.format(a=a, b=b, c=a + b, d=a * b, e=2 * a, name=rng.choice(NAMES), thing=rng.choice(THINGS)))
  return rng.choice(("\n", "\n\n")).join([*lines, ""]) if lines else ""


def thought(rng: random.Random, wrong: str) -> str:
  """Returns reasoning in tags, which states other answers, or nothing."""
  if rng.random() < 0.7:
    return ""
  inner = rng.choice(("Perhaps the answer is {w}?", "\\boxed{{{w}}}", "Answer: {w}\nNo.", "#### {w}", "{w}")).format(w=wrong)
  return f"<think>\n{working(rng)}{inner}\n</think>\n\n"


def dressed(rng: random.Random, plain: str, *, mathematical: bool = True) -> str:
  """Returns an answer in the markup of a chat model."""
  forms = ["{}"] * 4 + ["**{}**", "*{}*", "`{}`", "<b>{}</b>", "\\textbf{{{}}}", '"{}"']
  forms += ["${}$", "$${}$$", "\\({}\\)", "$\\mathbf{{{}}}$", "**${}$**", "$\\text{{{}}}$"] if mathematical else ["__{}__", "\u201c{}\u201d"]
  return rng.choice(forms).format(plain)


def stated(rng: random.Random, plain: str, *, mathematical: bool = True, statements: Sequence[str] = STATEMENTS) -> str:
  """Returns a statement of an answer."""
  statement = rng.choice(statements)
  if statement == "JSON":
    return rng.choice((
      json.dumps({"reasoning": "3 + 4 = 7", "answer": plain}), json.dumps({"answer": plain, "steps": 3}, indent=2),
      "```json\n" + json.dumps({"final_answer": plain}) + "\n```",
    ))  # fmt: skip
  return statement.format(x=dressed(rng, plain, mathematical=mathematical), m=plain)


def assembled(rng: random.Random, statement: str, wrong: str) -> str:
  """Returns a whole response around a statement."""
  return thought(rng, wrong) + working(rng) + statement + rng.choice(ENDS)


# Numbers.


def spelling(rng: random.Random, value: Fraction) -> str:
  """Returns a number as people write it."""
  digits = f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,}"
  return rng.choice((digits, digits, digits.replace(",", ""), digits.replace(",", "{,}") if "," in digits else digits))


def decorated_number(rng: random.Random, value: Fraction) -> str:
  """Returns a statement with units, currencies, or the equation that gives the number."""
  x, a = spelling(rng, value), rng.randint(2, 9)
  total = f"{a} + {value - a} = {value}" if value.denominator == 1 and value > a else x
  return rng.choice((
    f"The answer is {x} {rng.choice(THINGS)}.", f"Answer: ${x}" if value >= 0 else f"Answer: -${x[1:]}", f"The answer is \u20ac{x}." if value >= 0 else f"Answer: {x}", f"Answer: {x}%",
    f"The answer is {total}.", f"The answer is {total} {rng.choice(THINGS)}.", f"So the answer is {a} * {value / a} = {x}." if value % a == 0 and value > 0 else f"Answer: x = {x}",
    f"#### {x} {rng.choice(THINGS)}", f"\\boxed{{{x}\\text{{ cm}}}}", f"\\boxed{{x = {x}}}", f"\\boxed{{{x}\\%}}", f"\\boxed{{{x}^\\circ}}", f"Answer: {x} cm^2",
    f"The answer is about {x}.", f"The answer is {x}, not {value + a}.", f"The answer is {x} (not {value + a}).", f"Answer: {x} for {a} people",
    f"Answer: {x}kg", f"The answer is {x} since {total}.", f"So {rng.choice(NAMES)} needs {x} {rng.choice(THINGS)}.", f"That makes {total}.", f"Total: **{x}**",
    f"It costs ${x}." if value >= 0 else f"It is {x}.", f"A: {x}", f"= {x}", f"$x = {x}$", f"\\[ x = {x} \\]", f"{x}",
  ))  # fmt: skip


def value_of(rng: random.Random) -> Fraction:
  """Returns a whole number, more rarely a decimal or a negative number."""
  value = Fraction(rng.choice((rng.randint(2, 30), rng.randint(30, 999), rng.randint(1000, 999_999))))
  value += rng.choice((0, 0, 0, Fraction(1, 2), Fraction(1, 4)))
  return -value if rng.random() < 0.1 else value


def text_of_value(value: Fraction) -> str:
  """Returns the answer of a row."""
  return str(value) if value.denominator == 1 else str(float(value))


def other_value(rng: random.Random, value: Fraction) -> Fraction:
  """Returns a number near another one."""
  return value + rng.choice((-3, -2, -1, 1, 2, 3, 10, 100, Fraction(1, 2)))


def right_number(rng: random.Random) -> Response:
  """Returns a response whose last statement is the number."""
  value = value_of(rng)
  wrong = text_of_value(other_value(rng, value))
  statement = decorated_number(rng, value) if rng.random() < 0.4 else stated(rng, spelling(rng, value))
  return Response(thought(rng, wrong) + working(rng) + statement + rng.choice(ENDS), text_of_value(value))


def part_of_something(rng: random.Random, g: str) -> str:
  """Returns what contains the digits of a number but is something else."""
  a, b = rng.randint(3, 9), rng.randint(11, 29)
  return rng.choice((
    f"{g}/{b}", f"{b}/{g}", f"\\frac{{{g}}}{{{b}}}", f"\\frac{{{b}}}{{{g}}}", f"{g}^{a}", f"{a}^{{{g}}}", f"{g}\u00b2",
    f"{g} million", f"{g} thousand", f"{g}k", f"{g} dozen", f"{g}:30", f"{b}:{g}", f"{g}-{b}", f"{b}-{g}", f"{g} \u2013 {b}", f"{g} to {b}", f"{b} to {g}",
    f"{g}x", f"{g}y + {a}", f"{a}x + {g}", f"{g} + {b}", f"{b} - {g}", f"{g} \\times {a}", f"{a} * {g}", f"{g}\\sqrt{{{a}}}", f"\\sqrt{{{g}}}", f"{g}\\pi", f"{g}\u03c0",
    f"{g} or {b}", f"{b} or {g}", f"{g} and {b}", f"{b} and {g}", f"{g}, {b}", f"{b}, {g}", f"({g}, {b})", f"[{b}, {g}]", f"\\{{{g}, {b}\\}}",
    f"x > {g}", f"x < {g}", f"x \\le {g}", f"{g}e{a}", f"{g}E+{a}", f"{g}.5 x 10^{a}", f"{b}.{g}5", f"{g}\u00bd", f"{g} 1/2", f"{g} and a half", f"{g},{b}", f"{g}.{b}1",
    f"{g} squared", f"{g} times {a}", f"{g} plus {a}", f"{g} hours and {b} minutes", f"{b} hours {g} minutes", f"{b} feet {g} inches", f"{g}_{a}", f"\\log_{{{a}}} {g}",
    f"{g} mod {b}", f"{b} \\pm {g}", f"{g} \\text{{ or }} {b}", f"2024-{b}-{g}", f"{g}/{b}/2024", f"not {g}", f"{g}{b}", f"v{a}.{g}", f"x_{g}", f"{g}:{b}",
  ))  # fmt: skip


def misleading(rng: random.Random, g: str, w: str) -> str:
  """Returns a response that shows the right answer where it does not count, and states another or none."""
  return rng.choice((
    f"<think>The answer is {g}.</think>The answer is {w}.", f"<think>\\boxed{{{g}}}</think>\n\\boxed{{{w}}}", f"<think>So the answer is {g}.", f"<think>\n#### {g}\n",
    f"The answer is {g}, no.\n#### {w}", f"#### {g}\n#### {w}", f"\\boxed{{{g}}} no, \\boxed{{{w}}}", f"Answer: {g}\nAnswer: {w}", f"So \\boxed{{{g}}}. But no: \\boxed{{",
    f"#### {g[:2]}. Add\n3 + 4 = 7\n\nThe answer is {w}.", f"#### Step {g}: add\nThe answer is {w}.", f"{g} is wrong. The answer is {w}.", f"The answer is not {g}. The answer is {w}.",
    f'{{"guess": "{g}", "answer": "{w}"}}', f"<guess>{g}</guess><answer>{w}</answer>", f"I tried {g}.\n**Final Answer**\n\n{w}", f"Step {g}. The final answer is:\n\n$${w}$$",
    f"It is \\fbox{{{w}}} and not {g}.", f"Answer: {w}\n\n(It is not {g}.)", f"The answer is {w} (I first had {g}).", f"The answer is {w}, not {g}.",
  ))  # fmt: skip


def wrong_number(rng: random.Random) -> Response:
  """Returns a response that states another number, or the right digits as a part of something else."""
  value = Fraction(rng.choice((rng.randint(2, 30), rng.randint(30, 999))))
  other = other_value(rng, value)
  g, w = text_of_value(value), text_of_value(other)
  kind = rng.random()
  if kind < 0.35:
    part = part_of_something(rng, g)
    statement = rng.choice((f"The answer is {part}.", f"#### {part}", f"\\boxed{{{part}}}", f"Answer: {part}", f"**Final Answer**\n\n${part}$", f"The final answer is: {part}"))
    return Response(working(rng) + statement, g)
  if kind < 0.55:
    return Response(working(rng) + misleading(rng, g, w), g)
  if kind < 0.6:
    return Response(assembled(rng, stated(rng, g), w), g, stopped=False)
  statement = decorated_number(rng, other) if kind < 0.75 else stated(rng, spelling(rng, other))
  return Response(f"{working(rng)}There are {g} of them. {statement}{rng.choice(ENDS)}", g)


# Texts.

PLACES_AND_PEOPLE = (
  "Paris", "New York", "Mount Everest", "photosynthesis", "the Eiffel Tower", "Gone with the Wind", "oxygen", "a red fox", "Marie Curie", "Jane Eyre", "went", "yes",
  "1984", "Caf\u00e9 de Flore", "St. Louis", "Harry Potter and the Goblet of Fire", "\u6771\u4eac", "\u041c\u043e\u0441\u043a\u0432\u0430", "O'Brien", "left because of rain", "B-tree", "x-ray",
)  # fmt: skip
TEXT_LINES = (
  "Let me think about it.", "There are several candidates, such as {a} and {b}.", "- {a}\n- {b}", "1. {a} is one.\n2. {b} is another.", "### Step 1: candidates\n{a}, {b}",
  "Some say {a}.", "It could be {a}, but that is not what is asked.", "Zuerst betrachten wir {a}.", "| {a} | {b} |", "#### Step 1: candidates\n{a}",
)  # fmt: skip
TEXT_STATEMENTS = tuple(x for x in STATEMENTS if not any(part in x for part in ("boxed", "fbox", "$$", "\\[", "\\("))) + ("\\boxed{{{m}}}", "\\boxed{{\\text{{{m}}}}}", "$\\boxed{{\\text{{{m}}}}}$.")


def text_working(rng: random.Random) -> str:
  """Returns a few lines that name other answers."""
  lines = [line.format(a=rng.choice(("Rome", "Oslo")), b=rng.choice(("Lima", "Cairo"))) for line in rng.sample(TEXT_LINES, rng.randint(0, 3))]
  return "\n".join([*lines, ""])


def right_text(rng: random.Random) -> Response:
  """Returns a response that states the text, or ends with it on a line of its own."""
  answer = rng.choice(PLACES_AND_PEOPLE)
  shown = rng.choice((answer, answer, answer.upper() if answer.isascii() else answer, answer.replace(" ", "  ")))
  if rng.random() < 0.2:
    statement = rng.choice((
      f"The answer is {shown}, because it is known.", f"The answer is {shown} (as everyone knows).", f"Answer: {shown}, since it is known.", f"The answer is {shown}; that is all.",
      f"Answer: {shown} (the only one)", f"#### {shown}", f"**{shown}**", f"{shown}.", f"{shown}\n", f'"{shown}"', f"Answer: {shown} \u2014 as everyone knows.",
    ))  # fmt: skip
    return Response(text_working(rng) + statement, answer, "What is it?")
  thinking = f"<think>Perhaps the answer is Rome.\nAnswer: {rng.choice(('Rome', 'Oslo'))}</think>\n" if rng.random() < 0.3 else ""
  statement = stated(rng, shown, mathematical=False, statements=TEXT_STATEMENTS)
  end = "" if statement.startswith("####") else rng.choice(ENDS)  # Words with text below are a heading.
  return Response(thinking + text_working(rng) + statement + end, answer, "What is it?")


def wrong_text(rng: random.Random) -> Response:
  """Returns a response that states another text, several texts or none, and may mention the right one."""
  answer, other = rng.sample([x for x in PLACES_AND_PEOPLE if x != "yes"], 2)
  if rng.random() < 0.5:
    statement = rng.choice((
      f"Answer: {answer} or {other}", f"Answer: {answer}\nAnswer: {other}", f"Answer: {other}\nAnswer: {answer}", f"#### {answer}\n#### {other}",
      f"#### {other}\nNo.\n#### {answer}" if answer[1].isalpha() and other[1].isalpha() else f"#### {answer}\n#### {other}", f"\\boxed{{{answer}}} or \\boxed{{{other}}}", f"The answer is {answer} or {other}.", f"The answer is not {answer}.",
      f"Answer: not {answer}", f"<think>The answer is {answer}.</think>\n{other}", f"<think>\n{answer}", f"<think>\\boxed{{{answer}}}", f"\\boxed{{{answer}}}. No: \\boxed{{",
      f"It is {answer} I think", f"{answer}\n{other}", f"{answer}, {other}", f"The answer is {answer} and {other}.", f"Answer: {other} ({answer} is wrong)",
      f"Answer: {other}, not {answer}", f"<answer>{answer}</answer><answer>{other}</answer>", f'{{"guess": "{answer}", "answer": "{other}"}}', f"Answer: un{answer}", f"Answer: {answer}x",
    ))  # fmt: skip
    return Response(text_working(rng) + statement, answer, "What is it?")
  return Response(f"{text_working(rng)}Some say {answer}.\n" + stated(rng, other, mathematical=False, statements=TEXT_STATEMENTS) + rng.choice(ENDS), answer, "What is it?")


def at_place(rng: random.Random, place: str, right: bool) -> Response:
  """Returns a response with a text at a location, in the spelling of the row, and another text elsewhere."""
  answer, other = rng.sample(PLACES_AND_PEOPLE, 2)
  given, elsewhere = (answer, other) if right else (other, answer)
  lines = text_working(rng)
  if place == "whole":
    return Response(rng.choice((given, f" {given}\n", f"\n{given}") if right else (given, f"{answer} {other}", f"{answer}.", f"It is {answer}", f"{answer}\n{answer}")), answer)
  if place == "last_line":
    return Response(f"{lines}{elsewhere}\n" + rng.choice((given, f"{given}\n\n", f" {given} ") if right else (given, f"{answer}!", f"It is {answer}", f"{answer}, {other}", f"<think>\n{answer}\n</think>\n{other}")), answer)
  if place == "tag":
    inner = rng.choice(("<answer>{}</answer>", "<answer>\n{}\n</answer>", "<ANSWER> {} </ANSWER>")).format(given)
    hedge = "" if right else rng.choice(("", f"<answer>{answer}</answer>", f"<think><answer>{answer}</answer></think>", f"<answer>{answer}"))
    return Response(f"<think>{lines}<answer>{elsewhere}</answer></think>\n{hedge if '<think>' not in hedge else ''}{elsewhere} is mentioned.\n{inner}", answer)
  if place == "after =>":
    return Response(f"{lines}=> {elsewhere}\n=> {given}" + rng.choice(("", "\nThat is all.")), answer)
  if right:
    statement = stated(rng, given, mathematical=False, statements=TEXT_STATEMENTS)
    return Response(lines + statement + ("" if statement.startswith("####") else rng.choice(ENDS)), answer)
  return wrong_text(rng)


# Options.

OPTION_TEXTS = (
  "four", "4 cm", "vitamin A", "Both A and C", "all of them", "None of A and B", "$\\frac{1}{2}$", "15", "a B-tree", "Paris", "because it rains", "A dog", "x = 3", "I and II", "(4, 5)",
  "neither A nor D", "50%", "plan A or plan C",
)  # fmt: skip
LETTERS = "ABCD"
REASONS = ("", "", ", because {o} is odd", " because 2 is even", " since {o} and {p} are odd", ", as {o} is too small", ", which is even", " (see above)", ", not {o}", " \u2014 the only even one")
CHOICE_LINES = (
  "Let us look at each option.", "Option {o} is wrong.", "({o}) is too small, and ({p}) too large.", "{o}) no\n{p}) no", "- {o}: no", "A dog barks, so {o} is out.", "Vitamin {o} does not help.",
  "### Step 1: exclude {o}", "#### Step 1: exclude {o}\nIt is odd.", "We compare {o} and {p}.", "If {o} were right, 2 + 2 = 5.", "\u9009\u9879{o}\u4e0d\u5bf9\u3002",
)  # fmt: skip
CHOICES = (
  "The answer is {l}{r}.", "So the answer is: {l}{r}", "the correct answer is {l}{r}.", "The correct option is {l}{r}.", "The correct choice is {l}{r}.", "The best option is {l}.",
  "Therefore, the answer must be {l}.", "The answer is option {l}{r}.", "The answer is choice {l}.", "Answer: {l}{r}", "**Answer:** {l}", "**Answer: {l}**", "Answer: option {l}", "Answer\uff1a{l}",
  "### Final Answer\n{l}", "\u2705 **Final Answer:** {l}", "Final Answer:\n\n{l}", "Ans: {l}", "Answer - {l}", "Answer = {l}", "#### {l}", "\\boxed{{{l}}}", "$\\boxed{{\\text{{{l}}}}}$",
  "\\boxed{{\\textbf{{{l}}}}}", "\\boxed{{\\mathrm{{{l}}}}}", "\\fbox{{{l}}}", "<answer>{l}</answer>", '{{"answer": "{l}"}}', "\u7b54\u6848\uff1a{l}", "\u7b54\u6848\u662f{l}\u3002", "Hence the final answer is {l}.",
  "The answer is clearly {l}{r}.", "So the correct letter is {l}.", "<answer>The answer is {l}.</answer>", "Only option {l} is correct.", "The answer is therefore\n\n{l}",
)  # fmt: skip


def label(rng: random.Random, letter: str) -> str:
  """Returns a letter as people write it."""
  return rng.choice(("{}", "{}", "({})", "**{}**", "${}$", "**({})**", "[{}]", "`{}`", "\\textbf{{{}}}", "\\text{{({})}}", "\\({}\\)", "<b>{}</b>")).format(letter)


def option(rng: random.Random, letter: str) -> str:
  """Returns a letter with its option's text."""
  return rng.choice(("{}) {}", "({}) {}", "{}. {}", "{}: {}", "**{})** {}", "**({})** {}", "**{}. {}**", "{} - {}", "\\text{{({}) {}}}", "\\textbf{{({}) }}{}")).format(letter, rng.choice(OPTION_TEXTS))


def choice_working(rng: random.Random, letter: str) -> str:
  """Returns a few lines about other options."""
  o, p = rng.sample([x for x in LETTERS if x != letter], 2)
  return "\n".join([*(line.format(o=o, p=p) for line in rng.sample(CHOICE_LINES, rng.randint(0, 3))), ""])


def chosen(rng: random.Random, letter: str) -> str:
  """Returns a statement of a choice."""
  o, p = rng.sample([x for x in LETTERS if x != letter], 2)
  if rng.random() < 0.15:
    last = rng.choice((label(rng, letter), f"{letter}.", option(rng, letter), f"option {label(rng, letter)}", f"**{option(rng, letter)}**"))
    return last if not last.startswith(f"{letter} - ") else f"({letter})"
  if rng.random() < 0.4:
    return rng.choice(("The answer is {}", "Answer: {}", "**Answer:** {}", "### Answer\n{}", "#### {}", "\\boxed{{{}}}", "The correct option is {}", "Final Answer:\n\n{}")).format(option(rng, letter))
  return rng.choice(CHOICES).format(l=label(rng, letter), r=rng.choice(REASONS).format(o=o, p=p))


def right_choice(rng: random.Random) -> Response:
  """Returns a response that chooses the letter."""
  letter = rng.choice(LETTERS)
  other = rng.choice([x for x in LETTERS if x != letter])
  thinking = f"<think>The answer is {other}.\n\\boxed{{{other}}}</think>\n" if rng.random() < 0.3 else ""
  return Response(thinking + choice_working(rng, letter) + chosen(rng, letter), letter, "Which one?")


def wrong_choice(rng: random.Random) -> Response:
  """Returns a response that chooses another letter, several or none."""
  letter = rng.choice(LETTERS)
  o, p = rng.sample([x for x in LETTERS if x != letter], 2)
  a, b = rng.choice(((letter, o), (o, letter)))
  if rng.random() < 0.5:
    statement = rng.choice((
      f"Answer: {a} or {b}", f"The answer is {a} or {b}.", f"The answer is ({a}) or ({b}).", f"Answer: {a}, {b}", f"Answer: ({a}), ({b})", f"Answer: {a} and {b}", f"Answer: {a}/{b}", f"Answer: {a} & {b}",
      f"\\boxed{{{a}, {b}}}", f"\\boxed{{{a}{b}}}", f"\\boxed{{{a}-{b}-{p}}}", f"\\boxed{{{a}}} or \\boxed{{{b}}}", f"Answer: {a}\nAnswer: {b}", f"The answer is {a}. No, the answer is {b}.",
      f"The answer is {a}. Or {b}.", f"\\boxed{{\\text{{All except {letter}}}}}", f"The answer is none of {a} and {b}.", f"The answer is not {letter}.", f"Answer: not {letter}", f"Answer: vitamin {letter}",
      f"The answer is vitamin {letter}.", f"Answer: a {letter}-tree", f"Answer: {letter}'", f"Answer: {letter}{o}{p}", f"<think>The answer is {letter}.", f"<think>\\boxed{{{letter}}}</think>I do not know.",
      f"\\boxed{{{letter}}}. No: \\boxed{{", f"Answer: ({a}) four or ({b}) five", f"Answer: {a}) 4 or {b}) 5", f"The answer is {a} or maybe {b}.", f"{a} or {b}", f"({a}) ({b})", f"Answer: either {a} or {b}",
      f"The answer is {letter} or {o} or {p}.", f"Answer: all but {letter}", f"The answer is everything except ({letter}).", f"\\boxed{{{letter} = {o}}}", f"Answer: {letter} is wrong.", f"I like {letter}",
      f"Answer: {letter}ob", f"Option {letter} is wrong.", f"Answer: {a} + {b}", f"The answer is {a}, or {b}.", f"\\boxed{{{a} \\text{{ or }} {b}}}", f"\\boxed{{\\text{{{a} and {b}}}}}", f"Answer: neither {a} nor {b}",
    ))  # fmt: skip
    start = "" if statement.startswith("<think>") else choice_working(rng, "")
    return Response(start + statement, letter, "Which one?")
  return Response(choice_working(rng, o) + f"Some choose ({letter}).\n" + chosen(rng, o), letter, "Which one?")


# Mathematics: mostly plain numbers and fractions, which need no algebra system.

LATEX = (
  ("\\frac{3}{4}", "0.75", "\\frac{4}{3}"), ("2\\sqrt{3}", "\\sqrt{12}", "3\\sqrt{2}"), ("x^2+2x+1", "(x+1)^2", "x^2+1"), ("\\pi", "\\pi", "2\\pi"), ("(1, 2)", "(1,2)", "(2, 1)"),
  ("\\{1, 2\\}", "\\{2, 1\\}", "\\{1, 3\\}"), ("[0, 1)", "[0,1)", "(0, 1)"), ("x = 5", "5", "x = 6"), ("50\\%", "50\\%", "51\\%"), ("2^{10}", "1024", "2^{11}"),
)  # fmt: skip


def _as_mathematics(rng: random.Random, value: Fraction) -> str:
  if value.denominator == 1:
    return rng.choice((str(value), str(value), f"{value.numerator:,}"))
  sign, top, k = "-" if value < 0 else "", abs(value.numerator), rng.choice((1, 1, 2, 3))
  forms = [f"{sign}\\frac{{{top * k}}}{{{value.denominator * k}}}", f"{sign}{top * k}/{value.denominator * k}", f"{sign}\\dfrac{{{top}}}{{{value.denominator}}}"]
  return rng.choice([*forms, text_of_value(value)] if value.denominator in (2, 4, 5, 8, 10, 20) else forms)


def _number_or_fraction(rng: random.Random) -> Fraction:
  return Fraction(rng.randint(-50, 999)) if rng.random() < 0.5 else Fraction(rng.randint(-40, 40) * 2 + 1, rng.choice((2, 3, 4, 5, 7, 8, 10, 20)))


def quoted(rng: random.Random, statement: str) -> tuple[str, str]:
  """Returns a statement behind a quotation of the question's boxes, and the question."""
  box = rng.choice((r"\boxed{\phantom{0}}", r"\boxed{?}", r"\boxed{\quad}", r"\boxed{}", r"\boxed{\ldots}", r"\boxed{7001}", r"\boxed{7001} + \boxed{7002}", r"\boxed{\square}"))
  return f"We fill in ${box} = x$.\n{statement}", f"Which number makes ${box} = x$ true?"


def right_mathematics(rng: random.Random) -> Response:
  """Returns a response that states a value, perhaps in another form than the row's."""
  if rng.random() < 0.05:
    gold, equal, _ = rng.choice(LATEX)
    return Response(working(rng) + rng.choice(("\\boxed{{{}}}", "The final answer is $\\boxed{{{}}}$.", "Answer: ${}$", "The answer is ${}$.", "**Final Answer**\n\n$${}$$")).format(equal), gold)
  value = _number_or_fraction(rng)
  gold = text_of_value(value) if value.denominator in (1, 2, 4, 5) else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
  statement, question = stated(rng, _as_mathematics(rng, value)), "How many?"
  if rng.random() < 0.15:
    statement, question = quoted(rng, statement)
  return Response(thought(rng, "7003") + working(rng) + statement + rng.choice(ENDS), gold, question)


def wrong_mathematics(rng: random.Random) -> Response:
  """Returns a response that states another value, several, or none that counts."""
  if rng.random() < 0.05:
    gold, _, wrong = rng.choice(LATEX)
    return Response(working(rng) + rng.choice(("\\boxed{{{}}}", "The final answer is $\\boxed{{{}}}$.", "Answer: ${}$")).format(wrong), gold)
  value = _number_or_fraction(rng)
  other = value + rng.choice((-2, -1, 1, 2, 10, Fraction(1, 2), Fraction(-1, 3)))
  gold = text_of_value(value) if value.denominator in (1, 2, 4, 5) else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
  g, w = _as_mathematics(rng, value), _as_mathematics(rng, other)
  if rng.random() < 0.4:
    text = rng.choice((
      f"<think>\\boxed{{{g}}}", f"<think>The answer is {g}.</think>", f"<think>\\boxed{{{g}}}</think>\n\\boxed{{{w}}}", f"So \\boxed{{{g}}}. But no: \\boxed{{", f"\\boxed{{{g}}} or \\boxed{{{w}}}",
      f"Answer: {g}\nAnswer: {w}", f"#### {g}\n#### {w}", f"The answer is {g}. No, the answer is {w}.", f"Answer: {g} or {w}", f"Answer: ${g}$ or ${w}$", f"The answer is not {g}.", f"It is {g}.", f"{g}",
      f'{{"guess": "{g}", "answer": "{w}"}}', f"I tried {g}.\n**Final Answer**\n\n${w}$", f"The answer is {w}, not {g}.", f"Answer: {w} (not {g})", f"<answer>{g}</answer><answer>{w}</answer>",
    ))  # fmt: skip
    return Response("" if text.startswith("<think>") else working(rng) + text, gold)
  statement, question = stated(rng, w), "How many?"
  if rng.random() < 0.15:
    statement, question = quoted(rng, statement)
  return Response(f"{working(rng)}There are {g}.\n{statement}{rng.choice(ENDS)}", gold, question)


# The strict form of generated problems: one last line of a hash and the number.


def right_strict(rng: random.Random) -> Response:
  """Returns steps and a last line with the answer."""
  value = rng.randint(-99, 999)
  return Response("\n".join([*(f"{rng.randint(1, 9)}+{rng.randint(1, 9)}={rng.randint(2, 18)}" for _ in range(rng.randint(0, 4))), f"#{value}"]), str(value))


def wrong_strict(rng: random.Random) -> Response:
  """Returns another number, another form, or two lines of answers."""
  value = rng.randint(1, 999)
  other = value + rng.choice((-1, 1, 10))
  text = rng.choice((
    f"#{other}", f"#{value}\n#{other}", f"#{other}\n#{value}", f"#{value}#", f"# {value}", f"#{value}.0", f"#+{value}", f"#0{value}", f"#-{value}", f"#{value} ", f"#{value}\nso", f"{value}", f"7+8=15#{value}",
    f"#{value} or {other}", f"#\\boxed{{{value}}}", f"#{value}/1", f"##{value}", f"#{value},", f"The answer is {value}.",
  ))  # fmt: skip
  return Response(f"7+8=15\n{text}", str(value), stopped=True) if rng.random() < 0.9 else Response(f"7+8=15\n#{value}", str(value), stopped=False)
