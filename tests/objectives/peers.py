"""Recorder of the results of verl's and TRL's own loss functions on the inputs of golden.json.

  python -m tests.objectives.peers VERL TRL     writes tests/objectives/peers.json

VERL and TRL are the folders of the unpacked packages (those that hold `trainer/`). Of the packages'
dependencies, Python needs only NumPy and PyTorch. The functions run unchanged: verl's
`core_algos.py` is executed as a whole, with stand-ins for its imports. TRL's methods are extracted
from their classes by name and called on an object that has the attributes they read. Only the calls
are this module's own.
"""

import ast
import collections
import hashlib
import json
import math
import pathlib
import sys
import textwrap
import types
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
PEERS = HERE / "peers.json"
GOLDEN = HERE.parents[1] / "jaxrl_llm" / "objectives" / "golden.json"
VERSIONS = {"verl": "0.9.1", "trl": "1.16.0"}

WITHOUT_EMPTY = [0, 1, 2, 4]
"""Rows of golden.json that have a counted token."""


def inputs_digest(inputs: dict[str, Any]) -> str:
  """Returns the hash that ties peers.json to the inputs on which it was recorded."""
  return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------------------------
# Their code
# ---------------------------------------------------------------------------------------------------------------------------------------


def cut_out(path: pathlib.Path, *names: str) -> str:
  """Returns the source of functions of a file, named `function` or `Class.function`.

  Decorators stay, except for `staticmethod`, which means nothing outside a class.
  """
  text = path.read_text(encoding="utf-8")
  sources = {}
  for node in ast.parse(text).body:
    for child in node.body if isinstance(node, ast.ClassDef) else [node]:
      if isinstance(child, ast.FunctionDef):
        qualified = f"{node.name}.{child.name}" if child is not node else child.name
        first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
        lines = [line for line in text.splitlines()[first - 1 : child.end_lineno] if line.strip() != "@staticmethod"]
        sources[qualified] = textwrap.dedent("\n".join(lines))
  return "\n\n".join(sources[name] for name in names)


def load_verl(root: pathlib.Path) -> types.ModuleType:
  """Executes the whole of `verl.trainer.ppo.core_algos` and returns it as a module.

  Its imports are stand-ins, except for the three helpers that it calls.
  """
  import torch

  class Config:
    """Fields of ActorConfig that the losses read, with its `get`."""

    def __init__(self, **fields):
      fields = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "global_batch_info": {}} | fields
      self.__dict__.update(fields)

    def get(self, name, default=None):
      return getattr(self, name, default)

  class Other:
    pass

  def module(name, **members):
    stand_in = types.ModuleType(name)
    stand_in.__dict__.update(members)
    stand_in.__path__ = []
    sys.modules[name] = stand_in
    return stand_in

  functional: dict[str, Any] = {"torch": torch}
  exec(cut_out(root / "utils" / "torch_functional.py", "masked_sum", "masked_mean", "clip_by_value"), functional)
  module("omegaconf", DictConfig=Other)
  for name in ("verl", "verl.trainer", "verl.workers"):
    module(name)
  torch_functional = module("verl.utils.torch_functional", **functional)
  module("verl.utils", as_torch_index=None, group_mean_std=None, torch_functional=torch_functional)
  module("verl.trainer.config", AlgoConfig=Other)
  module("verl.utils.import_utils", deprecated=lambda replacement="": lambda f: f)
  module("verl.workers.config", ActorConfig=Config)
  core = module("core_algos", Config=Config)
  exec(compile((root / "trainer" / "ppo" / "core_algos.py").read_text(encoding="utf-8"), "core_algos.py", "exec"), core.__dict__)
  return core


def load_trl(root: pathlib.Path) -> dict[str, Any]:
  """Returns TRL's loss methods by trainer, and the static methods that they call."""
  import torch

  helpers: dict[str, Any] = {"torch": torch, "math": math}
  exec(cut_out(root / "trainer" / "utils.py", "nanmin", "nanmax"), helpers)
  names = ("_compute_loss", "get_off_policy_mask", "get_gamma_weights")
  exec(cut_out(root / "trainer" / "grpo_trainer.py", *(f"GRPOTrainer.{name}" for name in names)), helpers)
  trainers = {"grpo": helpers["_compute_loss"]}
  for trainer, path in (("rloo", "trainer/rloo_trainer.py"), ("gmpo", "experimental/gmpo/gmpo_trainer.py")):
    scope = dict(helpers)
    exec(cut_out(root / path, f"{trainer.upper()}Trainer._compute_loss"), scope)
    trainers[trainer] = scope["_compute_loss"]
  return trainers | {name: helpers[name] for name in names[1:]}


