"""Benchmark of the update: refusals, counts, reports, and a loss that equals TRL's.

No wall-clock time is judged.
"""

import json
import re
import sys

import numpy as np
import pytest

from experiments.benchmarks import packing, peers, random_batch, random_checkpoint, roofline, train_step
from experiments.benchmarks.engines.train_job import Batch, TrainJob, padded, read_batch, with_pad_id
from jaxrl_llm.models import load, preset
from tests.marks import few

NANO = preset("nano", vocab_size=264)._replace(tie_embeddings=False, max_positions=32)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
  """A checkpoint and a batch: 3 groups of 4, prompts of 6 tokens, responses of up to 8 tokens."""
  folder = tmp_path_factory.mktemp("work") / "nano"
  random_checkpoint.write(folder, NANO, num_prompts=2, prompt_tokens=6)
  settings = dict(rows=12, group_size=4, prompt_tokens=6, median=4, sigma=0.7, cap=8, noise=0.1, seed=0)
  return folder, random_batch.make(*load(folder), **settings)


@pytest.fixture
def flags(work, tmp_path, monkeypatch):
  """Function `(changed arrays, **flags) -> argv`; an array that is None is left out."""
  monkeypatch.setattr(roofline, "find_machine", lambda device, num_bytes: roofline.Machine("toy", 1e9, 1e9, "made up"))
  folder, arrays = work

  def make(changes=None, **settings):
    np.savez(tmp_path / "b.npz", **{name: x for name, x in (arrays | (changes or {})).items() if x is not None})
    settings = dict(checkpoint=folder, batch=tmp_path / "b.npz", repeats=1) | settings
    return [f"--{name}={value}" for name, value in settings.items()]

  return make


def refused(capsys, message):
  error = capsys.readouterr().err
  assert error.count("\n") == 1, error
  assert re.search(message, error), error


@pytest.mark.parametrize("main", [train_step.main, peers.main])
@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(checkpoint="nowhere/at/all"), r"--checkpoint: found 'nowhere/at/all', which does not exist"),
    (dict(batch="nowhere.npz"), r"--batch: found no file .*nowhere.npz"),
    (dict(objective="grop"), r"--objective: unknown objective 'grop' \(did you mean 'grpo'\?\)"),
    (dict(optimizer="adam"), r"--optimizer: found 'adam' \(did you mean 'adamw'\?\)"),
    (dict(remat="ful"), r"--remat: found 'ful'.*did you mean 'full'"),
    (dict(microbatch=5), r"--microbatch: found 5, expected a divisor of the 12 rows"),
    (dict(row_tokens=7), r"--row_tokens: found 7, expected at least 14"),
    (dict(b1=1), r"--b1: found 1.0"),
    (dict(repeats=0), r"--repeats: found 0"),
  ],
)
def test_bad_flags_get_one_line(flags, capsys, main, changes, message):
  assert main(flags(**changes)) == 2
  refused(capsys, message)


ONES = np.ones((12, 8), np.int32)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(old_logps=None, advantages=None), r"lacks old_logps, advantages; write it with np.savez"),
    (dict(prompt_ids=np.ones(6, np.int32)), r"`prompt_ids` has the shape \[6\], expected \[B P\]"),
    (
      dict(advantages=np.ones(11, np.float32)),
      r"`advantages` has the shape \[11\], expected \[12\] for `prompt_ids` \[12, 6\]",
    ),
    (dict(completion_ids=ONES[:3]), r"`completion_ids` has the shape \[3, 8\], expected \[12 C\]"),
    (dict(old_logps=np.zeros((12, 7), np.float32)), r"`old_logps` has the shape \[12, 7\], expected \[12, 8\]"),
    (dict(completion_mask=2 * ONES), r"`completion_mask` contains 2, expected only 0 and 1"),
    (dict(completion_mask=ONES * (np.arange(8) != 1)), r"`completion_mask` of row 0 has a 1 after a 0"),
    (dict(completion_mask=0 * ONES), r"at least one token to learn from"),
    (dict(prompt_mask=np.zeros((12, 6), bool)), r"`prompt_mask` of row 0 is 0 everywhere"),
    (dict(completion_ids=ONES.astype(np.float32)), r"`completion_ids` is float32, expected int32"),
    (dict(advantages=np.full(12, np.nan, np.float32)), r"`advantages` contains a non-finite number"),
    (dict(old_logps=np.ones((12, 8), np.float32)), r"`old_logps` reaches 1 inside the mask"),
    (dict(prompt_ids=np.full((12, 6), 264)), r"`prompt_ids` has ids from 264 to 264, expected 0 to 263"),
    (
      dict(prompt_ids=np.ones((12, 30), np.int32)),
      r"the longest row has 38 tokens, expected at most the 32 positions",
    ),
  ],
)
def test_bad_batches_get_one_line(flags, capsys, changes, message):
  assert train_step.main(flags(changes)) == 2
  refused(capsys, message)


