"""Truth of the pages: links, fields, defaults and commands agree with the code.

Read are the Markdown pages of the repository. Entries of the log are as old as their dates, and are
read for links only. CONTRIBUTING.md says how a page states a default.
"""

import argparse
import ast
import contextlib
import importlib
import inspect
import io
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from experiments.launch import __main__ as launch
from jaxrl_llm import tasks
from jaxrl_llm.advantages.estimators import ESTIMATORS
from jaxrl_llm.cli.__main__ import COMMANDS
from jaxrl_llm.cli.new import FILES
from jaxrl_llm.config import command_line, entries, fields
from jaxrl_llm.objectives import OBJECTIVES
from jaxrl_llm.rewards.sandbox.backends import BACKENDS
from jaxrl_llm.rollouts.environments import ENVIRONMENTS, FAMILIES
from jaxrl_llm.settings.values import holds

ROOT = pathlib.Path(__file__).resolve().parents[1]
LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
ALL = {path: (ROOT / path).read_text(encoding="utf-8") for path in LISTED if not path.startswith(("jaxrl_llm/cli/template", "tests/"))}
PAGES = {path: text for path, text in ALL.items() if not path.startswith(("experiments/log/", "experiments/LOG"))}

LECTURES = {
  path.relative_to(ROOT).as_posix(): re.sub(r"^# ?", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
  for path in sorted((ROOT / "experiments" / "notebooks").glob("0*.py"))
}
"""Texts of the lectures. Their links are checked with the notebooks."""

NEW_FILES = {*FILES.values(), "configs/drpo.py"}
"""Files that a reader makes: those of a new project, and the config of a new objective."""

NO_FIELDS = {
  "model.decode": "a method",
  "model.extend": "a method",
  "model.safetensors": "a file",
  "learner.micro_batches": "a field of recorded runs",
  "objective.width": "a setting of the objective that experiments/README.md adds",
}
"""Names on the pages that look like fields."""

NAMED = {
  "objective": OBJECTIVES,
  "advantage": ESTIMATORS,
  "task": tasks.names(),
  "environment": (*ENVIRONMENTS, *(f"{family}:http://host" for family in FAMILIES)),
  "sandbox": BACKENDS,
}
"""Names of the entries of each open section that have settings of their own."""

FIELD = r"(?:--)?(?:config\.)?((?:" + "|".join(fields.SECTIONS) + r")\.[a-z_0-9]+)"


def known_settings():
  """Returns the settings of all entries by path, each with every entry that has it."""
  known = {}
  for section, names in {**NAMED, "alarms": [""]}.items():
    for name in names:
      for setting, value in entries.settings(section, {f"{section}.{fields.OPEN[section]}": name} if name else {}).items():
        known.setdefault(f"{section}.{setting}", []).append(value)
  return known


SETTINGS = known_settings()
TABLES = (fields.FIELDS, fields.REWARD_MODEL_FIELDS)


# Links.


@pytest.mark.parametrize("page", ALL)
def test_every_link_of_a_page_exists(page):
  assert not dead_links(page, ALL[page])


def dead_links(page, text):
  """Returns the links that lead to no file, to one without a page, or to no heading of a page."""
  dead, prose = [], re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
  targets = [*re.findall(r"\]\(([^)\s]+)\)", prose), *re.findall(r'(?:href|src)="([^"]+)"', prose)]
  for path, _, heading in (target.partition("#") for target in targets if "://" not in target):
    file = (ROOT / page).parent / path if path else ROOT / page
    if not file.exists() or not on_site(file):
      dead.append(path)
    elif heading and file.suffix == ".md" and heading not in anchors(text if not path else file.read_text(encoding="utf-8")):
      dead.append(f"{path}#{heading}")
  return dead


def on_site(file):
  """Says if the site has a page of a file. Its build says so too, but takes a minute."""
  path = file.resolve().relative_to(ROOT).as_posix()
  shown = path.endswith((".ipynb", ".md", ".png", ".py", ".svg")) or path.startswith(("LICENSE", "docs/schemas/"))
  return shown or (file / "README.md").is_file()


def anchors(text):
  """Returns the anchors of a page's headings."""
  titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)]
  return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_a_dead_link_is_seen():
  text = "# One heading\n[a](nowhere.md) [b](README.md#one) [c](#one-heading) [d](https://example.com/x.md)\n```\n[e](gone)\n```"
  assert dead_links("CONTRIBUTING.md", f"{text} [f](pyproject.toml)") == ["nowhere.md", "README.md#one", "pyproject.toml"]


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page):
  named = re.findall(r"`((?:jaxrl_llm|configs|experiments|tests)/[\w./]*)`", PAGES[page])
  assert not [path for path in named if not (ROOT / path).exists() and path not in NEW_FILES]


