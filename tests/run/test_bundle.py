"""Bundles of a step: equal in every bit elsewhere, changed, damaged, and taken apart."""

import contextlib
import functools
import hashlib
import io
import json
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import jax
import numpy as np
import pytest

from jaxrl_llm import main
from jaxrl_llm.cli import blame, bundle
from jaxrl_llm.run.jobs.blame import page, table
from jaxrl_llm.run.jobs.bundle import box, contents, repeat
from jaxrl_llm.run.jobs.bundle.box import Box, BoxError
from jaxrl_llm.run.jobs.bundle.opened import open_bundle
from tests.marks import few
from tests.runs import ROOT, VARIED, environment, flags, quick

pytestmark = pytest.mark.usefixtures("in_the_checkout")
SHORT = VARIED | {
  "num_steps": 2, "warm_start.num_steps": 1, "warm_start.batch_size": 8, "warm_start.cache": False, "checkpoint.every": 2,
  "checkpoint.keep": 5, "eval.every": 2, "eval.num_prompts": 8, "eval.batch_prompts": 8, "learner.learning_rate": 2e-3,
  "log.num_table_rows": 0, "log.tensorboard": False,
}  # fmt: skip
RUNS = {"gspo": ("gspo", {}), "lora": ("gspo", {"model.lora_rank": 2}), "sapo": ("sapo", {"learner.rows_per_device": 4})}


def call(command, *args: str) -> int:
  with quick():
    return command.main(["command", *map(str, args)])


@pytest.fixture(scope="module")
def boxed(tmp_path_factory):
  """Makes runs and bundles of their second step, each only once."""

  @functools.cache
  def make(case: str) -> tuple[pathlib.Path, pathlib.Path]:
    (name, changes), folder = RUNS[case], tmp_path_factory.mktemp(case)
    run, path = folder / "run", folder / "step.zip"
    assert call(main, f"--config=configs/{name}.py:tiny", *flags(SHORT | changes), f"--workdir={run}") == 0
    with contextlib.redirect_stdout(io.StringIO()) as said:
      assert call(bundle, f"{run}@2", f"--out={path}") == 0
    assert "the repeated step equals the run's own row in each of its" in said.getvalue()
    return run, path

  return make


# Another number of simulated devices has other threads, and adds up in another order.
ELSEWHERE = """
import sys
from unittest import mock
import jax
from jaxrl_llm.cli.bundle import main
with mock.patch.object(jax, "device_count", lambda: 1):
  sys.exit(main(["bundle", "step.zip", "--run"]))
"""


@pytest.mark.parametrize("case", few(list(RUNS), "gspo"))
def test_it_runs_to_the_same_bits_in_another_process(case, boxed, tmp_path):
  """Without the run's folder, in a folder with nothing but the bundle."""
  run, path = boxed(case)
  shutil.copyfile(path, tmp_path / "step.zip")
  gone, settings = run.rename(run.with_name("gone")), environment(jax.local_device_count()) | {"PYTHONPATH": str(ROOT)}
  try:
    result = subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=tmp_path, env=settings, capture_output=True, text=True)
  finally:
    gone.rename(run)
  assert result.returncode == 0 and "equal in every bit" in result.stdout, result.stdout + result.stderr


@pytest.fixture(scope="module")
def as_sapo(boxed):
  """A bundle of GSPO with SAPO in its place, whose loss is not 0 on-policy, and its losses."""
  with quick():
    opened = open_bundle(boxed("gspo")[1], {"objective.name": ["sapo"]})
    yield opened, lambda **of: update(opened, **of)


def update(opened, **of) -> float:
  """Returns the loss of the first update, or of a part of it."""
  state = jax.tree.map(np.array, opened.state)  # It is donated.
  return repeat.update(opened, state, 0, repeat.chosen(opened, **of))[1]["actor/loss"]


