"""Type checks of the package in tests, at a fraction of jaxtyping's cost.

jaxtyping's import hook wraps every function and class of the package. For each call its wrapper
binds the arguments, opens a scope for the names of dimensions and runs the type checker twice; for
each definition, those of inner functions too, it compiles two more functions. In a run that takes
20 seconds, 10 went into functions without a single shape. So only functions whose signature has an
array or a PyTree keep the wrapper. Others are checked by beartype itself, and functions without
annotations are left alone.

Python 3.11 collects the attributes of a protocol anew for each `isinstance`, which halves its
speed. A run encodes thousands of rows and checks its tokenizer with each. They are collected once.
"""

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping

_with_shapes = jaxtyping.jaxtyped


def has_shapes(annotation: Any) -> bool:
  """Returns whether jaxtyping has a part in an annotation; True for a text, which may hide one."""
  if isinstance(annotation, str | typing.ForwardRef):
    return True
  if isinstance(annotation, list | tuple):  # The arguments of a Callable.
    return any(map(has_shapes, annotation))
  if typing.get_origin(annotation) is typing.Literal:
    return False
  if parts := typing.get_args(annotation):
    return has_shapes(parts)
  return inspect.isclass(annotation) and type(annotation).__module__.startswith("jaxtyping")


def checked(fn: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
  """Decorates a function or class as `jaxtyping.jaxtyped` does, without scopes of no use."""
  if fn is None:
    return lambda fn: checked(fn, typechecker=typechecker)
  if not isinstance(fn, types.FunctionType):
    return fn if inspect.isclass(fn) and not dataclasses.is_dataclass(fn) else _with_shapes(fn, typechecker=typechecker)
  annotations = fn.__annotations__.values()
  if any(map(has_shapes, annotations)):
    return _with_shapes(fn, typechecker=typechecker)
  return typechecker(fn) if annotations else fn


def install() -> None:
  """Replaces the decorator that the import hook applies, and remembers attributes of protocols."""
  jaxtyping.jaxtyped = checked
  if sys.version_info < (3, 12):  # Later versions remember them in the protocol.
    typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)
