"""Saving of low-rank adapters in PEFT's format, apart from the weights that they adapt."""

import os
import pathlib

import jax
import numpy as np

from jaxrl_llm.messages import Problem
from jaxrl_llm.models.files.safetensors import write_file
from jaxrl_llm.models.files.saving import check_folder, on_host, picture_notes, whole_folder
from jaxrl_llm.models.files.tensor_names import TensorEntry, entries
from jaxrl_llm.models.linear import ADAPTER
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.params import at_path
from jaxrl_llm.types import Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def save_adapter(
  path: str | os.PathLike,
  model: Model,
  params: Params,
  *,
  base: str,
  dtype: str | None = None,
  tokenizer_from: str | os.PathLike | None = None,
) -> None:
  """Saves the adapters of a model, which `peft.PeftModel.from_pretrained` adds to their base.

  The folder appears only when it is complete.

  Args:
    path: Folder to write, which must be new or empty.
    model: Model with adapters.
    params: Params of the model, on any devices.
    base: Name or folder of the base model, for `base_model_name_or_path`.
    dtype: Dtype of the saved matrices; None keeps theirs.
    tokenizer_from: Folder whose tokenizer and processors are copied, as in `save_hf`.

  Raises:
    ValueError: If the model has no adapters, adapts its experts, or the folder is not empty.

  Note:
    On several hosts all of them must call this; the first one writes.
  """
  path, lora = pathlib.Path(path), model.config.lora
  if lora is None:
    raise ValueError(Problem("adapter", "a model without adapters", "one that was trained with model.lora_rank"))
  check_folder(path)
  adapted = [entry for entry in entries(model.config) if f"{entry.path[-1]}{ADAPTER}a" in at_path(params, entry.path[:-1])]
  if any(entry.over_experts for entry in adapted):
    why = "transformers holds all experts in one tensor, for which PEFT has another format; without --adapter they are merged"
    raise ValueError(Problem("adapter", "adapters of experts (mlp/.* of a mixture)", f"adapters of attention only: {why}"))
  layout, tensors = {}, []
  for entry in adapted:
    name = entry.names[0].removesuffix(".weight")
    for part, matrix in zip("AB", _matrices(params, entry, dtype), strict=True):
      layout[f"base_model.model.{name}.lora_{part}.weight"] = (matrix.shape, matrix.dtype.name)
      tensors.append(matrix)
  if jax.process_index():
    return
  config = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank, "lora_alpha": lora.alpha,
    "target_modules": sorted({entry.names[0].split(".")[-2] for entry in adapted}), "lora_dropout": 0.0, "bias": "none",
    "fan_in_fan_out": False, "inference_mode": True,
  }  # fmt: skip
  notes = {CONFIG: config, **picture_notes(model.config.vision, tokenizer_from)}
  with whole_folder(path, tokenizer_from, notes) as folder:
    write_file(folder / WEIGHTS, layout, tensors)


def _matrices(params: Params, entry: TensorEntry, dtype: str | None) -> tuple[np.ndarray, np.ndarray]:
  """Returns A as [rank, in] and B as [out, rank], with heads flattened as in the tensor."""
  module = at_path(params, entry.path[:-1])
  a, b = (on_host(module[f"{entry.path[-1]}{ADAPTER}{part}"], entry.layer, dtype) for part in "ab")
  return np.ascontiguousarray(a.reshape(-1, a.shape[-1]).T), np.ascontiguousarray(b.reshape(b.shape[0], -1).T)