def torch_loss(batch: Batch, logps: np.ndarray, name: str) -> float:
  """Computes TRL's `_compute_loss` of "grpo" and "dapo" in NumPy, without a reference."""
  mask, advantages = batch.completion_mask, batch.advantages[:, None]
  ratio = np.exp(logps - batch.old_logps)
  high = 1.2 if name == "grpo" else 1.28
  losses = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, high) * advantages) * mask
  return (losses.sum(1) / mask.sum(1)).mean() if name == "grpo" else losses.sum() / mask.sum()


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "settings"), few([("grpo", {}), ("dapo", dict(microbatch=4)), ("grpo", dict(row_tokens=14))], 0))
def test_the_first_loss_equals_trls(work, flags, tmp_path, objective, settings):
  folder, _ = work
  out = tmp_path / "out" / "result.json"
  assert train_step.main([*flags(objective=objective, **settings), f"--json={out}"]) == 0
  result = json.loads(out.read_text())
  batch = read_batch(TrainJob("", str(tmp_path / "b.npz")), vocab_size=264, max_positions=32)
  tokens = np.concatenate([batch.prompt_ids, batch.completion_ids], axis=1)
  scores = random_batch.logprobs(*load(folder), tokens, np.broadcast_to(np.arange(14), tokens.shape), np.ones_like(tokens))
  assert result["first"]["loss"] == pytest.approx(torch_loss(batch, scores[:, 6:].astype(np.float64), objective), abs=1e-6)
  real = batch.completion_mask.sum()
  assert result["tokens"] == {"responses": 12, "real": 12 * 6 + real, "completion": real}
  saved = 9 * 6 if not settings.get("row_tokens") else round(result["waste"]["prompts_saved"] * result["tokens"]["real"])
  assert result["rows"]["used"] == result["tokens"]["real"] - saved
  assert result["roofline"]["flops"] <= result["roofline"]["unshared_flops"]
  assert "tokens/s" in train_step.describe(result)


def test_attended_pairs():
  prompt, mask = np.ones((2, 2), np.int32), np.ones((2, 2), bool)
  batch = Batch(prompt, mask, prompt, np.array([[1, 1], [1, 0]], bool), np.zeros((2, 2), np.float32), np.ones(2, np.float32))
  sequences, layout, _ = train_step.lay_out(TrainJob("", "", row_tokens=8), batch)
  assert train_step.attended_pairs(sequences) == 4 * 5 // 2 + 3 * 4 // 2
  assert train_step.attended_pairs(sequences, layout) == 3 + (10 - 3) + (6 - 3)


def test_peers_get_prompts_on_the_right_and_an_unused_pad_id():
  ids = np.array([[5, 6, 0], [7, 0, 0]], np.int32)
  batch = Batch(ids, ids > 0, ids, ids > 0, np.zeros((2, 3), np.float32), np.ones(2, np.float32))
  job = with_pad_id(TrainJob("", "b.npz"), batch, vocab_size=8)
  assert job.pad_id == 0
  assert padded(batch, 3).prompt_ids.tolist() == [[5, 6], [3, 7]]
  assert padded(batch, 3).completion_ids.tolist() == [[5, 6], [7, 3]]
  with pytest.raises(ValueError, match="uses all 2 ids"):
    with_pad_id(job, batch._replace(prompt_ids=ids * 0 + 1, completion_ids=ids * 0), vocab_size=2)


@pytest.mark.exhaustive
def test_three_layouts_have_the_same_loss(flags, capsys):
  assert packing.main(flags()) == 0
  out = capsys.readouterr().out
  losses = [float(x) for x in re.findall(r"loss (\S+)", out)]
  assert len(losses) == 3 and np.ptp(losses) < 1e-6
  assert "padded: 12 rows of 14 slots" in out


FAKE = """
from experiments.benchmarks.engines.train_job import TrainJob
from experiments.benchmarks.engines.worker import Engine, Stepped, serve
serve(lambda job: Engine(job.objective, lambda seed: Stepped(8, {loss}, 1.0)), TrainJob)
"""


def test_a_different_first_loss_is_reported(tmp_path):
  commands = {}
  for name, loss in (("ours", 0.5), ("trl", 0.501)):
    (tmp_path / f"{name}.py").write_text(FAKE.format(loss=loss))
    commands[name] = [sys.executable, str(tmp_path / f"{name}.py")]
  result = peers.compare(commands, TrainJob("", ""), repeats=2, timeout=60, mode=peers.TRAINING)
  assert result["first_loss_differs"] == {"trl": pytest.approx(1e-3)}
  assert result["engines"]["ours"]["tokens"] == [8, 8]
  assert "first loss of trl differs from ours by 1.0e-03" in peers.describe(result, peers.TRAINING)
