"""Values of Parquet's own types are those that a JSON file would have."""

import datetime
import decimal

import numpy as np
import pytest

from jaxrl_llm.tasks import make
from jaxrl_llm.tasks.files import text_files
from jaxrl_llm.tasks.files.text_files import FileFault

pa = pytest.importorskip("pyarrow")


def write(path, **columns):
  from pyarrow import parquet

  parquet.write_table(pa.table(columns), path)
  return path


def values(path):
  return [record if isinstance(record, FileFault) else record["a"] for _, record in text_files.read_records(path)]


@pytest.mark.parametrize("narrow", [np.float32, np.float16])
def test_narrow_floats_are_their_shortest_decimal(narrow, tmp_path):
  """0.1 in 32 bits is "0.1", and not the 0.10000000149011612 that is the same number in 64."""
  tenths = [i / 10 for i in range(30)] + [-0.3, 1e-4, 1234.5]
  array = pa.array(np.asarray(tenths, narrow))
  expected = [float(str(x)) for x in np.asarray(tenths, narrow)]
  assert values(write(tmp_path / "a.parquet", a=array)) == expected and expected[:30] == tenths[:30]
  lists = pa.ListArray.from_arrays(pa.array(range(34), pa.int32()), array)
  inside = pa.StructArray.from_arrays([lists, pa.array([None] * 33, pa.string())], ["x", "y"])
  assert values(write(tmp_path / "b.parquet", a=inside)) == [{"x": [x], "y": None} for x in expected]
  assert values(write(tmp_path / "c.parquet", a=pa.array([None, 0.1], pa.float32()).dictionary_encode())) == [None, 0.1]


def test_maps_are_objects_and_dates_beyond_python_are_faults(tmp_path):
  maps = pa.array([[("ground_truth", 0.1)], [], None], pa.map_(pa.string(), pa.float32()))
  assert values(write(tmp_path / "a.parquet", a=maps)) == [{"ground_truth": 0.1}, {}, None]
  days = pa.array([0, 10**8, 1], pa.int32()).view(pa.date32())
  first, second, third = values(write(tmp_path / "b.parquet", a=days))
  assert (first, second.reason, third) == (datetime.date(1970, 1, 1), "value out of range", datetime.date(1970, 1, 2))


def test_nanoseconds_are_cut_to_what_python_holds(tmp_path):
  kinds = {"timestamp": pa.timestamp("ns"), "time": pa.time64("ns"), "duration": pa.duration("ns")}
  columns = {name: pa.array([1_000_000_001, None], pa.int64()).view(kind) for name, kind in kinds.items()}
  first, second = (record for _, record in text_files.read_records(write(tmp_path / "a.parquet", **columns)))
  assert [value.isoformat() for value in (first["timestamp"], first["time"])] == ["1970-01-01T00:00:01", "00:00:01"]
  assert first["duration"] == datetime.timedelta(seconds=1) and set(second.values()) == {None}


def test_a_task_of_typed_columns(tmp_path):
  """The answers that a person would write, and the reward that reads them."""
  made = {
    "final_number": {
      pa.decimal128(10, 2): [(decimal.Decimal(i) / 4, f"{i / 4:.2f}") for i in range(30)],
      pa.float32(): [(i / 10, str(i // 10) if i % 10 == 0 else f"{i / 10}") for i in range(30)],
      pa.float64(): [(float(f"{i}e-7"), f"{i / 10**7:.7f}".rstrip("0").rstrip(".")) for i in range(30)],
      pa.uint64(): [(2**64 - 1 - i, str(2**64 - 1 - i)) for i in range(30)],
    },
    "final_text": {
      pa.date32(): [(datetime.date(2026, 3, 1 + i), f"2026-03-{1 + i:02}") for i in range(30)],
      pa.timestamp("ms"): [(datetime.datetime(2026, 3, 1, 9, i), f"2026-03-01T09:{i:02}:00") for i in range(30)],
      pa.bool_(): [(i % 2 == 0, ("true", "false")[i % 2]) for i in range(30)],
    },
  }
  for reward, kinds in made.items():
    for number, (kind, pairs) in enumerate(kinds.items()):
      questions = [f"{i}?" for i in range(30)]
      path = write(tmp_path / f"{reward}{number}.parquet", question=questions, answer=pa.array([x for x, _ in pairs], kind))
      task = make("file", path=path, data_dir=tmp_path)
      answers = {row["question"]: row["answer"] for row in (*task.train, *task.test)}
      assert task.rewards == (reward,) and answers == dict(zip(questions, [text for _, text in pairs], strict=True)), kind