def test_another_objective_has_the_loss_of_its_formula(as_sapo):
  """SAPO's, by a loop in float64 over the arrays of the bundle."""
  opened, loss = as_sapo
  assert opened.changed["objective.name"] == ("gspo", "sapo")
  batch, losses = opened.batches[0], []
  logprobs = np.float64(opened.programs.logprobs(opened.state.params, jax.device_put(batch)).logprobs)
  for row, segment in sorted({(row, int(batch.segments[row, slot])) for row, slot in np.argwhere(batch.mask > 0)}):
    own = (batch.segments[row] == segment) & (batch.mask[row] > 0)
    ratio, advantages = np.exp(logprobs[row] - batch.old_logprobs[row])[own], np.float64(batch.advantages[row])[own]
    tau = np.where(advantages > 0, 1.0, 1.05)
    losses.append(np.mean(-4 / tau / (1 + np.exp(-tau * (ratio - 1))) * advantages))
  assert abs(np.mean(losses) - loss()) < 1e-6 < abs(loss()), "a loss of 0 would prove little"


def test_parts_of_a_step_add_up_to_it(as_sapo):
  _, loss = as_sapo
  whole, alone = loss(), [loss(groups=[group]) for group in range(4)]  # Those of the first update.
  assert abs(sum(alone) - whole) < 1e-6 and np.count_nonzero(alone) >= 3
  assert abs(loss(drop=[2]) + alone[2] - whole) < 1e-6 < abs(alone[2])
  assert abs(sum(loss(responses=[i]) for i in range(8, 12)) - alone[2]) < 1e-6


@pytest.mark.slow
def test_the_command_takes_a_part_in_another_precision(boxed, capsys):
  capsys.readouterr()
  assert call(bundle, boxed("gspo")[1], "--run", "--only_response=3", "--dtype=bfloat16") == 0
  out = capsys.readouterr().out
  assert "the loss of 1 responses counts" in out and "config.model.dtype: 'float32' -> 'bfloat16'" in out
  assert "equal in every bit" not in out


def error(capsys, command, *args) -> str:
  """Returns the one line with which a command is refused."""
  capsys.readouterr()
  assert call(command, *args) == 2
  (line,) = capsys.readouterr().err.splitlines()
  return line


@pytest.mark.parametrize("case", [pytest.param("lora", marks=pytest.mark.slow), pytest.param("gspo", marks=pytest.mark.exhaustive)])
def test_weights_by_reference(case, boxed, tmp_path, capsys):
  """Neither weights nor the optimizer's state are in the file, and others are refused."""
  run, path = shutil.copytree(boxed(case)[0], tmp_path / "run"), tmp_path / "first.zip"
  assert call(bundle, f"{run}@1", f"--out={path}", "--weights=reference") == 0
  assert not [name for name in Box(path).names if name.startswith("state/")]
  assert call(bundle, path, "--run") == 0 and "equal in every bit" in capsys.readouterr().out
  line = error(capsys, bundle, f"{run}@2", f"--out={path}", "--weights=reference")
  assert "found no checkpoint of the state before step 2" in line
  shutil.rmtree(run / "checkpoints" / "1")
  shutil.copytree(run / "checkpoints" / "3", run / "checkpoints" / "1")
  line = error(capsys, bundle, path, "--run")
  assert f"found weights in {run / 'checkpoints' / '1'} with the SHA-256" in line and "that of the weights before the step" in line
  shutil.rmtree(run)
  assert "which has the weights of this bundle" in error(capsys, bundle, path, "--run")


@pytest.mark.slow
def test_adapters_without_the_frozen_weights(boxed, tmp_path, capsys):
  """It needs no run, and the frozen weights are checked."""
  run, path = boxed("lora")
  own, crafted = tmp_path / "own.zip", tmp_path / "crafted.zip"
  assert call(bundle, f"{run}@2", f"--out={own}", "--weights=adapters") == 0
  names = [name for name in Box(own).names if name.startswith("state/params/")]
  assert names == [name for name in Box(path).names if name.startswith("state/params/") and "_lora_" in name] != []
  gone = run.rename(run.with_name("gone"))
  try:
    assert call(bundle, own, "--run") == 0 and "equal in every bit" in capsys.readouterr().out
  finally:
    gone.rename(run)
  remade(own, crafted, **{"about.json": about(own, lambda x: x["config"].update(seed=1))})
  assert "found weights with the frozen ones of config.model.path=None with the SHA-256" in error(capsys, bundle, crafted, "--run")
  line = error(capsys, bundle, f"{boxed('gspo')[0]}@2", f"--out={own}", "--weights=adapters")
  assert "--weights: found adapters for a run without any" in line


