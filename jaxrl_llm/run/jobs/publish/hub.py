"""Upload of an exported folder to the Hugging Face Hub, only if the user asks for it."""

import re
from pathlib import Path
from typing import Any

from jaxrl_llm.messages import MissingPackageError, Problem, one_line

_FIELD = "--push"


def check_push(name: str) -> Any:
  """Checks that a repository can be made, before anything is computed.

  Args:
    name: OWNER/NAME of the repository.

  Returns:
    The client for `push`.

  Raises:
    ValueError: If the name is no OWNER/NAME, is taken or belongs to others, if there is no valid
      token, or if the hub does not answer. One line.
    MissingPackageError: If huggingface_hub is not installed.
  """
  if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", name):
    raise ValueError(Problem(_FIELD, repr(name), "OWNER/NAME, as in my-lab/qwen3-gspo"))
  try:
    from huggingface_hub import HfApi
  except ImportError as error:
    raise MissingPackageError("--push needs the package huggingface_hub: pip install 'jaxrl-llm[hf]'") from error
  api, owner = HfApi(), name.partition("/")[0]
  try:
    user = api.whoami()
    is_taken = api.repo_exists(name)
  except Exception as error:  # Also of the HTTP library: no network, no token, a wrong one.
    expected = "a hub that answers and a token that may write: run `hf auth login` first"
    raise ValueError(Problem(_FIELD, f"{name!r}, and {one_line(error, limit=160)}", expected)) from error
  own = [user.get("name"), *(group.get("name") for group in user.get("orgs") or ())]
  if owner not in own:
    known = f"one of {', '.join(filter(None, own))}, to whom the token belongs"
    raise ValueError(Problem(_FIELD, f"{name!r}, whose owner is {owner}", known))
  if is_taken:
    raise ValueError(Problem(_FIELD, f"{name!r}, which is taken", "a new name: an upload never changes a repository that exists"))
  return api


def push(api: Any, folder: Path, name: str) -> str:
  """Makes a private repository and uploads a folder. Returns its address.

  Raises:
    ValueError: If the hub refuses the repository or the upload. One line; the folder stays.
  """
  try:
    made = api.create_repo(name, private=True, exist_ok=False)
    api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Export of a run of jaxrl_llm")
  except Exception as error:  # Whatever the HTTP library raises.
    again = f"`hf upload {name} {folder}` tries again"
    raise ValueError(f"--push: {name} was not uploaded ({one_line(error, limit=160)}); the export is in {folder}, and {again}") from error
  return str(made)
