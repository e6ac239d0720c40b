"""Equality of answers: equal values in any spelling, and no absolute tolerance."""

import itertools
import random

import pytest

from jaxrl_llm.rewards.maths import equivalent
from tests.rewards import pairs

pytest.importorskip("math_verify")


DIFFERENT = [
  # Powers, factorials and constants that are nearly 0 (huggingface/Math-Verify#14).
  (r"\left(\frac{2}{3}\right)^{100}", r"\left(\frac{2}{3}\right)^{101}"),
  (r"\frac{1}{30!}", r"\frac{1}{31!}"),
  (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
  (r"\frac{2^{2005}+1}{3\cdot 2^{2006}}", r"\frac{1}{3\cdot 2^{2006}}"),
  (r"\frac{2^{2005}+1}{3\cdot 2^{2006}}", r"\frac{2^{2005}}{3\cdot 2^{2006}}"),
  (r"\frac{3}{2^{100}}", r"\frac{5}{2^{100}}"),
  (r"e^{-1000}", r"e^{-1001}"), (r"\sqrt{2}\cdot10^{-20}", r"\sqrt{3}\cdot 10^{-20}"),
  (r"\sin(10^{-20})", r"\sin(10^{-21})"),
  (r"\binom{200}{100}^{-1}", r"\binom{200}{99}^{-1}"), ("0.1+10^{-20}", "0.1"), (r"\cos(10^{-20})", "1"),
  ("0", "10^{-300}"),
  # Decimals and large numbers.
  ("0.0000001", "0.0000002"), ("1e-20", "2e-20"), ("123456789.123456789", "123456789.123456788"),
  ("10^{100}+1", "10^{100}"),
  (r"\sqrt{10^{40}+1}", "10^{20}"), (r"e^{\pi\sqrt{163}}", "262537412640768744"),
  (r"\frac{355}{113}", r"\pi"),
  (r"10^{30}+\pi", "10^{30}+e"), (r"\sqrt{2}", "1.4142135"), (r"\sqrt{2}", "1.4142136" + "5"),
  # Inside of other things.
  ("(2^{-60}, 1)", "(2^{-61}, 1)"), (r"\{2^{-60}, 1\}", r"\{2^{-61}, 1\}"), ("[2^{-60}, 1)", "[2^{-61}, 1)"),
  (r"(-\infty,10^{-20}]", r"(-\infty,10^{-21}]"),
  (r"\begin{pmatrix}2^{-60}\\1\end{pmatrix}", r"\begin{pmatrix}2^{-61}\\1\end{pmatrix}"),
  ("x = 2^{-60}", "x = 2^{-61}"), ("x = 2^{-60}", "2^{-61}"), ("y=2^{-60}x", "y=2^{-61}x"),
  ("2^{60}y=x", "2^{61}y=x"),
  ("x < 2^{-60}", "x < 2^{-61}"), (r"0.0000001\%", r"0.0000003\%"),
  (r"10^{-20}\text{ m}", r"10^{-21}\text{ m}"), ("10^{-20}i", "10^{-21}i"),
  (r"\ln(1+10^{-20})", r"\ln(1+10^{-21})"), (r"3\pm 10^{-20}", r"3\pm 10^{-21}"),
  (r"1:10^{20}", r"1:10^{21}"), ("(0.3333333,1)", "(0.3333334,1)"),
  # Formulas.
  (r"\frac{x}{2^{60}}", r"\frac{x}{2^{61}}"), ("e^{-100}x", "e^{-101}x"),
  (r"\frac{x}{10^{20}}+1", r"\frac{x}{10^{21}}+1"),
  (r"\frac{n!}{10^{20}}", r"\frac{n!}{10^{21}}"), ("2h + 3t", "2h + 3"), (r"\pi r^2 h", r"\pi r^2"),
  # Lists and sums with dots compare their terms.
  (r"1, 2, \ldots, n", r"1, 3, 5, \ldots, 2n-1"), ("1,2,...,n", "1,3,...,n"),
  (r"1,2,\ldots,n", r"1,2,\ldots,n+1"), (r"1,2,\ldots,n", "1,2,n"),
  (r"1+2+\cdots+n", r"1+3+\cdots+n"), (r"1+2+\cdots+n", r"1,2,\ldots,n"),
  (r"\{1,2,\ldots\}", r"\{2,4,\ldots\}"), ("1,2,\u2026,100", "1,2,\u2026,200"),
  # Numbers without an operator, and text that is no formula.
  ("2", "2 2/3"), ("10", "4 10/3"), ("5", "2 3"), ("201", r"1\,200"), ("6", "5, 6]"),
  ("7", r"x = 5 \text{ or } 7 {"), ("2", r"2\text{ million}"),
  # Intervals against inequalities.
  ("[0,12.5)", "0<x<12.5"), ("(0,12)", "0<x<12.5"), (r"(-\infty,3)", r"x\le 3"),
  (r"(-\infty,1)\cup(3,\infty)", r"x<1 \text{ or } x>2"),
]  # fmt: skip
EQUAL = [
  (r"\frac{2^{100}}{3^{100}}", r"\left(\frac{2}{3}\right)^{100}"), (r"\frac{1}{30!}", r"\frac{31}{31!}"),
  ("100!/98!", "9900"), ("10^{-20}", "1e-20"),
  (r"\sqrt{5+2\sqrt{6}}", r"\sqrt{2}+\sqrt{3}"), ("e^{-100}x", r"\frac{x}{e^{100}}"), ("n!", "n(n-1)!"),
  ("2^{-60}x", r"\frac{x}{2^{60}}"),
  # A rounded decimal.
  ("100/3", "33.333333"), (r"\pi", "3.14159265"), (r"5\sqrt{5}", "11.180340"), ("(1/3, 1)", "(0.333333, 1)"),
  ("28", "28%"), ("0.28", r"28\%"),
  # Mixed numbers, thousands, scientific notation, repeating decimals.
  ("71/6", "11 5/6"), ("71/6", r"11\frac{5}{6}"), ("71/6", r"11\tfrac56"), ("-5/2", r"-2\ \tfrac12"),
  ("7/2", "3\u00bd"), ("1200", r"1\,200"),
  ("1200", "1~200"), ("1200", "1\u202f200"), ("1234567.5", "1 234 567.5"), ("-1200", "-1 200"),
  ("4.5e33", r"4.5 \times 10^{33}"),
  ("4.5e33", r"4.5 \cdot 10^{33}"), ("1e6", "1000000"), ("0.0045", "4.5e-3"),
  ("(4500, 1)", r"(4.5 \times 10^3, 1)"), ("41/33", r"1.\overline{24}"),
  # Other spellings.
  (r"\emptyset", r"\varnothing"), (r"\emptyset", r"\{\}"), (r"\emptyset", "\u2205"),
  (r"\emptyset", "no solution"), (r"1-\frac1e", r"1-\frac{1}{\mathrm{e}}"),
  ("5:30", r"5\text{:}30"), ("DNE", r"\text{does not exist}"), ("DNE", r"\text{undefined}"),
  ("073", r"\textbf{(073)}"), ("A", r"\text{(A)}"),
  ("15", r"\textbf{(D) }15"), ("t^2 + 5t", "t(t+5)"), ("x = 1,234", "1234"),
  # Complex numbers.
  ("-1", r"e^{i\pi}"), ("2i", "(1+i)^2"), (r"\frac{1+i}{2}", r"\frac{1}{1-i}"), ("i", r"e^{i\pi/2}"),
  # Lists with dots.
  (r"1,2,\ldots,n", "1, 2, ..., n"), (r"1+2+\cdots+n", "1+2+...+n"),
  (r"\{1,2,\ldots,n\}", r"\{1, 2, \dotsc, n\}"), (r"\frac12, 1, \ldots", r"0.5, 1, \dots"),
  # An interval and the inequality that it solves.
  ("(0,12.5)", "0<x<12.5"), (r"(-\infty,3)", "3 > x"), ("[2,5)", r"2 \le x < 5"),
  (r"(-\infty,1)\cup(3,\infty)", r"x<1 \text{ or } x>3"),
  (r"(-\infty,3)\cup(3,\infty)", r"x \neq 3"),
]  # fmt: skip


@pytest.mark.parametrize("gold, answer", DIFFERENT)
def test_different(gold, answer):
  assert not equivalent(gold, answer)


@pytest.mark.parametrize("gold, answer", EQUAL)
def test_equal(gold, answer):
  assert equivalent(gold, answer)


@pytest.mark.slow
@pytest.mark.parametrize("cases, expected", [(DIFFERENT, False), (EQUAL, True)], ids=["different", "equal"])
def test_the_other_way_round(cases, expected):
  assert [pair for pair in cases if equivalent(*pair[::-1]) != expected] == []


@pytest.mark.parametrize("text", ["x^{10^{12}}", "((x!)!)!", r"\alpha^{10^{12}}", "x^{y^{100}}", r"2^{100000}+\sqrt{2}", r"\ln(2^{99999})"])
def test_what_is_too_large_to_evaluate_keeps_its_verdict(text):
  assert equivalent(text + "+0", text) and not equivalent("5", text)


def verdicts(kind, count, *, right):
  rng = random.Random(f"{kind.__name__} {right}")
  made = [kind(rng, right=right) for _ in range(count)]
  return [pair for pair in made if equivalent(*pair) != right]


@pytest.mark.parametrize("kind, right", list(itertools.product(pairs.KINDS, [True, False])))
def test_a_few_of_each_kind(kind, right):
  assert not verdicts(kind, 200 if kind is pairs.numbers else 4, right=right)


@pytest.mark.slow
@pytest.mark.parametrize("right, most", [(False, 0), (True, 50)])
def test_ten_thousand_pairs(right, most):
  failures = verdicts(pairs.mixed, 10_000, right=right)
  assert len(failures) <= most, failures[:20]