def test_what_cannot_be_done_is_refused_in_one_line(boxed, tmp_path, capsys):
  run, path = boxed("gspo")
  out = f"--out={tmp_path / 'step.zip'}"
  assert "found step 9, expected 1 to 2, the last RL step" in error(capsys, bundle, f"{run}@9", out)
  assert "expected WORKDIR@STEP" in error(capsys, bundle, str(run), out)
  assert "found no RL run in" in error(capsys, bundle, f"{tmp_path}@1", out)
  assert "--out: found none" in error(capsys, bundle, f"{run}@2")
  assert "--only_group: found 99" in error(capsys, bundle, path, "--run", "--only_group=99")
  line = error(capsys, bundle, path, "--run", "--config.reward.kl_coef=1")
  assert "config.reward.kl_coef: found '1', expected a field that a learner alone can honour" in line
  assert "'grpo', which reads ref_logprobs" in error(capsys, bundle, path, "--run", "--config.objective.name=grpo")
  assert "config.learner.b1: found 2.0" in error(capsys, bundle, path, "--run", "--config.learner.b1=2.0")
  other = shutil.copytree(run, tmp_path / "run")
  shutil.rmtree(other / "checkpoints" / "1")
  line = error(capsys, bundle, f"{other}@2", out)
  assert "step 2 begins with the state after step 1: found step 1, expected a checkpoint at or before it" in line
  assert not (tmp_path / "step.zip").exists()


def read_all(path: pathlib.Path) -> dict[str, bytes]:
  opened = Box(path)
  return {name: opened._read(name) for name in opened.names}


@pytest.mark.parametrize("resealed", [False, True], ids=["", "under a new seal"])
def test_damage_is_refused_in_one_line(boxed, tmp_path, resealed):
  """Flipped bits and cuts. Under a new seal, only those that change no entry may pass."""
  whole, rng = boxed("gspo")[1].read_bytes(), np.random.default_rng(0)
  intact, path, refused = read_all(boxed("gspo")[1]), tmp_path / "damaged.zip", 0
  # The directory at the end and headers are a small part of the file.
  places = np.concatenate([rng.integers(len(whole), size=100), len(whole) - 1 - rng.integers(6000, size=60)])
  damaged = [whole[:at] + bytes([whole[at] ^ 1 << rng.integers(8)]) + whole[at + 1 :] for at in places]
  damaged += [whole[:length] for length in (0, 1, 100, len(whole) - 1, *rng.integers(len(whole), size=36))]
  for content in damaged:
    path.write_bytes(content)
    if resealed and len(content) > 64:
      box.seal(path)
    try:
      contents = read_all(path)
    except BoxError as error:
      refused += 1
      assert str(error).startswith(f"{path}: found ") and len(str(error).splitlines()) == 1
    else:
      assert resealed and contents == intact
  assert len(damaged) == 200 and refused >= (150 if resealed else 200)


def remade(source: pathlib.Path, path: pathlib.Path, *, stored=zipfile.ZIP_STORED, more=(), **changes) -> pathlib.Path:
  """Writes a bundle with other entries, and with a manifest and a seal that agree with them."""
  entries = read_all(source) | {name.replace("__", "/"): x for name, x in changes.items()}
  entries = {name: x for name, x in entries.items() if x is not None}
  listed = {name: {"size": len(x), "sha256": hashlib.sha256(x).hexdigest()} for name, x in entries.items()}
  with zipfile.ZipFile(path, "w", stored) as file:
    for name, x in [*entries.items(), *more, ("manifest.json", json.dumps({"entries": listed}).encode())]:
      file.writestr(name, x)
    file.comment = b"0" * 64
  box.seal(path)
  return path


def array(x, *, allow_pickle=False) -> bytes:
  file = io.BytesIO()
  np.lib.format.write_array(file, np.asarray(x), allow_pickle=allow_pickle)
  return file.getvalue()


def about(source: pathlib.Path, change) -> bytes:
  value = json.loads(read_all(source)["about.json"])
  change(value)
  return json.dumps(value).encode()