# Fields and their values.


@pytest.mark.parametrize("page", PAGES | LECTURES)
def test_every_field_that_a_page_names_exists(page):
  assert not wrong_fields((PAGES | LECTURES)[page])


def wrong_fields(text):
  """Returns the fields in code spans that do not exist, and the values that they do not take."""
  wrong = []
  for path, value in re.findall(rf"`{FIELD}(?:=([^`]*))?`", text):
    if path in NO_FIELDS:
      continue
    rows = [table[path] for table in TABLES if path in table] + SETTINGS.get(path, [])
    value = re.split(r"\s+--", value)[0]  # Other flags follow.
    if not rows:
      wrong.append(path)
    elif value and not is_placeholder(value) and not any(takes(row, value) for row in rows):
      wrong.append(f"{path}={value}")
  return wrong


def is_placeholder(value):
  """Returns whether a value stands for the reader's own, as in `--config.seed=N`."""
  return "..." in value or bool(re.fullmatch(r"\$?[A-Z_]+|[a-z]", value))


def takes(row, text):
  """Returns whether a field or a setting takes the value that a text means."""
  meanings = [text, text.strip("'\"")]
  with contextlib.suppress(ValueError, SyntaxError):
    meanings.append(ast.literal_eval(meanings[1] if text.startswith('"(') else text))
  return (None in meanings and (row.default is None or row.check.optional)) or any(holds(row.check, each) for each in meanings)


def test_a_wrong_field_and_a_wrong_value_are_seen():
  text = "`rollout.max_new_tokens` `rollout.max_new_token` `--config.rollout.group_size=0` `learner.schedule=N` `objective.tau_poss`"
  assert wrong_fields(text) == ["rollout.max_new_token", "rollout.group_size=0", "objective.tau_poss"]


# Defaults.


@pytest.mark.parametrize("page", PAGES)
def test_every_default_that_a_page_states_is_the_default(page):
  assert not wrong_defaults(PAGES[page])


def stated_defaults(text):
  """Yields fields with the words for their defaults, of texts and of tables."""
  yield from re.findall(rf"`{FIELD}`\s+\((?:the\s+)?default:?\s+(?:is\s+)?`?([^`;,)]+)", text)
  for table in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
    head, _, *rows = [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in table.splitlines()]
    if "default" in head:
      for row in rows:
        for path in re.findall(rf"`{FIELD}`", row[0]):
          yield path, row[head.index("default")].strip("`")


def wrong_defaults(text):
  """Returns the stated defaults that no field or setting of that name has."""
  wrong = []
  for path, words in stated_defaults(text):
    rows = [table[path] for table in TABLES if path in table] + SETTINGS.get(path, [])
    # The sentence of a field that is None may say which value that stands for.
    if not any(means(words, row.default) or f"None: {words}." in row.sentence for row in rows):
      wrong.append(f"{path}: {words}, and not {[row.default for row in rows]}")
  return wrong


def means(words, default):
  """Returns whether the words for a default mean a value; a unit may follow a number."""
  if default is None or default == ():
    return words in ("none", "None", "()", "off")
  if isinstance(default, bool):
    return words in (("True", "yes", "on") if default else ("False", "no", "off"))
  if isinstance(default, int | float):
    return float(words.split()[0].replace(",", "")) == default
  return words.strip("'\"") == str(default)


def test_a_wrong_default_is_seen():
  text = "`rollout.group_size` (default 8 samples) `seed` (default 3) `rollout.group_size`\n(default 9)\n"
  table = "| field | default |\n| --- | --- |\n| `eval.samples` | 4 |\n| `teacher.frozen` | yes |\n| `teacher.path` | none |\n"
  assert [line.partition(",")[0] for line in wrong_defaults(text + table)] == ["rollout.group_size: 9", "teacher.frozen: yes"]


# Commands.


@pytest.mark.parametrize("page", PAGES | LECTURES)
def test_every_command_of_a_page_is_understood(page):
  problems = [f"{shlex.join(command)}: {problem}" for command in commands((PAGES | LECTURES)[page]) if (problem := refusal(*command))]
  assert not problems


