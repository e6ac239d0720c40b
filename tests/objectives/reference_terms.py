"""Reference of what joins an objective: corrections, teachers, and coefficients.

As `reference`, it imports nothing of the package. `reference` writes its sections of golden.json.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.objectives import reference_corrections

DIVERGENCE_MASK = [[1, 0, 1], [0, 1, 1]]
BETAS = (0.0, 0.3, 0.5, 1.0)
TEMPERATURES = (1.0, 1.7)


class Divergence(NamedTuple):
  """A divergence from a teacher, and its gradient in the student's logits, [B, T, V]."""

  loss: float
  grad_student_logits: list[list[list[float]]]


def softmax(logits: list[float]) -> list[float]:
  """Computes probabilities."""
  weights = [math.exp(x - max(logits)) for x in logits]
  return [w / math.fsum(weights) for w in weights]


def divergence(student, teacher, mask, *, beta: float, temperature: float = 1.0) -> Divergence:
  """Computes loss and gradient from the definition, token by token.

  JSD = β·KL(π_T‖m) + (1 − β)·KL(π‖m),  m = β·π_T + (1 − β)·π;  β = 0: KL(π_T‖π), β = 1: KL(π‖π_T)

  The chain rule goes through the student's probabilities: ∂D/∂z_v = q_v·(D'_v − Σ_u q_u·D'_u).
  """
  places = [(b, t) for b, row in enumerate(mask) for t, m in enumerate(row) if m]
  losses, grad = [], [[[0.0] * len(logits) for logits in row] for row in student]
  for b, t in places:
    q, p = (softmax([float(z) / temperature for z in x[b][t]]) for x in (student, teacher))
    if beta == 0:
      value, by_q = math.fsum(x * math.log(x / y) for x, y in zip(p, q)), [-x / y for x, y in zip(p, q)]
    elif beta == 1:
      value, by_q = math.fsum(y * math.log(y / x) for x, y in zip(p, q)), [math.log(y / x) + 1 for x, y in zip(p, q)]
    else:
      m = [beta * x + (1 - beta) * y for x, y in zip(p, q)]
      value = beta * math.fsum(x * math.log(x / z) for x, z in zip(p, m))
      value += (1 - beta) * math.fsum(y * math.log(y / z) for y, z in zip(q, m))
      by_q = [(1 - beta) * (-beta * x / z + math.log(y / z) + 1 - (1 - beta) * y / z) for x, y, z in zip(p, q, m)]
    centre = math.fsum(y * slope for y, slope in zip(q, by_q))
    losses.append(value / len(places))
    grad[b][t] = [y * (slope - centre) / temperature / len(places) for y, slope in zip(q, by_q)]
  return Divergence(math.fsum(losses), grad)


def teacher_advantages(coef: float, mask, old, teacher, advantages, advice: str = "opd") -> list[list[float]]:
  """Computes what a teacher adds to the advantages of the counted tokens."""
  result = [[0.0 for _ in row] for row in mask]
  for b, row in enumerate(mask):
    gaps = {t: teacher[b][t] - old[b][t] for t, m in enumerate(row) if m}
    for t, gap in gaps.items():
      advantage = advantages[b][t]
      before, whole = (math.fsum(abs(x) for j, x in gaps.items() if j < end) for end in (t, len(row)))
      if advice == "opd":
        result[b][t] = coef * gap
      elif advice == "iw_opd":
        result[b][t] = coef * (1 + 0.5 * (1 - before / whole)) * gap
      elif advice == "rlsd":
        scale = min(max(math.exp(gap if advantage > 0 else -gap), 0.8), 1.2)
        result[b][t] = advantage * ((1 - coef) + coef * scale) - advantage
      elif advice == "sdar":
        result[b][t] = coef / (1 + math.exp(-5 * gap))
  return result


def entropy_coefficients(first: float, target: float, step: float, entropies: list[float | None]) -> list[float]:
  """Follows an entropy coefficient from step to step; an entropy of None could not be measured."""
  coefs = [first]
  for entropy in entropies:
    sign = 0 if entropy is None else (entropy < target) - (entropy > target)
    coefs.append(max(0.0, coefs[-1] + sign * step))
  return coefs[1:]


# ---------------------------------------------------------------------------------------------------------------------------------------
# Cases
# ---------------------------------------------------------------------------------------------------------------------------------------


def logits(scale: float, rate: float, phase: float) -> list[list[list[float]]]:
  """Makes logits [2, 3, 7], rounded so that the file shows them in full."""
  return [[[round(scale * math.sin(rate * (21 * b + 7 * t + v) + phase), 3) for v in range(7)] for t in range(3)] for b in range(2)]


def divergences() -> dict[str, Any]:
  """Computes the section of divergences."""
  inputs = {"mask": DIVERGENCE_MASK, "student_logits": logits(2.0, 1.0, 0.0), "teacher_logits": logits(3.0, 0.7, 1.5)}
  cases = []
  for beta in BETAS:
    for temperature in TEMPERATURES:
      settings = {"beta": beta} | ({} if temperature == 1 else {"temperature": temperature})
      result = divergence(inputs["student_logits"], inputs["teacher_logits"], DIVERGENCE_MASK, **settings)
      cases.append({"settings": settings} | result._asdict())
  return {"defaults": {"temperature": 1.0}, "inputs": inputs, "cases": cases}


def sections(evaluate: Callable[..., Any], reads: Callable[..., list[str]], inputs: dict[str, Any], margin: float) -> dict[str, Any]:
  """Computes the sections beside the objectives.

  Args:
    evaluate: `reference.reference`.
    reads: `reference.reads`.
    inputs: Batches by name.
    margin: Minimum distance of a case from a bound.
  """
  taught = []
  for batch, settings in (
    ("far", {"coef": 1.0}), ("near", {"coef": 0.25}), ("far", {"coef": 1.0, "advice": "iw_opd"}),
    ("near", {"coef": 0.5, "advice": "iw_opd"}), ("far", {"coef": 0.5, "advice": "rlsd"}), ("near", {"coef": 1.0, "advice": "rlsd"}),
    ("far", {"coef": 0.1, "advice": "sdar"}), ("near", {"coef": 1.0, "advice": "sdar"}),
  ):  # fmt: skip
    fields = [inputs[batch][field] for field in ("mask", "old_logprobs", "ref_logprobs", "advantages")]
    made = teacher_advantages(settings["coef"], *fields, advice=settings.get("advice", "opd"))
    taught.append({"settings": settings, "inputs": batch, "advantages": made})
  # Numbers of few binary digits, so that no rounding decides whether a coefficient is 0.
  followed = []
  for settings, entropies in (
    ({"first": 0.0, "target": 0.5, "step": 0.125}, [0.75, 0.25, 0.25, 0.5, None, 0.625, 0.375]),
    ({"first": 0.25, "target": 0.25, "step": 0.1875}, [0.5, 0.5, 0.1, 0.1, 0.3]),
  ):
    followed.append({"settings": settings, "entropies": entropies, "coefficients": entropy_coefficients(**settings, entropies=entropies)})
  return {
    "corrections": reference_corrections.section(evaluate, reads, inputs, margin),
    "divergences": divergences(),
    "teacher_advantages": {"cases": taught},
    "entropy_coefficients": {"cases": followed},
  }