MASK = "batch__0__mask.npy"
CRAFTED = {
  "a shape": (lambda s: {MASK: array(np.ones((8, 79), np.float32))}, "mask.npy: float32 [8, 79], expected float32 [8, 80]"),
  "a dtype": (lambda s: {MASK: array(np.ones((8, 80)))}, "mask.npy: float64 [8, 80], expected float32"),
  "a pickle": (lambda s: {MASK: array([[None] * 80] * 8, allow_pickle=True)}, "mask.npy: object [8, 80], expected float32"),
  "too many bytes": (lambda s: {MASK: array(np.ones((8, 80), np.float32)) + b"0"}, "mask.npy: 2561 bytes of numbers, expected 2560"),
  "a missing array": (lambda s: {"state__step.npy": None}, "found no state/step.npy"),
  "a missing part": (lambda s: {MASK: None}, "batch/0 without mask, expected"),
  "an unknown array": (lambda s: {"state__more.npy": array([1.0])}, "found the entry state/more.npy, expected entries of a bundle only"),
  "a way out": (lambda s: {"more": [("../evil.npy", b"")]}, "found an entry named '../evil.npy'"),
  "an absolute way out": (lambda s: {"more": [("/evil.npy", b"")]}, "found an entry named '/evil.npy'"),
  "a bomb": (lambda s: {"stored": zipfile.ZIP_DEFLATED}, "which is compressed or encrypted"),
  "an unlisted entry": (lambda s: {"more": [("extra.npy", b"")]}, "'extra.npy', which the manifest does not list"),
  "one name twice": (lambda s: {"more": [("about.json", b"{}")]}, "found two entries of one name"),
  "no JSON": (lambda s: {"about.json": b"["}, "found about.json, which is not JSON"),
  "another format": (lambda s: {"about.json": about(s, lambda x: x.update(format=2))}, "found format 2 in about.json"),
  "code to import": (lambda s: {"about.json": about(s, lambda x: x["config"]["objective"].update(name="os:system"))}, "if you trust it"),
  "a huge model": (lambda s: {"about.json": about(s, lambda x: x["model"].update(num_layers=10**9))}, "found 1000000000 layers"),
  "another model": (lambda s: {"about.json": about(s, lambda x: x["model"].update(d_ff=7))}, "down.npy, expected at most"),
  "no model": (lambda s: {"about.json": about(s, lambda x: x["model"].update(d_ff="7"))}, "model.d_ff: found '7', expected int"),
  "other weights": (lambda s: {"about.json": about(s, lambda x: x["weights"].update(sha256="0" * 64))}, "that of the weights before"),
}  # fmt: skip


@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_bundle_is_refused_in_one_line(case, boxed, tmp_path, capsys):
  """Its seal and its manifest are right."""
  change, message = CRAFTED[case]
  source = boxed("gspo")[1]
  with pytest.warns(UserWarning, match="Duplicate") if case == "one name twice" else pytest.MonkeyPatch.context():
    path = remade(source, tmp_path / "crafted.zip", **change(source))
  assert message in (line := error(capsys, bundle, path, "--run")) and str(path) in line


def test_exact_numerics_are_known_before_devices_start(boxed, tmp_path):
  run, source = boxed("gspo")
  exact = lambda x: x["config"]["numerics"].update(exact=True)
  (tmp_path / "run").mkdir()
  config = json.loads((run / "config.json").read_text())
  (tmp_path / "run/config.json").write_text(json.dumps(config | {"numerics": {"exact": True}}))
  boxes = [remade(source, tmp_path / "exact.zip", **{"about.json": about(source, exact)})]
  boxes.append(remade(source, tmp_path / "neither.zip", **{"about.json": b"[]"}))
  sources = (f"{run}@2", source, f"{tmp_path / 'run'}@2", *boxes, f"{tmp_path}@2")
  assert [contents.is_exact(str(x)) for x in sources] == [False, False, True, True, False, False]


