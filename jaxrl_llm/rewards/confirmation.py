"""Exact confirmation that two parsed expressions are equal, where math-verify rounds.

math-verify drops differences below 1e-15 and compares decimals to six places, both absolutely, so
that all tiny numbers are equal to it. Here numbers are compared as exact fractions where they are
rational, and else to 50 digits of the numbers themselves.
"""

import itertools
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.functions.elementary.trigonometric import TrigonometricFunction

from jaxrl_llm.rewards.plain_numbers import PLACES, Number, same

_MAX_MAGNITUDE = 5e4  # As in `expression_limits`.
_DIGITS = 50  # Digits to which irrational numbers must agree.
_HUNDREDTH = sympy.UnevaluatedExpr(sympy.Rational(1, 100))  # How the parser writes a percent sign.
# Values of the letters of an expression: positive, so that roots and logarithms are real, and once
# whole, so that factorials are exact.
_POINTS = (lambda i: sympy.Integer(7 + 4 * i), lambda i: sympy.Rational(11 + 6 * i, 2))
_UNDECIDED = (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError, RecursionError)


def aligned(gold: Any, answer: Any) -> tuple[Any, Any]:
  """Returns both expressions in forms that can be compared.

  The letter i becomes the imaginary unit, which math-verify reads as an unknown. An inequality
  becomes the set of its solutions if the other expression is a set, and several ("x < 1 or x > 3")
  the union of their sets.

  Example:
    >>> x = sympy.Symbol("x", real=True)
    >>> aligned(sympy.Interval.open(0, 3), sympy.And(0 < x, x < 3))
    (Interval.open(0, 3), Interval.open(0, 3))
    >>> aligned(sympy.Integer(-1), sympy.Symbol("i") ** 2)
    (-1, -1)
  """
  if not any(
    _is_relation(side) or isinstance(side, sympy.Symbol) and side.name != "i" for side in (gold, answer)
  ):
    gold, answer = (_with_imaginary_unit(side) for side in (gold, answer))
  return _solved(gold, answer), _solved(answer, gold)


def confirmed(gold: Any, answer: Any) -> bool:
  """Returns whether two expressions that math-verify takes for equal are so, part by part.

  What cannot be evaluated, such as a symbol of words, keeps math-verify's verdict.

  Args:
    gold: Correct answer, as math-verify parses it.
    answer: Answer to judge, parsed alike.

  Example:
    >>> confirmed(sympy.Rational(1, 2**60), sympy.Rational(1, 2**61)), confirmed(sympy.sqrt(8), 2 * sympy.sqrt(2))
    (False, True)
  """
  try:
    return gold == answer or _same(gold, answer)
  except _UNDECIDED:
    return True


def _with_imaginary_unit(expression: Any) -> Any:
  letters = {symbol for symbol in getattr(expression, "free_symbols", ()) if symbol.name == "i"}
  return expression.xreplace(dict.fromkeys(letters, sympy.I)) if letters else expression


def _solved(expression: Any, other: Any) -> Any:
  if not isinstance(other, sympy.Set):
    return expression
  each = list(expression) if isinstance(expression, sympy.FiniteSet) else [expression]
  if isinstance(other, sympy.FiniteSet) or not all(isinstance(part, Relational | sympy.And) for part in each):
    return expression
  if any(isinstance(part, sympy.Eq) for part in each):
    return expression
  try:
    return sympy.Union(*(part.as_set() for part in each))
  except _UNDECIDED:
    return expression


def _same(gold: Any, answer: Any) -> bool:
  gold, answer = _right_sides(gold, answer)
  if _is_relation(gold) and _is_relation(answer):
    return _same_relations(gold, answer)
  if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
    return all(map(_same_value, gold.doit().flat(), answer.doit().flat()))
  kinds = (sympy.FiniteSet, sympy.Tuple, sympy.Interval)
  if isinstance(gold, kinds) or isinstance(answer, kinds):
    return _same_lists(gold, answer)
  if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
    return _same_value(gold, answer)
  return True  # Unions of intervals are compared exactly by math-verify.


