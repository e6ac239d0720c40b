"""Right and wrong answers with their verdicts by construction; shares no code with the graders."""

import math
import random
from decimal import Context, Decimal
from fractions import Fraction

EXACT = Context(prec=200)
Pair = tuple[str, str]
"""A correct answer, and another spelling of it or of a different value."""


def spell_integer(rng: random.Random, value: int) -> str:
  """Writes a whole number in one of many ways."""
  sign, digits, groups = "-" * (value < 0), str(abs(value)), f"{abs(value):,}".split(",")
  ways = [
    digits,
    digits,
    digits + ".0",
    *(gap.join(groups) for gap in (",", "{,}", r"\,", "~", " ", "\u202f")),
  ]
  if abs(value) > 10**6 and not value % 10:
    mantissa = digits.rstrip("0")
    point, power = mantissa[0] + ("." + mantissa[1:]) * (len(mantissa) > 1), len(digits) - 1
    ways += [
      f"{point}e{power}",
      rf"{point} \times 10^{{{power}}}",
      rf"{mantissa} \cdot 10^{{{len(digits) - len(mantissa)}}}",
    ]
    ways += [f"{point}E+{power}", f"{point}*10^{power}"]
  text = sign + rng.choice(ways)
  return rng.choice([text] * 9 + [rf"\text{{{text}}}", rf"\textbf{{{text}}}", rf"\mathbf{{{text}}}"])