def test_blame_prints_what_adds_up(boxed, tmp_path, capsys):
  _, path = boxed("gspo")
  capsys.readouterr()
  assert call(blame, path, "--leave_out=1", f"--page={tmp_path / 'page.html'}") == 0
  lines = capsys.readouterr().out.splitlines()
  head, _, *rows, total, _, _, _, without, name = lines
  data = re.search('id="data">(.*?)</script>', pathlib.Path(name).read_text("utf-8"))[1]
  assert [x["label"].split(", a")[0] for x in json.loads(data)["samples"][::4]] == [
    f"group {row.split()[0]}: share {row.split()[1]}" for row in rows
  ]
  norm, recorded = re.search(r"gradient norm (\S+) \(in the run (\S+)\)", head).groups()
  assert norm == recorded
  shares = [float(row.split()[1]) for row in rows]
  assert len(rows) == 4 and abs(sum(shares) - 1) < 1e-3 and total.split()[:2] == ["sum", "1.0000"]
  assert sorted(shares, key=abs, reverse=True) == shares and without.startswith(f"without group {rows[0].split()[0]}")


def test_the_tokens_of_the_page_add_up_to_the_table(as_sapo):
  opened, _ = as_sapo
  blamed = table.blame(opened, by="group", order="norm")
  rows = page.data(opened, blamed, most=20)["samples"]
  assert [x["number in the step"] for x in rows] == [x["response"] for i in blamed.order for x in blamed.parts[i]]
  assert all(len(x["tokens"]) == len(x["blame/loss"]) == len(x["blame/share"]) for x in rows)
  for rank, i in enumerate(blamed.order):
    own = [x for x in rows if x["rank"] == rank]
    assert abs(sum(sum(x["blame/loss"]) for x in own) - blamed.shares.losses[i]) < 1e-6
    assert {x["group"] for x in own} == {blamed.parts[i][0]["group"]} and own[0]["reward"] == blamed.parts[i][0]["reward"]
    assert {x["share of the group"] for x in own} == {f"{blamed.shares.shares[i]:.4f}"}
    assert all(abs(sum(x["blame/share"]) - any(x["blame/loss"])) < 1e-6 for x in own)
  assert np.count_nonzero(np.abs(blamed.shares.losses) > 1e-4) >= 3, "sums of 0 would prove little"
  assert len(page.data(opened, blamed, most=20, response=rows[3]["number in the step"])["samples"]) == 1


def test_one_group_agrees_with_nobody(as_sapo):
  opened, _ = as_sapo
  alone = opened._replace(responses=[x for x in opened.responses if x["group"] == 2])
  head, _, row, _ = table.lines_of(alone, blamed := table.blame(alone, by="group", order="against"), most=20)
  assert head.endswith(", 1 group") and row.split()[:3] == ["2", "1.0000", "-"]
  assert "share 1.0000, agreement -" in page.data(alone, blamed, most=20)["samples"][0]["label"]


def test_blame_takes_another_update(boxed, capsys):
  _, path = boxed("gspo")
  capsys.readouterr()
  assert call(blame, path, "--update=2") == 0
  norms = re.match(r"update 2 of RL step 2 of run: .*gradient norm (\S+) \(in the run (\S+)\), 4 groups", capsys.readouterr().out)
  assert float(norms[1]) == pytest.approx(float(norms[2]), rel=1e-5)
  assert "--update: found 3, expected 1 to 2, the number of updates of the step" in error(capsys, blame, path, "--update=3")


@pytest.mark.slow
def test_blame_takes_a_run(boxed, capsys):
  run, path = boxed("gspo")
  texts = []
  for source in (path, f"{run}@2"):
    capsys.readouterr()
    assert call(blame, source) == 0
    texts.append(capsys.readouterr().out)
  assert texts[0] == texts[1]


@pytest.mark.slow
def test_blame_names_responses_and_tokens(boxed, capsys):
  _, path = boxed("gspo")
  capsys.readouterr()
  assert call(blame, path, "--by=response", "--group=2") == 0
  rows = capsys.readouterr().out.splitlines()[2:-1]
  assert sorted(int(row.split()[0]) for row in rows) == [8, 9, 10, 11]
  losses = {int(row.split()[0]): float(row.split()[4]) for row in rows}
  assert call(blame, path, "--by=token", "--response=9") == 0
  *_, total = capsys.readouterr().out.splitlines()
  assert float(total.split()[1]) == pytest.approx(losses[9], rel=1e-3)
  assert "--response: found 31, expected one of update 1" in error(capsys, blame, path, "--by=token", "--response=31")
  assert "--response: expected it with --by=token" in error(capsys, blame, path, "--response=3")
