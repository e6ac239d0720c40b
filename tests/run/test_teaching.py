"""What teachers read and where their scores go, and runs whose policy is its own teacher."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.packing import Trajectory
from jaxrl_llm.learner.teacher_programs import Scores
from jaxrl_llm.run.jobs.dry_run import describe_run
from jaxrl_llm.run.setup.start import Run
from jaxrl_llm.run.steps import learn, teach
from tests.run.test_teacher import SHORT, refused
from tests.runs import column, lines_of, quick, rows, run_here, tiny_config

SELF = {"teacher.path": "self", "teacher.privileged": "{answer} is {prompt}"}


def sequence(prompt, response):
  zeros, ones = np.zeros(len(prompt), np.float32), np.ones(len(response), np.float32)
  tokens, mask = np.array([*prompt, *response], np.int32), np.concatenate([zeros, ones])
  return Trajectory(tokens, mask, 0 * mask, -mask, num_prompt=len(prompt))


def run_of(teachers, *, privileged=None, **section):
  """Makes a run of which only what scores are made of exists; `teachers` score rows."""
  config = tiny_config("opd", {"teacher.row_tokens": 20, "teacher.row_buckets": (1, 2)} | {f"teacher.{n}": x for n, x in section.items()})
  config.learner.row_tokens, config.learner.row_buckets = 12, (1, 2)
  with quick():
    mesh, _ = mesh_lib.make_meshes(**config.mesh)
  programs = {name: SimpleNamespace(score=score) for name, score in teachers.items()}
  experiment = SimpleNamespace(mesh=mesh, learner=SimpleNamespace(teachers=programs), privileged=privileged)
  run = object.__new__(Run)
  run.config, run.experiment, run.teachers, run.state = config, experiment, dict.fromkeys(teachers), SimpleNamespace(params=None)
  return run


def test_a_teacher_reads_its_own_prompt_and_its_scores_lie_at_the_response():
  seen = []

  def score(params, batch):
    seen.append(batch)
    return Scores(jnp.float32(batch.tokens), jnp.float32(batch.positions))

  sequences = [sequence([1, 2], [11, 12, 13]), sequence([1, 2], [14]), sequence([3], [15, 16])]
  examples = [{"answer": 90}, {"answer": 90}, {"answer": 91}]
  run = run_of({"": score}, privileged=lambda row: [row["answer"], 99, 98, 97], path="self")
  layout = packing.arrange(sequences, row_tokens=12, row_buckets=(1, 2), share_prompts=True)
  (scores,) = teach.scores_of_rows(run, [sequences], [examples])
  laid = teach.lay_scores(scores, sequences, layout)
  packed = packing.pack(sequences, layout)
  np.testing.assert_array_equal(laid.logprobs, np.where(packed.mask > 0, packed.tokens, 0))
  # Each response begins at position 4, behind the prompt of the teacher.
  np.testing.assert_array_equal(laid.entropy[packed.mask > 0], np.concatenate([4 + np.arange(len(x.logprobs)) for x in scores]))
  (teachers_rows,) = seen
  read = set(np.asarray(teachers_rows.tokens).ravel())
  assert {90, 91, 99} <= read and not {90, 91, 97, 98, 99} & set(packed.tokens.ravel())
  assert not {1, 2, 3} & read


def test_each_of_several_teachers_scores_the_samples_of_its_problems():
  constant = lambda x: lambda params, batch: Scores(jnp.full(batch.tokens.shape, x), jnp.full(batch.tokens.shape, -x))
  run = run_of({"a": constant(-2.0), "b": constant(-5.0), "c": constant(0.0)}, paths=("a=x", "b=y", "c=z"), column="kind")
  run.config.teacher.path = None
  sequences = [sequence([1, 2], [11, 12, 13]), sequence([1, 2], [14]), sequence([3], [15, 16])]
  examples = [{"kind": "a"}, {"kind": "a"}, {"kind": "b"}]
  (scores,) = teach.scores_of_rows(run, [sequences], [examples])
  assert [x.logprobs.tolist() for x in scores] == [[-2, -2, -2], [-2], [-5, -5]]
  layout = packing.arrange(sequences, row_tokens=12, row_buckets=(1, 2))
  placed = [packing.pack(sequences, layout)]  # Its log-probabilities are -1.
  assert teach.kl_of_each(run, placed, [scores], [sequences], [layout], [examples]) == {"teacher/kl/a": 1, "teacher/kl/b": 4}


@pytest.mark.exhaustive
def test_privileged_text_reaches_the_teacher_and_nothing_else(tmp_path, monkeypatch):
  """The first step of a run is the same without a teacher, and with one that reads any text."""
  packed, read = {}, {}
  with_logprobs, read_by_teacher = learn.with_logprobs, teach.read_by_teacher

  def first_rows(into, real):
    def recorded(*args):
      into.append(jax.device_get(args[-2] if len(args) > 1 else args[0]))
      return real(*args)

    return recorded

  none, same = {"teacher.opd_coef": 0.0, "teacher.path": None}, SELF | {"teacher.privileged": "{prompt}"}
  for name, changes in {"none": none, "answer": SELF, "same": same}.items():
    monkeypatch.setattr(learn, "with_logprobs", first_rows(packed.setdefault(name, []), with_logprobs))
    monkeypatch.setattr(teach, "read_by_teacher", first_rows(read.setdefault(name, []), read_by_teacher))
    run_here(tiny_config("opd", SHORT | {"num_steps": 1} | changes), tmp_path / name)
  assert not read["none"]
  for other in ("answer", "same"):
    assert column(tmp_path / other, "rollout/tokens_sha256") == column(tmp_path / "none", "rollout/tokens_sha256")
    for one, two in zip(jax.tree.leaves(packed["none"]), jax.tree.leaves(packed[other]), strict=True):
      np.testing.assert_array_equal(one, two)
  texts = lambda batches: [bytes(np.minimum(x.tokens, 255).astype(np.uint8).ravel()) for x in batches]
  assert not any(b" is " in text for name in packed for text in texts(packed[name])) and len(packed["answer"]) == 2
  # A teacher's own rows, and those of the mini-batch that its scores are laid into.
  assert [b" is " in text for text in texts(read["answer"])] == [True, True, False, False]
  assert not any(b" is " in text for text in texts(read["same"]))
  # With the policy's own prompt, the teacher is the policy.
  (same,), (answer,) = rows(tmp_path / "same", "rl"), rows(tmp_path / "answer", "rl")
  assert abs(same["teacher/kl"]) < 1e-5 and same["teacher/advantage_abs"] < 1e-5 and answer["teacher/advantage_abs"] > 1e-2


@pytest.mark.exhaustive
def test_the_exact_divergence_from_the_policy_behind_another_prompt(tmp_path):
  """It is 0 behind the same prompt, and not behind another one."""
  exact = {"teacher.gkd_coef": 1.0, "learner.row_tokens": None, "learner.row_buckets": None}
  for name, changes in {"same": {"teacher.privileged": "{prompt}"}, "answer": {}}.items():
    run_here(tiny_config("opd", SHORT | SELF | exact | {"num_steps": 1} | changes), tmp_path / name)
  (same,), (answer,) = rows(tmp_path / "same", "rl"), rows(tmp_path / "answer", "rl")
  assert abs(same["teacher/kl"]) < 1e-5 and same["teacher/agreement"] > 0.99
  assert answer["teacher/kl"] > 0.02 and answer["teacher/gkd_loss"] == pytest.approx(answer["teacher/kl"], rel=1e-4)


@pytest.mark.exhaustive
def test_a_frozen_copy_of_the_policy_survives_a_resumption(tmp_path):
  changes = SHORT | SELF | {"teacher.frozen": True, "learner.learning_rate": 3e-2}
  for name, steps in {"whole": (2,), "parts": (1, 2)}.items():
    for num_steps in steps:
      run_here(tiny_config("opd", changes | {"num_steps": num_steps}), tmp_path / name)
  run_here(tiny_config("opd", changes | {"teacher.frozen": None}), tmp_path / "current")
  whole, parts, current = (lines_of(tmp_path / name, "rl") for name in ("whole", "parts", "current"))
  assert whole == parts and len(whole) == 2 and current[0] == whole[0]
  assert column(tmp_path / "current", "teacher/kl")[1] != column(tmp_path / "whole", "teacher/kl")[1]


def test_a_privileged_prompt_that_cannot_be_is_refused():
  line = refused(SELF | {"teacher.privileged": "{prompt}{anwser}"})
  assert line.startswith("config.teacher.privileged: found {anwser}, expected one of the columns") and "did you mean {answer}?" in line
  line = refused(SELF | {"teacher.row_tokens": 30})
  need = "38 tokens, the longest prompt of teacher.privileged (14) and a response"
  assert line == f"config.teacher.row_tokens: found 30, expected at least {need}"
  line = refused(SELF | {"teacher.row_tokens": 40, "teacher.row_buckets": (1,)})
  assert line.startswith("config.teacher.row_buckets: found (1,), expected a number of at least 16: 16 sequences of up to 38 tokens")


def test_a_dry_run_counts_the_teachers_rows_and_a_frozen_copy_alone():
  def kinds(changes):
    with quick():
      text = describe_run(tiny_config("opd", SELF | changes))
    return {line.split()[0]: line for line in text.splitlines() if line.startswith("  ")}

  current, frozen = kinds({}), kinds({"teacher.frozen": True})
  assert "teacher" in current and "--config.teacher.row_tokens=112" in current
  assert "frozen reference" not in current["always"] and "teacher" not in current["always"]
  assert "frozen reference" in frozen["always"]


def test_several_teachers_must_be_those_of_the_problems():
  several = {"teacher.path": None, "teacher.paths": ("1=a", "2=b"), "teacher.column": "level"}
  assert refused(several | {"teacher.column": "levl"}).startswith("config.teacher.column: found 'levl', expected one of the columns")
  line = refused(several | {"teacher.paths": ("1=a", "3=b")})
  assert line == "config.teacher.column: found '2' in column 'level' of a problem, expected one of the names in teacher.paths, 1, 3"
  line = refused(several | {"teacher.paths": ("1=a", "2=b", "3=c")})
  assert line == "config.teacher.paths: found '3', expected only names that a problem has in column 'level'"
  assert refused(several).startswith("config.teacher.paths: found ")  # There is no folder a.
