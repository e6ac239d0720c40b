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
