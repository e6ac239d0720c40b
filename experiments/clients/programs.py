"""What each client does with the service, run by a Python that has the client and not this package.

  python programs.py CLIENT URL MODEL TOKENIZER

It prints a line of JSON for each feature: its name, whether it works, and what was seen. Imports
are late, because each Python has one client only.
"""

import asyncio
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator

KEY = "none"
CITY = 'Repeat: {"name": "Paris", "people": 2}'
SUM = "What is 3 plus 4? Use the tool."

Seen = Iterator[tuple[str, str]]


def openai(url: str, model: str, tokenizer: str) -> Seen:
  """Makes the SDK's own calls, with pydantic's schemas."""
  import openai as sdk
  from pydantic import BaseModel, ConfigDict

  class City(BaseModel):
    """A city."""

    # A small model would go on with further keys.
    model_config = ConfigDict(extra="forbid")

    name: str
    people: int

  client, settings = sdk.OpenAI(base_url=f"{url}/v1", api_key=KEY), dict(model=model, max_tokens=40, temperature=0.0)
  asked = [{"role": "user", "content": "Say hello."}]
  answer = client.chat.completions.create(messages=asked, logprobs=True, top_logprobs=5, n=2, **settings)
  message = answer.choices[0].message
  assert message.content and answer.choices[1].message.content == message.content
  client.chat.completions.create(messages=[*asked, message.model_dump(), *asked], **settings)
  client.chat.completions.create(messages=[{"role": "developer", "content": "Be brief."}, *asked], **settings)
  assert client.models.retrieve(model).id == model
  yield "chat", "two answers, one sent back, the role developer"
  token = answer.choices[0].logprobs.content[0]
  assert len(token.top_logprobs) == 5 and token.logprob == token.top_logprobs[0].logprob < 0
  scored = client.completions.create(prompt="Paris is in France", echo=True, logprobs=1, max_tokens=0, model=model)
  own = scored.choices[0].logprobs.token_logprobs
  assert own[0] is None and all(x < 0 for x in own[1:])
  yield "log-probabilities", "5 likeliest tokens; those of a prompt"
  options = {"include_usage": True, "continuous_usage_stats": True}
  chunks = list(client.chat.completions.create(messages=asked, stream=True, stream_options=options, **settings))
  assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == message.content
  assert all(chunk.usage for chunk in chunks)
  yield "stream", "the text of the whole answer, usage in each chunk"
  parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
  function = {"name": "add", "parameters": parameters}
  calling = dict(tools=[{"type": "function", "function": function}], tool_choice="required", parallel_tool_calls=False)
  (call,) = client.chat.completions.create(messages=asked, **calling, **settings).choices[0].message.tool_calls
  assert call.function.name == "add" and isinstance(json.loads(call.function.arguments)["a"], int)
  yield "tools", "a forced call"
  parsed = client.chat.completions.parse(messages=[{"role": "user", "content": CITY}], response_format=City, **settings)
  assert isinstance(parsed.choices[0].message.parsed, City)
  yield "schemas", "`parse`"
  try:
    client.completions.create(prompt="word " * 9000, model=model)
    raise AssertionError("a prompt beyond the context was taken")
  except sdk.BadRequestError as error:
    assert error.code == "context_length_exceeded", error.code
  yield "completions", "prompts; one too long has its own code"


def openai_agents(url: str, model: str, tokenizer: str) -> Seen:
  """Runs an agent with two tools, and one without."""
  import agents
  from openai import AsyncOpenAI

  agents.set_tracing_disabled(True)
  served = agents.OpenAIChatCompletionsModel(model=model, openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY))
  calls = []

  @agents.function_tool
  def add(a: int, b: int) -> int:
    """Adds two numbers."""
    calls.append(a + b)
    return a + b

  @agents.function_tool
  def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    calls.append(a * b)
    return a * b

  brief = agents.ModelSettings(max_tokens=100, temperature=0.0)
  speaker = agents.Agent(name="a", model=served, model_settings=brief)
  forced = brief.resolve(agents.ModelSettings(tool_choice="required"))
  caller = agents.Agent(name="a", instructions="Use the tools.", tools=[add, multiply], model=served, model_settings=forced)

  # One event loop, which the SDK's connections stay in.
  async def seen() -> list[tuple[str, str]]:
    plain = await agents.Runner.run(speaker, "Say hello.")
    run = agents.Runner.run_streamed(speaker, "Say hello.")
    pieces = [x.data.delta async for x in run.stream_events() if getattr(getattr(x, "data", None), "delta", None)]
    assert plain.final_output and "".join(pieces) == plain.final_output
    result = await agents.Runner.run(caller, SUM, max_turns=4)
    assert 7 in calls and result.final_output
    return [("chat", "`Runner.run`"), ("stream", "`Runner.run_streamed`"), ("tools", "two tools, called and answered")]

  yield from asyncio.run(seen())


def smolagents(url: str, model: str, tokenizer: str) -> Seen:
  """Runs `ToolCallingAgent` with two tools."""
  import smolagents as smol

  calls = []

  @smol.tool
  def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
      a: First number.
      b: Second number.
    """
    calls.append(a + b)
    return a + b

  @smol.tool
  def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
      a: First number.
      b: Second number.
    """
    calls.append(a * b)
    return a * b

  # A small model would go on with calls until its budget is spent.
  settings = dict(max_tokens=80, temperature=0.0, parallel_tool_calls=False)
  served = smol.OpenAIServerModel(model_id=model, api_base=f"{url}/v1", api_key=KEY, **settings)
  agent = smol.ToolCallingAgent(tools=[add, multiply], model=served, max_steps=2, verbosity_level=0)
  agent.run(SUM)
  assert 7 in calls, calls
  yield "tools", "`ToolCallingAgent`, two tools, called and answered"