def commands(text):
  """Yields the commands of the repository's modules as [MODULE, *ARGUMENTS]."""
  blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
  spans = re.findall(r"`([^`\n]*(?:\n[^`\n]+)?)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
  for line in [line for block in blocks for line in block.replace("\\\n", " ").splitlines()] + spans:
    if not re.search(r"\bpython3? -m (jaxrl_llm|experiments|tests)|\bjaxrl-llm \w", line) or re.search(r"\.\.\.|\[--|\[[A-Z]", line):
      continue
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split, words = True, []
    for word in [*lexer, ";"]:
      if set(word) <= set(";&|<>"):
        if command := of_words(words):
          yield command
        words = []
      else:
        words.append(word)


def of_words(words):
  """Returns the module and the arguments of one command, or None if it is not one of ours."""
  for number, word in enumerate(words):
    if word == "-m" and words[number + 1].split(".")[0] in ("jaxrl_llm", "experiments", "tests"):
      return words[number + 1 :]
    if word == "jaxrl-llm" and words[number + 1] in COMMANDS:
      return [COMMANDS[words[number + 1]].module, *words[number + 2 :]]
  return None


class Understood(BaseException):
  """Raised in place of what a command would do after its arguments are parsed."""


def refusal(module, *args):
  """Returns why a command would be refused, or an empty string. Nothing of it is run."""
  path = ROOT / module.replace(".", "/")
  file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__main__.py"
  if not file.exists() or not args:
    return "" if file.exists() else "no such module"
  config, overrides, rest = command_line.split(args)
  overrides = {field: texts for field, texts in overrides.items() if not is_placeholder(texts[-1])}
  try:
    if config or overrides:
      command_line.override(command_line.load(of_ours(config)) if config else fields.base(), dict(overrides))
  except command_line.UsageError as error:
    return str(error)
  if missing := [path for path in re.findall(r"--\w+=((?:configs|experiments)/[\w/]+\.py)", " ".join(rest)) if not (ROOT / path).exists()]:
    return f"{missing[0]}: no such file"
  if module == "experiments.claims" and args and not args[0].startswith("-"):
    from experiments.claims.claim import CLAIMS

    name = "E20" if is_placeholder(args[0]) else args[0]
    return refusal(CLAIMS[name].study, *args[1:]) if name in CLAIMS else "no such claim"
  source = file.read_text(encoding="utf-8")
  if re.search(r"\.parse_args\(|^from experiments\.claims import .*\bstudy(_command)?$", source, flags=re.MULTILINE):
    return refusal_of_parser(main_module(module), args, program=[module] if "main(sys.argv)" in source else [])
  if module == "experiments.launch":
    with contextlib.redirect_stdout(io.StringIO()) as help_text:
      launch.main(["--help", *rest])
    source = help_text.getvalue()
  # Parsers by hand name their flags where they describe them.
  unknown = [flag for flag in re.findall(r"^--(\w+)", "\n".join(rest), flags=re.MULTILINE) if not re.search(rf"--{flag}\b", source)]
  return f"{unknown} not in {file.name}" if unknown else ""


def of_ours(config):
  """Returns a config that exists, for one that stands for the reader's own."""
  file = config.partition(":")[0]
  own = file in NEW_FILES or re.search(r"[A-Z]{3}|my_", file)
  return "configs/gspo.py:tiny" if own else config


def refusal_of_parser(module, args, *, program):
  """Returns what a module's `argparse` parser says to arguments, and stops before they are used."""
  parse, said = argparse.ArgumentParser.parse_args, io.StringIO()

  def stop(parser, args=None, namespace=None):
    parse(parser, args, namespace)
    raise Understood

  main = importlib.import_module(module).main
  with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
    patch.setattr(argparse.ArgumentParser, "parse_args", stop)
    patch.setattr(sys, "argv", [module, *args])
    patch.setattr(subprocess, "Popen", None)  # A main that does more than parse starts nothing.
    try:
      main(*([[*program, *args]] if inspect.signature(main).parameters else []))
    except Understood:
      return ""
    except SystemExit:
      pass
  return (said.getvalue().strip() or "its main did not parse").splitlines()[-1]


def main_module(module):
  """Returns the module that `python -m` runs."""
  return f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module


def test_a_wrong_command_is_seen():
  text = """`python -m jaxrl_llm.mian --config=configs/gspo.py` `python -m experiments.claims E99`
```sh
.venv/bin/python -m jaxrl_llm.main --config=configs/gspo.py:tinny --dry_run
python -m jaxrl_llm.main --config=configs/gspo.py:tiny \\
  --config.rollout.groupsize=4   # a comment
X=1 python -m experiments.claims E20 --smock && python -m jaxrl_llm.report --sreve runs/a
python -m experiments.launch --config=configs/gspo.py --sweep=FILE --target=xpk --tpu_tipe=v5p-128
python -m experiments.launch --config=configs/gspo.py --sweep=experiments/sweeps/clip_rage.py
python -m jaxrl_llm.evaluate --chekpoint=runs/a; jaxrl-llm export runs/a exported --into=there
```
"""
  problems = [refusal(*command) for command in commands(text)]
  words = ("'tinny'", "groupsize", "--smock", "--sreve", "tpu_tipe", "clip_rage", "chekpoint", "--into", "no such module", "no such claim")
  assert len(problems) == len(words) and all(word in problem for word, problem in zip(words, problems, strict=True)), problems
