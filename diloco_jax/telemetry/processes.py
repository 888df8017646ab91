"""DIR/processes.json: which process was what, from when to when."""

from collections.abc import Callable
import json
import os
import pathlib
import signal
import threading
from typing import Any

from diloco_jax.telemetry import lines

# Exits that are no fault: by itself with 0, or as the launcher asked.
EXIT_OK = '0'
EXIT_STOPPED = 'stopped'


def exit_text(returncode: int) -> str:
  """'0', '1', ... or the name of the signal: how a process ended."""
  if returncode >= 0:
    return str(returncode)
  try:
    return signal.Signals(-returncode).name
  except ValueError:
    return f'signal {-returncode}'


def is_bad_exit(exit_: str | None) -> bool:
  return exit_ is not None and exit_ not in (EXIT_OK, EXIT_STOPPED)


class ProcessTable:
  """The table of processes, rewritten atomically at each change."""

  def __init__(
    self, path: str | os.PathLike, clock: Callable[[], float]
  ) -> None:
    """Takes up the rows of an existing file.

    Args:
      path: processes.json.
      clock: seconds since the run's start.
    """
    self._path = pathlib.Path(path)
    self._clock = clock
    self._lock = threading.Lock()
    self._rows = read_processes(path) if self._path.exists() else []

  def start(
    self, role: str, index: int, incarnation: int | None, pid: int
  ) -> None:
    """A process was started; the incarnation may be told later."""
    row = {
      'role': role,
      'index': index,
      'incarnation': incarnation,
      'pid': pid,
      'started_s': round(self._clock(), 3),
      'ended_s': None,
      'exit': None,
    }
    with self._lock:
      self._rows.append(row)
      self._save()

  def end(self, pid: int, exit_: str) -> None:
    """A process has ended; see `exit_text`. Raises KeyError if not running."""
    with self._lock:
      row = self._running(pid)
      row['ended_s'] = round(self._clock(), 3)
      row['exit'] = exit_
      self._save()

  def set_incarnation(self, pid: int, incarnation: int) -> None:
    """The syncer has said who the process is. Raises KeyError likewise."""
    with self._lock:
      row = self._running(pid)
      if row['incarnation'] != incarnation:
        row['incarnation'] = incarnation
        self._save()

  @property
  def rows(self) -> list[dict[str, Any]]:
    with self._lock:
      return [dict(row) for row in self._rows]

  def _running(self, pid: int) -> dict[str, Any]:
    # Numbers are used again by the system: the newest row is meant.
    for row in reversed(self._rows):
      if row['pid'] == pid and row['ended_s'] is None:
        return row
    raise KeyError(f'no running process {pid} in {self._path}')

  def _save(self) -> None:
    lines.write_atomic(self._path, json.dumps(self._rows, indent=1) + '\n')


def read_processes(path: str | os.PathLike) -> list[dict[str, Any]]:
  """The rows of processes.json. Raises MalformedLineError, OSError."""
  text = pathlib.Path(path).read_text(encoding='utf-8')
  try:
    rows = json.loads(text)
  except ValueError as e:
    raise lines.MalformedLineError(path, 1, f'not JSON: {e}') from e
  if not isinstance(rows, list) or not all(isinstance(x, dict) for x in rows):
    raise lines.MalformedLineError(path, 1, 'not a list of processes')
  return rows
