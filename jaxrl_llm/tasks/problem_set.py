"""Construction of tasks from stored rows: prompts, selection of problems and held-out splits."""

import collections
import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.image_prompts import with_marks
from jaxrl_llm.pretrained.pictures import BadPicture, PictureConfig
from jaxrl_llm.tasks import prompt_template
from jaxrl_llm.tasks.answers import SPELT, reward_for, unfit
from jaxrl_llm.tasks.files import chats, report, storage, tables
from jaxrl_llm.tasks.files import columns as columns_lib
from jaxrl_llm.tasks.files.chats import CONVERSATION
from jaxrl_llm.tasks.files.columns import Convert, Unusable, short
from jaxrl_llm.tasks.files.report import OTHER_DATE, OTHER_LEVEL, Report, Tally
from jaxrl_llm.tasks.files.storage import IMAGES, Row, picture_digests
from jaxrl_llm.tasks.files.tables import INDEX, ConvertedRows
from jaxrl_llm.tasks.files.text_files import Records
from jaxrl_llm.tasks.image_prompts import check_reads_pictures, prompt_ids
from jaxrl_llm.tasks.task import Task
from jaxrl_llm.text_types import RewardFn, Tokenizer

COLUMNS = ("question", "answer", "level", "response", "id", "place")
"""Columns that every stored row has."""


class Setup(NamedTuple):
  """Settings common to all tasks.

  Attributes:
    levels: Difficulty levels to keep, in all splits; None keeps all.
    data_dir: Local folder that holds datasets; None is ~/.cache/jaxrl_llm/data.
    tokenizer: The checkpoint's tokenizer if the policy comes from one; None is the task's own byte
      tokenizer.
    bad_rows: Policy for unusable problems: "drop" leaves them out and counts them in the task's
      report; "error" raises at the first.
    max_prompt_tokens: Maximum length of a prompt, in tokens; longer ones are bad rows. None is no
      limit. Generated tasks ignore it.
    max_tokens: Maximum length of a demonstration with its prompt, in tokens; a longer one is
      a bad row, but only its demonstration is left out. None is no limit.
    max_answer_tokens: Maximum length of an answer that a response must spell, in tokens with the
      end token; problems with longer ones are bad rows. None is no limit.
    shots: Number of solved problems in front of every prompt; see `shots.with_shots`. A test with
      other problems (`test_name`, `test_levels`) shows solved problems of its own kind, and none if
      it has no training problems.
    shot_template: Text of a solved problem, with columns and `{solution}` in braces.
    vary_shots: Whether each prompt has solved problems of its own.
    pictures: Settings of the checkpoint's pictures; None for a policy that reads text alone, which
      tasks with pictures refuse.
    max_pictures: Maximum number of pictures of a problem; ones with more are bad rows. None is no
      limit.
    problems: Function from seeds to the problems of the run's environment, for the task
      `environment`; None if it has none.
    columns: Columns that others than the policy read, such as a teacher, which own files must have.
  """

  levels: Collection[int] | None = None
  data_dir: str | os.PathLike | None = None
  tokenizer: Tokenizer | None = None
  bad_rows: str = "drop"
  max_prompt_tokens: int | None = None
  max_tokens: int | None = None
  max_answer_tokens: int | None = None
  shots: int = 0
  shot_template: str = "{prompt}{solution}\n"
  vary_shots: bool = False
  pictures: PictureConfig | None = None
  max_pictures: int | None = None
  problems: Callable[[Sequence[int]], list[dict[str, Any]]] | None = None
  columns: tuple[str, ...] = ()


class Style(NamedTuple):
  """The prompts and rewards of a set.

  Attributes:
    template: Prompt template; see `prompt_template`.
    rewards: Names of the reward functions; see `Task.rewards`. If empty, `reward_for` chooses one.
    form_reward: Name of the reward for the form of an answer; see `Task.form_reward`.
    verifiers: Reward functions that the task itself provides; see `Task.verifiers`.
    test_fraction: Fraction of the problems held out, by a hash of the question, if the set has no
      test split.
    options: Number of options that the prompts show; 0 for none. See `reward_for`.
  """

  template: str
  rewards: tuple[str, ...]
  form_reward: str | None = None
  verifiers: Mapping[str, RewardFn] = {}
  test_fraction: float = 0.1
  options: int = 0

  def with_settings(self, prompt_template: str | None = None, reward: str | Sequence[str] | None = None) -> "Style":
    """Returns the style with the user's template and reward names, if they are set."""
    rewards = self.rewards if reward is None else (reward,) if isinstance(reward, str) else tuple(reward)
    return self._replace(template=prompt_template or self.template, rewards=rewards)


