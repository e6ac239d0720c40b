"""Files that grow are sent in few parts, which always join to what the file was."""

import itertools
import random

from jaxrl_llm.workdir.bucket.objects import collect, paths_of, send


class Sent:
  """Objects and index of a bucket that only a test has."""

  def __init__(self, folder):
    self.folder, self.objects, self.files, self.seen, self.numbers = folder, {}, {}, {}, itertools.count()

  def publish(self, merged_bytes=64):
    kept, pieces = collect(self.folder, self.files, self.seen, merged_bytes=merged_bytes)
    self.files = send(pieces, kept, self.objects.__setitem__, lambda path: f"{path}-{next(self.numbers)}")
    return pieces

  def joined(self, path):
    return b"".join(self.objects[part.name] for part in self.files[path])


def test_what_belongs_to_one_machine_or_is_sent_otherwise_is_left_out(tmp_path):
  left_out = ("checkpoints/4/manifest.json", "tensorboard/rl/events", ".lock", "a.tmp", "report.html")
  for name in ("config.json", "logs/attempt-1.log", *left_out):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("x\n")
  assert paths_of(tmp_path) == ["config.json", "logs/attempt-1.log"]


def test_a_growing_file_is_sent_in_whole_lines_and_in_few_parts(tmp_path):
  sent, path = Sent(tmp_path), tmp_path / "metrics.jsonl"
  with open(path, "wb") as file:
    for number in range(50):
      file.write(b'{"step": %d}\n{"half' % number)
      file.flush()
      sent.publish()
      assert sent.joined("metrics.jsonl") == path.read_bytes()[: -len(b'{"half')]
  assert all(part.bytes >= 64 for part in sent.files["metrics.jsonl"][:-1])
  assert len(sent.files["metrics.jsonl"]) <= 1 + path.stat().st_size // 64
  assert sent.publish() == [], "nothing has changed"


def test_a_file_that_was_cut_on_resuming_is_sent_from_where_it_differs(tmp_path):
  sent, path = Sent(tmp_path), tmp_path / "metrics.jsonl"
  lines = [b'{"step": %d}\n' % number for number in range(40)]
  for count in (10, 20, 30, 40):
    path.write_bytes(b"".join(lines[:count]))
    sent.publish(merged_bytes=1)
  first = sent.files["metrics.jsonl"][:2]
  other = tmp_path / "metrics.tmp"
  # Longer than before, as another file.
  other.write_bytes(b"".join(lines[:25]) + b'{"other": 1}\n' * 40)
  other.replace(path)
  sent.publish(merged_bytes=1)
  assert sent.joined("metrics.jsonl") == path.read_bytes() and sent.files["metrics.jsonl"][:2] == first
  path.unlink()
  sent.publish()
  assert "metrics.jsonl" not in sent.files


def test_random_histories_join_to_the_file(tmp_path):
  lots = random.Random(0)
  sent, path = Sent(tmp_path), tmp_path / "samples.jsonl"
  path.touch()
  for number in range(300):
    if lots.random() < 0.15:
      lines = path.read_bytes().splitlines(keepends=True)
      (tmp_path / "new.tmp").write_bytes(b"".join(lines[: lots.randrange(len(lines) + 1)]))
      (tmp_path / "new.tmp").replace(path)
      sent.seen.clear()  # A run resumes in a new process.
    with open(path, "ab") as file:
      file.write(b"%d\n" % number * lots.randrange(20))
    if lots.random() < 0.7:
      sent.publish(lots.choice((1, 64, 1000)))
      assert sent.joined("samples.jsonl") == path.read_bytes()


def test_other_files_are_sent_whole_and_only_if_they_differ(tmp_path):
  sent, path = Sent(tmp_path), tmp_path / "summary.json"
  path.write_text("{}")
  assert len(sent.publish()) == 1
  (tmp_path / "again.tmp").write_text("{}")
  (tmp_path / "again.tmp").replace(path)
  assert sent.publish() == []
  path.write_text('{"a": 1}')
  assert len(sent.publish()) == 1 and sent.joined("summary.json") == b'{"a": 1}'
