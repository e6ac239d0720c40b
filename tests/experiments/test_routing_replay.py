"""Tests of `experiments/ablations/routing_replay`: measures, verdicts and tiny studies."""

import functools
import math

import jax
import numpy as np
import pytest

from experiments.ablations.routing_replay import __main__ as command
from experiments.ablations.routing_replay import bed as beds
from experiments.ablations.routing_replay import figures, measures, rules, studies
from experiments.results import from_json

TINY = beds.SMOKE._replace(num_minibatches=4, warm_steps=0)


@pytest.fixture
def bed(monkeypatch):
  """Bed with a tiny model whose samplers all have the dtype bfloat16.

  Every other response is rewarded, so that updates change the weights.
  """
  monkeypatch.setattr(beds, "graded", lambda rollouts, chosen: np.arange(len(rollouts.tokens), dtype=np.float32) % 2)
  draw = functools.partial(beds.draw, dtype="bfloat16")
  monkeypatch.setattr(beds, "draw", lambda *args, dtype="", **rest: draw(*args, **rest))
  monkeypatch.setattr(beds, "held_out", lambda *_, **__: 0.5)
  return beds.make_bed(TINY)


def test_changed_experts_are_those_counted_by_hand():
  # One row of three tokens and a slot of padding, with two layers of two experts. The route of the
  # last token affects no later token.
  a = np.array([[[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]]])
  b = np.array([[[[1, 0], [2, 0]], [[2, 3], [2, 3]], [[5, 6], [5, 6]], [[5, 6], [5, 6]]]])
  segments = np.array([[1, 1, 1, 0]])
  assert measures.change_by_layer(a, b, segments) == [0.5, 0.25]
  assert measures.tokens_changed(a, b, segments) == 1.0
  assert measures.smallest_overlap(a, b, segments) == 0.0
  b[0, 1] = -1  # A token that is not recorded does not count.
  assert measures.change_by_layer(a, b, segments) == [0.0, 0.5]
  assert measures.smallest_overlap(a, b, segments) == 0.5


def test_mismatch_and_spread_by_hand():
  mask = np.array([[1.0, 1.0, 0.0]])
  measured = measures.mismatch(np.log([[0.6, 0.1, 1.0]]), np.log([[0.2, 0.1, 0.001]]), mask)
  assert measured == pytest.approx({"k3": (3 - 1 - math.log(3)) / 2, "f2": 0.5, "gap": math.log(3)}, abs=1e-9)
  measured = measures.ratio_spread(np.array([[0.2, -0.2, 9.0], [0.8, 0.4, 9.0]]), np.repeat(mask, 2, axis=0))
  assert measured["std_log_r"] == pytest.approx(np.std([0.2, -0.2, 0.8, 0.4]))
  assert measured["std_log_s"] == pytest.approx(np.std([0.0, 0.6]))
  assert measured["max_r"] == pytest.approx(math.exp(0.8))
  assert measured["f2"] == 0.25


def test_the_teachers_workings_fit_and_are_graded():
  bed = beds.make_bed(TINY)
  problems = beds.questions("train")[::40]
  batch = beds.demonstrations(bed, problems, np.random.default_rng(0))
  assert batch.mask.sum(axis=1).max() < beds.RESPONSE_TOKENS
  assert set(beds.questions("train")).isdisjoint(beds.questions("test"))
  drawn = batch.mask[:, beds.PROMPT_TOKENS :] > 0
  responses = batch.tokens[:, beds.PROMPT_TOKENS :]
  rollouts = beds.Rollouts(None, None, responses, drawn, None, stopped=np.ones(len(problems), bool))
  assert np.mean(beds.graded(rollouts, problems)) == pytest.approx((1 - beds.ERROR_RATE) ** 2, abs=0.1)
  assert not np.any(beds.graded(rollouts._replace(stopped=np.zeros(len(problems), bool)), problems))


@pytest.mark.slow
def test_replay_does_what_it_promises(bed):
  promises = studies.checks(bed, bed.init(jax.random.key(0)), 0)
  assert promises["own_routes"]
  assert promises["r2_same_program"] == 0
  assert promises["own_routes_gap"] < 1e-4
  assert promises["r2_other_rows"] < 1e-4
  assert promises["r3_overlap"] == 1 and promises["recorded"] == 1
  assert promises["live_overlap"] < 1


