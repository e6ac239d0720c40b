"""Heads beside a tied embedding, and folders with two sets of weights: what transformers reads."""

import json

import numpy as np
import pytest

from jaxrl_llm.models import load_reward_params, make_model, make_reward_model, save_hf
from jaxrl_llm.models.files import safetensors
from jaxrl_llm.models.files.loading import check_tensors, load, load_params, logits, open_source, read_config
from tests.models.recorded import CHECKPOINTS, INDEX, WEIGHTS, read, rewrite, write

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IN_VISION = EMBEDDING.replace("model.", "model.language_model.")


@pytest.fixture
def changed(copy):
  """Function `changed(name, change, **fields)` that copies a checkpoint and changes its tensors."""

  def make(name, change, **fields):
    folder = copy(name, **fields)
    rewrite(folder / WEIGHTS, change)
    return folder

  return make


def negative(tensors):
  tensors[HEAD] = -tensors.get(EMBEDDING, tensors.get(IN_VISION))


def equal(tensors):
  tensors[HEAD] = tensors.get(EMBEDDING, tensors.get(IN_VISION)).copy()


def last_row(tensors):
  equal(tensors)
  tensors[HEAD][-1, -1] += 1


def wider(tensors):
  tensors[HEAD] = tensors[EMBEDDING].astype(np.float32)


def wider_and_other(tensors):
  wider(tensors)
  tensors[HEAD][3] *= 1 + 2**-12  # Rounds to the same bfloat16.


def only_head(tensors):
  tensors[HEAD] = tensors.pop(EMBEDDING, None) if EMBEDDING in tensors else tensors.pop(IN_VISION)


def reads(folder):
  """Returns whether a folder is read as a tied model; all of its tensors are then accepted."""
  config, source = open_source(folder)
  check_tensors(config, source)
  assert config == read_config(folder)
  return config.tie_embeddings


@pytest.mark.parametrize(
  ("name", "change", "tied"),
  [
    ("qwen3", negative, False), ("smollm2", last_row, False), ("qwen3_vl", negative, False), ("qwen2", wider_and_other, False),
    ("qwen3", equal, True), ("qwen2", wider, True), ("qwen3_vl", equal, True), ("qwen3_vl_moe", equal, False),
    ("qwen3", only_head, True), ("qwen3_vl", only_head, True),
  ],
)  # fmt: skip
def test_a_head_is_compared_with_the_embedding_that_the_config_ties_it_to(name, change, tied, changed):
  assert reads(changed(name, change)) == tied


def test_a_large_head_is_compared_block_by_block(changed, monkeypatch):
  monkeypatch.setattr(safetensors, "_BLOCK_BYTES", 1000)  # 7 rows of 32 numbers, 96 rows.
  assert [reads(changed("qwen3", change)) for change in (equal, last_row)] == [True, False]


def test_the_other_head_is_used_trained_and_exported(changed, loaded, tmp_path):
  tokens = [[5, 7, 11, 13]]
  expected = -np.asarray(logits(*loaded("qwen3"), tokens))
  folder = changed("qwen3", negative)
  model, params = load(folder)
  # A head of its own is multiplied in another order on some CPUs.
  np.testing.assert_allclose(logits(model, params, tokens), expected, atol=1e-5)
  assert "head" in load_params(folder, make_model(read_config(folder)))
  save_hf(tmp_path / "out", model, params)
  assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
  np.testing.assert_array_equal(read(tmp_path / "out" / WEIGHTS)[HEAD], read(folder / WEIGHTS)[HEAD])


def test_an_embedding_stored_as_the_head_gives_the_model(changed, loaded):
  folder = changed("qwen3", only_head)
  np.testing.assert_array_equal(logits(*load(folder), [[5, 7, 11]]), logits(*loaded("qwen3"), [[5, 7, 11]]))


def test_a_reward_model_takes_the_trunk_behind_any_head(changed):
  folders = [changed("qwen3", change) for change in (negative, only_head)]
  model = make_reward_model(read_config(CHECKPOINTS / "qwen3"))
  one, other = (load_reward_params(folder, model)["trunk"]["embedding"] for folder in folders)
  np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("where", ["head", "embedding"])
def test_an_untied_model_needs_both(where, changed):
  name = HEAD if where == "head" else EMBEDDING
  folder = changed("llama3", lambda tensors: tensors.pop(name))
  with pytest.raises(ValueError, match=f"{name} missing"):
    load(folder)


def test_an_untied_model_with_equal_heads_stays_untied(changed):
  assert not reads(changed("qwen3", equal, tie_word_embeddings=False))


def shards(folder, names_of_first):
  """Moves the weights to two files with an index."""
  tensors, weight_map = read(folder / WEIGHTS), {}
  first = {name: x for name, x in tensors.items() if name in names_of_first}
  parts = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": {k: tensors[k] for k in tensors.keys() - first}}
  for file, part in parts.items():
    write(folder / file, part)
    weight_map |= dict.fromkeys(part, file)
  (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
  return weight_map


@pytest.mark.parametrize(("change", "tied"), [(negative, False), (equal, True)])
def test_head_and_embedding_may_lie_in_two_files(change, tied, changed):
  folder = changed("smollm2", change)
  shards(folder, {HEAD})
  (folder / WEIGHTS).unlink()
  assert reads(folder) == tied


def test_a_whole_file_counts_more_than_an_index_of_others(copy):
  folder = copy("smollm2")
  shards(folder, {EMBEDDING})
  other = read(folder / WEIGHTS)[EMBEDDING] + 1
  rewrite(folder / WEIGHTS, lambda tensors: tensors.update({EMBEDDING: other}))
  np.testing.assert_array_equal(open_source(folder)[1].read(EMBEDDING), other)
  (folder / "model-00002-of-00002.safetensors").unlink()  # What is not read need not be there.
  assert set(open_source(folder)[1].files.values()) == {WEIGHTS}


def test_a_whole_file_that_the_index_names_is_one_of_its_files(copy):
  folder = copy("smollm2")
  weight_map = shards(folder, {EMBEDDING})
  (folder / "model-00002-of-00002.safetensors").rename(folder / WEIGHTS)
  named = {name: file if file.startswith("model-00001") else WEIGHTS for name, file in weight_map.items()}
  (folder / INDEX).write_text(json.dumps({"weight_map": named}))
  assert reads(folder) and set(open_source(folder)[1].files.values()) == {WEIGHTS, "model-00001-of-00002.safetensors"}