def spell_fraction(rng: random.Random, value: Fraction) -> str:
  """Writes a fraction as a quotient, reduced or not, a mixed number, or a decimal if it is one."""
  scale, sign = rng.choice([1, 1, 1, 2, 3, 10]), "-" * (value < 0)
  top, bottom = abs(value.numerator) * scale, value.denominator * scale
  ways = [
    f"{top}/{bottom}",
    *(rf"\{name}{{{top}}}{{{bottom}}}" for name in ("frac", "dfrac", "tfrac", "frac ")),
  ]
  whole, rest = divmod(top, bottom)
  if whole and rest:
    ways += [
      f"{whole} {rest}/{bottom}",
      rf"{whole}\frac{{{rest}}}{{{bottom}}}",
      rf"{whole} \dfrac{{{rest}}}{{{bottom}}}",
    ]
  if 10**20 % value.denominator == 0:
    ways += [
      format(Decimal(abs(value.numerator) * (10**20 // value.denominator)).scaleb(-20, EXACT), "f")
    ] * 3
  return sign + rng.choice(ways)


def spell_number(rng: random.Random, value: Fraction) -> str:
  """Writes a number in one of many ways, rarely with a unit or a name."""
  text = spell_integer(rng, value.numerator) if value.denominator == 1 else spell_fraction(rng, value)
  return rng.choice([text] * 198 + [text + r"\text{ cm}", f"x = {text}"])


def a_number(rng: random.Random) -> Fraction:
  """Draws a number of any size."""
  return rng.choice([
    lambda: Fraction(rng.randint(-50, 50)), lambda: Fraction(rng.randint(-(10**6), 10**6)),
    lambda: Fraction(rng.randint(1, 999) * 10 ** rng.randint(5, 40)),
    lambda: Fraction(rng.randint(-(10**9), 10**9), 10 ** rng.randint(1, 9)),
    lambda: Fraction(rng.randint(-(10**30), 10**30)), lambda: Fraction(rng.randint(-500, 500), rng.randint(2, 60)),
  ])()  # fmt: skip


def near(rng: random.Random, value: Fraction) -> Fraction:
  """Draws a different number that is near in one of several senses."""
  small = Fraction(1, 10 ** rng.randint(7, 20))
  others = [
    value + 1,
    value - 1,
    -value,
    value * 10,
    value / 10,
    value + small,
    value * (1 + small),
    value * 2,
    value + Fraction(1, 3),
  ]
  return rng.choice([other for other in others if other != value])


def numbers(rng: random.Random, *, right: bool) -> Pair:
  """Draws whole numbers, decimals and fractions."""
  value = a_number(rng)
  other = value if right else near(rng, value)
  gold, answer = spell_number(rng, value), spell_number(rng, other)
  # A decimal may be the rounded value of a fraction.
  rounded = not right and abs(value - other) < Fraction(1, 10**5) and ("." in gold) != ("." in answer)
  return numbers(rng, right=right) if rounded else (gold, answer)


def several(rng: random.Random, *, right: bool) -> Pair:
  """Draws tuples, sets, intervals, matrices, equations and inequalities of fractions."""
  values = [
    Fraction(value, rng.choice([1, 1, 2, 3, 7]))
    for value in rng.sample(range(-30, 0), 2) + rng.sample(range(1, 30), 2)
  ]
  others = list(values)
  if not right:
    others[rng.randrange(2)] += rng.choice(
      [Fraction(1, 3), Fraction(1, 2), Fraction(1, 2 ** rng.randint(55, 90))]
    )

  def joined(numbers, separator):
    spell = lambda x: rng.choice(
      [
        f"{x}",
        rf"\frac{{{x.numerator}}}{{{x.denominator}}}",
        rf"\dfrac{{{2 * x.numerator}}}{{{2 * x.denominator}}}",
      ]
    )
    return separator.join(map(spell, numbers))

  shuffled = rng.sample(others, len(others))
  low, high = rng.choice("[("), rng.choice("])")
  return rng.choice([
    ("(" + joined(values, ", ") + ")", rf"\left( {joined(others, ',')} \right)"),
    (rf"\{{{joined(values, ', ')}\}}", rng.choice([r"\{%s\}", "%s"]) % joined(shuffled, ", ")),
    (low + joined(values[1:3], ", ") + high, rf"\left{low} {joined([others[0] - values[0] + others[1], others[2]], ',')}\right{high}"),
    (rf"\begin{{pmatrix}} {joined(values, ' & ')} \end{{pmatrix}}", rf"\begin{{bmatrix}}{joined(others, '&')}\end{{bmatrix}}"),
    tuple(f"{joined(side[:1], '')} < x < {joined([side[1] + 60], '')}" for side in (values, others)),
    (f"x = {joined(values[:1], '')}", joined([others[0] + others[1] - values[1]], "")),
    (f"y = ({joined(values[:1], '')})x", f"({joined([2 * (others[0] + others[1] - values[1])], '')})x - 2y = 0"),
  ])  # fmt: skip


def polynomials(rng: random.Random, *, right: bool) -> Pair:
  """Draws factored and expanded polynomials."""
  roots = [rng.randint(-9, 9) for _ in range(rng.randint(2, 3))]
  scale = rng.choice([1, 1, 2, 3, -1, 5])
  coefficients = [scale]
  for root in roots:
    coefficients = [a - root * b for a, b in zip([*coefficients, 0], [0, *coefficients], strict=True)]
  if not right:
    at = rng.randrange(len(coefficients))
    coefficients[at] += rng.choice([1, -1, 2])
  letter = rng.choice("xyzntab")
  factors = "".join(
    f"({letter} {'-' if root > 0 else '+'} {abs(root)})" if root else letter for root in roots
  )
  factored = {1: "", -1: "-"}.get(scale, str(scale)) + factors
  degree = len(coefficients) - 1
  terms = ""
  for i, value in enumerate(coefficients):
    if value:
      power = degree - i
      unknown = (
        ""
        if not power
        else letter
        if power == 1
        else rng.choice([f"{letter}^{power}", f"{letter}^{{{power}}}"])
      )
      number = "" if abs(value) == 1 and power else str(abs(value))
      terms += (" - " if value < 0 else " + ") + number + unknown
  expanded = (
    terms.removeprefix(" + ").replace(" - ", "-", 1) if terms.startswith(" - ") else terms.removeprefix(" + ")
  )
  pair = (factored, expanded or "0")
  return pair if rng.random() < 0.5 else pair[::-1]


def irrational(rng: random.Random, *, right: bool) -> Pair:
  """Draws roots, multiples of pi and e, logarithms, complex numbers, and tiny powers."""
  a, b, k = rng.randint(2, 30), rng.choice([2, 3, 5, 6, 7, 10, 11, 13]), rng.randint(2, 12)
  off = 0 if right else rng.choice([1, 2])
  n = rng.randint(55, 200)
  return rng.choice([
    (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b + off}}}"),
    (rf"\frac{{{a}}}{{\sqrt{{{b}}}}}", rf"\frac{{{a + off}\sqrt{{{b}}}}}{{{b}}}"),
    (rf"\frac{{{a}\pi}}{{{k}}}", rf"{a + off}\pi/{k}"),
    (rf"{a}\pi", rf"\frac{{{k * a + off}\pi}}{{{k}}}"),
    (rf"\frac{{{a}}}{{e}}", rf"{a + off} e^{{-1}}"),
    (rf"{k}\ln({a})", rf"\ln({a**k + off})"),
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


KINDS = (numbers, several, polynomials, irrational)
"""Generators `(random, right) -> (correct answer, answer)`."""


def mixed(rng: random.Random, *, right: bool) -> Pair:
  """Draws pairs of all kinds; most are numbers, whose verdicts take no algebra system."""
  return rng.choices(KINDS, [197, 1, 1, 1])[0](rng, right=right)
