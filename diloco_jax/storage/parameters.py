"""Parameters on disk, as an Orbax checkpoint that any Orbax user can read."""

import pathlib
import shutil
from typing import Any


def save(folder: pathlib.Path, params: Any) -> None:
  """Write parameters; what was there stays until the new ones are whole.

  Args:
    folder: of the checkpoint, absolute or relative to the working directory.
    params: pytree of arrays.
  """
  # Importing Orbax takes a second that only those who save should pay.
  import orbax.checkpoint as ocp

  folder = folder.absolute()
  partial = folder.with_name(folder.name + '.partial')
  shutil.rmtree(partial, ignore_errors=True)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(partial, params)
  shutil.rmtree(folder, ignore_errors=True)
  partial.rename(folder)


def load(folder: pathlib.Path, like: Any = None) -> Any:
  """Read parameters back.

  Args:
    folder: that `save` wrote.
    like: pytree of arrays or ShapeDtypeStructs with the structure and, where
      given, the shardings wanted; None: NumPy-backed arrays as saved.

  Raises:
    FileNotFoundError: there is no checkpoint.
  """
  import orbax.checkpoint as ocp

  folder = folder.absolute()
  if not folder.is_dir():
    raise FileNotFoundError(f'no checkpoint at {folder}')
  with ocp.StandardCheckpointer() as checkpointer:
    if like is None:
      return checkpointer.restore(folder)
    return checkpointer.restore(folder, like)