def _right_sides(gold: Any, answer: Any) -> tuple[Any, Any]:
  """Unwraps "x = 5" against "5" as math-verify does."""
  if isinstance(gold, sympy.Eq | sympy.And) != isinstance(answer, sympy.Eq | sympy.And):
    return tuple(side.rhs if isinstance(side, sympy.Eq) else _last(side) for side in (gold, answer))
  return gold, answer


def _last(expression: Any) -> Any:
  return (
    expression._unsorted_args[-1].rhs
    if hasattr(expression, "_unsorted_args") and _is_relation(expression)
    else expression
  )


def _is_relation(expression: Any) -> bool:
  return isinstance(expression, Relational | sympy.And)


def _same_relations(gold: Any, answer: Any) -> bool:
  """Returns whether relations have equal sides, or equations have equal solutions."""
  if isinstance(gold, sympy.And) and isinstance(answer, sympy.And):
    parts = list(zip(gold._unsorted_args, answer._unsorted_args, strict=False))
    if all(isinstance(part, sympy.Eq) for pair in parts for part in pair):  # x = 1/2 = 0.5
      return _same_relations(
        *(sympy.Eq(side._unsorted_args[0].lhs, _last(side), evaluate=False) for side in (gold, answer))
      )
    return all(_same_relations(*pair) for pair in parts)
  if isinstance(gold, sympy.And) or isinstance(answer, sympy.And):
    return True
  if gold.lhs == answer.lhs:
    return _same(gold.rhs, answer.rhs)
  left, right = _difference(gold.lhs, gold.rhs), _difference(answer.lhs, answer.rhs)
  if _vanishes(left - right) or _vanishes(left + right):
    return True
  if not isinstance(gold, sympy.Eq) or not isinstance(answer, sympy.Eq):
    return False
  solutions = [
    sympy.solve(difference, *sorted(difference.free_symbols, key=str), dict=True)
    for difference in (left, right)
  ]
  values = [
    [sympy.Tuple(*(value for _, value in sorted(each.items(), key=str))) for each in side]
    for side in solutions
  ]
  return _matched(*values)


def _same_lists(gold: Any, answer: Any) -> bool:
  ordered = any(isinstance(side, sympy.Tuple | sympy.Interval) for side in (gold, answer))
  left, right = _elements(gold), _elements(answer)
  if ordered:
    return len(left) == len(right) and all(map(_equal_parts, left, right))
  return _matched(left, right)


def _elements(expression: Any) -> Sequence[Any]:
  if isinstance(expression, sympy.Interval):
    return [expression.start, expression.end]
  if isinstance(expression, sympy.FiniteSet | sympy.Tuple):
    return list(getattr(expression, "_unsorted_args", expression.args))
  return [expression]


def _matched(left: Iterable[Any], right: Iterable[Any]) -> bool:
  """Returns whether each element has an equal one on the other side."""
  left, right = list(left), list(right)
  equal = [[_equal_parts(a, b) for b in right] for a in left]
  return all(map(any, equal)) and all(map(any, zip(*equal, strict=True)))


def _equal_parts(left: Any, right: Any) -> bool:
  return left == right or _same(left, right)


def _same_value(gold: sympy.Expr, answer: sympy.Expr) -> bool:
  """Returns whether two numbers or formulas are equal; decimals may be rounded values."""
  if isinstance(gold, sympy.Symbol) or isinstance(answer, sympy.Symbol):
    return True  # Words: math-verify compares their letters.
  percents = [_percent(side) for side in (gold, answer)]
  if percents != [None, None]:  # 28 % is 28 and 0.28.
    bare = [
      side if percent is None else percent for side, percent in zip((gold, answer), percents, strict=True)
    ]
    if _same_value(*bare):
      return True
    gold, answer = (
      side if percent is None else percent / 100
      for side, percent in zip((gold, answer), percents, strict=True)
    )
  decimals = [_decimal(side) for side in (gold, answer)]
  if any(decimals) and not (gold.free_symbols or answer.free_symbols):
    exact, decimal = (answer, decimals[0]) if decimals[0] else (gold, decimals[1])
    return same(decimal, decimals[1]) if all(decimals) else _rounds_to(exact, decimal)
  return _vanishes(_difference(gold, answer))


