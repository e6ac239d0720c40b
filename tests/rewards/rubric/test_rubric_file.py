"""Rubric files: what is read from them, and one line for each mistake."""

import json
import re
import sys

import pytest

from jaxrl_llm.config import check
from jaxrl_llm.rewards.rubric import Criterion, read_rubric, rubric_problems
from tests.rewards.rubric.fake import written
from tests.runs import ROOT, tiny_config

URL = "http://localhost:8000/v1"
SECRET = "sk-Abc123-secret"


def yes_no(**fields):
  return [{"name": "good", "description": "Is it?"} | fields]


def test_the_example_is_a_rubric(monkeypatch):
  monkeypatch.setenv("OPENAI_BASE_URL", f"{URL}/")
  rubric = read_rubric(ROOT / "configs/rubrics/explanation.yaml")
  assert (rubric.name, rubric.url, rubric.api_key_env, rubric.temperature) == ("explanation", URL, None, 0)
  assert [(x.name, x.weight, x.low, x.high, x.is_yes_no) for x in rubric.criteria] == [
    ("correct", 3, 0, 1, True), ("sound", 2, 0, 1, True), ("clear", 1, 1, 5, False), ("flatters", -1, 0, 1, True),
  ]  # fmt: skip
  assert rubric.extra == {"chat_template_kwargs": {"enable_thinking": False}}


def test_yaml_and_json_with_the_same_keys_are_the_same(tmp_path):
  fields = {"url": URL, "model": "m", "criteria": yes_no(weight=0.5, scale="-1..1")}
  (tmp_path / "r.json").write_text(json.dumps(fields))
  (tmp_path / "r.yaml").write_text(
    f"url: {URL}\nmodel: m\ncriteria:\n  - name: good\n    description: Is it?\n    weight: 0.5\n    scale: -1..1\n"
  )
  one, other = read_rubric(tmp_path / "r.json"), read_rubric(tmp_path / "r.yaml")
  assert one == other._replace(path=one.path)
  assert one.criteria == (Criterion("good", "Is it?", 0.5, -1, 1, False),)


