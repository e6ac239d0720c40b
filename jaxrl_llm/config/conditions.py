"""Conditions on which a field is read; the table of fields names them, and imports no jax."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Condition(NamedTuple):
  """A condition on other fields.

  Attributes:
    words: Condition in words, for the help and for messages.
    holds: Test of the values of a config by path.
  """

  words: str
  holds: Callable[[Mapping[str, Any]], bool]


ADAPTIVE_KL = Condition("kl.target is set", lambda x: x["kl.target"] is not None)
ADAPTIVE_ENTROPY = Condition("entropy.target is set", lambda x: x["entropy.target"] is not None)
CHECKPOINT_TEACHER = Condition(
  "teacher.path is a checkpoint, or teacher.paths is set",
  lambda x: x["teacher.path"] not in (None, "self") or x["teacher.paths"] is not None,
)
DIVERGENCE = Condition("teacher.gkd_coef is above 0", lambda x: x["teacher.gkd_coef"] > 0)
ENVIRONMENT = Condition("environment.name is set", lambda x: x["environment.name"] is not None)
FILE_OF_PAIRS = Condition("task.name is 'file'", lambda x: x["task.name"] == "file")
IN_FLIGHT = Condition("rollout.update_in_flight is set", lambda x: x["rollout.update_in_flight"] is not None)
KEPT_WARM_START = Condition(
  "warm_start.cache is True and warm_start.num_steps is above 0",
  lambda x: x["warm_start.cache"] and x["warm_start.num_steps"] > 0,
)
KL_IN_REWARD = Condition("reward.kl_coef is above 0", lambda x: x["reward.kl_coef"] > 0)
LAG = Condition("rollout.staleness is above 0", lambda x: x["rollout.staleness"] > 0)
PRESET = Condition("model.path is None", lambda x: x["model.path"] is None)
PRIVILEGED = Condition("teacher.privileged is set", lambda x: x["teacher.privileged"] is not None)
REWARD_MODEL = Condition("reward.model_path is set", lambda x: x["reward.model_path"] is not None)
SAMPLERS = Condition("rollout.samplers is above 0", lambda x: x["rollout.samplers"] > 0)
SELF_TEACHER = Condition("teacher.path is 'self'", lambda x: x["teacher.path"] == "self")
SHOTS = Condition("task.shots is above 0", lambda x: x["task.shots"] > 0)
TEACHER = Condition(
  "teacher.path or teacher.paths is set", lambda x: x["teacher.path"] is not None or x["teacher.paths"] is not None
)
TEACHERS = Condition("teacher.paths is set", lambda x: x["teacher.paths"] is not None)
TRACE = Condition("profile.start is set", lambda x: x["profile.start"] is not None)
