"""The corrections that a config names, checked together and applied in a fixed order."""

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.objectives.corrections import CORRECTIONS
from jaxrl_llm.objectives.mismatch import LEVELS, MISMATCH
from jaxrl_llm.objectives.rejections import MISMATCH_ESTIMATORS, OVER
from jaxrl_llm.objectives.settings import is_finite, is_number, one_of
from jaxrl_llm.segments import token_mean
from jaxrl_llm.settings import import_path
from jaxrl_llm.settings.signature import Setting, settings_of, unread
from jaxrl_llm.settings.values import holds
from jaxrl_llm.types import Objective, PolicyOutputs, TrainBatch

_CAP = {"cap": (lambda x: is_number(x) and x >= 1, "a number >= 1, so that k = 1 keeps its weight"), "level": one_of(LEVELS)}
_BAND = {
  "low": (lambda x: is_number(x) and 0 <= x <= 1, "a number from 0 to 1, so that k = 1 is inside"),
  "high": (lambda x: is_number(x) and x >= 1, "a number >= 1, so that k = 1 is inside"),
}

_FLOOR = (lambda x: is_number(x) and 0 <= x <= 1, "a number from 0 to 1, so that k = 1 keeps its weight")
_ABOVE_ZERO = (lambda x: is_finite(x) and x > 0, "a finite number > 0")
_BOUND = (lambda x: is_number(x) and x >= 0, "a number >= 0")

RULES = {
  "tis": _CAP | {"floor": _FLOOR},
  "mis": _CAP,
  "icepop": _BAND,
  "geometric_rejection": _BAND,
  "kpop": {"bound": _BOUND},
  "m2po": {"threshold": _ABOVE_ZERO},
  "sequence_tv": _CAP | {"low": _BOUND, "high": _BOUND},
  "rejection": {"estimator": one_of(MISMATCH_ESTIMATORS), "over": one_of(OVER), "limit": _BOUND},
  "off_policy_mask": {
    "delta": (lambda x: is_finite(x) and x >= 0, "a finite number of nats per token >= 0"),
    "anchor": one_of(("old", "sampler")),
  },
  "top_entropy": {"share": (lambda x: is_number(x) and 0 < x < 1, "a number > 0 and < 1, the share of tokens to keep")},
}
"""Rules of the settings of each correction: the test that one must pass, and the same in words."""


class Term(NamedTuple):
  """A correction with its settings.

  Attributes:
    text: The term as it was given.
    wrap: Function from an objective to the corrected one.
    needs: Optional fields of a batch that it reads.
    weighs: Whether it puts a weight on the mismatch of learner and sampler.
    replaces_old: Whether it takes another policy for π_old.
  """

  text: str
  wrap: Callable[[Objective], Objective]
  needs: frozenset[str]
  weighs: bool
  replaces_old: bool

  @property
  def measures_staleness(self) -> bool:
    """Whether it compares the current policy with the old one or the sampler's, not these two."""
    return not self.replaces_old and len(self.needs & MISMATCH) == 1


def factory(name: str) -> Callable[..., Objective]:
  """Returns a correction `(objective, **settings) -> Objective`.

  Args:
    name: Key of `CORRECTIONS`, or import path MODULE:FUNCTION of such a function.

  Raises:
    ValueError: If there is no such correction. One line, with the fix.
  """
  if ":" in name:
    return import_path.load_factory(name, where=f"{name!r}")
  if name not in CORRECTIONS:
    hint = did_you_mean(name, CORRECTIONS)
    raise ValueError(f"found {name!r}, expected one of {', '.join(CORRECTIONS)}, MODULE:FUNCTION{hint}")
  return CORRECTIONS[name]


def settings_by_name(name: str) -> dict[str, Setting]:
  """Returns the settings of a correction; see `factory`."""
  return settings_of(factory(name), RULES.get(name, {}))


def parse_term(text: str) -> tuple[str, dict[str, Any]]:
  """Splits NAME or NAME:SETTING=VALUE&SETTING=VALUE.

  Example:
    >>> parse_term("tis:cap=2.0&level=sequence"), parse_term("my_module:mine")
    (('tis', {'cap': 2.0, 'level': 'sequence'}), ('my_module:mine', {}))
  """
  name, _, settings = text.rpartition(":") if "=" in text.rpartition(":")[2] else (text, "", "")
  return name, {key: _value(value) for key, _, value in (part.partition("=") for part in filter(None, settings.split("&")))}


