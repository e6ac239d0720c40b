"""One notation for answers, by rewriting their text."""

import time

import pytest

from jaxrl_llm.rewards.notation import REWRITINGS, is_formula, terms_around_dots, unified


@pytest.mark.parametrize("text, expected", [
  ("\u22125", "-5"), ("\u20135", "-5"), ("\uff11\uff12", "12"), ("\U0001d7d3", "5"),
  ("1\u2009000\u00a0000", "1000000"), ("5\u200b", "5"),
  ("x\u00b2", "x^{2}"), ("10\u207b\u00b3", "10^{-3}"), ("\u00bd", r"\frac{1}{2}"),
  ("3\u00bd", r"\frac{7}{2}"), ("3\u03c0", "3\\pi"),
  ("\u221a2", r"\sqrt{2}"), ("\u221a(x+1)", r"\sqrt{x+1}"), ("\u2205", r"\emptyset"), ("\u0435", "\u0435"),
  ("5\u2009cm", "5 cm"),
  ("a \n\t b", "a b"), ("1 000", "1000"), ("1 000.5", "1000.5"), ("-1 000", "-1000"), ("1 00", "1 00"),
  ("2x 100 200", "2x 100200"),
  ("3-1 000", "3-1 000"),
  # Groups of digits.
  (r"1\,200", "1200"), ("1~200", "1200"), (r"1{,}234{,}567.5", "1234567.5"), (r"1,\!200", "1200"),
  (r"\frac{1\,200}{7}", r"\frac{1200}{7}"),
  (r"1\,20", r"1\,20"), ("x = 82,035", "x = 82035"), (r"1,234\%", r"1234\%"), ("1,234, 5", "1,234, 5"),
  ("(1,234)", "(1,234)"),
  # Mixed numbers.
  ("11 5/6", r"\frac{71}{6}"), (r"11\frac{5}{6}", r"\frac{71}{6}"), (r"-11\ \tfrac56", r"-\frac{71}{6}"),
  ("(1 1/2, 3)", r"(\frac{3}{2}, 3)"),
  ("4 10/3", "4 10/3"), ("0 1/2", "0 1/2"), ("x^2 1/2", "x^2 1/2"), ("3 1 1/2", "3 1 1/2"),
  (r"4\frac{10}{3}", r"4\frac{10}{3}"),
  # Scientific notation and scales.
  ("4.5e33", r"45 \cdot 10^{32}"), (r"4.50 \times 10^{33}", r"45 \cdot 10^{32}"),
  ("4.5*10^33", r"45 \cdot 10^{32}"),
  ("4.5 x 10^(33)", r"45 \cdot 10^{32}"), ("4.5 \u00d7 10\u00b3\u00b3", r"45 \cdot 10^{32}"),
  ("1E-6", "10^{-6}"), ("0e5", "0"), ("20e-1", "2"),
  (r"1/2.5 \times 10^5", r"1/2.5 \times 10^5"), (r"3^2 \times 10^5", r"3^2 \times 10^5"), ("3e2x", "3e2x"),
  ("2e", "2e"), ("1e999999", "1e999999"),
  ("3 million", r"3 \cdot 10^{6}"), (r"2.5 \text{ billion dollars}", r"25 \cdot 10^{8}\text{ dollars}"),
  (r"0.\overline{12}", r"\frac{12}{99}"), (r"1.2\bar{3}", r"\frac{111}{90}"),
  # Fonts, labels and signs.
  (r"\textbf{(073)}", "(073)"), (r"\mathbf{4.5 \times 10^{3}}", r"45 \cdot 10^{2}"),
  (r"\text{Room 5}", r"\text{Room 5}"),
  (r"\textbf{(D)}\ \frac{1}{2}", r"\frac{1}{2}"), (r"\text{(A)}", r"\text{(A)}"),
  (r"\text{(A)}, \text{(C)}", r"\text{(A)}, \text{(C)}"),
  (r"1-\frac{1}{\mathrm{e}}", r"1-\frac{1}{ e}"), (r"\pi\mathrm{i}", r"\pi i"), (r"5\text{:}30", "5:30"),
  (r"\left\{ \right\}", r"\left\{ \right\}"),
  # Words.
  ("DNE", r"\text{undefined}"), (r"\text{Does not exist}", r"\text{undefined}"),
  (r"\text{no solution}", r"\emptyset"), ("END", "END"),
  # The last letter is an unknown, or a unit.
  ("2h + 3t", "2h + 3{t}"), (r"\pi r^2 h", r"\pi r^2 {h}"), ("5 m", "5 m"), ("x = 5 m", "x = 5 m"),
  ("2e^{3} m", "2e^{3} m"),
  # Dots.
  ("1, 2, ..., n", r"1, 2, \ldots , n"), (r"1,2,\cdots,n", r"1,2,\ldots ,n"),
  ("1,2,\u2026,n", r"1,2,\ldots ,n"), ("3.14...", "3.14"),
])  # fmt: skip
def test_one_notation(text, expected):
  assert unified(text) == expected


@pytest.mark.parametrize("rewriting", REWRITINGS, ids=lambda rewriting: rewriting.before)
def test_each_rewriting_has_an_example_that_needs_it(rewriting):
  assert unified(rewriting.before) == rewriting.after
  assert rewriting.pattern.search(rewriting.before) and any(trigger in rewriting.before for trigger in rewriting.triggers)


@pytest.mark.parametrize("text", ["2 3", "4 10/3", r"2\,3", "5 } 6", "{5", "1, 2 3", "(2 3)", "3.5 4"])
def test_what_is_no_formula(text):
  assert not is_formula(text)


@pytest.mark.parametrize("text", [
  "2, 3", r"\log_2 8", r"\frac 1 2", "2^3 5", r"\binom 5 2", r"1 & 2 \\ 3 & 4", "5 cm", r"\sqrt 2", "x_1 2", "12 : 30",
])  # fmt: skip
def test_formulas(text):
  assert is_formula(text)


def test_terms_around_dots():
  assert terms_around_dots(r"(1, f(2, 3), \ldots )") == [["1", ",", "f(2, 3)", ",", ""], [""]]
  assert terms_around_dots(r"1+2+\ldots +n") == [["1", "+", "2", "+", ""], ["", "+", "n"]]
  assert terms_around_dots(r"\{1, \ldots \}") == terms_around_dots(r"1, \ldots")
  assert terms_around_dots("1, 2, n") is None


def test_hostile_text_is_rewritten_in_milliseconds():
  pieces = ["1 ", "1,", "1,234", "1\\,", "1 000 ", "1 1/2 ", "1e5", "\\text{", "{", "\\frac{1}{", "...", "\\ldots ", "=1", "1}", "a "]
  pieces += ["0.\\overline{", "1.", "~1", "\\mathrm{e}"]
  start = time.process_time()
  for piece in pieces:
    for text in (piece * (3000 // len(piece)), piece * (3000 // len(piece)) + "t", "(" + piece * (3000 // len(piece)) + ")"):
      unified(text)
      is_formula(text)
      terms_around_dots(text)
  assert time.process_time() - start < 3
