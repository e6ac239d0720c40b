"""An exported run: a model that other programs open with its tokenizer, a card, and an upload."""

import json

import pytest
import tokenizers

from jaxrl_llm import export
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.run.jobs.publish import card, hub
from jaxrl_llm.workdir import claim
from tests.runs import VARIED, quick, run_here, tiny_config

SHORT = VARIED | {
  "num_steps": 2, "warm_start.num_steps": 2, "warm_start.batch_size": 8, "eval.every": 2, "eval.num_prompts": 8, "eval.batch_prompts": 8,
  "log.tensorboard": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  folder, config = tmp_path_factory.mktemp("trained") / "run", tiny_config(overrides=SHORT)
  folder.mkdir()
  claim.claim(folder, config.to_dict())
  run_here(config, folder)
  return folder


@pytest.fixture(scope="module")
def exported(workdir, tmp_path_factory):
  folder = tmp_path_factory.mktemp("exported") / "nano-gspo"
  with quick():
    assert export.main([str(workdir), str(folder)]) == 0
  return folder


def test_the_card_says_what_was_trained_how_and_how_well(exported, workdir):
  text = (exported / "README.md").read_text("utf-8")
  _, front, body = text.split("---\n", 2)
  assert '"text-generation"' in front and 'library_name: "transformers"' in front and "license" not in front
  for words in (
    "# nano-gspo\n", "on `arithmetic` with `gspo`", "| objective | `gspo` |", "2, of 8 prompts with 4 samples each", "| 0 | 0.0% | ",
    "| 2 | ", "learning_curves.png", "| `num_steps` | `2` |", "jaxrl_llm 0", "## Licence",
  ):  # fmt: skip
    assert words in body, words
  assert str(workdir) not in text and str(workdir.parent) not in text
  assert (exported / "learning_curves.png").read_bytes()[:4] == b"\x89PNG"
  assert json.loads((exported / "run_config.json").read_text())["objective.name"] == "gspo"


def test_the_tokenizer_and_the_ids_are_those_of_the_run(exported):
  theirs, ours = tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json")), ByteTokenizer()
  assert theirs.encode("7+8=é").ids == ours.encode("7+8=é", add_bos=True)
  config, generation = (json.loads((exported / f"{name}.json").read_text()) for name in ("config", "generation_config"))
  expected = (ours.bos_id, ours.eos_id, ours.pad_id)
  for content in (config, generation):
    assert tuple(content[f"{name}_token_id"] for name in ("bos", "eos", "pad")) == expected


def test_transformers_generates_with_the_export_alone(exported):
  transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
  model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
  tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
  ids = model.generate(**tokenizer("7+8=", return_tensors="pt"), max_new_tokens=4, do_sample=False)
  assert ids.shape[1] >= 6 and isinstance(tokenizer.decode(ids[0]), str)


@pytest.mark.parametrize(
  ("text", "licence"),
  [("---\nlicense: apache-2.0\n---\n", "apache-2.0"), ("---\nlicense: 'mit'\ntags:\n- x\n---\n# T", "mit"),
   ("# no front\nlicense: mit", None), ("---\nlicense:\n- mit\n---\n", None)],
)  # fmt: skip
def test_the_licence_of_the_base_is_read_from_its_card(text, licence, tmp_path):
  assert card.licence_of(tmp_path) is None
  (tmp_path / "README.md").write_text(text)
  assert card.licence_of(tmp_path) == licence


def test_a_card_names_no_folder_of_this_machine():
  values = ("somewhere/deep/model", ["math=runs/a", "runs/b"], None, 3, "gsm8k")
  assert [card._without_folders(x) for x in values] == ["model", ["math=a", "b"], None, 3, "gsm8k"]


@pytest.mark.parametrize("is_adapter", [False, True])
def test_the_card_of_a_base_model_names_it_without_its_folder(is_adapter, tmp_path):
  workdir, base, folder = (tmp_path / name for name in ("run", "secret/Base-1B", "out"))
  for path in (workdir, base, folder):
    path.mkdir(parents=True)
  (base / "README.md").write_text("---\nlicense: mit\n---\n")
  (workdir / "config.json").write_text(json.dumps({"model": {"path": str(base)}, "objective": {"name": "gspo"}, "task": {"name": "gsm8k"}}))
  (note,) = card.write_card(folder, workdir, card.Exported(3, is_adapter, base), name="T")
  text = (folder / "README.md").read_text("utf-8")
  assert "`Base-1B`" in text and 'license: "mit"' in text and "Not measured." in text and "learning_curves" not in text
  assert ('library_name: "peft"' in text) == is_adapter and note.startswith("the card has no learning curves: ")
  assert all("secret" not in path.read_text("utf-8") for path in folder.iterdir())


class Hub:
  """A hub that lists what it is asked for."""

  def __init__(self, taken=(), refuses=False):
    self.taken, self.refuses, self.calls = taken, refuses, []

  def whoami(self):
    return {"name": "ann", "orgs": [{"name": "lab"}]}

  def repo_exists(self, name):
    return name in self.taken

  def create_repo(self, name, **options):
    self.calls.append(("create", name, options))
    if self.refuses:
      raise PermissionError("403 Forbidden:\nno rights")
    return f"https://hub/{name}"

  def upload_folder(self, *, repo_id, folder_path, commit_message):
    self.calls.append(("upload", repo_id, folder_path))


def use(monkeypatch, fake):
  monkeypatch.setattr("huggingface_hub.HfApi", lambda: fake)
  return fake


def test_a_push_makes_a_private_repository_and_uploads_the_folder(workdir, tmp_path, monkeypatch, capsys):
  fake, folder = use(monkeypatch, Hub()), tmp_path / "out"
  with quick():
    assert export.main([str(workdir), str(folder), "--push=lab/model"]) == 0
  assert fake.calls == [("create", "lab/model", {"private": True, "exist_ok": False}), ("upload", "lab/model", str(folder))]
  assert capsys.readouterr().out.endswith("uploaded to https://hub/lab/model, which is private\n")
  assert "# model\n" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("model", "--push: found 'model', expected OWNER/NAME, as in my-lab/qwen3-gspo"),
    ("a/b/c", "--push: found 'a/b/c', expected OWNER/NAME"),
    ("other/model", "--push: found 'other/model', whose owner is other, expected one of ann, lab, to whom the token belongs"),
    ("lab/taken", "--push: found 'lab/taken', which is taken, expected a new name"),
  ],
)
def test_a_name_that_cannot_be_used_is_refused_before_anything_is_written(name, words, workdir, tmp_path, monkeypatch, capsys):
  fake = use(monkeypatch, Hub(taken=("lab/taken",)))
  assert export.main([str(workdir), str(tmp_path / "out"), f"--push={name}"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert words in line and not fake.calls and not (tmp_path / "out").exists()


def test_a_hub_that_does_not_answer_is_one_line():
  with pytest.raises(ValueError) as error:  # The real client: the network is off in tests.
    hub.check_push("lab/model")
  assert str(error.value).startswith("--push: found 'lab/model', and ") and "\n" not in str(error.value)
  assert str(error.value).endswith("expected a hub that answers and a token that may write: run `hf auth login` first")


def test_a_refused_upload_keeps_the_export(tmp_path):
  with pytest.raises(ValueError) as error:
    hub.push(Hub(refuses=True), tmp_path, "lab/model")
  again = f"the export is in {tmp_path}, and `hf upload lab/model {tmp_path}` tries again"
  assert str(error.value) == f"--push: lab/model was not uploaded (PermissionError: 403 Forbidden: no rights); {again}"


def test_adapters_are_exported_only_where_there_is_a_base(workdir, tmp_path, capsys):
  with quick():
    assert export.main([str(workdir), str(tmp_path / "out"), "--adapter"]) == 2
  assert "--adapter: found a run whose base began at random, expected no --adapter" in capsys.readouterr().err
