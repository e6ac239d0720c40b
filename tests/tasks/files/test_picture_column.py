"""Pictures of own problems and of MathVision: paths, bytes, and rows that are left out."""

import base64
import functools
import json
import os

import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.pretrained import png
from jaxrl_llm.pretrained.pictures import PictureConfig
from jaxrl_llm.tasks.files import picture_column
from jaxrl_llm.tasks.files.columns import Columns, Unusable
from tests.tasks.written import parquet_bytes, write_lines

CONFIG = PictureConfig(patch_size=8, min_pixels=256, max_pixels=4096)


def picture(shade, side=16):
  return png.encode(np.full((side, side, 3), shade, np.uint8))


@pytest.fixture
def load(tmp_path):
  common = {"images_column": "images", "data_dir": tmp_path / "data", "pictures": CONFIG, "reward": "final_number"}
  return functools.partial(tasks.make, "file", **common)


def write(folder, rows):
  (folder / "pictures").mkdir(exist_ok=True)
  for i in range(40):
    (folder / "pictures" / f"{i}.png").write_bytes(picture(i))
  return write_lines(folder / "own.jsonl", rows)


GOOD = [{"question": "How dark?", "answer": i, "images": f"pictures/{i}.png"} for i in range(40)]


def test_paths(load, tmp_path):
  both = {"question": "From <image> to <image>?", "answer": 1, "images": ["pictures/1.png", "pictures/2.png"]}
  none = {"question": "1 + 1?", "answer": 2, "images": None}
  task = load(path=write(tmp_path, [*GOOD, both, none]))
  rows = {row["place"]: row for split in (task.train, task.test) for row in split}
  assert len(rows) == 42 and not task.report.dropped
  assert rows["own.jsonl:8"]["images"] == (picture(7),) and rows["own.jsonl:8"]["prompt"] == "<image>How dark?"
  assert rows["own.jsonl:41"]["images"] == (picture(1), picture(2)) and rows["own.jsonl:41"]["prompt"] == both["question"]
  assert rows["own.jsonl:42"]["images"] == () and rows["own.jsonl:42"]["prompt"] == "1 + 1?"


BAD = {
  "missing picture": "pictures/none.png",
  "picture too small": "pictures/dot.png",
  "broken picture": "own.jsonl",
  "picture is an address": "https://example.com/a.png",
  "picture is neither a path nor bytes": 7,
  "marks unlike the pictures": ["pictures/1.png", "pictures/2.png"],
  "prompt longer than 30 tokens": ["pictures/1.png"] * 40,
  "duplicate question with another answer": "pictures/3.png",
}


def test_bad_pictures_are_left_out_and_counted(load, tmp_path):
  texts = {"marks unlike the pictures": "In <image>?", "prompt longer than 30 tokens": "?"}
  bad = [{"question": texts.get(reason, "How dark?"), "answer": 1, "images": value} for reason, value in BAD.items()]
  path = write(tmp_path, [*GOOD, *bad])
  (tmp_path / "pictures" / "dot.png").write_bytes(picture(1, side=1))
  task = load(path=path, max_prompt_tokens=30)
  assert task.report.dropped == dict.fromkeys(BAD, 1) and task.report.kept == 40
  assert task.report.first["marks unlike the pictures"] == "own.jsonl:46: 1 marks <image> in the prompt, but 2 pictures"
  # A picture that appears later is seen.
  (tmp_path / "pictures" / "none.png").write_bytes(picture(99))
  assert "missing picture" not in load(path=path, max_prompt_tokens=30).report.dropped


def encoded(content):
  return base64.b64encode(content).decode()


ADDRESSES = {
  "data": lambda content: "data:image/png;base64," + encoded(content),
  "upper case, lines": lambda content: "DATA:image/png;charset=x;base64," + "\n".join([encoded(content)[:40], encoded(content)[40:]]),
  "percent signs": lambda content: "data:image/png;base64," + encoded(content).replace("+", "%2B").replace("=", "%3D"),
  "without base64": lambda content: "data:image/png," + "".join(f"%{byte:02x}" for byte in content),
  "base64 alone": encoded,
  "in an object": lambda content: {"bytes": encoded(content), "path": "gone.png"},
}


@pytest.mark.parametrize("form", ADDRESSES)
def test_pictures_in_base64(form, tmp_path):
  made = picture_column.load(ADDRESSES[form](picture(7)), tmp_path)
  assert made == (picture(7),)


PATHS = {
  "too long": ("x" * 5000, "broken picture"),
  "below a file": ("own.jsonl/a.png", "broken picture"),
  "an unknown user's": ("~no-such-user/a.png", "missing picture"),
  "a folder": ("pictures", "picture is no file"),
  "a pipe": ("pipe", "picture is no file"),
  "a loop": ("loop", "broken picture"),
  "a null byte": ("a\0b.png", "picture is neither a path nor bytes"),
  "broken base64": ("data:image/png;base64,iVBOR?", "picture's base64 is broken"),
  "no base64 at all": ("data:image/png;base64,", "broken picture"),
  "a drawing": ("data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'/>", "broken picture"),
  "an address": ("HTTPS://example.com/a.png", "picture is an address"),
  "a cut picture": (picture(7)[:45], "broken picture"),
  "numbers": ([1, 2, 3], "picture is neither a path nor bytes"),
  "lists of lists": ([[["a"]]], "picture is neither a path nor bytes"),
}


