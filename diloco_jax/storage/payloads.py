"""Arrays beside the tape: what was merged, so that Θ can be made again."""

from collections.abc import Callable, Mapping, Sequence
import pathlib
from typing import Any

import numpy as np

FOLDER = pathlib.Path('tape', 'payloads')
START = 'start'  # Θ(0), a member for each fragment


def of_merge(incarnation: int, number: int) -> str:
  """The name of what one round merged."""
  return f'merge_{incarnation}_{number}'


def keeper(workdir: pathlib.Path) -> Callable[[str, Sequence[Any]], None]:
  """Saves lists of fragments under names; 4 bytes a parameter each."""
  folder = workdir / FOLDER
  folder.mkdir(parents=True, exist_ok=True)

  def keep(name: str, members: Sequence[Mapping[str, Any]]) -> None:
    flat = {
      f'{index}:{path}': np.asarray(x)
      for index, member in enumerate(members)
      for path, x in member.items()
    }
    np.savez(folder / f'{name}.npz', **flat)

  return keep


def load(workdir: pathlib.Path, name: str) -> list[dict[str, np.ndarray]]:
  """The fragments of one name, in their order. Raises OSError, ValueError."""
  members: dict[int, dict[str, np.ndarray]] = {}
  with np.load(workdir / FOLDER / f'{name}.npz', allow_pickle=False) as kept:
    for key in kept.files:
      index, _, path = key.partition(':')
      members.setdefault(int(index), {})[path] = kept[key]
  return [members[index] for index in sorted(members)]


def are_there(workdir: pathlib.Path) -> bool:
  return (workdir / FOLDER / f'{START}.npz').exists()