# ---------------------------------------------------------------------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------------------------------------------------------------------


def run_verl(core, case: dict[str, Any], x: dict[str, Any]):
  """Runs one case of verl.

  `function` is a key of verl's registry of policy losses, or the name of a function.
  """
  import torch

  settings, mask, function = dict(case["settings"]), x["mask"], case["function"]
  if function == "compute_value_loss":
    return core.compute_value_loss(vpreds=x["values"], returns=x["returns"], values=x["old_values"], response_mask=mask, **settings)[0], {}
  if function == "kl_penalty":
    return core.agg_loss(core.kl_penalty(x["logprobs"], x["ref_logprobs"], settings["kl_penalty"]), mask, "token-mean"), {}
  correction = settings.pop("rollout_is_weights", None)
  if correction is not None:
    correction = torch.exp(x["old_logprobs"] - x["sampler_logprobs"]).clamp(max=correction)
  old = x[settings.pop("old_log_prob", "old_logprobs")]
  loss_agg_mode = settings.pop("loss_agg_mode", "token-mean")
  loss_fn = core.compute_policy_loss_reinforce if function == "reinforce" else core.POLICY_LOSS_REGISTRY[function]
  return loss_fn(
    old, x["logprobs"], x["advantages"], mask, loss_agg_mode=loss_agg_mode, config=core.Config(**settings), rollout_is_weights=correction
  )


class Accelerator:
  """Accelerator of a single process."""

  num_processes = 1
  sync_gradients = True

  def gather(self, x):
    return x

  def reduce(self, x, reduction):
    return x


def run_trl(trainers, case: dict[str, Any], x: dict[str, Any]):
  """Runs one case of TRL: `function` is the trainer, and settings are fields of its config."""
  import torch

  s = {
    "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": None, "delta": None, "beta": 0.0, "importance_sampling_level": "token",
    "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "max_completion_length": 256, "entropy_coef": 0.0, "off_policy_mask_threshold": None,
    "importance_sampling_ratio": None,
  } | case["settings"]  # fmt: skip
  mask = x["mask"]
  advantages = x["advantages"][:, 0] if case["inputs"] != "far" else x["advantages"]
  trainer = types.SimpleNamespace(
    _get_per_token_logps_and_entropies=lambda *args, **kwargs: (x["logprobs"], x["entropy"], None),
    args=types.SimpleNamespace(**s, steps_per_generation=1),
    accelerator=Accelerator(),
    model=types.SimpleNamespace(training=True),
    current_gradient_accumulation_steps=1,
    epsilon_low=s["epsilon"],
    epsilon_high=s["epsilon"] if s["epsilon_high"] is None else s["epsilon_high"],
    aux_loss_enabled=False,
    top_entropy_quantile=1.0,
    use_vllm=s["importance_sampling_ratio"] is not None,
    vllm_importance_sampling_correction=True,
    use_adaptive_entropy=False,
    _entropy_bonus_enabled=s["entropy_coef"] != 0,
    _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
    get_gamma_weights=trainers["get_gamma_weights"],
    get_off_policy_mask=trainers["get_off_policy_mask"],
    **{key: s[key] for key in ("loss_type", "beta", "importance_sampling_level", "max_completion_length", "entropy_coef")},
    off_policy_mask_threshold=s["off_policy_mask_threshold"],
  )
  ids = torch.zeros(mask.shape, dtype=torch.long)
  inputs = {
    "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, "completion_mask": mask, "advantages": advantages,
    "old_per_token_logps": x["old_logprobs"], "old_logps": (x["old_logprobs"] * mask).sum(1), "ref_per_token_logps": x["ref_logprobs"],
    "num_items_in_batch": mask.sum(),
  }  # fmt: skip
  if s["off_policy_mask_threshold"] is not None:
    inputs["sampling_per_token_logps"] = x["sampler_logprobs"]
  if s["importance_sampling_ratio"] is not None:
    inputs["importance_sampling_ratio"] = torch.exp(x["old_logprobs"] - x["sampler_logprobs"]).clamp(max=s["importance_sampling_ratio"])
  loss = trainers[case["function"]](trainer, None, inputs)
  metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
  return loss, {name: metrics[name] for name in ("clip_ratio/region_mean",) if name in metrics}


