"""Numbers of the service in Prometheus' text format, under vLLM's names where it has them."""

from collections.abc import Mapping

from jaxrl_llm.decoding.engine.requests import EngineCounts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REASONS = {"stop": "stop", "length": "length", "aborted": "abort", "error": "error"}


def exposition(counts: EngineCounts, *, model: str, tells_cached: bool) -> str:
  """Returns the numbers of an engine as Prometheus reads them.

  Args:
    counts: Counts of the engine.
    model: Name of the model.
    tells_cached: Whether clients may know how many tokens were cached.

  Example:
    >>> counts = EngineCounts(running=1, waiting=2, rows=4, ended={"stop": 3}, prompt_tokens=70, cached_tokens=8, drawn_tokens=50)
    >>> for line in exposition(counts, model="toy", tells_cached=False).splitlines()[:3]:
    ...   print(line)
    # HELP vllm:num_requests_running Requests that have a row.
    # TYPE vllm:num_requests_running gauge
    vllm:num_requests_running{model_name="toy"} 1
  """
  is_used = counts.running / counts.rows
  numbers: list[tuple[str, str, str, Mapping[str, float] | float]] = [
    ("num_requests_running", "gauge", "Requests that have a row.", counts.running),
    ("num_requests_waiting", "gauge", "Requests that wait for a row.", counts.waiting),
    ("kv_cache_usage_perc", "gauge", "Part of the cache's rows that requests have, from 0 to 1.", is_used),
    ("gpu_cache_usage_perc", "gauge", "The same, under vLLM's older name.", is_used),
    ("prompt_tokens_total", "counter", "Tokens of the prompts whose completions have begun.", counts.prompt_tokens),
    ("generation_tokens_total", "counter", "Tokens drawn.", counts.drawn_tokens),
    ("request_success_total", "counter", "Requests that have ended, by reason.", counts.ended),
  ]
  if tells_cached:
    numbers += [
      ("prefix_cache_queries_total", "counter", "Tokens of prompts looked up in the cache.", counts.prompt_tokens),
      ("prefix_cache_hits_total", "counter", "Tokens of prompts that were there.", counts.cached_tokens),
    ]
  label = f'model_name="{_escaped(model)}"'
  lines = []
  for name, kind, text, value in numbers:
    lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} {kind}"]
    if isinstance(value, Mapping):
      lines += [f'vllm:{name}{{{label},finished_reason="{_REASONS[reason]}"}} {count}' for reason, count in value.items()]
    else:
      lines.append(f"vllm:{name}{{{label}}} {value}")
  return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
  return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
