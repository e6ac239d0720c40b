"""Synthetic responses that state numbers and mathematics, right and wrong."""

import random
from fractions import Fraction

from tests.rewards.responses import ENDS, NAMES, THINGS, Response, assembled, stated, thought, working


def spelling(rng: random.Random, value: Fraction) -> str:
  """Returns a number as people write it."""
  digits = f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,}"
  return rng.choice((digits, digits, digits.replace(",", ""),
      digits.replace(",", "{,}") if "," in digits else digits))


def decorated_number(rng: random.Random, value: Fraction) -> str:
  """Returns a statement with units, currencies, or the equation that gives the number."""
  x, a = spelling(rng, value), rng.randint(2, 9)
  total = f"{a} + {value - a} = {value}" if value.denominator == 1 and value > a else x
  return rng.choice((
    f"The answer is {x} {rng.choice(THINGS)}.", f"Answer: ${x}" if value >= 0 else f"Answer: -${x[1:]}",
    f"The answer is \u20ac{x}." if value >= 0 else f"Answer: {x}", f"Answer: {x}%",
    f"The answer is {total}.", f"The answer is {total} {rng.choice(THINGS)}.",
    f"So the answer is {a} * {value / a} = {x}." if value % a == 0 and value > 0 else f"Answer: x = {x}",
    f"#### {x} {rng.choice(THINGS)}", f"\\boxed{{{x}\\text{{ cm}}}}", f"\\boxed{{x = {x}}}",
    f"\\boxed{{{x}\\%}}", f"\\boxed{{{x}^\\circ}}", f"Answer: {x} cm^2",
    f"The answer is about {x}.", f"The answer is {x}, not {value + a}.",
    f"The answer is {x} (not {value + a}).", f"Answer: {x} for {a} people",
    f"Answer: {x}kg", f"The answer is {x} since {total}.",
    f"So {rng.choice(NAMES)} needs {x} {rng.choice(THINGS)}.", f"That makes {total}.", f"Total: **{x}**",
    f"It costs ${x}." if value >= 0 else f"It is {x}.", f"A: {x}", f"= {x}", f"$x = {x}$", f"\\[ x = {x} \\]",
    f"{x}",
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
    f"{g}/{b}", f"{b}/{g}", f"\\frac{{{g}}}{{{b}}}", f"\\frac{{{b}}}{{{g}}}", f"{g}^{a}", f"{a}^{{{g}}}",
    f"{g}\u00b2",
    f"{g} million", f"{g} thousand", f"{g}k", f"{g} dozen", f"{g}:30", f"{b}:{g}", f"{g}-{b}", f"{b}-{g}",
    f"{g} \u2013 {b}", f"{g} to {b}", f"{b} to {g}",
    f"{g}x", f"{g}y + {a}", f"{a}x + {g}", f"{g} + {b}", f"{b} - {g}", f"{g} \\times {a}", f"{a} * {g}",
    f"{g}\\sqrt{{{a}}}", f"\\sqrt{{{g}}}", f"{g}\\pi", f"{g}\u03c0",
    f"{g} or {b}", f"{b} or {g}", f"{g} and {b}", f"{b} and {g}", f"{g}, {b}", f"{b}, {g}", f"({g}, {b})",
    f"[{b}, {g}]", f"\\{{{g}, {b}\\}}",
    f"x > {g}", f"x < {g}", f"x \\le {g}", f"{g}e{a}", f"{g}E+{a}", f"{g}.5 x 10^{a}", f"{b}.{g}5",
    f"{g}\u00bd", f"{g} 1/2", f"{g} and a half", f"{g},{b}", f"{g}.{b}1",
    f"{g} squared", f"{g} times {a}", f"{g} plus {a}", f"{g} hours and {b} minutes", f"{b} hours {g} minutes",
    f"{b} feet {g} inches", f"{g}_{a}", f"\\log_{{{a}}} {g}",
    f"{g} mod {b}", f"{b} \\pm {g}", f"{g} \\text{{ or }} {b}", f"2024-{b}-{g}", f"{g}/{b}/2024", f"not {g}",
    f"{g}{b}", f"v{a}.{g}", f"x_{g}", f"{g}:{b}",
  ))  # fmt: skip


