"""The tape: an append-only record of events and decisions, as JSON lines.

Every line is `{"t_s": seconds since the run's start, "kind": ..., fields}`.
"""

from collections.abc import Iterator, Mapping
import os
from typing import Any

from diloco_jax.telemetry import lines

EVENT = 'event'  # a machine's input and output, for replay only
_EVENT_MARK = b'"kind":"event"'
_HEAD_BYTES = 48  # t_s and kind stand first in a line


def is_event(raw: bytes) -> bool:
  """Whether a line is an `event`, told without parsing it."""
  return _EVENT_MARK in raw[:_HEAD_BYTES]


class TapeWriter:
  """Appends to a tape; what is appended survives a kill of the process."""

  def __init__(self, path: str | os.PathLike) -> None:
    self._file = lines.LineFile(path)

  def append(
    self,
    kind: str,
    fields: Mapping[str, Any],
    t_s: float,
    durable: bool = False,
  ) -> None:
    """Appends one line.

    Args:
      kind: what happened.
      fields: JSON values; tuples become lists, NaN and infinity null.
      t_s: seconds since the run's start.
      durable: return only when the line is on the disk.

    Raises:
      OSError: the line is not there (disk full); the tape stays readable.
      TypeError: a field is not a JSON value.
    """
    assert 't_s' not in fields and 'kind' not in fields, sorted(fields)
    line = {'t_s': round(float(t_s), 6), 'kind': kind, **fields}
    self._file.append(lines.encode_line(line), durable)

  def close(self) -> None:
    self._file.close()


def check_line(
  line: dict[str, Any], path: str | os.PathLike, number: int
) -> dict[str, Any]:
  """The line, if it has a time and a kind. Raises MalformedLineError."""
  t_s = line.get('t_s')
  if isinstance(t_s, bool) or not isinstance(t_s, (int, float)):
    raise lines.MalformedLineError(path, number, 't_s is not a number')
  if not isinstance(line.get('kind'), str):
    raise lines.MalformedLineError(path, number, 'kind is not a string')
  return line


def iterate_tape(
  path: str | os.PathLike, events: bool = True
) -> Iterator[dict[str, Any]]:
  """Every line of a tape; a torn last line is left out.

  Args:
    path: the file.
    events: with the lines of kind `event`, which are most of a tape.

  Raises:
    MalformedLineError: with file and line, for anything else that is wrong.
    FileNotFoundError: there is no such tape.
  """
  keep = None if events else lambda raw: not is_event(raw)
  for number, line in lines.read_lines(path, keep):
    if events or line.get('kind') != EVENT:
      yield check_line(line, path, number)


def read_tape(
  path: str | os.PathLike, events: bool = True
) -> list[dict[str, Any]]:
  """The lines of `iterate_tape`, all of them."""
  return list(iterate_tape(path, events))
