"""Right and wrong answers with their verdicts by construction; shares no code with the graders."""

import math
import random
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

EXACT = Context(prec=200)
Pair = tuple[str, str]
"""A correct answer, and another spelling of it or of a different value."""


def spell_integer(rng: random.Random, value: int) -> str:
  """Writes a whole number in one of many ways."""
  sign, digits = "-" * (value < 0), str(abs(value))
  groups = f"{abs(value):,}".split(",")
  ways = [digits, digits + ".0", digits + ".", ",".join(groups), "{,}".join(groups), r"\,".join(groups), " ".join(groups), "\u202f".join(groups)]
  text = sign + rng.choice(ways).removesuffix(".")
  if abs(value) > 10**6 and not value % 10:
    mantissa = digits.rstrip("0")
    zeros = len(digits) - len(mantissa)
    point = mantissa[0] + ("." + mantissa[1:] if len(mantissa) > 1 else "")
    power = zeros + len(mantissa) - 1
    ways = [f"{point}e{power}", rf"{point} \times 10^{{{power}}}", rf"{mantissa} \cdot 10^{{{zeros}}}", f"{point}E+{power}", f"{point}*10^{power}"]
    text = rng.choice([text, sign + rng.choice(ways)])
  return rng.choice([text] * 8 + [rf"\text{{{text}}}", rf"\textbf{{{text}}}", rf"\mathbf{{{text}}}"])