@pytest.mark.parametrize("case", PATHS)
def test_any_fault_of_a_picture_has_a_reason(case, tmp_path):
  value, reason = PATHS[case]
  write(tmp_path, GOOD)
  os.mkfifo(tmp_path / "pipe")
  (tmp_path / "loop").symlink_to("loop")
  with pytest.raises(Unusable) as caught:
    picture_column.load(value, tmp_path)
  assert caught.value.reason == reason and len(caught.value.detail) < 300
  path = tmp_path / "other.jsonl"
  if not isinstance(value, bytes):
    path.write_text(json.dumps({"question": "?", "answer": 1, "images": value}))
    picture_column.stamp(path, Columns(images="images"))


def test_any_value_is_pictures_or_has_a_reason(tmp_path):
  odd = [True, 0, 1.5, "", " ", "\ud800", b"", b"\x89PNG", [], [None], {}, {"bytes": None}, {"url": "x"}, ["a", 1], (b"x",), object()]
  for value in (*odd, *([x] for x in odd), *({"bytes": x} for x in odd), *({"path": x} for x in odd)):
    try:
      assert picture_column.load(value, tmp_path) == ()
    except Unusable as error:
      assert error.reason and "\n" not in error.reason


def test_pictures_beyond_the_room_of_a_prompt_are_left_out_and_counted(load, tmp_path):
  """Too many of them, or one that is too narrow to be reduced enough."""
  two = {"question": "From <image> to <image>?", "answer": 1, "images": ["pictures/1.png", "pictures/2.png"]}
  narrow = {"question": "How long?", "answer": 1, "images": "pictures/narrow.png"}
  path = write(tmp_path, [*GOOD, two, narrow])
  (tmp_path / "pictures" / "narrow.png").write_bytes(png.encode(np.zeros((2, 300, 3), np.uint8)))
  assert not load(path=path, pictures=CONFIG._replace(max_pixels=64**2)).report.dropped.get("picture too narrow to reduce")
  task = load(path=path, pictures=CONFIG._replace(max_pixels=32**2), max_pictures=1)
  assert task.report.dropped == {"more than 1 picture(s)": 1, "picture too narrow to reduce": 1}
  assert task.report.first["more than 1 picture(s)"] == "own.jsonl:41: 2; see rollout.prompt_images"
  assert task.report.first["picture too narrow to reduce"] == "own.jsonl:42: 300 x 2 pixels are 13 image tokens, expected at most 4"


def test_questions_about_a_picture_stay_in_one_split(load, tmp_path):
  more = [row | {"question": f"How dark, {word}?"} for row in GOOD for word in ("really", "about")]
  task = load(path=write(tmp_path, [*GOOD, *more]), test_fraction=0.3)
  train, test = ({row["images"] for row in split} for split in (task.train, task.test))
  assert train.isdisjoint(test) and len(train) + len(test) == 40 and len(task.test) == 3 * len(test)


def test_bytes_in_parquet(load, tmp_path):
  rows = [{"question": "How dark?", "answer": str(i), "images": [{"bytes": picture(i), "path": "gone.png"}]} for i in range(9)]
  (tmp_path / "own.parquet").write_bytes(parquet_bytes(rows))
  plain = [row | {"images": row["images"][0]["bytes"]} for row in rows]
  (tmp_path / "plain.parquet").write_bytes(parquet_bytes(plain))
  made = [load(path=tmp_path / name, bad_rows="error") for name in ("own.parquet", "plain.parquet")]
  assert {row["images"][0] for row in [*made[0].train, *made[0].test]} == {picture(i) for i in range(9)}
  assert made[0].fingerprint == made[1].fingerprint


def test_a_model_that_reads_text_alone_is_refused(load, tmp_path):
  with pytest.raises(ValueError, match="task file: found problems with pictures for a model that reads text alone"):
    load(path=write(tmp_path, GOOD), pictures=None)


def test_mathvision(tmp_path):
  letters, decoded = list("ABCDE"), lambda i: {"bytes": picture(i), "path": None}
  common = {"image": "images/1.jpg", "solution": None, "level": 2, "subject": "counting"}
  rows = [
    {"id": "1", "question": "How many?\n<image1>", "options": [], "decoded_image": decoded(1), "answer": "\\frac{1}{2}", **common},
    {"id": "2", "question": "Which one?\n<image1>", "options": letters, "decoded_image": decoded(2), "answer": "B", **common},
    {"id": "3", "question": "Which one?\n<image1>", "options": list("12345"), "decoded_image": decoded(3), "answer": "C", **common},
    {"id": "4", "question": "Lost?", "options": [], "decoded_image": {"bytes": b"no picture", "path": None}, "answer": "4", **common},
  ]
  for name in ("test-00000-of-00001-3532b8d3f1b4047a", "testmini-00000-of-00001-f8ff70fcb2f29b1d"):
    (tmp_path / f"{name}.parquet").write_bytes(parquet_bytes(rows[:3] if "mini" in name else rows))
  task = tasks.make("mathvision", source=tmp_path, data_dir=tmp_path / "data", pictures=CONFIG)
  assert task.routed and task.rewards == ("maths", "choice") and not len(task.train)
  assert [row["reward"] for row in task.test] == ["maths", "choice", "choice"] and task.report.dropped == {"broken picture": 1}
  assert task.test[1]["prompt"].startswith("<image>Please solve") and task.test[1]["prompt"].endswith("Which one?\n<image1>\n")
  assert task.test[2]["prompt"].endswith("<image1>\n(A) 1\n(B) 2\n(C) 3\n(D) 4\n(E) 5\n") and task.test[2]["level"] == 2
  mini = tasks.make("mathvision", source=tmp_path, data_dir=tmp_path / "data", pictures=CONFIG, mode="testmini")
  assert len(mini.test) == 3 and not mini.report.dropped