class ProblemSetEntry(NamedTuple):
  """A registry entry, which makes a task by its name.

  Attributes:
    load: Function `(setup, **settings) -> task`, whose keyword-only arguments are the settings.
    check: Function `(**settings)` that rejects invalid settings without reading any data.
    needs_settings: Whether the task requires settings, and so cannot be part of a mixture.
    is_of_environment: Whether an environment makes the problems and rewards the responses.
    has_parts: Whether it mixes other tasks, with weights and shots of their own.
  """

  load: Callable[..., Task]
  check: Callable[..., object] = lambda **settings: None
  needs_settings: bool = False
  is_of_environment: bool = False
  has_parts: bool = False


def _stem(row: Row) -> tuple[str, ...]:
  """Returns what alone decides a problem's split: its pictures, or else its question or its turns.

  So no picture is in both splits, and another system message makes no other problem.
  """
  if digests := picture_digests(row):
    return digests
  if CONVERSATION not in row:
    return (row["question"],)
  return (chats.as_json([x for x in json.loads(row[CONVERSATION]) if x["role"] != "system"]) or row["question"],)


def make_task(
  name: str,
  records: Mapping[str, Callable[[], Records]],
  convert: Convert,
  *,
  key: str,
  style: Style,
  setup: Setup,
  columns: Sequence[str] = (),
  shown: Sequence[str] = (),
  choose: Callable[[Row], bool] | None = None,
  bad_rows: str | None = None,
) -> Task:
  """Returns a task made of records, which are checked and stored once and then read from disk.

  Args:
    name: Name of the task.
    records: Records by split: "test", "train" or both. A problem in both stays in the first.
    convert: Function from a record to a row.
    key: Key of the dataset; see `tables.key_of`.
    style: Prompts and rewards.
    setup: Settings common to all tasks.
    columns: Columns of the rows besides `COLUMNS`.
    shown: Those of them that tell problems with the same question apart.
    choose: Predicate of the rows to keep; None keeps all.
    bad_rows: Policy for records that are not problems; None is the policy of `setup`.

  Raises:
    ValueError: If records cannot be used, the template has unknown columns, no problem has a
      requested level, a problem does not fit under the policy "error", or a split would be empty.
      One line.
  """
  if IMAGES in columns:
    check_reads_pictures(name, setup.pictures)
  seen: set[bytes] = set()
  distinct = {"seen": seen, "identity": columns_lib.identity_of(*shown)}
  generators = {
    split: lambda tally, read=read: columns_lib.usable_rows(read(), convert, tally, **distinct)
    for split, read in records.items()
  }
  title, bad_rows = name.replace(":", "_"), bad_rows or setup.bad_rows
  sources, counts = tables.open_table(
    title, key, generators, columns=(*COLUMNS, *columns), data_dir=setup.data_dir, bad_rows=bad_rows
  )
  tokenizer = setup.tokenizer or ByteTokenizer()
  if not style.rewards:
    stored = (row["answer"] for source in sources.values() for row in ConvertedRows(source, storage.plain))
    style = style._replace(rewards=(reward_for(stored, options=style.options),))
  first = storage.plain(next(iter(sources.values()))[0])
  prompt_template.check_template(style.template, [x for x in first if x not in ("place", INDEX, IMAGES, CONVERSATION)])
  tally = Tally(setup.bad_rows)
  kept, levels, fingerprint = _select(sources, style, tokenizer, setup, tally, choose)
  if setup.levels is not None and not set(setup.levels) & levels:
    known = ", ".join(map(str, sorted(levels)[:12])) + ("" if len(levels) <= 12 else f", ... {max(levels)}")
    raise ValueError(f"task.levels: found {tuple(setup.levels)}, but the problems of task {name} have {known}; None keeps all")
  counts = report.merge([counts._replace(kept=sum(map(len, kept.values()))), Report(0, 0, tally.dropped, tally.first)])
  for split, some in kept.items():
    if not some:
      raise ValueError(f"task {name}, {split}: found no problem that can be used ({report.in_words(counts)})")
  if "test" not in kept:  # A set without a training split is for tests only.
    kept = _split(name, kept["train"], style.test_fraction, report.in_words(counts))
  sources = {"train": sources.get("train", ()), "test": sources.get("test", sources.get("train"))}

  def rows(split: str, *, demonstrations: bool = False) -> ConvertedRows:
    indices = [one.index for one in kept.get(split, ()) if one.imitable or not demonstrations]
    return ConvertedRows(sources[split], _prompting(style.template, response=demonstrations), indices=indices)

  return Task(
    name=name,
    tokenizer=tokenizer,
    train=rows("train"),
    test=rows("test"),
    demonstrations=rows("train", demonstrations=True),
    rewards=style.rewards,
    form_reward=style.form_reward,
    verifiers=style.verifiers,
    report=counts,
    fingerprint=fingerprint,
  )


class _Kept(NamedTuple):
  """A kept row: its number in the file, index in the source and the draw that decides its split."""

  order: int
  index: int
  draw: float
  imitable: bool


