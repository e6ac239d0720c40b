"""Synthetic responses that choose an option, right and wrong."""

import random

from tests.rewards.responses import Response

OPTION_TEXTS = (
  "four", "4 cm", "vitamin A", "Both A and C", "all of them", "None of A and B", "$\\frac{1}{2}$", "15",
  "a B-tree", "Paris", "because it rains", "A dog", "x = 3", "I and II", "(4, 5)",
  "neither A nor D", "50%", "plan A or plan C",
)  # fmt: skip
LETTERS = "ABCD"
REASONS = ("", "", ", because {o} is odd", " because 2 is even", " since {o} and {p} are odd",
  ", as {o} is too small", ", which is even", " (see above)", ", not {o}", " \u2014 the only even one")
CHOICE_LINES = (
  "Let us look at each option.", "Option {o} is wrong.", "({o}) is too small, and ({p}) too large.",
  "{o}) no\n{p}) no", "- {o}: no", "A dog barks, so {o} is out.", "Vitamin {o} does not help.",
  "### Step 1: exclude {o}", "#### Step 1: exclude {o}\nIt is odd.", "We compare {o} and {p}.",
  "If {o} were right, 2 + 2 = 5.", "\u9009\u9879{o}\u4e0d\u5bf9\u3002",
)  # fmt: skip
CHOICES = (
  "The answer is {l}{r}.", "So the answer is: {l}{r}", "the correct answer is {l}{r}.",
  "The correct option is {l}{r}.", "The correct choice is {l}{r}.", "The best option is {l}.",
  "Therefore, the answer must be {l}.", "The answer is option {l}{r}.", "The answer is choice {l}.",
  "Answer: {l}{r}", "**Answer:** {l}", "**Answer: {l}**", "Answer: option {l}", "Answer\uff1a{l}",
  "### Final Answer\n{l}", "\u2705 **Final Answer:** {l}", "Final Answer:\n\n{l}", "Ans: {l}", "Answer - {l}",
  "Answer = {l}", "#### {l}", "\\boxed{{{l}}}", "$\\boxed{{\\text{{{l}}}}}$",
  "\\boxed{{\\textbf{{{l}}}}}", "\\boxed{{\\mathrm{{{l}}}}}", "\\fbox{{{l}}}", "<answer>{l}</answer>",
  '{{"answer": "{l}"}}', "\u7b54\u6848\uff1a{l}", "\u7b54\u6848\u662f{l}\u3002",
  "Hence the final answer is {l}.",
  "The answer is clearly {l}{r}.", "So the correct letter is {l}.", "<answer>The answer is {l}.</answer>",
  "Only option {l} is correct.", "The answer is therefore\n\n{l}",
)  # fmt: skip


def label(rng: random.Random, letter: str) -> str:
  """Returns a letter as people write it."""
  return rng.choice(("{}", "{}", "({})", "**{}**", "${}$", "**({})**", "[{}]", "`{}`", "\\textbf{{{}}}",
      "\\text{{({})}}", "\\({}\\)", "<b>{}</b>")).format(letter)


def option(rng: random.Random, letter: str) -> str:
  """Returns a letter with its option's text."""
  return rng.choice(("{}) {}", "({}) {}", "{}. {}", "{}: {}", "**{})** {}", "**({})** {}", "**{}. {}**",
      "{} - {}", "\\text{{({}) {}}}", "\\textbf{{({}) }}{}")).format(letter, rng.choice(OPTION_TEXTS))


def choice_working(rng: random.Random, letter: str) -> str:
  """Returns a few lines about other options."""
  o, p = rng.sample([x for x in LETTERS if x != letter], 2)
  return "\n".join([*(line.format(o=o, p=p) for line in rng.sample(CHOICE_LINES, rng.randint(0, 3))), ""])


def chosen(rng: random.Random, letter: str) -> str:
  """Returns a statement of a choice."""
  o, p = rng.sample([x for x in LETTERS if x != letter], 2)
  if rng.random() < 0.15:
    last = rng.choice((label(rng, letter), f"{letter}.", option(rng, letter), f"option {label(rng, letter)}",
        f"**{option(rng, letter)}**"))
    return last if not last.startswith(f"{letter} - ") else f"({letter})"
  if rng.random() < 0.4:
    return rng.choice(("The answer is {}", "Answer: {}", "**Answer:** {}", "### Answer\n{}", "#### {}",
        "\\boxed{{{}}}", "The correct option is {}", "Final Answer:\n\n{}")).format(option(rng, letter))
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
      f"Answer: {a} or {b}", f"The answer is {a} or {b}.", f"The answer is ({a}) or ({b}).",
      f"Answer: {a}, {b}", f"Answer: ({a}), ({b})", f"Answer: {a} and {b}", f"Answer: {a}/{b}",
      f"Answer: {a} & {b}",
      f"\\boxed{{{a}, {b}}}", f"\\boxed{{{a}{b}}}", f"\\boxed{{{a}-{b}-{p}}}",
      f"\\boxed{{{a}}} or \\boxed{{{b}}}", f"Answer: {a}\nAnswer: {b}",
      f"The answer is {a}. No, the answer is {b}.",
      f"The answer is {a}. Or {b}.", f"\\boxed{{\\text{{All except {letter}}}}}",
      f"The answer is none of {a} and {b}.", f"The answer is not {letter}.", f"Answer: not {letter}",
      f"Answer: vitamin {letter}",
      f"The answer is vitamin {letter}.", f"Answer: a {letter}-tree", f"Answer: {letter}'",
      f"Answer: {letter}{o}{p}", f"<think>The answer is {letter}.",
      f"<think>\\boxed{{{letter}}}</think>I do not know.",
      f"\\boxed{{{letter}}}. No: \\boxed{{", f"Answer: ({a}) four or ({b}) five", f"Answer: {a}) 4 or {b}) 5",
      f"The answer is {a} or maybe {b}.", f"{a} or {b}", f"({a}) ({b})", f"Answer: either {a} or {b}",
      f"The answer is {letter} or {o} or {p}.", f"Answer: all but {letter}",
      f"The answer is everything except ({letter}).", f"\\boxed{{{letter} = {o}}}",
      f"Answer: {letter} is wrong.", f"I like {letter}",
      f"Answer: {letter}ob", f"Option {letter} is wrong.", f"Answer: {a} + {b}",
      f"The answer is {a}, or {b}.", f"\\boxed{{{a} \\text{{ or }} {b}}}",
      f"\\boxed{{\\text{{{a} and {b}}}}}", f"Answer: neither {a} nor {b}",
    ))  # fmt: skip
    start = "" if statement.startswith("<think>") else choice_working(rng, "")
    return Response(start + statement, letter, "Which one?")
  return Response(choice_working(rng, o) + f"Some choose ({letter}).\n" + chosen(rng, o), letter,
    "Which one?")
