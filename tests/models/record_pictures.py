"""A script that records checkpoints with a vision tower, each with its logits by transformers.

  python -m tests.models.record_pictures           records them again
  python -m tests.models.record_pictures --check   saves them with `save_hf`, and opens the result

The script needs torch, torchvision, Pillow and transformers. The checkpoints were recorded with
transformers 5.24.0 and torch 2.14.1.
"""

import pathlib
import shutil
import tempfile

import numpy as np

from tests.models.record_checkpoints import draw, main

FOLDER = pathlib.Path(__file__).parent / "pictures"
LOGITS = "logits.npz"
TOWER = dict(
  depth=4, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, out_hidden_size=32, num_position_embeddings=36,
  deepstack_visual_indexes=[0, 1, 2],
)  # fmt: skip
ROPE = dict(rope_type="default", rope_theta=1e6, mrope_interleaved=True, mrope_section=[4, 2, 2])
DECODER = dict(
  vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
  rope_parameters=ROPE, max_position_embeddings=512,
)  # fmt: skip
TOKENS = dict(image_token_id=90, video_token_id=91, vision_start_token_id=88, vision_end_token_id=89)
PICTURES = ((9, 23), (17, 8))
"""Heights and widths; neither is a multiple of a square of patches."""

# By name: the family, and further fields of its decoder and of its config.
CHECKPOINTS = {
  "qwen3_vl": ("Qwen3VL", {}, dict(tie_word_embeddings=True)),
  "qwen3_vl_moe": ("Qwen3VLMoe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12), {}),
}


def rows(processor) -> list[dict]:
  """Returns prompts with no picture, one and two, as arguments of the reference."""
  import torch

  rng = np.random.default_rng(0)
  pictures = [rng.integers(256, size=(*size, 3), dtype=np.uint8) for size in PICTURES]
  made = []
  for count in range(3):
    tokens, arguments = rng.integers(80, size=5).tolist(), {}
    if count:
      arguments = dict(processor(images=pictures[:count], return_tensors="pt"))
    for grid in arguments.get("image_grid_thw", []):
      tokens += [88, *[90] * (int(grid.prod()) // 4), 89, *rng.integers(80, size=3).tolist()]
    ids = torch.tensor([tokens])
    types = dict(mm_token_type_ids=(ids == 90).int()) if count else {}
    made.append(dict(input_ids=ids, **arguments, **types))
  return made, pictures


def logits_of(model, row: dict) -> np.ndarray:
  """Computes the logits of a prompt with transformers."""
  import torch

  with torch.no_grad():
    return model(**row).logits[0].numpy()


def record(name: str) -> None:
  """Records a checkpoint, prompts with pictures, and their positions and logits."""
  import torch
  import transformers
  from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

  family, decoder, fields = CHECKPOINTS[name]
  torch.manual_seed(list(CHECKPOINTS).index(name))
  config = getattr(transformers, f"{family}Config")(text_config=DECODER | decoder, vision_config=TOWER, **TOKENS, **fields)
  model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
  draw(model)
  folder = FOLDER / name
  shutil.rmtree(folder, ignore_errors=True)
  model.save_pretrained(folder)
  sizes = dict(shortest_edge=64, longest_edge=4096)
  processor = Qwen2VLImageProcessorPil(patch_size=4, size=sizes, image_mean=[0.5] * 3, image_std=[0.5] * 3)
  processor.save_pretrained(folder)
  made, pictures = rows(processor)
  recorded = {f"picture{i}": picture for i, picture in enumerate(pictures)}
  for count, row in enumerate(made):
    recorded |= {f"tokens{count}": row["input_ids"][0].numpy(), f"logits{count}": logits_of(model, row)}
    if count:
      positions, _ = model.model.get_rope_index(row["input_ids"], row["mm_token_type_ids"], row["image_grid_thw"])
      recorded |= {f"positions{count}": positions[:, 0].numpy().T, f"pixels{count}": row["pixel_values"].numpy()}
  assert min(recorded[f"logits{count}"].std() for count in range(3)) > 0.5
  np.savez_compressed(folder / LOGITS, **recorded)
  print(name, {file.name: file.stat().st_size for file in sorted(folder.iterdir())})


def check(name: str) -> None:
  """Compares the logits of a checkpoint that `save_hf` saved with the recorded ones."""
  import torch
  import transformers
  from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

  from jaxrl_llm.models import load, save_hf

  with tempfile.TemporaryDirectory() as temporary, np.load(FOLDER / name / LOGITS) as recorded:
    saved = pathlib.Path(temporary) / name
    save_hf(saved, *load(FOLDER / name))
    model = transformers.AutoModelForImageTextToText.from_pretrained(saved, dtype=torch.float32).eval()
    made, _ = rows(Qwen2VLImageProcessorPil.from_pretrained(FOLDER / name))
    errors = [np.abs(logits_of(model, row) - recorded[f"logits{count}"]).max() for count, row in enumerate(made)]
  print(f"{name:<16} largest errors of transformers' logits after save_hf {errors}")
  assert max(errors) < 3e-5


if __name__ == "__main__":
  main(__doc__, CHECKPOINTS, record, check)