def _percent(expression: sympy.Expr) -> sympy.Expr | None:
  is_percent = (
    isinstance(expression, sympy.Mul) and len(expression.args) == 2 and expression.args[1] == _HUNDREDTH
  )
  return expression.args[0] if is_percent else None


def _decimal(expression: sympy.Expr) -> Number | None:
  """Returns a decimal as written, but without trailing zeros; None for anything else."""
  # The sign of a decimal is parsed as a factor.
  negative = isinstance(expression, sympy.Mul) and len(expression.args) == 2 and expression.args[0] == -1
  number = -expression.args[1] if negative else expression
  if not isinstance(number, sympy.Float):
    return None
  value = Fraction(str(number))
  return Number(value, next(places for places in itertools.count() if (value * 10**places).denominator == 1))


def _rounds_to(expression: sympy.Expr, decimal: Number) -> bool:
  """Returns whether a decimal is the value of an expression, or its rounded value."""
  exact = _exact(expression)
  if not exact.is_Rational:
    # Six written places may end with zeros, which the parser dropped: 11.180340 is 5 sqrt(5).
    exact, decimal = (
      sympy.Rational(exact.evalf(2 * _DIGITS)),
      decimal._replace(places=max(decimal.places, PLACES)),
    )
  return same(Number(Fraction(int(exact.p), int(exact.q))), decimal)


def _exact(expression: sympy.Expr) -> sympy.Expr:
  """Evaluates an expression with each decimal as a fraction."""
  floats = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
  calls = {call: sympy.Dummy(str(call), real=True) for call in expression.atoms(AppliedUndef)}
  return expression.xreplace(floats | calls).doit()


def _difference(left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
  return _exact(sympy.Add(left, sympy.Mul(-1, right, evaluate=False), evaluate=False))


def _vanishes(difference: sympy.Expr) -> bool:
  """Returns whether an exact expression is 0 at every point where it can be evaluated."""
  if difference.is_Rational:
    return difference.is_zero
  symbols = sorted(difference.free_symbols, key=str)
  if not symbols:
    return _is_zero(difference, _digits(difference))
  if _magnitude(difference) > _MAX_MAGNITUDE:
    return True
  digits = _digits(difference)
  return all(
    _is_zero(difference.xreplace({symbol: point(i) for i, symbol in enumerate(symbols)}).doit(), digits)
    for point in _POINTS
  )


def _magnitude(expression: sympy.Basic) -> float:
  """Bounds log10 of an expression's largest number, with letters below 100: x^(10^9) takes for ever."""
  if expression.is_Rational:
    return max(abs(expression.p), expression.q).bit_length() * 0.302
  if not expression.args:
    return 2.0
  base, exponent = expression.as_base_exp() if isinstance(expression, sympy.Pow | sympy.exp) else (None, None)
  if base is not None:
    return (_magnitude(base) + 0.5) * 10 ** min(_magnitude(exponent), 300)
  parts = [_magnitude(part) for part in expression.args]
  if isinstance(expression, sympy.Mul):
    return sum(parts)
  if isinstance(expression, sympy.Add | sympy.Abs | sympy.log | TrigonometricFunction):
    return max(parts) + len(parts)
  return 10 ** min(max(parts), 300) * max(parts)  # Factorials, binomials, sums.


def _digits(expression: sympy.Expr) -> int:
  """Returns 50 and as many digits as the numbers in an expression and their exponentials have.

  1 + 2^-200 then differs from 1 in a logarithm.
  """
  sizes = [max(abs(number.p), number.q) for number in expression.atoms(sympy.Rational)]
  return _DIGITS + max(
    (min(size, 1000) // 2 + min(size.bit_length(), 10_000) // 3 for size in sizes), default=0
  )


def _is_zero(number: sympy.Expr, digits: int) -> bool:
  """Returns whether a number is 0 to so many digits of its terms, or cannot be evaluated."""
  if number.is_Rational:
    return number.is_zero
  value = number.evalf(digits, maxn=digits + 20)
  # Digits that cancel are not significant, and evalf marks a number without any by its precision.
  return all(not part.is_Float or part._prec <= 1 or not part for part in value.as_real_imag())
