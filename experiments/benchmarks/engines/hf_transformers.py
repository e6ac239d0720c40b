"""Worker for `generate` of transformers.

`output_logits=True` would keep the logits of all steps. A logits processor sees the logits of a
step and, one step later, the token that was drawn from them. It therefore keeps the logits of one
step, and the log-probability of each drawn token.
"""

import argparse
import functools
import os

import numpy as np

from experiments.benchmarks.engines.job import Job, left_padded, read_prompts
from experiments.benchmarks.engines.worker import Engine, Generated, serve

CACHES = ("dynamic", "static")
RECORDS = ("processor", "output_logits")


def load(job: Job, *, cache: str = "dynamic", record: str = "processor", threads: int = 0) -> Engine:
  """Loads the weights and the prompts, and makes the settings.

  Args:
    job: Job to sample.
    cache: Value of `cache_implementation` of transformers.
    record: Source of the log-probabilities: "processor" for the logits processor, "output_logits"
      for the library's own output.
    threads: Number of threads of torch; 0 means one per core. The threads wait for each other after
      every operation, so that one thread is far faster if other programs use the cores too.
  """
  import torch
  import transformers
  from transformers.generation import logits_process

  num_threads = threads or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
  torch.set_num_threads(num_threads)
  device = "cuda" if torch.cuda.is_available() else "cpu"
  model = (
    transformers.AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=getattr(torch, job.dtype))
    .to(device)
    .eval()
  )
  rows = read_prompts(
    job,
    vocab_size=model.config.vocab_size,
    max_positions=getattr(model.config, "max_position_embeddings", None),
  )
  tokens, mask = (torch.from_numpy(x).to(device) for x in left_padded(rows, job.pad_id))
  tokens, mask = tokens.long(), mask.long()
  settings = transformers.GenerationConfig(
    do_sample=True,
    # The filters below are added by hand, in an order with which the recorded log-probabilities are
    # those of the sampling distribution.
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    max_new_tokens=job.max_new_tokens,
    num_return_sequences=job.group_size,
    eos_token_id=list(job.stop_ids) or None,
    pad_token_id=job.pad_id,
    use_cache=True,
    return_dict_in_generate=True,
    output_logits=record == "output_logits",
    cache_implementation=None if cache == "dynamic" else cache,
  )
  model.generation_config = settings
  filters = []
  if job.temperature != 1:
    filters.append(logits_process.TemperatureLogitsWarper(job.temperature))
  if job.top_k:
    filters.append(logits_process.TopKLogitsWarper(job.top_k))
  if job.top_p < 1:
    filters.append(logits_process.TopPLogitsWarper(job.top_p))

  class Recorder(logits_process.LogitsProcessor):
    """Logits processor that records the log-probabilities of drawn tokens, each one step late."""

    def __init__(self):
      self.scores, self.logprobs = None, []

    def __call__(self, input_ids, scores):
      if self.scores is not None:
        self.note(input_ids[:, -1:])
      self.scores = scores
      return scores

    def note(self, drawn):
      scores = self.scores.float()
      self.logprobs.append((scores.gather(1, drawn) - scores.logsumexp(1, keepdim=True))[:, 0])

  stops = torch.tensor(job.stop_ids, dtype=torch.long, device=device)

  @torch.inference_mode()
  def generate(seed: int) -> Generated:
    torch.manual_seed(seed)
    recorder = Recorder()
    processors = logits_process.LogitsProcessorList([*filters, recorder] if record == "processor" else filters)
    output = model.generate(tokens, attention_mask=mask, generation_config=settings, logits_processor=processors)
    drawn = output.sequences[:, tokens.shape[1] :]
    if record == "processor":
      recorder.note(drawn[:, -1:])
      logprobs = torch.stack(recorder.logprobs, dim=1)
    else:
      logprobs = [
        torch.log_softmax(x.float(), -1).gather(1, drawn[:, t : t + 1]) for t, x in enumerate(output.logits)
      ]
      logprobs = torch.cat(logprobs, dim=1)
    # Everything after a stop token is padding.
    ended = torch.isin(drawn, stops).int().cumsum(1)
    alive = (ended - torch.isin(drawn, stops).int()) == 0
    lengths = alive.sum(1)
    return Generated(np.asarray(lengths.cpu()), float((logprobs * alive).sum() / lengths.sum()))

  about = (
    f"transformers {transformers.__version__}, torch {torch.__version__} on {device}, "
    f"{num_threads} threads, {cache} cache"
  )
  return Engine(f"{about}, log-probabilities by {record}", generate)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(
    prog="python -m experiments.benchmarks.engines.hf_transformers", description=__doc__.splitlines()[0]
  )
  parser.add_argument("--cache", choices=CACHES, default="dynamic")
  parser.add_argument("--record", choices=RECORDS, default="processor")
  parser.add_argument("--threads", type=int, default=0)
  serve(functools.partial(load, **vars(parser.parse_args())))
