"""Per-token advantages from the log-probabilities of teachers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.devices import hosts
from jaxrl_llm.devices.mesh import num_row_shards, own_row_shards, place_tokens
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.packing import Layout, Trajectory
from jaxrl_llm.learner.teacher_programs import Scores, read_by_teacher
from jaxrl_llm.rollouts.jobs import Examples
from jaxrl_llm.run.setup.start import Run
from jaxrl_llm.types import Metrics, Params, TrainBatch


def add_teacher_advantages(
  run: Run,
  placed: list[TrainBatch],
  minibatches: Sequence[Sequence[Trajectory]],
  layouts: Sequence[Layout],
  examples: Sequence[Examples],
) -> tuple[list[TrainBatch], list[Metrics], dict[str, float]]:
  """Adds the teachers' advantages to those of each mini-batch, if the config asks for them.

  A single teacher reads the rows of the mini-batch. With prompts of its own, or with several
  teachers, each reads rows of its own, and its scores are laid into those of the mini-batch.

  Args:
    run: RL run.
    placed: The mini-batches on the devices.
    minibatches: Sequences of each mini-batch.
    layouts: Their places.
    examples: Task row of each sequence.

  Returns:
    The mini-batches, their metrics, and the step's metrics of each of several teachers.
  """
  section, learner = run.config.teacher, run.experiment.learner
  if not section.opd_coef:
    return placed, [{} for _ in placed], {}
  of_each = {}
  if run.experiment.privileged is None and section.paths is None:
    scores = [learner.teachers[""].score(run.teachers[""], read_by_teacher(x)) for x in placed]
  else:
    scored = scores_of_rows(run, minibatches, examples)
    scores = [place_tokens(run.experiment.mesh, lay_scores(*of_batch)) for of_batch in zip(scored, minibatches, layouts, strict=True)]
    if section.paths is not None:
      of_each = kl_of_each(run, placed, scored, minibatches, layouts, examples)
  advised = [learner.advise(of_batch, read_by_teacher(x)) for of_batch, x in zip(scores, placed, strict=True)]
  placed = [x._replace(advantages=advantages) for x, (advantages, _) in zip(placed, advised, strict=True)]
  return placed, [metrics for _, metrics in advised], of_each


def with_teachers_prompts(run: Run, sequences: Sequence[Trajectory], examples: Examples) -> list[Trajectory]:
  """Returns the sequences behind the prompts that their teacher reads.

  Args:
    run: RL run.
    sequences: Sequences of a mini-batch.
    examples: Task row of each.
  """
  encode = run.experiment.privileged
  if encode is None:
    return list(sequences)
  return [packing.with_prompt(sequence, encode(row)) for sequence, row in zip(sequences, examples, strict=True)]


def teacher_of(run: Run, example: dict[str, Any]) -> str:
  """Returns the name of a problem's teacher, "" for the only one."""
  section = run.config.teacher
  return "" if section.paths is None else str(example[section.column])


def teacher_params(run: Run, name: str) -> Params:
  """Returns the weights of a teacher, which may be those of the policy, now or as RL began."""
  section = run.config.teacher
  if section.path == "self":
    return run.reference if section.frozen else run.state.params
  return run.teachers[name]


def scores_of_rows(
  run: Run, minibatches: Sequence[Sequence[Trajectory]], examples: Sequence[Examples]
) -> list[list[Scores]]:
  """Returns each sequence's scores by its own teacher, for the tokens of the response alone."""
  experiment, learner = run.experiment, run.config.learner
  sizes = run.config.learner if experiment.privileged is None else run.config.teacher
  options = dict(row_tokens=sizes.row_tokens, row_buckets=sizes.row_buckets, share_prompts=learner.share_prompts)
  options |= dict(num_shards=num_row_shards(experiment.mesh), own_shards=own_row_shards(experiment.mesh))
  options |= dict(group_size=run.config.rollout.group_size)
  passes = []
  for number, (sequences, rows) in enumerate(zip(minibatches, examples, strict=True)):
    sequences = with_teachers_prompts(run, sequences, rows)
    names = [teacher_of(run, row) for row in rows]
    for name, programs in experiment.learner.teachers.items():
      own = [i for i, of in enumerate(names) if of == name]
      if own:
        layout = packing.arrange([sequences[i] for i in own], **options)
        batch = packing.pack([sequences[i] for i in own], layout)._replace(routing=None)
        scored = programs.score(teacher_params(run, name), read_by_teacher(place_tokens(experiment.mesh, batch)))
        passes.append((number, own, [sequences[i].num_prompt for i in own], layout, scored))
  of_sequences: list[list] = [[None] * len(sequences) for sequences in minibatches]
  # One wait for all passes.
  for (number, own, prompts, layout, _), scores in zip(passes, hosts.to_host([x[-1] for x in passes]), strict=True):
    lifted = zip(*(packing.lift(array, layout) for array in scores), strict=True)
    for i, length, arrays in zip(own, prompts, lifted, strict=True):
      of_sequences[number][i] = Scores(*(x[length:] for x in arrays))
  return of_sequences


def lay_scores(scores: Sequence[Scores], sequences: Sequence[Trajectory], layout: Layout) -> Scores:
  """Lays scores of responses into the rows of a mini-batch; zeros for its prompts."""
  behind = lambda x, sequence: np.concatenate([np.zeros(sequence.num_prompt, np.float32), x])
  whole = lambda arrays: [behind(x, sequence) for x, sequence in zip(arrays, sequences, strict=True)]
  return Scores(*(packing.lay(whole(arrays), layout) for arrays in zip(*scores, strict=True)))


def kl_of_each(
  run: Run,
  placed: Sequence[TrainBatch],
  scored: Sequence[Sequence[Scores]],
  minibatches: Sequence[Sequence[Trajectory]],
  layouts: Sequence[Layout],
  examples: Sequence[Examples],
) -> dict[str, float]:
  """Returns `teacher/kl/NAME`, the estimate of the reverse KL to each teacher that scored a token.

  The estimate is that of `teacher/kl`, over the counted tokens of the step.
  """
  totals: dict[str, list[float]] = {}
  olds = hosts.to_host([x.old_logprobs for x in placed])
  for old, scores, sequences, layout, rows in zip(olds, scored, minibatches, layouts, examples, strict=True):
    for before, score, sequence, row in zip(packing.lift(old, layout), scores, sequences, rows, strict=True):
      counted, start = sequence.mask[sequence.num_prompt :] > 0, sequence.num_prompt
      gaps = (before[start:] - score.logprobs)[counted]
      total = totals.setdefault(teacher_of(run, row), [0.0, 0])
      total[0], total[1] = total[0] + float(np.sum(gaps)), total[1] + len(gaps)
  return {f"teacher/kl/{name}": total / count for name, (total, count) in sorted(totals.items()) if count}
