"""Limits of the algebra system: expressions that must never reach it, and those that must."""

import random
import time

import pytest

from jaxrl_llm.rewards.expression_limits import too_large


@pytest.mark.parametrize("text", [
  "9^{9^{9^{9}}}", "9^9^9", "9**9**9", "9^(9^(9^9))", "{9}^{{9}^{{9}^{9}}}", "9\\,^{9^9}", "9^{-9^9}",
  "\\left(9^{9}\\right)^{\\left(9^{9}\\right)}",
  "(((9^{999})^{999})^{999})", "(9^{99999})^{99999}", "10^{-99999999}", "0.5^{999999999}", "9^{9^9}-9^{9^9}+5", "2^{2^{2^{2^{2^{2}}}}}",
  "99999999!", "(99999999)!", "(9^9)!", "((10!)!)", "100!!", "9^{10!}", "10!^{10!}", "9^9!", "9^{9!}",
  "(" * 3000 + "1" + ")" * 3000, "9" * 200_000, "1 " * 500, "+".join("1" * 20_000), "+".join("1" * 400), "x" * 1001,
  "\\sum_{k=1}^{99999999} k", "\\prod_{k=1}^{1000000} k", "\\binom{1000000000}{500000000}", "\\gcd(99999999, 3)",
], ids=lambda text: text[:24])  # fmt: skip
def test_too_large(text):
  assert too_large(text)


@pytest.mark.parametrize("text", [
  "5", "", "-\\frac{1}{2}", "2^{2019}-1", "2^{100000}", "3^{3^{3}}", "2^{2^{10}}", "100!", "2000!", "n!", "(n+1)!",
  "\\frac{2011!}{2^{2011}}", "1,234,567",
  "x^{100}+y^{100}", "x^{10^{12}}", "x^10+x^9+x^8+x^7+x^6+x^5", "(x+1)^{20}", "(1+i)^{2020}", "2^{50}\\cdot 3^{50}\\cdot 5^{50}",
  "\\binom{2000}{1000}", "\\sum_{k=1}^{n} k", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\sqrt{2}^{\\sqrt{2}}",
  "e^{i\\pi}", "[0, 1)", "10^{100}",
  "\\left( 3, \\frac{\\pi}{2} \\right)", "y = -2x^{2} + 4x + 3", "1" * 400,
])  # fmt: skip
def test_typical_answers_pass(text):
  assert not too_large(text)


def test_any_text_is_judged_in_milliseconds():
  rng, pieces = random.Random(0), [*"0123456789^!(){}[]+-*/x ,.\\", "\\frac", "\\left(", "\\right)", "**", "^{"]
  texts = ["".join(rng.choices(pieces, k=rng.choice([5, 50, 900]))) for _ in range(500)]
  texts += [piece * (1000 // len(piece)) for piece in [*pieces, "9^", "9!", "{9}^", "(9^9)", "^{9", "9^{"]]
  start = time.process_time()
  for text in texts:
    too_large(text)
  assert time.process_time() - start < 3
