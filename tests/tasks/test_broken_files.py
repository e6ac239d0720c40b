"""Files that are not what they seem: each is read for what it is, or its fault is named."""

import base64
import gzip
import json

import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.pretrained import png
from jaxrl_llm.pretrained.pictures import PictureConfig
from jaxrl_llm.tasks.files import report
from tests.tasks.written import parquet_bytes

NUMBERS = range(40)


def user(text):
  return {"role": "user", "content": text}


def assistant(text):
  return {"role": "assistant", "content": text}


def lines(*rows):
  return "\n".join(map(json.dumps, rows)).encode()


def sums(answer=lambda i: i + 1, question=lambda i: f"{i} + 1?", **more):
  return [{"question": question(i), "answer": answer(i)} | {name: make(i) for name, make in more.items()} for i in NUMBERS]


def table(rows, delimiter):
  return "\r\n".join(delimiter.join(map(str, row)) for row in [rows[0].keys(), *(row.values() for row in rows)])


PICTURE = "data:image/png;base64," + base64.b64encode(png.encode(np.zeros((16, 16, 3), np.uint8))).decode()
READ = "40 problems read, 40 kept\n"

FILES = {
  # What each file is: name, content, settings, and words of the only right reactions.
  "chats as answers": ("a.jsonl", lines(*sums(lambda i: [user("?"), assistant(str(i + 1))])), {}, READ, "final_number"),
  "answers of users": ("a.jsonl", lines(*sums(lambda i: [user(str(i))])), {}, "answer does not end with the assistant"),
  "answers in an object": (
    "a.jsonl", lines(*sums(lambda i: {"style": "rule", "ground_truth": str(i)})), {}, "answer is an object", "such as answer.ground_truth"),
  "several answers": ("a.jsonl", lines(*sums(lambda i: [i, -i])), {}, "answer is a list of several", "'[0, 0]', expected one value"),
  "an object as text": (
    "a.csv", table(sums(lambda i: f"\"{{'value': '{i}'}}\""), ",").encode(), {}, "lists or objects as text in 'answer'"),
  "chats as JSON text": ("a.jsonl", lines(*sums(question=lambda i: json.dumps([user(f"{i}?")]))), {}, READ, "question 'question' (chats)"),
  "chats as Python": ("a.jsonl", lines(*sums(question=lambda i: str([user(f"{i}?")]))), {}, "a chat in Python's spelling"),
  "decimals in quotation marks": ("a.jsonl", lines(*sums(lambda i: f'"{i}.50"')), {}, "numbers in quotation marks", "'\"0.50\"'"),
  "NaN": ("a.jsonl", lines(*sums(lambda i: float("nan") if i < 9 else i)), {}, "9 answer is nan", "careful: 9 of 40 rows"),
  "NaN of pandas as text": ("a.csv", table(sums(lambda i: "nan" if i < 9 else f"town {i}"), ",").encode(), {}, "9 answer is nan"),
  "empty answers": ("a.csv", table(sums(lambda i: "" if i else 1), ",").encode(), {}, "39 answer is empty"),
  "one row again and again": (
    "a.jsonl", lines(*sums(lambda i: 2, lambda i: "1 + 1?")), {}, "found one problem in all", "39 duplicate question"),
  "contradictions": ("a.jsonl", lines(*sums(question=lambda i: f"{i // 2}?")), {}, "20 duplicate question with another answer"),
  "formulas": ("a.jsonl", lines(*sums(lambda i: rf"\frac{{{i}}}{{7}}")), {}, READ, "verifier: maths"),
  "solutions": ("a.jsonl", lines(*sums(lambda i: f"One more.\n#### {i + 1}")), {}, READ, "verifier: maths"),
  "letters without options": (
    "a.jsonl", lines(*sums(lambda i: "ABCD"[i % 4])), {}, "careful: the answers are letters, such as 'A', but the prompts show no options"),
  "answers beyond any budget": (
    "a.jsonl", lines(*sums(lambda i: "so it goes " * i)), {"max_answer_tokens": 64}, "34 answer longer than 64 tokens"),
  "one answer to all": ("a.jsonl", lines(*sums(lambda i: "rule")), {}, "careful: all answers are 'rule'"),
  "mixed types": (
    "a.jsonl", lines(*sums(lambda i: [i, str(i), [i], None, {"a": i}][i % 5])), {}, "8 answer is null", "8 answer is an object"),
  "CSV with semicolons": ("a.csv", table(sums(), ";").encode(), {}, READ, "final_number"),
  "CSV of Excel": ("a.csv", b"\xef\xbb\xbfsep=;\r\n" + table(sums(lambda i: f"{i},5"), ";").encode(), {}, READ, "decimal commas"),
  "CSV that is TSV": ("a.csv", table(sums(), "\t").encode(), {}, READ),
  "UTF-16 without a mark": ("a.jsonl", lines(*sums()).decode().encode("utf-16-le"), {}, "UTF-16 without its mark"),
  "Parquet as JSON lines": ("a.jsonl", parquet_bytes(sums()), {}, READ),
  "JSON lines as Parquet": ("a.parquet", lines(*sums()), {}, READ),
  "a JSON list as lines": ("a.jsonl", json.dumps(sums(), indent=1).encode(), {}, READ),
  "two JSON lists": ("a.jsonl", json.dumps(sums()).encode() * 2, {}, "1 text behind the JSON list"),
  "gzip under another name": ("a.jsonl", gzip.compress(lines(*sums())), {}, READ),
  "zstd": ("a.jsonl", b"\x28\xb5\x2f\xfd" + bytes(40), {}, "found a packed file, expected records; unpack it"),
  "a workbook": ("a.csv", b"PK\x03\x04" + bytes(40), {}, "found a ZIP archive or an Excel workbook"),
  "a web page": ("a.jsonl", b"<!DOCTYPE html>\n<html><body>404: not found</body></html>\n", {}, "found a web page"),
  "a pointer of Git LFS": ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", {}, "git lfs pull"),
  "broken pictures": (
    "a.jsonl", lines(*sums(image=lambda i: [PICTURE, "gone.png", "https://x.org/a.png", "data:image/png;base64,?", "a" * 5000][i % 5])),
    {"images_column": "image"}, "8 missing picture", "8 picture is an address", "8 picture's base64 is broken", "8 broken picture"),
  "another name of a column": ("a.jsonl", lines(*sums(qustion=str)).replace(b'"question"', b'"q"'), {}, "did you mean 'qustion'?"),
  "a column within another": (
    "a.jsonl", lines(*sums(info=lambda i: {"gold": i})), {"answer_column": "info.golden"}, "did you mean 'info.gold'?"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_file_is_read_for_what_it_is_or_its_fault_is_named(case, tmp_path):
  name, content, settings, *words = FILES[case]
  (tmp_path / name).write_bytes(content)
  settings = {"pictures": PictureConfig(patch_size=8)} | settings if "images_column" in settings else settings
  try:
    task = tasks.make("file", path=tmp_path / name, data_dir=tmp_path / "data", **settings)
    said = "\n".join([*report.lines(task.report), f"verifier: {task.rewards[0]}"])
  except ValueError as error:
    said = str(error)
    assert "\n" not in said
  for word in words:
    assert word in said, said