def langchain(url: str, model: str, tokenizer: str) -> Seen:
  """Calls `ChatOpenAI`, also for structured output by its three methods."""
  from langchain_openai import ChatOpenAI
  from pydantic import BaseModel, ConfigDict

  class City(BaseModel):
    """A city."""

    # A small model would go on with further keys.
    model_config = ConfigDict(extra="forbid")

    name: str
    people: int

  served = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=KEY, max_tokens=80, temperature=0.0)
  answer = served.invoke("Say hello.").content
  assert answer
  yield "chat", "`invoke`"
  assert "".join(chunk.content for chunk in served.stream("Say hello.")) == answer
  yield "stream", "`stream`"
  (call,) = served.bind_tools([City], tool_choice="required", parallel_tool_calls=False).invoke(CITY).tool_calls
  assert call["name"] == "City" and isinstance(call["args"]["people"], int)
  yield "tools", "`bind_tools`, a forced call"
  for method in ("function_calling", "json_mode", "json_schema"):
    structured = served.with_structured_output(City, method=method).invoke(CITY)
    assert isinstance(structured, City), method
  yield "schemas", "`with_structured_output` by its three methods"


TASKS = {
  "choices": {
    "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "{{gold}}", "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": "acc"}],
  },
  "rolling": {
    "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
  },
  "generated": {
    "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}, "metric_list": [{"metric": "exact_match"}],
  },
}  # fmt: skip
PROBLEMS = [("The capital of France is", [" Paris", " green"], 0), ("Two plus two is", [" yellow", " four"], 1)]


def lm_eval(url: str, model: str, tokenizer: str) -> Seen:
  """Runs tasks of each kind of the harness, from the command line."""
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    lines = [json.dumps({"question": question, "choices": choices, "gold": gold}) for question, choices, gold in PROBLEMS]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}}, "test_split": "test"}
    for task, settings in TASKS.items():
      (folder / f"{task}.yaml").write_text(json.dumps({"task": task, **files, **settings}))

    def results(kind: str, route: str, tasks: str, *more: str) -> dict[str, dict[str, float]]:
      served = f"model={model},base_url={url}/v1/{route},tokenizer={tokenizer},num_concurrent=2,max_retries=1"
      command = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--model_args", served, "--tasks", *tasks.split(",")]
      command += ["--include_path", str(folder), "--output_path", str(folder / kind), *more]
      done = subprocess.run(command, text=True, capture_output=True, env=os.environ | {"OPENAI_API_KEY": KEY})
      assert done.returncode == 0, done.stderr[-800:]
      (path,) = (folder / kind).rglob("results_*.json")
      return json.loads(path.read_text())["results"]

    of_text = results("local-completions", "completions", ",".join(TASKS), "--batch_size", "2")
    assert of_text["choices"]["acc,none"] == 1.0 and math.isfinite(of_text["rolling"]["word_perplexity,none"])
    yield "log-probabilities", "multiple choice, rolling perplexity; batches of 2, 2 requests at once"
    assert "exact_match,none" in of_text["generated"]
    yield "completions", "`generate_until`"
    assert "exact_match,none" in results("local-chat-completions", "chat/completions", "generated", "--apply_chat_template")["generated"]
    yield "chat", "`generate_until`"


def guidellm(url: str, model: str, tokenizer: str) -> Seen:
  """Runs a benchmark of three synthetic requests with its own defaults."""
  with tempfile.TemporaryDirectory() as folder:
    command = [str(pathlib.Path(sys.executable).with_name("guidellm")), "run", "--backend", f"kind=openai_http,target={url}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8", "--profile", "kind=synchronous"]
    command += ["--tokenizer", f"kind=hf_auto,model={tokenizer}", "--constraint", "kind=max_requests,count=3"]
    command += ["--output", f"kind=json,path={folder}/results.json", "--disable-console"]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-800:]
    (benchmark,) = json.loads((pathlib.Path(folder) / "results.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 3 and totals["errored"] == 0, totals
    yield "stream", "3 of 3 requests at its defaults"


def skyrl(url: str, model: str, tokenizer: str) -> Seen:
  """Sends the default body of `RemoteInferenceClient`, which is not a package of its own."""
  drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 8, "min_tokens": 1, "logprobs": 1}
  drawn |= {"include_stop_str_in_output": True, "skip_special_tokens": True, "stop": None}
  value = {"model": model, "token_ids": [72, 101, 108], "sampling_params": drawn}
  headers = {"content-type": "application/json"}
  with urllib.request.urlopen(urllib.request.Request(f"{url}/inference/v1/generate", json.dumps(value).encode(), headers)) as answer:
    (choice,) = json.load(answer)["choices"]
  assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
  back = urllib.request.Request(f"{url}/detokenize", json.dumps({"model": model, "tokens": choice["token_ids"]}).encode(), headers)
  with urllib.request.urlopen(back) as answer:
    assert isinstance(json.load(answer)["prompt"], str)
  yield "token ids", "its default body on `/inference/v1/generate`; `/detokenize`"


CLIENTS: dict[str, Callable[[str, str, str], Seen]] = {
  program.__name__: program for program in (openai, openai_agents, smolagents, langchain, lm_eval, guidellm, skyrl)
}

if __name__ == "__main__":
  client, *where = sys.argv[1:]
  for feature, seen in CLIENTS[client](*where):
    print(json.dumps({"feature": feature, "seen": seen}), flush=True)