def misleading(rng: random.Random, g: str, w: str) -> str:
  """Returns a response with the right answer where it does not count, and perhaps another one."""
  return rng.choice((
    f"<think>The answer is {g}.</think>The answer is {w}.", f"<think>\\boxed{{{g}}}</think>\n\\boxed{{{w}}}",
    f"<think>So the answer is {g}.", f"<think>\n#### {g}\n",
    f"The answer is {g}, no.\n#### {w}", f"#### {g}\n#### {w}", f"\\boxed{{{g}}} no, \\boxed{{{w}}}",
    f"Answer: {g}\nAnswer: {w}", f"So \\boxed{{{g}}}. But no: \\boxed{{",
    f"#### {g[:2]}. Add\n3 + 4 = 7\n\nThe answer is {w}.", f"#### Step {g}: add\nThe answer is {w}.",
    f"{g} is wrong. The answer is {w}.", f"The answer is not {g}. The answer is {w}.",
    f'{{"guess": "{g}", "answer": "{w}"}}', f"<guess>{g}</guess><answer>{w}</answer>",
    f"I tried {g}.\n**Final Answer**\n\n{w}", f"Step {g}. The final answer is:\n\n$${w}$$",
    f"It is \\fbox{{{w}}} and not {g}.", f"Answer: {w}\n\n(It is not {g}.)",
    f"The answer is {w} (I first had {g}).", f"The answer is {w}, not {g}.",
  ))  # fmt: skip


def wrong_number(rng: random.Random) -> Response:
  """Returns a response with another number, or the right digits as a part of something else."""
  value = Fraction(rng.choice((rng.randint(2, 30), rng.randint(30, 999))))
  other = other_value(rng, value)
  g, w = text_of_value(value), text_of_value(other)
  kind = rng.random()
  if kind < 0.35:
    part = part_of_something(rng, g)
    statement = rng.choice((f"The answer is {part}.", f"#### {part}", f"\\boxed{{{part}}}", f"Answer: {part}",
        f"**Final Answer**\n\n${part}$", f"The final answer is: {part}"))
    return Response(working(rng) + statement, g)
  if kind < 0.55:
    return Response(working(rng) + misleading(rng, g, w), g)
  if kind < 0.6:
    return Response(assembled(rng, stated(rng, g), w), g, stopped=False)
  statement = decorated_number(rng, other) if kind < 0.75 else stated(rng, spelling(rng, other))
  return Response(f"{working(rng)}There are {g} of them. {statement}{rng.choice(ENDS)}", g)


# Mathematics: mostly plain numbers and fractions, which need no algebra system.

LATEX = (
  ("\\frac{3}{4}", "0.75", "\\frac{4}{3}"), ("2\\sqrt{3}", "\\sqrt{12}", "3\\sqrt{2}"),
  ("x^2+2x+1", "(x+1)^2", "x^2+1"), ("\\pi", "\\pi", "2\\pi"), ("(1, 2)", "(1,2)", "(2, 1)"),
  ("\\{1, 2\\}", "\\{2, 1\\}", "\\{1, 3\\}"), ("[0, 1)", "[0,1)", "(0, 1)"), ("x = 5", "5", "x = 6"),
  ("50\\%", "50\\%", "51\\%"), ("2^{10}", "1024", "2^{11}"),
)  # fmt: skip


def _as_mathematics(rng: random.Random, value: Fraction) -> str:
  if value.denominator == 1:
    return rng.choice((str(value), str(value), f"{value.numerator:,}"))
  sign, top, k = "-" if value < 0 else "", abs(value.numerator), rng.choice((1, 1, 2, 3))
  forms = [f"{sign}\\frac{{{top * k}}}{{{value.denominator * k}}}",
    f"{sign}{top * k}/{value.denominator * k}", f"{sign}\\dfrac{{{top}}}{{{value.denominator}}}"]
  return rng.choice([*forms, text_of_value(value)] if value.denominator in (2, 4, 5, 8, 10, 20) else forms)


def _number_or_fraction(rng: random.Random) -> Fraction:
  return Fraction(rng.randint(-50, 999)) if rng.random() < 0.5 else Fraction(rng.randint(-40, 40) * 2 + 1,
    rng.choice((2, 3, 4, 5, 7, 8, 10, 20)))