@pytest.mark.parametrize(
  ("fields", "line"),
  [
    ({"criteria": None}, "criteria: found nothing, expected a list of 1 to 50 criteria"),
    ({"criteria": []}, r"criteria: found \[\], expected a list"),
    ({"criteria": ["good"]}, r"criteria\[0\]: found 'good', expected a mapping"),
    ({"criteria": yes_no(weight="heavy")}, r"criteria\[0\].weight: found 'heavy', expected a number"),
    ({"criteria": yes_no(weight=float("nan"))}, r"criteria\[0\].weight: found nan, expected a number"),
    ({"criteria": yes_no(weigth=1)}, r"criteria\[0\].'weigth': found .* did you mean 'weight'"),
    ({"criteria": yes_no(scale="5..1")}, r"criteria\[0\].scale: found '5..1', expected 'yes/no', or bounds"),
    ({"criteria": yes_no(name="Good one")}, r"criteria\[0\].name: found 'Good one', expected lower-case"),
    ({"criteria": yes_no() * 2}, r"criteria\[1\].name: found 'good' twice"),
    ({"criteria": yes_no(weight=-1)}, r"criteria: found weights \[-1.0\], expected at least one weight above 0"),
    ({"model": 3}, "model: found 3, expected the name of a model"),
    ({"modle": "m"}, "'modle': found a field that does not exist, .*did you mean 'model'"),
    ({"temperature": "cold"}, "temperature: found 'cold', expected a number from 0 to 2"),
    ({"concurrency": 0}, "concurrency: found 0, expected a whole number from 1"),
    ({"tries": True}, "tries: found True, expected a whole number"),
    ({"timeout_s": 400}, "timeout_s: found 400, expected at most deadline_s=300"),
    ({"template": "Grade {respnse} {response}"}, "template: found {respnse}, .* did you mean 'response'"),
    ({"template": "{problem}"}, "template: found {response} 0 times, expected {response} once"),
    ({"extra": {"messages": []}}, "extra.messages: found a field of the request that is set here"),
    ({"url": "localhost:8000"}, "url: found 'localhost:8000', expected a URL such as"),
    ({"url": f"{URL}/chat/completions"}, "url: found .*, expected the base URL, without /chat/completions"),
    ({"url": f"http://me:{SECRET}@host/v1"}, "url: found a user, a password, a query or a fragment"),
    ({"url": f"{URL}?key={SECRET}"}, "url: found a user, a password, a query or a fragment"),
    ({"api_key": SECRET}, "'api_key': found a field that does not exist, .* did you mean 'api_key_env'"),
    ({"api_key_env": SECRET}, "api_key_env: found no name of a variable, expected .* never the key itself"),
    ({"api_key_env": "abcSECRETabc"}, "api_key_env: found no environment variable of that name, expected"),
    ({"api_key_env": "NO_SUCH_KEY"}, "api_key_env: found no environment variable NO_SUCH_KEY, expected"),
    ({"api_key_env": "KEY_WITH_LINE"}, "api_key_env: found a blank .* in the value of the variable KEY_WITH_LINE"),
  ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_the_file_and_the_field(tmp_path, monkeypatch, fields, line):
  monkeypatch.setenv("KEY_WITH_LINE", f"{SECRET}\n")
  path = written(tmp_path / "rubric.json", **{"url": URL} | fields)
  (message,) = rubric_problems(path)
  assert re.search(f"^{re.escape(path)}: {line}", message), message
  assert "SECRET" not in message and SECRET not in message


def test_a_config_reports_the_mistakes_of_its_rubrics(tmp_path):
  paths = written(tmp_path / "a.json", URL, tries=0, deadline_s=9, timeout_s=1), written(tmp_path / "b.json", URL, deadline_s=4000)
  config = tiny_config(overrides={"reward.terms": tuple(f"judge:{path}=0.5" for path in paths)})
  assert check.config_problems(config) == [
    f"config.reward.terms: {paths[0]}: tries: found 0, expected a whole number from 1 to 20",
    f"config.reward.terms: {paths[1]}: deadline_s: found 4000, expected less than config.watchdog.seconds=3600, which ends the run",
  ]


def test_all_mistakes_are_reported_together(tmp_path):
  path = written(tmp_path / "rubric.json", URL, tries=0, max_tokens=0, criteria=yes_no(weight="x"))
  assert [line.split(": ")[1] for line in rubric_problems(path)] == ["max_tokens", "tries", "criteria[0].weight"]


@pytest.mark.parametrize(
  ("name", "text", "line"),
  [
    ("r.yaml", None, "found no file that can be read"),
    ("r.txt", "model: m", "found .txt, expected the path of a rubric, a file .yaml, .yml or .json"),
    ("r.yaml", "model: [", "found no YAML"),
    ("r.yaml", "- model", "found list, expected a mapping with the keys name, url, model"),
    ("r.yaml", "model: a\nmodel: b", "found the key 'model' twice"),
    ("r.yaml", "!!python/object/apply:os.getcwd []", "found no YAML"),
    ("r.yaml", "&a [*a]", "found list"),
    ("r.json", "{", "found no JSON"),
    ("r.json", '{"model": "a", "model": "b"}', "found the key 'model' twice"),
    ("r.json", "[" * 100_000, "found a document that is nested too deeply"),
    ("r.json", " " * 2_000_000, "found 2,000,000 bytes"),
  ],
)
def test_a_file_that_is_no_rubric_is_one_line(tmp_path, name, text, line):
  if text is not None:
    (tmp_path / name).write_text(text)
  (message,) = rubric_problems(tmp_path / name)
  assert message.startswith(f"{tmp_path / name}: {line}"), message


def test_without_a_yaml_package_json_is_left(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "yaml", None)
  (tmp_path / "r.yaml").write_text("model: m")
  (line,) = rubric_problems(tmp_path / "r.yaml")
  assert "found YAML, expected JSON (a file .json with the same keys): PyYAML is missing (pip install pyyaml)" in line
  assert rubric_problems(written(tmp_path / "r.json", URL)) == []


def test_without_a_url_the_environment_names_it(tmp_path, monkeypatch):
  monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
  path = written(tmp_path / "rubric.json", None)
  assert "url: found none, and no environment variable OPENAI_BASE_URL" in rubric_problems(path)[0]
  monkeypatch.setenv("OPENAI_BASE_URL", f"http://me:{SECRET}@host")
  (line,) = rubric_problems(path)
  assert "url (of the environment variable OPENAI_BASE_URL): found a user" in line and SECRET not in line
