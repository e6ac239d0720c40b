"""Evaluation: `python -m jaxrl_llm.evaluate [--config=FILE[:ARGUMENT]] [--checkpoint=WHERE] [...]`

  --checkpoint      the weights: workdir of a run (its newest checkpoint), WORKDIR@STEP, a folder in
                    Hugging Face's format, a .gguf file, package:NAME or hub:OWNER/NAME. A workdir
                    may be in a bucket. Default: the weights that the config begins with
  --config          the experiment; optional for a run, which has its own
  --metrics         metrics by lighteval's names, as in avg@n:n=16,pass@k:k=1&n=16,maj@n:n=8 (quote
                    the &). Default: avg, pass and maj of config.eval.samples, and those of
                    config.eval.metrics
  --config.FIELD    new value of one field, as in --config.task.test_name=aime24 or
                    --config.eval.num_prompts=30
  --samples, --out  files for every sample and for the results.
                    Default: WORKDIR/evaluations/NAME/samples.jsonl and eval.json
  --regrade         a file of samples to grade again with the config's verifier; no model is loaded
  --help_fields     print every field, or those that begin with the next argument, with its default
                    and meaning
"""

import shlex
import sys
from collections.abc import Sequence

from jaxrl_llm.config import command_line
from jaxrl_llm.config.command_line import UsageError
from jaxrl_llm.messages import INTERRUPTED, refuse
from jaxrl_llm.run.jobs.evaluate import request as request_lib
from jaxrl_llm.workdir.bucket.copies import NotSentError, give_back


def main(argv: Sequence[str]) -> int:
  """Runs a command line and returns its exit status.

  Args:
    argv: Arguments, beginning with the program's name.

  Returns:
    0 after an evaluation, 1 if the verifier failed on every sample or memory ran out, 2 for bad
    input and 130 after Ctrl-C.
  """
  try:
    if text := command_line.help_text(argv, __doc__):
      print(text)
      return 0
    request = request_lib.parse(argv)
    from jaxrl_llm.rewards.outcome import NoRewardError
    from jaxrl_llm.rollouts.jobs import EngineError
    from jaxrl_llm.run.jobs.evaluate import evaluation  # Late: bad input is refused without JAX.
    from jaxrl_llm.run.setup.out_of_memory import OutOfMemoryError

    try:
      evaluation.run(request, command=shlex.join(["python", "-m", "jaxrl_llm.evaluate", *argv[1:]]))
      if request.given is not None and (sent := give_back(request.given, request.source.path, [request.samples, request.out])):
        print(f"sent to {sent.rpartition('/')[0]}")
    except (NoRewardError, OutOfMemoryError, EngineError, NotSentError) as error:
      return refuse(error, 1)
  except UsageError as error:
    return refuse(error)
  except KeyboardInterrupt:
    print("interrupted; nothing was written", file=sys.stderr)
    return INTERRUPTED
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