def _value(text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (SyntaxError, ValueError):
    return text


def corrected(objective: Objective, terms: Sequence[str] = ()) -> Objective:
  """Wraps an objective in corrections.

  They apply in the order of `CORRECTIONS`, from the inside out, those of other modules as the last
  but one. Weights multiply, so only the place of bypass matters: as the outermost, it sets what all
  others see as π_old.

  Args:
    objective: Objective to wrap.
    terms: Corrections with their settings; see `parse_term`.

  Returns:
    The wrapped objective, or the objective itself without terms.

  Raises:
    ValueError: If terms are illegal, exclude each other or have no effect on this objective, such
      as any correction of sft. All problems are in one line.

  Example:
    >>> from jaxrl_llm.objectives.gspo import gspo
    >>> sorted(corrected(gspo(), ["tis:cap=2.0", "off_policy_mask:delta=0.1"]).needs)
    ['old_logprobs', 'sampler_logprobs']
    >>> corrected(gspo(), ["tis:capp=2"])
    Traceback (most recent call last):
      ...
    ValueError: tis:capp=2: capp: found 2, expected None, because correction tis does not read it \
and takes cap=2.0, floor=0.0, level='token'; did you mean 'cap'?
  """
  for term in read_terms(objective, terms):
    objective = term.wrap(objective)
  return objective


def read_terms(objective: Objective, texts: Sequence[str]) -> list[Term]:
  """Returns corrections of an objective in the order in which they apply; see `corrected`.

  Raises:
    ValueError: If they cannot be used. One line.
  """
  parsed = [(text, *parse_term(text)) for text in texts]
  problems = [problem for text, name, settings in parsed for problem in _problems(text, name, settings)]
  names = [name for _, name, _ in parsed]
  problems += [f"found {name!r} twice, expected each correction once" for name in dict.fromkeys(names) if names.count(name) > 1]
  if problems:
    raise ValueError("; ".join(problems))
  if texts and not objective.correctable:
    why = "because the objective has no policy term that a weight could correct"
    raise ValueError("; ".join(f"found {text!r}, expected no such term, {why}" for text in texts))
  places = {name: place for place, name in enumerate(CORRECTIONS)}
  parsed.sort(key=lambda each: places.get(each[1], len(places) - 1.5))
  terms = [_term(objective, *each) for each in parsed]
  if problems := _conflicts(objective, terms):
    raise ValueError("; ".join(problems))
  return terms


def mismatch_weights(terms: Sequence[Term]) -> Callable[..., Float[Array, "N R"]] | None:
  """Returns a function that computes the weight of each token for the mismatch; None if none does.

  Args:
    terms: Corrections; see `read_terms`. Those that do not weigh the mismatch are left out.

  Returns:
    The function `(old_logprobs, sampler_logprobs, mask) -> weights`, for one sequence per row.

  Example:
    >>> from jaxrl_llm.objectives.gspo import gspo
    >>> weights = mismatch_weights(read_terms(gspo(), ["tis:cap=2.0"]))
    >>> weights(jnp.log(jnp.array([[0.5, 0.9]])), jnp.log(jnp.array([[1.0, 0.1]])), jnp.ones((1, 2))).tolist()
    [[0.5, 2.0]]
  """
  weighing = [term for term in terms if term.weighs]
  if not weighing:
    return None
  weight_itself = Objective(token_mean, lambda outputs, batch: (batch.importance, {}), correctable=True)
  token_loss = weighing[0].wrap(weight_itself).token_loss  # `read_terms` allows one.

  def weights(old_logprobs: ArrayLike, sampler_logprobs: ArrayLike, mask: ArrayLike) -> Float[Array, "N R"]:
    old, sampled, mask = map(jnp.asarray, (old_logprobs, sampler_logprobs, mask))
    ones = jnp.ones(mask.shape, int)
    return token_loss(PolicyOutputs(old), TrainBatch(ones, ones, ones, mask, jnp.zeros_like(mask), old, sampled))[0]

  return weights


def _problems(text: str, name: str, settings: Mapping[str, Any]) -> list[str]:
  """Returns what is wrong with a term by itself."""
  try:
    known = settings_by_name(name)
  except ValueError as error:
    return [str(error)]
  wrong = [f"{text}: {unread(key, x, known, f'correction {name}')}" for key, x in settings.items() if key not in known]
  wrong += [
    f"{text}: {key}: found {settings[key]!r}, expected {setting.check.words}"
    for key, setting in known.items()
    if key in settings and not holds(setting.check, settings[key])
  ]
  missing = [key for key, setting in known.items() if setting.is_required and key not in settings]
  wrong += [f"found {text!r}, expected a value of {key}, as in {name}:{key}=..." for key in missing]
  if not wrong and {"low", "high"} <= settings.keys() and not settings["low"] < settings["high"]:
    wrong = [f"{text}: low: found {settings['low']!r}, expected less than high"]
  return wrong


def _term(objective: Objective, text: str, name: str, settings: Mapping[str, Any]) -> Term:
  make = factory(name)
  wrap = lambda inner: import_path.make(make, settings, Objective, inner, where=repr(name))
  bare = wrap(objective._replace(needs=frozenset(), corrects_mismatch=False))
  with_old = wrap(objective._replace(needs=frozenset({"old_logprobs"})))
  return Term(text, wrap, bare.needs, bare.corrects_mismatch, "old_logprobs" not in with_old.needs)


def _conflicts(objective: Objective, terms: Sequence[Term]) -> list[str]:
  """Returns problems of terms that are legal alone, but not together or with this objective."""
  said = lambda term, why: f"found {term.text!r}, expected no such term, because {why}"
  weighing = [term for term in terms if term.weighs]
  problems = []
  if len(weighing) > 1:
    clashing = " and ".join(repr(term.text) for term in weighing)
    problems.append(f"found {clashing}, expected at most one of them, because each puts its own weight on the mismatch")
  replacing = [term for term in terms if term.replaces_old]
  if replacing:
    ignored = f"{replacing[0].text} uses the sampler's policy as the old one, which leaves no mismatch"
    problems += [said(term, ignored) for term in terms if term not in replacing and term.needs >= MISMATCH]
    if not any("old_logprobs" in needs for needs in (objective.needs, *(term.needs for term in terms if term not in replacing))):
      problems.append(said(replacing[0], "the objective never reads the old policy"))
  elif "sampler_logprobs" in objective.needs:
    twice = "the objective itself corrects the mismatch, which would count twice"
    problems += [said(term, twice) for term in weighing]
  return problems
