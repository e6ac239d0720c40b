"""The command that serves a checkpoint: refusals before a weight is read, and a whole service."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.devices.addresses import KEY_VARIABLE
from jaxrl_llm.models import load
from jaxrl_llm.models import logits as logits_of
from jaxrl_llm.run.jobs.serving import open_checkpoint
from jaxrl_llm.serve import __main__ as command
from jaxrl_llm.serve import server
from tests.run.test_train_models import checkpoint_folder  # noqa: F401
from tests.runs import ROOT, environment
from tests.serve.fake_engine import ChatBytes, FakeEngine, ask, events_of

URL = re.compile(r"serving (\S+) at (http://127\.0\.0\.1:\d+), ([\d,]+) tokens of context")


@pytest.mark.parametrize(
  ("options", "words"),
  [
    (["--host=0.0.0.0"], "--host: found '0.0.0.0' without an API key"),
    (["--host=192.0.2.1", "--api_key="], "--api_key: found a key that no header can carry"),
    (["--checkpoint=nowhere"], "--checkpoint: found 'nowhere', which does not exist"),
    (["--checkpoint=configs"], "neither a run nor a published model"),
    (["--checkpoint=package:llm-smollm3"], "not installed"),
    (["--checkpoint=pyproject.toml"], "neither a run nor a published model"),
  ],
)
def test_bad_input_is_one_line(options, words, capsys, monkeypatch):
  monkeypatch.chdir(ROOT)
  monkeypatch.delenv(KEY_VARIABLE, raising=False)
  assert command.main(["--checkpoint=nowhere", *options]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and words in line


@pytest.mark.parametrize(
  "options",
  [
    ["--slots=0"], ["--port=65536"], ["--port=x"], ["--context=1.5"], ["--dtype=int4"], ["--model=x"], [], ["--tinker"],
    ["--tinker", "--model=a=b"],
  ],
)  # fmt: skip
def test_arguments_that_are_none_are_usage_errors(options, capsys):
  with pytest.raises(SystemExit, match="2"):
    command.main([*options, *(["--checkpoint=nowhere"] if options else [])])
  assert "error: " in capsys.readouterr().err


def test_the_key_of_the_environment_opens_other_hosts(capsys, monkeypatch):
  monkeypatch.setenv(KEY_VARIABLE, "a key of sixteen")
  assert command.main(["--checkpoint=nowhere", "--host=0.0.0.0"]) == 2
  assert "--checkpoint" in capsys.readouterr().err


def test_without_uvicorn_the_message_names_the_extra(capsys, monkeypatch):
  find_spec = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "uvicorn" else find_spec(name, *args))
  assert command.main(["--checkpoint=nowhere"]) == 2
  assert capsys.readouterr().err == "error: the service needs the package uvicorn: pip install 'jaxrl-llm[serve]'\n"
  monkeypatch.setitem(sys.modules, "uvicorn", None)
  engine = FakeEngine()
  with pytest.raises(ImportError, match=r"jaxrl-llm\[serve\]"):
    server.start(engine, ChatBytes(), name="x")
  engine.close()


@pytest.fixture(scope="module")
def served(checkpoint_folder):  # noqa: F811
  """The address of a service on two devices, in a process of its own that Ctrl-C ends."""
  options = ["--port=0", "--slots=4", "--context=64", "--name=nano", "--return_sampling_mask"]
  process = subprocess.Popen(
    [sys.executable, "-m", "jaxrl_llm.serve", f"--checkpoint={checkpoint_folder}", *options],
    cwd=ROOT, env=environment(2), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  line = process.stdout.readline()
  if not (match := URL.fullmatch(line.split(";")[0])):
    raise AssertionError(f"{line}{process.communicate()}")
  assert match[1] == "nano" and match[3] == "64"
  yield SimpleNamespace(url=match[2])
  process.send_signal(signal.SIGINT)
  output, log = process.communicate(timeout=30)
  assert (process.returncode, output, log) == (0, "", "ended\n")


@pytest.mark.slow
def test_ids_and_log_probabilities_are_those_of_the_model(served, checkpoint_folder):  # noqa: F811
  """Token-exact: of what was drawn, and of what a learner computes for it, to 1e-5."""
  prompt, sampling = [5, 6, 7], {"max_tokens": 40, "seed": 3, "logprobs": 1, "temperature": 0.7, "ignore_eos": True}
  ask_for = lambda **more: ask(served, "/inference/v1/generate", {"model": "nano", "token_ids": prompt, "sampling_params": sampling | more})
  (choice,) = ask_for()[2]["choices"]
  ids = choice["token_ids"]
  assert len(ids) == 40 and choice["finish_reason"] == "length"
  assert [x["token"] for x in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in ids]
  model, params = load(checkpoint_folder)
  scores = np.asarray(logits_of(model, params, [[*prompt, *ids]]), np.float64)[0, len(prompt) - 1 : -1] / 0.7
  scores -= np.log(np.sum(np.exp(scores), axis=-1, keepdims=True))
  drawn = [x["logprob"] for x in choice["logprobs"]["content"]]
  np.testing.assert_allclose(drawn, scores[np.arange(40), ids], atol=1e-5)
  # Of a prompt too, whose rows and spans lie on two devices.
  scored = {"token_ids": [*prompt, *ids], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
  answer = ask(served, "/inference/v1/generate", scored)[2]
  of_prompt = np.asarray(logits_of(model, params, [[*prompt, *ids]]), np.float64)[0, :-1]
  of_prompt -= np.log(np.sum(np.exp(of_prompt), axis=-1, keepdims=True))
  sent = [next(iter(score.values()))["logprob"] for score in answer["prompt_logprobs"][1:]]
  np.testing.assert_allclose(sent, of_prompt[np.arange(42), [*prompt[1:], *ids]], atol=1e-5)
  assert ask_for()[2]["choices"][0]["token_ids"] == ids
  assert ask_for(seed=4)[2]["choices"][0]["token_ids"] != ids
  assert choice["sampling_mask"] is None and choice["routed_experts"] is None
  (filtered,) = ask_for(top_k=5)[2]["choices"]
  assert [len(kept) for kept in filtered["sampling_mask"]] == [5] * 40
  assert all(token in kept for token, kept in zip(filtered["token_ids"], filtered["sampling_mask"], strict=True))


@pytest.mark.slow
def test_a_chat_with_a_model_streams_its_tokens(served):
  value = {"messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 30, "return_token_ids": True, "n": 2, "logprobs": True}
  whole = ask(served, "/v1/chat/completions", value)[2]
  events = events_of(ask(served, "/v1/chat/completions", {**value, "stream": True})[2])
  for i, choice in enumerate(whole["choices"]):
    chunks = [x for event in events for x in event["choices"] if x["index"] == i]
    assert [token for x in chunks for token in x.get("token_ids", [])] == choice["token_ids"] and choice["token_ids"]
    assert "".join(x["delta"]["content"] for x in chunks) == choice["message"]["content"]
  # A next turn reads what the first has left in the cache.
  turn = {"token_ids": [*whole["prompt_token_ids"], *whole["choices"][0]["token_ids"], 9], "sampling_params": {"max_tokens": 1}}
  assert ask(served, "/inference/v1/generate", turn)[2]["usage"]["prompt_tokens_details"]["cached_tokens"] > len(whole["prompt_token_ids"])


@pytest.mark.slow
def test_stop_strings_end_a_completion_of_a_model(served):
  value = {"prompt": "a", "seed": 2, "max_tokens": 50, "return_token_ids": True, "ignore_eos": True}
  (free,) = ask(served, "/v1/completions", value)[2]["choices"]
  stop = next(character for character in free["text"][3:] if character.isascii())
  (choice,) = ask(served, "/v1/completions", {**value, "stop": stop})[2]["choices"]
  assert choice["finish_reason"] == "stop" and choice["text"] == free["text"].partition(stop)[0]
  assert choice["token_ids"] == free["token_ids"][: len(choice["token_ids"])]


def test_routes_of_a_dense_model_are_refused(checkpoint_folder, capsys):  # noqa: F811
  assert command.main([f"--checkpoint={checkpoint_folder}", "--return_routed_experts"]) == 2
  assert capsys.readouterr().err.startswith("error: --return_routed_experts: found a model without experts, expected one with them")


@pytest.mark.parametrize(("tensor", "words"), [(3, "expected a number that divides the 8 devices"), (4, "--tensor=4 does not divide axis")])
def test_devices_that_do_not_fit_are_one_line(tensor, words, checkpoint_folder, capsys):  # noqa: F811
  assert command.main([f"--checkpoint={checkpoint_folder}", f"--tensor={tensor}"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and words in line


def test_a_folder_opens_with_its_tokenizer(checkpoint_folder):  # noqa: F811
  opened = open_checkpoint(str(checkpoint_folder), dtype="bfloat16")
  assert (opened.name, opened.version, opened.model.config.dtype) == ("nano", 0, "bfloat16")
  assert opened.tokenizer.chat_template is not None
  assert opened.model.mesh.shape["data"] == 8


def test_a_folder_without_a_template_opens_without_chat(checkpoint_folder, tmp_path, capsys):  # noqa: F811
  for path in checkpoint_folder.iterdir():
    (tmp_path / path.name).write_bytes(path.read_bytes())
  settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
  del settings["chat_template"]
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  assert open_checkpoint(str(tmp_path)).tokenizer.chat_template is None
  assert "/v1/chat/completions is off" in capsys.readouterr().err
