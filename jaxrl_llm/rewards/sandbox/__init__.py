"""Execution of untrusted programs in sandboxes, and their grades by tests; no JAX.

A back end is chosen by name. There is no default.
"""

from jaxrl_llm.rewards.sandbox.backends import BACKENDS, choose, execute, probe
from jaxrl_llm.rewards.sandbox.code_blocks import extract_code
from jaxrl_llm.rewards.sandbox.grades import Grade, code_tests, grade
from jaxrl_llm.rewards.sandbox.program import Execution, Judge, Program, ProgramRefused, Sandbox, SandboxLimits
from jaxrl_llm.rewards.sandbox.unit_tests import AssertTests, CallTests, StdioTests, read_tests

__all__ = [
  "BACKENDS", "AssertTests", "CallTests", "Execution", "Grade", "Judge", "Program", "ProgramRefused", "Sandbox", "SandboxLimits",
  "StdioTests", "choose", "code_tests", "execute", "extract_code", "grade", "probe", "read_tests",
]  # fmt: skip
