"""Addresses that servers listen on: those of this machine alone, and others, which need a key."""

import ipaddress

KEY_VARIABLE = "JAXRL_LLM_API_KEY"
"""Environment variable with the key of a server."""

_LEAST_KEY = 16


def is_loopback(host: str) -> bool:
  """Returns whether only this machine reaches a host.

  Example:
    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
  """
  try:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def check_address(host: str, api_key: str | None) -> None:
  """Refuses a host that others reach without an API key.

  Raises:
    ValueError: If the key is missing, empty, not printable ASCII or too short. One line.
  """
  if api_key is not None and (not api_key or not api_key.isascii() or not api_key.isprintable() or api_key.strip() != api_key):
    raise ValueError("--api_key: found a key that no header can carry, expected printable ASCII characters without spaces around them")
  if is_loopback(host):
    return
  if api_key is None:
    raise ValueError(f"--host: found {host!r} without an API key, expected 127.0.0.1, or a key in JAXRL_LLM_API_KEY or --api_key")
  if len(api_key) < _LEAST_KEY:
    # As many guesses as the network carries are allowed.
    raise ValueError(f"--api_key: found {len(api_key)} characters, expected {_LEAST_KEY} or more for a host that others reach")