def quoted(rng: random.Random, statement: str) -> tuple[str, str]:
  """Returns a statement behind a quotation of the question's boxes, and the question."""
  box = rng.choice((r"\boxed{\phantom{0}}", r"\boxed{?}", r"\boxed{\quad}", r"\boxed{}", r"\boxed{\ldots}",
      r"\boxed{7001}", r"\boxed{7001} + \boxed{7002}", r"\boxed{\square}"))
  return f"We fill in ${box} = x$.\n{statement}", f"Which number makes ${box} = x$ true?"


def right_mathematics(rng: random.Random) -> Response:
  """Returns a response that states a value, perhaps in another form than the row's."""
  if rng.random() < 0.05:
    gold, equal, _ = rng.choice(LATEX)
    return Response(working(rng) + rng.choice(("\\boxed{{{}}}", "The final answer is $\\boxed{{{}}}$.",
          "Answer: ${}$", "The answer is ${}$.", "**Final Answer**\n\n$${}$$")).format(equal), gold)
  value = _number_or_fraction(rng)
  gold = text_of_value(value) if value.denominator in (1, 2, 4,
    5) else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
  statement, question = stated(rng, _as_mathematics(rng, value)), "How many?"
  if rng.random() < 0.15:
    statement, question = quoted(rng, statement)
  return Response(thought(rng, "7003") + working(rng) + statement + rng.choice(ENDS), gold, question)


def wrong_mathematics(rng: random.Random) -> Response:
  """Returns a response that states another value, several, or none that counts."""
  if rng.random() < 0.05:
    gold, _, wrong = rng.choice(LATEX)
    return Response(working(rng) + rng.choice(("\\boxed{{{}}}", "The final answer is $\\boxed{{{}}}$.",
          "Answer: ${}$")).format(wrong), gold)
  value = _number_or_fraction(rng)
  other = value + rng.choice((-2, -1, 1, 2, 10, Fraction(1, 2), Fraction(-1, 3)))
  gold = text_of_value(value) if value.denominator in (1, 2, 4,
    5) else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
  g, w = _as_mathematics(rng, value), _as_mathematics(rng, other)
  if rng.random() < 0.4:
    text = rng.choice((
      f"<think>\\boxed{{{g}}}", f"<think>The answer is {g}.</think>",
      f"<think>\\boxed{{{g}}}</think>\n\\boxed{{{w}}}", f"So \\boxed{{{g}}}. But no: \\boxed{{",
      f"\\boxed{{{g}}} or \\boxed{{{w}}}",
      f"Answer: {g}\nAnswer: {w}", f"#### {g}\n#### {w}", f"The answer is {g}. No, the answer is {w}.",
      f"Answer: {g} or {w}", f"Answer: ${g}$ or ${w}$", f"The answer is not {g}.", f"It is {g}.", f"{g}",
      f'{{"guess": "{g}", "answer": "{w}"}}', f"I tried {g}.\n**Final Answer**\n\n${w}$",
      f"The answer is {w}, not {g}.", f"Answer: {w} (not {g})", f"<answer>{g}</answer><answer>{w}</answer>",
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
  steps = [f"{rng.randint(1, 9)}+{rng.randint(1, 9)}={rng.randint(2, 18)}" for _ in range(rng.randint(0, 4))]
  return Response("\n".join([*steps, f"#{value}"]), str(value))


def wrong_strict(rng: random.Random) -> Response:
  """Returns another number, another form, or two lines of answers."""
  value = rng.randint(1, 999)
  other = value + rng.choice((-1, 1, 10))
  text = rng.choice((
    f"#{other}", f"#{value}\n#{other}", f"#{other}\n#{value}", f"#{value}#", f"# {value}", f"#{value}.0",
    f"#+{value}", f"#0{value}", f"#-{value}", f"#{value} ", f"#{value}\nso", f"{value}", f"7+8=15#{value}",
    f"#{value} or {other}", f"#\\boxed{{{value}}}", f"#{value}/1", f"##{value}", f"#{value},",
    f"The answer is {value}.",
  ))  # fmt: skip
  return Response(f"7+8=15\n{text}", str(value),
    stopped=True) if rng.random() < 0.9 else Response(f"7+8=15\n#{value}", str(value), stopped=False)