def _select(
  sources: Mapping[str, Sequence], style: Style, tokenizer: Tokenizer, setup: Setup, tally: Tally, choose: Callable[[Row], bool] | None
) -> tuple[dict[str, list[_Kept]], set[int], str]:
  """Returns the kept rows of each split in order, the levels of all rows and a fingerprint."""
  kept: dict[str, list[_Kept]] = {}
  levels, digest, draws, shared = set(), hashlib.blake2b(digest_size=8), {}, collections.Counter()
  for split, source in sources.items():
    kept[split] = []
    for index, row in enumerate(ConvertedRows(source, _prompting(style.template, keep=(INDEX,)))):
      levels.add(row["level"])
      stem = _stem(row)
      shared[hash(stem)] += not row.get(IMAGES)
      if choose is not None and not choose(row):
        tally.bad(OTHER_DATE, row["place"], row["date"])
      elif _usable(row, tokenizer, style, setup, tally):
        imitable = bool(row["response"]) and _imitable(row, tokenizer, setup, tally)
        told = (row["prompt"], row["answer"], row["response"], *filter(None, [row.get(CONVERSATION)]))
        digest.update("\0".join((split, *told, *picture_digests(row))).encode())
        kept[split].append(_Kept(row[INDEX], index, storage.uniform("split", *stem), imitable))
        draws[split, index] = hash(stem), storage.uniform("split", *stem, row["prompt"])
    # A question of several problems, such as "Which is true?", must not decide for all of them.
    of_split = ((one, *draws[split, one.index]) for one in kept[split])
    kept[split] = sorted(one._replace(draw=other) if shared[stem] > 1 else one for one, stem, other in of_split)
  return kept, levels, digest.hexdigest()


def _prompting(template: str, *, response: bool = True, keep: Collection[str] = ()) -> Callable[[bytes], Row]:
  def convert(record: bytes) -> Row:
    stored = storage.plain(record).items()
    row = {name: value for name, value in stored if (name != INDEX or name in keep) and (name != CONVERSATION or value)}
    row = row if response else row | {"response": ""}
    return row | {"prompt": with_marks(prompt_template.render(template, row), len(row.get(IMAGES, ())))}

  return convert


def _usable(row: Row, tokenizer: Tokenizer, style: Style, setup: Setup, tally: Tally) -> bool:
  reward, most = style.rewards[0] if style.rewards else "", setup.max_answer_tokens
  try:
    length = len(prompt_ids(row, tokenizer, setup.pictures)) if row["prompt"] else 0
  except (BadPicture, Unusable) as error:
    tally.bad(error.reason, row["place"], error.detail)
    return False
  if setup.levels is not None and row["level"] not in setup.levels:
    tally.bad(OTHER_LEVEL, row["place"], f"level {row['level']}")
  elif kind := unfit(row["answer"], reward):
    tally.bad(f"answer is no {kind}", row["place"], f"{short(row['answer'])}, but the reward {reward} needs one")
  elif most is not None and reward in SPELT and _tokens_above(row["answer"], most - 1, tokenizer):
    tally.bad(f"answer longer than {most} tokens", row["place"], f"{short(row['answer'])}; see rollout.max_new_tokens")
  elif not length:
    tally.bad("prompt of zero tokens", row["place"])
  elif setup.max_pictures is not None and len(row.get(IMAGES, ())) > setup.max_pictures:
    tally.bad(f"more than {setup.max_pictures} picture(s)", row["place"], f"{len(row[IMAGES])}; see rollout.prompt_images")
  elif setup.max_prompt_tokens is not None and length > setup.max_prompt_tokens:
    tally.bad(f"prompt longer than {setup.max_prompt_tokens} tokens", row["place"], f"{length}; see rollout.prompt_buckets")
  else:
    return True
  return False


def _tokens_above(text: str, most: int, tokenizer: Tokenizer) -> bool:
  """Returns whether a text has more tokens than that; a token has at least a byte."""
  return len(text.encode()) > most and len(tokenizer.encode(text)) > most


def _imitable(row: Row, tokenizer: Tokenizer, setup: Setup, tally: Tally) -> bool:
  if setup.max_tokens is None:
    return True
  length = len(prompt_ids(row, tokenizer, setup.pictures)) + len(tokenizer.encode(row["response"])) + 1
  if length > setup.max_tokens:
    tally.bad(f"not imitated: longer than {setup.max_tokens} tokens with its prompt", row["place"], str(length))
  return length <= setup.max_tokens


def _split(name: str, rows: list[_Kept], fraction: float, counts: str) -> dict[str, list[_Kept]]:
  """Holds out a fraction of the rows; a split left empty gets the row nearest to the border."""
  if not 0 < fraction < 1:
    raise ValueError(f"task.test_fraction: found {fraction}, expected a number between 0 and 1, such as 0.1")
  if len(rows) < 2:
    expected = "one to train on and one to test; name a file of test problems: task.test_path"
    raise ValueError(f"task {name}: found one problem in all, expected {expected} ({counts})")
  draws = sorted(one.draw for one in rows)
  border = min(max(fraction, draws[0] + 2.0**-48), draws[-1])
  return {"train": [one for one in rows if one.draw >= border], "test": [one for one in rows if one.draw < border]}