@pytest.mark.exhaustive
def test_drift_counts_what_each_update_changed(bed):
  rows = studies.drift(bed, bed.init(jax.random.key(0)), 0, learning_rate=0.1, updates=2)
  assert [row["update"] for row in rows] == [1, 2]
  assert rows[0]["change"] == rows[0]["since_start"] > 0
  assert all(len(row["layers"]) == TINY.num_layers and np.mean(row["layers"]) == pytest.approx(row["change"]) for row in rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("replay", ["none", "R2", "R3"])
def test_an_arm_trains(bed, replay):
  arm = studies.Arm(4, replay, "bfloat16", 0.03)
  rows = list(studies.train(bed, bed.init(jax.random.key(0)), 0, arm, warmup=1, rollouts=1, every=1, held_out=1))
  (rollout,) = (row for name, row in rows if name == "rollouts")
  assert rollout["first_ratio"] < 1e-4
  if replay == "R3":
    assert rollout["overlap"] == 1 > 1 - rollout["sampler_change"]
    assert 0 < rollout["k3"] < rollout["k3_live"]
  else:
    assert rollout["overlap"] < 1 and 0 < rollout["k3"] == rollout["k3_live"]
  spreads = [row for name, row in rows if name == "spreads"]
  assert [(row["update"], row["view"]) for row in spreads] == [(n, view) for n in (1, 2, 3, 4) for view in ("live", "replay")]
  assert all(row["std_log_r"] > 1e-3 for row in spreads)
  assert rows[-1] == ("ends", {"seed": 0} | arm._asdict() | {"start": 0.5, "end": 0.5})


def made_up(*, depth: float = 1.0, r3: float = 0.1, falls: tuple[str, ...] = (), moved: float = 0.1, k3: float = 2e-3):
  """Makes up rows as the studies write them.

  Args:
    depth: Exponent with which the changes grow with the layer.
    r3: Factor by which R3 multiplies the divergence.
    falls: Kinds of replay whose arms collapse at the high learning rate.
    moved: Fraction of the experts that an update changes.
    k3: Divergence between sampler and learner without R3.
  """
  rng = np.random.default_rng(0)
  near = lambda x: x * (1 + 0.01 * rng.random())
  tables = {name: [] for name in command.TABLES}
  for seed in rules.SEEDS:
    for layers in rules.DEPTHS:
      for rate in rules.DRIFT_RATES:
        for update in (1, 2):
          change = [near(rate * 10 * (layer + 1) ** depth) for layer in range(layers)]
          at = dict(seed=seed, depth=layers, learning_rate=rate, update=update)
          tables["updates"].append(at | dict(change=float(np.mean(change)), layers=change, since_start=near(rate * update)))
    for arm in rules.ARMS:
      at = {"seed": seed} | arm._asdict()
      of_arm = near(k3 * (r3 if arm.replay == "R3" else 1) * (1e-4 if arm.sampler == "float32" else 1))
      fell = arm.replay in falls and arm.rate == rules.HOT_RATE
      for index in range(4):
        row = dict(reward=0.5, k3=of_arm, k3_live=k3, f2=10 * of_arm, overlap=float(arm.replay == "R3"))
        tables["rollouts"].append(at | {"rollout": index + 1} | row | dict(first_ratio=1e-6, sampler_change=near(0.01)))
        for update in range(1, arm.updates + 1):
          for view in ("live", "replay"):
            spread = near(0.1 * update * (0.5 if view == "replay" else 1))
            values = dict(std_log_r=spread, std_log_s=spread / 4, max_r=1 + spread, f2=0.0, change=moved)
            tables["spreads"].append(at | dict(rollout=index + 1, update=update, view=view) | values)
      tables["ends"].append(at | dict(start=0.3, end=0.1 if fell else near(0.5 if arm.replay == "R3" else 0.4)))
    tables["checks"].append(dict(seed=seed, own_routes=True, own_routes_gap=1e-6, r2_same_program=0.0, r2_other_rows=1e-6))
  return tables


def test_verdicts():
  def verdicts(**settings):
    return {name: row["verdict"] for name, row in rules.judge(made_up(**settings)).items()}

  good = verdicts()
  identities, aside = ("T38", "T39, R2", "T39, R3"), ("E5, calibration", "E6, GRPO collapses without replay")
  assert {good[name] for name in identities} == {"identity verified"}
  assert {good[name] for name in good if name not in (*identities, *aside)} == {"reproduced"}
  assert good["E6, GRPO collapses without replay"] == "mechanism not engaged"
  bad = verdicts(depth=-0.5, r3=1.5, falls=("none",))
  contradicted = ("E5, depth of the model", "E5, layer", "E7, F(2): R3 lowest")
  assert {bad[name] for name in (*contradicted, *(name for name in bad if "KL" in name))} == {"contradicted"}
  assert bad["E6, GRPO collapses without replay"] == "inconclusive", "3 to 0 in three seeds: p is 1/4"
  off = verdicts(moved=0.01, k3=1e-4)
  assert {off[name] for name in off if "ratios" in name or "accuracy" in name} == {"mechanism not engaged"}


@pytest.mark.slow
def test_figures_are_drawn_from_the_rows_alone(tmp_path):
  figures.draw(made_up(), tmp_path, ["svg"])
  assert {path.name for path in tmp_path.iterdir()} == {"expert_drift.svg", "sampler_mismatch.svg", "training.svg"}


def test_a_stopped_measurement_resumes(tmp_path, monkeypatch, capsys):
  started = []

  def pieces(plan, seed):
    for name, table in (("a", "updates"), ("b", "ends")):
      yield f"{name} {seed}", lambda name=name, table=table: iter([started.append(f"{name} {seed}") or (table, {"seed": seed, "x": 0.5})])

  monkeypatch.setattr(command, "pieces", pieces)
  monkeypatch.setattr(rules, "judge", lambda results: {"E": {"rule": "", "verdict": "reproduced", "rows": len(results["updates"])}})
  path = tmp_path / "results.json"
  command.measure(command.SMOKE._replace(seeds=(0,)), path)
  command.measure(command.SMOKE, path, resume=True)
  assert started == ["a 0", "b 0", "a 1", "b 1"]
  results = from_json(path.read_text())
  assert results["updates"] == [{"seed": 0, "x": 0.5}, {"seed": 1, "x": 0.5}] and results["verdicts"]["E"]["rows"] == 2
  assert "b 1: " in capsys.readouterr().out