def spell_fraction(rng: random.Random, value: Fraction) -> str:
  """Writes a fraction as a quotient, reduced or not, a mixed number, or a decimal if it is one."""
  scale = rng.choice([1, 1, 1, 2, 3, 10])
  top, bottom, sign = abs(value.numerator) * scale, value.denominator * scale, "-" * (value < 0)
  ways = [f"{top}/{bottom}", rf"\frac{{{top}}}{{{bottom}}}", rf"\dfrac{{{top}}}{{{bottom}}}", rf"\frac {{{top}}} {{{bottom}}}", rf"\tfrac{{{top}}}{{{bottom}}}"]
  whole, rest = divmod(top, bottom)
  if whole and rest:
    ways += [f"{whole} {rest}/{bottom}", rf"{whole}\frac{{{rest}}}{{{bottom}}}", rf"{whole} \dfrac{{{rest}}}{{{bottom}}}"]
  if 10**20 % value.denominator == 0:
    ways += [format(Decimal(abs(value.numerator) * (10**20 // value.denominator)).scaleb(-20, EXACT), "f")] * 3
  return sign + rng.choice(ways)


def spell_number(rng: random.Random, value: Fraction) -> str:
  """Writes a number in one of many ways, sometimes with a unit or a name before it."""
  text = spell_integer(rng, value.numerator) if value.denominator == 1 else spell_fraction(rng, value)
  return rng.choice([text] * 9 + [f"{text}" + r"\text{ cm}", f"x = {text}"])


def a_number(rng: random.Random) -> Fraction:
  """Draws a number of any size."""
  kind = rng.randrange(6)
  if kind == 0:
    return Fraction(rng.randint(-50, 50))
  if kind == 1:
    return Fraction(rng.randint(-(10**6), 10**6))
  if kind == 2:
    return Fraction(rng.randint(1, 999) * 10 ** rng.randint(5, 40))
  if kind == 3:
    return Fraction(rng.randint(-(10**9), 10**9), 10 ** rng.randint(1, 9))
  if kind == 4:
    return Fraction(rng.randint(-(10**30), 10**30))
  return Fraction(rng.randint(-500, 500), rng.randint(2, 60))


def near(rng: random.Random, value: Fraction) -> Fraction:
  """Draws a different number that is near in one of several senses."""
  small = Fraction(1, 10 ** rng.randint(7, 20))
  others = [value + 1, value - 1, -value, value * 10, value / 10, value + small, value * (1 + small), value * 2, value + Fraction(1, 3)]
  return rng.choice([other for other in others if other != value])


def numbers(rng: random.Random, *, right: bool) -> Pair:
  value = a_number(rng)
  other = value if right else near(rng, value)
  gold, answer = spell_number(rng, value), spell_number(rng, other)
  # A decimal may be the rounded value of a fraction.
  rounded = not right and abs(value - other) < Fraction(1, 10**5) and ("." in gold) != ("." in answer)
  return numbers(rng, right=right) if rounded else (gold, answer)


def several(rng: random.Random, *, right: bool) -> Pair:
  """Tuples, intervals, sets, matrices, equations and inequalities of numbers."""
  values = rng.sample(range(-30, 30), rng.randint(2, 4))
  values = [Fraction(value, rng.choice([1, 1, 2, 3, 7])) for value in values]
  others = list(values)
  if not right:
    at = rng.randrange(len(values))
    change = rng.choice([Fraction(1), Fraction(1, 2), Fraction(1, 2 ** rng.randint(55, 90))])
    others[at] += change
  spell = lambda value: rng.choice([f"{value}", rf"\frac{{{value.numerator}}}{{{value.denominator}}}", rf"{value.numerator}/{value.denominator}"])
  form = rng.randrange(5)
  if form == 0:
    left, right_ = rng.choice([("(", ")"), (r"\left(", r"\right)")]), rng.choice([("(", ")"), (r"\left(", r"\right)")])
    return (left[0] + ", ".join(map(spell, values)) + left[1], right_[0] + ",".join(map(spell, others)) + right_[1])
  if form == 1:
    rng.shuffle(others)
    return (r"\{" + ", ".join(map(spell, values)) + r"\}", rng.choice([r"\{{{}\}}", "{}"]).format(", ".join(map(spell, others))))
  if form == 2:
    pair = sorted(values[:2])
    if others[:2] == values[:2]:
      others = values if right else [values[0] + 1, *values[1:]]
    low, high = rng.choice(["[", "("]), rng.choice(["]", ")"])
    return f"{low}{spell(pair[0])}, {spell(pair[1])}{high}", rf"\left{low}{spell(min(others[:2]))},{spell(max(others[:2]))}\right{high}"
  if form == 3:
    first, second = rng.choice(["pmatrix", "bmatrix"]), rng.choice(["pmatrix", "bmatrix"])
    return (
      rf"\begin{{{first}}} " + r" \\ ".join(map(spell, values)) + rf" \end{{{first}}}",
      rf"\begin{{{second}}}" + r"\\".join(map(spell, others)) + rf"\end{{{second}}}",
    )
  if others[0] == values[0] and not right:
    others[0] += 1
  return rng.choice([("x = {}", "{}"), ("x = {}", "x={}"), ("x = {}", "{} = x"), ("x < {}", "x<{}"), (r"x \le {}", r"x \leq {}"), ("{}", "y = {}")]).__class__(
    text.format(spell(value)) for text, value in zip(rng.choice([("x = {}", "x={}"), ("x < {}", "x<{}"), (r"x \le {}", r"x \leq {}"), ("{}", "y = {}")]), (values[0], others[0]), strict=True)
  )


def polynomials(rng: random.Random, *, right: bool) -> Pair:
  """Factored and expanded polynomials."""
  roots = [rng.randint(-9, 9) for _ in range(rng.randint(2, 3))]
  scale = rng.choice([1, 1, 2, 3, -1, 5])
  coefficients = [scale]
  for root in roots:
    coefficients = [a - root * b for a, b in zip([*coefficients, 0], [0, *coefficients], strict=True)]
  if not right:
    at = rng.randrange(len(coefficients))
    coefficients[at] += rng.choice([1, -1, 2])
  letter = rng.choice("xyzntab")
  factors = "".join(f"({letter} {'-' if root > 0 else '+'} {abs(root)})" if root else letter for root in roots)
  factored = {1: "", -1: "-"}.get(scale, str(scale)) + factors
  degree = len(coefficients) - 1
  terms = ""
  for i, value in enumerate(coefficients):
    if value:
      power = degree - i
      unknown = "" if not power else letter if power == 1 else rng.choice([f"{letter}^{power}", f"{letter}^{{{power}}}"])
      number = "" if abs(value) == 1 and power else str(abs(value))
      terms += (" - " if value < 0 else " + ") + number + unknown
  expanded = terms.removeprefix(" + ").replace(" - ", "-", 1) if terms.startswith(" - ") else terms.removeprefix(" + ")
  pair = (factored, expanded or "0")
  return pair if rng.random() < 0.5 else pair[::-1]


def irrational(rng: random.Random, *, right: bool) -> Pair:
  """Roots, multiples of pi and e, logarithms and complex numbers, tiny powers and factorials."""
  a, b, k = rng.randint(2, 30), rng.choice([2, 3, 5, 6, 7, 10, 11, 13]), rng.randint(2, 12)
  off = 0 if right else rng.choice([1, 2])
  n = rng.randint(55, 200)
  return rng.choice([
    (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b + off}}}"),
    (rf"\frac{{{a}}}{{\sqrt{{{b}}}}}", rf"\frac{{{a + off}\sqrt{{{b}}}}}{{{b}}}"),
    (rf"\frac{{{a}\pi}}{{{k}}}", rf"{a + off}\pi/{k}"),
    (rf"{a}\pi", rf"\frac{{{k * a + off}\pi}}{{{k}}}"),
    (rf"\frac{{{a}}}{{e}}", rf"{a + off} e^{{-1}}"),
    (rf"\ln {a}^{{{k}}}" if False else rf"{k}\ln({a})", rf"\ln({a**k + off})"),
    (rf"\log_{{{a}}}({a ** k})", f"{k + off}"),
    (f"({a}+{b}i)^2", f"{a * a - b * b + off}+{2 * a * b}i"),
    (rf"\frac{{1}}{{{a}-{b}i}}", rf"\frac{{{a + off}+{b}i}}{{{a * a + b * b}}}"),
    (rf"\left(\frac{{2}}{{3}}\right)^{{{n}}}", rf"\frac{{2^{{{n}}}}}{{3^{{{n + off}}}}}"),
    (rf"2^{{-{n}}}", rf"\frac{{1}}{{2^{{{n + off}}}}}"),
    (rf"\frac{{1}}{{{n}!}}", rf"\frac{{{n + 1}}}{{{n + 1 + off}!}}"),
    (f"{a}^{{{n}}}", f"{a ** n + off}"),
    (rf"\frac{{x}}{{2^{{{n}}}}}", rf"2^{{-{n + off}}}x"),
    (rf"e^{{-{n}}}", rf"\frac{{1}}{{e^{{{n + off}}}}}"),
    (rf"10^{{-{n}}}", f"{1 + off}e-{n}"),
    (rf"\binom{{{a + k}}}{{{k}}}", str(math.comb(a + k, k) + off)),
    (rf"\sqrt{{{a}}} + 10^{{-{n // 3}}}", rf"\sqrt{{{a}}} + {1 + off} \cdot 10^{{-{n // 3}}}"),
    (f"{round(a * b**0.5, 6) + off * 1e-6:.6f}", rf"{a}\sqrt{{{b}}}"),
    (rf"{a} \pm \sqrt{{{b}}}", rf"{a}\pm\sqrt{{{b + off}}}"),
    (rf"1, {a}, \ldots, n", rf"1,{a + off},\dots,n"),
    (rf"1+{a}+\cdots+{a}^n", rf"1 + {a + off} + \ldots + {a}^{{n}}"),
  ])  # fmt: skip


KINDS: dict[str, Callable[..., Pair]] = {"numbers": numbers, "several": several, "polynomials": polynomials, "irrational": irrational}
"""Generators of pairs by kind: `(random, right) -> (correct answer, answer)`."""
