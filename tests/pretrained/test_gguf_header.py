"""Headers of GGUF files, compared with the independent package gguf, and damaged headers."""

import struct

import gguf
import numpy as np
import pytest

from jaxrl_llm.pretrained.gguf_header import read_header


@pytest.fixture
def path(tmp_path):
  """File with every kind of value."""
  path = tmp_path / "model.gguf"
  writer = gguf.GGUFWriter(path, "llama")
  for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64", "bool"):
    getattr(writer, f"add_{kind}")(f"x.{kind}", 1)
  writer.add_string("x.text", "naïve 🙂")
  writer.add_array("x.texts", ["a", "", "é"])
  writer.add_array("x.numbers", [1, -2, 3])
  writer.add_tensor("a.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
  writer.add_tensor("b.weight", np.arange(5, dtype=np.float16))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def test_agrees_with_the_package(path):
  header, reader = read_header(path), gguf.GGUFReader(path)
  expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
  assert header.metadata == expected
  assert {name: (tensor.shape, tensor.ggml_type, tensor.offset) for name, tensor in header.tensors.items()} == {
    tensor.name: (tuple(tensor.shape[::-1].tolist()), int(tensor.tensor_type), tensor.data_offset) for tensor in reader.tensors
  }
  assert header.num_bytes == path.stat().st_size


def test_a_header_that_ends_early(path):
  whole = path.read_bytes()
  start = min(tensor.offset for tensor in read_header(path).tensors.values())
  cut = path.with_name("cut.gguf")
  for length in range(4, start - 32, 7):  # The last bytes before the tensors are padding.
    cut.write_bytes(whole[:length])
    with pytest.raises(ValueError, match=r"cut\.gguf: ends inside its header, after \d+ bytes; copy or download it again"):
      read_header(cut)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + b"\0" * 100, b'{"a": 1}'])
def test_another_file(tmp_path, content):
  path = tmp_path / "model.gguf"
  path.write_bytes(content)
  with pytest.raises(ValueError, match=r"model\.gguf: begins with b.*, expected b'GGUF'"):
    read_header(path)


def test_no_file(tmp_path):
  with pytest.raises(ValueError, match="found no file, expected a .gguf checkpoint"):
    read_header(tmp_path)


def head(*, version=3, num_tensors=0, values=b"", num_values=None, tail=b"") -> bytes:
  """Builds a header by hand."""
  return b"GGUF" + struct.pack("<IQQ", version, num_tensors, bool(values) if num_values is None else num_values) + values + tail


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (head(version=1), "found version 1 in its header, expected GGUF version 2 or 3"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "found big-endian numbers in its header"),
    (head(values=struct.pack("<Q1sI", 1, b"k", 99)), "found a value of unknown type 99"),
    (head(values=struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 2)), "found a list of type 9"),
    # Refused at once, without allocating memory.
    (head(values=struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 2**60)), "ends inside its header"),
    (head(values=struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**60)), "ends inside its header"),
    (head(values=struct.pack("<Q1sIQ", 1, b"k", 8, 2**62)), "ends inside its header"),
    (head(values=struct.pack("<Q1sIQ2s", 1, b"k", 8, 2, b"\xff\xff")), "can't decode byte 0xff"),
    (head(num_values=2**50), "ends inside its header"),
    (head(num_tensors=1, tail=struct.pack("<Q1sI", 1, b"t", 9)), "found a tensor of 9 dimensions"),
    (head(values=struct.pack("<Q17sII", 17, b"general.alignment", 4, 0)), "found an alignment of 0"),
    (head(values=struct.pack("<Q11sIH", 11, b"split.count", 2, 3)), "one of 3 parts, .*llama-gguf-split --merge"),
  ],
)
def test_damage(tmp_path, content, message):
  path = tmp_path / "model.gguf"
  path.write_bytes(content)
  with pytest.raises(ValueError, match=message) as error:
    read_header(path)
  assert str(path) in str(error.value) and "\n" not in str(error.value)
