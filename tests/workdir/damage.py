"""Damage to files and objects, as by a failing disk."""


def flip(data):
  return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


DAMAGES = {"cut": lambda data: data[:-1], "flip": flip, "delete": lambda data: None, "empty": lambda data: b""}
"""Functions from a content to the damaged one, or to None if nothing is left."""


def damage(path, kind):
  """Damages a file."""
  data = DAMAGES[kind](path.read_bytes())
  path.unlink() if data is None else path.write_bytes(data)