# ---------------------------------------------------------------------------------------------------------------------------------------
# Cases
# ---------------------------------------------------------------------------------------------------------------------------------------

NO_DUAL_CLIP = {"clip_ratio_c": 1e9}
DAPO = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, **NO_DUAL_CLIP}
PAPER_GSPO = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
WIDE_GSPO = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}
BY_SEQUENCE = {"importance_sampling_level": "sequence"}

VERL_CASES = {
  "vanilla": ("vanilla", {}, "far"),
  "vanilla-dual-clip": ("vanilla", {"clip_ratio_c": 1.3}, "far"),
  "vanilla-without-dual-clip": ("vanilla", NO_DUAL_CLIP, "far"),
  "vanilla-dapo": ("vanilla", DAPO, "far"),
  "vanilla-seq-mean-token-sum": ("vanilla", {**NO_DUAL_CLIP, "loss_agg_mode": "seq-mean-token-sum"}, "far"),
  "vanilla-seq-mean-token-mean": ("vanilla", {**NO_DUAL_CLIP, "loss_agg_mode": "seq-mean-token-mean"}, "far"),
  "vanilla-constant": (
    "vanilla", {**NO_DUAL_CLIP, "loss_agg_mode": "seq-mean-token-sum-norm", "global_batch_info": {"loss_scale_factor": 7}}, "far"
  ),
  "vanilla-padded-width": ("vanilla", {**NO_DUAL_CLIP, "loss_agg_mode": "seq-mean-token-sum-norm"}, "far"),
  "vanilla-token-sum": ("vanilla", {**NO_DUAL_CLIP, "loss_agg_mode": "token-sum"}, "far"),
  "vanilla-all-rows-count": (
    "vanilla", {**NO_DUAL_CLIP, "loss_agg_mode": "seq-mean-token-sum", "global_batch_info": {"global_batch_size": 5}}, "far"
  ),
  "vanilla-minirl": (
    "vanilla",
    {**NO_DUAL_CLIP, "clip_ratio_high": 0.27, "loss_agg_mode": "seq-mean-token-sum", "rollout_is_weights": 5.0}, "far",
  ),
  "gspo": ("gspo", {**PAPER_GSPO, "loss_agg_mode": "seq-mean-token-mean"}, "very_near"),
  "gspo-wide": ("gspo", {**WIDE_GSPO, "loss_agg_mode": "seq-mean-token-mean"}, "near"),
  "gspo-wide-token-mean": ("gspo", {**WIDE_GSPO, "loss_agg_mode": "token-mean"}, "near"),
  "gspo-token-advantages": ("gspo", {**WIDE_GSPO, "loss_agg_mode": "seq-mean-token-mean"}, "far"),
  "sapo": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, "far"),
  "sapo-narrow": ("sapo", {"tau_pos": 3.0, "tau_neg": 0.5}, "near"),
  "cispo": ("cispo", {"clip_ratio_low": 10.0, "clip_ratio_high": 4.0}, "far"),
  "cispo-two-sided": ("cispo", {"clip_ratio_low": 0.3, "clip_ratio_high": 0.5}, "far"),
  "cispo-script": ("cispo", {"clip_ratio_low": 10.0, "clip_ratio_high": 0.2}, "near"),
  "geo-mean": ("geo_mean", {"clip_ratio": 0.4}, "near"),
  "geo-mean-narrow": ("geo_mean", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}, "near"),
  "geo-mean-token-advantages": ("geo_mean", {"clip_ratio": 0.4}, "far"),
  "geo-mean-with-an-empty-row": ("geo_mean", {"clip_ratio": 0.4}, "near"),
  "dppo-tv": ("dppo_tv", {"clip_ratio": 0.15, "clip_ratio_c": 20.0, "old_log_prob": "sampler_logprobs"}, "far"),
  "dppo-tv-narrow": (
    "dppo_tv", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5, "old_log_prob": "sampler_logprobs"}, "far"
  ),
  "dppo-tv-old": ("dppo_tv", {"clip_ratio": 0.15, "clip_ratio_c": 20.0}, "near"),
  "dppo-kl": ("dppo_kl", {"clip_ratio": 0.05, "clip_ratio_c": 20.0, "old_log_prob": "sampler_logprobs"}, "far"),
  "dppo-kl-narrow": (
    "dppo_kl", {"clip_ratio_low": 0.01, "clip_ratio_high": 0.1, "clip_ratio_c": 1.5, "old_log_prob": "sampler_logprobs"}, "far"
  ),
  "dppo-kl-old": ("dppo_kl", {"clip_ratio": 0.05, "clip_ratio_c": 20.0}, "near"),
  "reinforce": ("reinforce", {"loss_agg_mode": "seq-mean-token-sum"}, "far"),
  "gpg": ("gpg", {"loss_agg_mode": "token-mean"}, "far"),
  "value": ("compute_value_loss", {"cliprange_value": 0.2}, "far"),
  "value-narrow": ("compute_value_loss", {"cliprange_value": 0.05, "loss_agg_mode": "seq-mean-token-mean"}, "near"),
  **{f"kl-{name}": ("kl_penalty", {"kl_penalty": name}, "far") for name in ("k1", "k2", "k3", "k1+", "k3+")},
  "kl-k3-far-from-the-reference": ("kl_penalty", {"kl_penalty": "k3"}, "far"),
}  # fmt: skip

