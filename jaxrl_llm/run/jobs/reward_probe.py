"""The probe of a run's reward, before anything is drawn: what earns what, and what looks broken."""

from collections.abc import Iterator, Sequence

from ml_collections import ConfigDict

from jaxrl_llm.evaluation import answer_reader
from jaxrl_llm.rewards import CallFn, WeightedReward, grade
from jaxrl_llm.rewards.outcome import Graded
from jaxrl_llm.rewards.probes import FORMS, Probe, Table, findings, measure, some_problems, table_lines
from jaxrl_llm.rewards.probes.texts import marked_forms, random_words, right_answer, shown_forms
from jaxrl_llm.run.observe.progress import visible
from jaxrl_llm.tasks import Row, Task
from jaxrl_llm.tasks.files.report import CAREFUL
from jaxrl_llm.text_types import Completion

NUM_PROBLEMS = 32
MAX_SECONDS = 60.0


def probe_lines(
  config: ConfigDict, task: Task, rewards: Sequence[WeightedReward], *, call: CallFn, has_turns: bool = False
) -> list[str]:
  """Grades probes by the run's own reward, and describes the results.

  Terms whose calls may cost money or much time (judges, reward models) are left out.

  Args:
    config: The run's config.
    task: Task with the problems.
    rewards: Terms of the run's reward.
    call: Caller of the reward functions, the run's grader.
    has_turns: Whether a response is a conversation with an environment, which cannot be prepared.

  Returns:
    Lines: a table of what earns what, and one line that begins with `CAREFUL` for each fault.
  """
  costly = [term.name for term in rewards if _is_costly(term)]
  terms = [term for term in rewards if not _is_costly(term)]
  rows = some_problems(task, NUM_PROBLEMS)
  if config.reward.at_random is not None:
    reason = "the reward is drawn at random (reward.at_random)"
  elif has_turns:
    reason = "a response is a conversation with an environment, whose turns cannot be prepared"
  elif rewards[0].name in costly or not any(term.weight and not term.monitors for term in terms):
    reason = f"{', '.join(costly) or 'no term'} gives the reward, and its calls may cost money or time"
  elif not any(str(row["answer"]).strip() or row["response"] for row in rows):
    reason = "the problems have neither a right answer to state nor a demonstration"
  else:
    return [visible(line) for line in _described(config, task, terms, rows, costly=costly, call=call)]
  return [f"the probe of the reward is left out: {reason}"]


def _described(
  config: ConfigDict,
  task: Task,
  terms: Sequence[WeightedReward],
  rows: Sequence[Row],
  *,
  costly: Sequence[str],
  call: CallFn,
) -> Iterator[str]:
  tokenizer, verifier, words = task.tokenizer, terms[0], random_words(0, 400)
  solved = dict(shots=config.task.shots, template=config.task.shot_template)
  table = measure(
    [row | {"answer": right_answer(verifier, row)} for row in rows],
    lambda probes: _graded(probes, terms, rows, task, call),
    forms=(*marked_forms(verifier), *FORMS),
    shown=shown_forms(rows, **solved, stop_strings=config.rollout.stop_strings),
    long_chars=min(20_000, config.rollout.max_new_tokens * len(words) // len(tokenizer.encode(words))),
    seconds=MAX_SECONDS,
  )
  paid = [term for term in terms if term.weight and not term.monitors]
  names = ", ".join(f"{term.name}{'' if term.weight == 1 else f' x {term.weight:g}'}" for term in paid)
  yield f"what earns what, by the run's own reward ({names}), on {table.num_problems} training problems:"
  yield from table_lines(table)
  if costly:
    yield f"left out of the probe: {', '.join(costly)}, whose calls may cost money or time"
  if table.num_problems < len(rows):
    yield f"grading is slow, so that only {table.num_problems} of {len(rows)} problems were probed"
  for term in paid:
    if term is not verifier and _is_own(term):  # It may well pay for a form or a length.
      yield from (f"{term.name} by itself: {x}" for x in findings(table.of_term(term.name, term.weight)))
  reads = _reading(verifier, table, rows[0])
  yield from (CAREFUL + fault for fault in findings(table, is_own=_is_own(verifier), reads=reads))


def _graded(
  probes: Sequence[Probe], terms: Sequence[WeightedReward], rows: Sequence[Row], task: Task, call: CallFn
) -> Graded:
  completions = []
  for probe in probes:
    ids = (*task.tokenizer.encode(probe.text), *([task.tokenizer.eos_id] if probe.stopped else []))
    completions.append(Completion(probe.text, ids, len(ids), probe.stopped))
  # The run's problems have no demonstration, which a reward could read.
  return grade(terms, completions, [rows[probe.row] | {"response": ""} for probe in probes], call=call)


def _is_costly(term: WeightedReward) -> bool:
  return term.service is not None or term.batch_fn is not None or any(map(_is_costly, term.routes))


def _is_own(term: WeightedReward) -> bool:
  """Returns whether a term, or that of a part of a mixture, is a function of the user's own."""
  imported = term.spec is not None and term.spec.name == "imported"
  return imported or any(map(_is_own, term.routes))


def _reading(verifier: WeightedReward, table: Table, row: Row) -> str | None:
  """Describes what a verifier reads in a stated right answer; None if it reads none at all."""
  if (reader := answer_reader(verifier)) is None:
    return None
  text = (table.form if table.form in table.forms else FORMS[-1]).replace("{}", table.example)
  answer = reader(Completion(text, (), 1, True), row)
  return f" (from {text!r} it reads {'nothing' if answer is None else repr(answer.text)})"