TRL_CASES = {
  "grpo": ("grpo", {"loss_type": "grpo", "beta": 0.04}, "near"),
  "grpo-token-advantages": ("grpo", {"loss_type": "grpo"}, "far"),
  "grpo-with-an-empty-row": ("grpo", {"loss_type": "grpo"}, "near"),
  "bnpo": ("grpo", {"loss_type": "bnpo", "epsilon_high": 0.28}, "far"),
  "dapo": ("grpo", {"loss_type": "dapo", "epsilon_high": 0.28}, "far"),
  "dapo-entropy": ("grpo", {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.01}, "far"),
  "grpo-entropy": ("grpo", {"loss_type": "grpo", "entropy_coef": 0.01}, "near"),
  "dapo-tis": ("grpo", {"loss_type": "dapo", "epsilon_high": 0.28, "importance_sampling_ratio": 2.0}, "far"),
  "dr-grpo": ("grpo", {"loss_type": "dr_grpo", "max_completion_length": 3000}, "far"),
  "gspo": ("grpo", {"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4, **BY_SEQUENCE}, "very_near"),
  "gspo-wide": ("grpo", {"loss_type": "grpo", "epsilon": 0.05, "epsilon_high": 0.1, **BY_SEQUENCE}, "near"),
  "gspo-token-advantages": ("grpo", {"loss_type": "grpo", "epsilon": 0.05, "epsilon_high": 0.1, **BY_SEQUENCE}, "far"),
  "gspo-kl": ("grpo", {"loss_type": "grpo", "epsilon": 0.05, "epsilon_high": 0.1, "beta": 0.3, **BY_SEQUENCE}, "near"),
  "gspo-weighted-kl": (
    "grpo", {"loss_type": "grpo", "epsilon": 0.05, "epsilon_high": 0.1, "beta": 0.3, "use_bias_correction_kl": True, **BY_SEQUENCE}, "near",
  ),
  "luspo": ("grpo", {"loss_type": "luspo", "epsilon": 2e-3, "epsilon_high": 2.5e-3, **BY_SEQUENCE}, "very_near"),
  "luspo-near": ("grpo", {"loss_type": "luspo", "epsilon": 2e-3, "epsilon_high": 2.5e-3, **BY_SEQUENCE}, "near"),
  "sapo": ("grpo", {"loss_type": "sapo"}, "far"),
  "sapo-sequence": ("grpo", {"loss_type": "sapo", **BY_SEQUENCE}, "near"),
  "cispo": ("grpo", {"loss_type": "cispo", "epsilon_high": 5.0}, "far"),
  "cispo-near": ("grpo", {"loss_type": "cispo", "epsilon_high": 1.1}, "near"),
  "cispo-unset": ("grpo", {"loss_type": "cispo"}, "near"),
  "vespo": ("grpo", {"loss_type": "vespo"}, "far"),
  "vespo-near": ("grpo", {"loss_type": "vespo"}, "near"),
  "vespo-zero-advantage": ("grpo", {"loss_type": "vespo"}, "near"),
  "delta": ("grpo", {"loss_type": "dapo", "delta": 1.3}, "far"),
  "delta-inside-the-band": ("grpo", {"loss_type": "dapo", "delta": 1.1}, "far"),
  "weighted-kl": ("grpo", {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True}, "far"),
  "off-policy-mask": ("grpo", {"loss_type": "grpo", "off_policy_mask_threshold": 0.2}, "near"),
  "gmpo": ("gmpo", {"epsilon": 0.4}, "near"),
  "gmpo-kl": ("gmpo", {"epsilon": 0.1, "epsilon_high": 0.2, "beta": 0.3}, "near"),
  "rloo": ("rloo", {}, "near"),
  "rloo-wide": ("rloo", {"epsilon": 0.5, "epsilon_high": 1.0}, "near"),
}  # fmt: skip


def rows_of(peer: str, name: str) -> list[int]:
  """Returns the rows of the inputs that a case uses.

  TRL and verl's GMPO count rows without a counted token, so only cases about such rows contain one.
  """
  keeps_all = name.endswith("with-an-empty-row") or (peer == "verl" and not name.startswith("geo-mean"))
  return [0, 1, 2, 3, 4] if keeps_all else WITHOUT_EMPTY


def changed(name: str, arrays: dict[str, Any]) -> dict[str, Any]:
  """Changes the inputs of the cases that are about one unusual number."""
  if name == "kl-k3-far-from-the-reference":
    arrays["ref_logprobs"][0][0] = arrays["logprobs"][0][0] + 5.0
  if name == "vespo-zero-advantage":
    arrays["advantages"][0] = [0.0] * len(arrays["advantages"][0])
  return arrays


def inputs_of(case: dict[str, Any], name: str, inputs: dict[str, Any]) -> dict[str, Any]:
  """Returns the arrays of a case as lists, for the peers here and for this package in the test."""
  return changed(name, {field: [list(rows[i]) for i in case["rows"]] for field, rows in inputs[case["inputs"]].items()})


def all_cases() -> dict[str, dict[str, dict[str, Any]]]:
  """Returns the cases by peer and name, with settings under the peer's own names."""
  return {
    peer: {
      name: {"function": function, "settings": settings, "inputs": inputs, "rows": rows_of(peer, name)}
      for name, (function, settings, inputs) in cases.items()
    }
    for peer, cases in (("verl", VERL_CASES), ("trl", TRL_CASES))
  }


def record(verl: pathlib.Path, trl: pathlib.Path) -> dict[str, Any]:
  """Records loss, gradient and metrics of every case."""
  import torch

  inputs = json.loads(GOLDEN.read_text(encoding="utf-8"))["inputs"]
  peers, run = {"verl": load_verl(verl), "trl": load_trl(trl)}, {"verl": run_verl, "trl": run_trl}
  cases = all_cases()
  for peer in cases:
    for name, case in cases[peer].items():
      arrays = {field: torch.tensor(rows, dtype=torch.float64) for field, rows in inputs_of(case, name, inputs).items()}
      by = "values" if case["function"] == "compute_value_loss" else "logprobs"
      arrays[by].requires_grad_()
      loss, metrics = run[peer](peers[peer], case, arrays)
      assert loss.dtype == torch.float64, f"{peer} {name}: {loss.dtype}"
      loss.backward()
      case["loss"], case["grad"], case["metrics"] = loss.item(), arrays[by].grad.tolist(), metrics
  return {"versions": VERSIONS, "torch": torch.__version__, "inputs_sha256": inputs_digest(inputs), **cases}


if __name__ == "__main__":
  from tests.objectives.reference import dumps

  version = (pathlib.Path(sys.argv[1]) / "version" / "version").read_text().strip()
  assert version == VERSIONS["verl"], version
  PEERS.write_text(dumps(record(*map(pathlib.Path, sys.argv[1:3]))), encoding="utf-8")
  print(f"{PEERS.name}: {PEERS.stat().st_size} bytes")
