"""Files of JSON lines, of which a kill can tear at most the last one.

A line counts once its line break is written. Whatever stands after the last
line break is torn: readers leave it out, and the next writer removes it.
"""

from collections.abc import Callable, Iterator, Mapping
import json
import math
import os
import pathlib
import tempfile
import threading
from typing import Any

import numpy as np

LINE_BYTES_MAX = 64 << 20  # of one line; a longer one is malformed
POLL_BYTES_MAX = 8 << 20  # read by one poll of one file


class MalformedLineError(ValueError):
  """A whole line that is not what the file should hold."""

  def __init__(self, path: str | os.PathLike, line: int, detail: str) -> None:
    self.path = str(path)
    self.line = line
    super().__init__(f'{path}:{line}: {detail}')


def _scalar(value: Any) -> Any:
  if isinstance(value, np.generic):
    return value.item()
  raise TypeError(f'cannot write a {type(value).__name__} as JSON')


def finite(value: Any) -> Any:
  """The same JSON value with null in the place of every NaN and infinity."""
  if isinstance(value, np.generic):
    value = value.item()
  if isinstance(value, float) and not math.isfinite(value):
    return None
  if isinstance(value, Mapping):
    return {key: finite(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [finite(item) for item in value]
  return value


def encode_line(fields: Mapping[str, Any]) -> bytes:
  """One compact JSON line; numbers that JSON does not have become null."""
  compact = (',', ':')
  try:
    text = json.dumps(
      fields, allow_nan=False, default=_scalar, separators=compact
    )
  except ValueError:
    text = json.dumps(finite(fields), allow_nan=False, separators=compact)
  return text.encode() + b'\n'


def _refuse_constant(name: str) -> Any:
  raise ValueError(f'{name} is not JSON')


def decode_line(
  raw: bytes, path: str | os.PathLike, line: int
) -> dict[str, Any]:
  """The object of one line. Raises MalformedLineError."""
  try:
    fields = json.loads(raw, parse_constant=_refuse_constant)
  except (ValueError, RecursionError) as e:
    raise MalformedLineError(path, line, f'not JSON: {e}') from e
  if not isinstance(fields, dict):
    raise MalformedLineError(path, line, 'not a JSON object')
  return fields


class LineFile:
  """Appends whole lines. Safe to call from several threads."""

  def __init__(self, path: str | os.PathLike) -> None:
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    self._fd = os.open(path, flags, 0o644)
    self._lock = threading.Lock()
    self._open = True
    _cut_torn_line(self._fd)

  def append(self, line: bytes, durable: bool = False) -> None:
    """Hands a line to the operating system, and to the disk if `durable`.

    A killed process loses nothing that was appended; a machine that loses
    power keeps what was durable.

    Raises:
      OSError: the line is not there, and the file is as it was before (only
        where fsync failed the line may be there).
    """
    assert line.endswith(b'\n')
    with self._lock:
      if not self._open:
        raise ValueError('append to a closed file')
      self._write(line)
    if durable:
      os.fsync(self._fd)

  def _write(self, line: bytes) -> None:
    done = 0
    try:
      while done < len(line):
        done += os.write(self._fd, line[done:])
    except OSError:
      # A full disk may take a part. Take it back, unless an older process
      # that still lives has appended behind it.
      end = os.lseek(self._fd, 0, os.SEEK_CUR)
      if done and os.fstat(self._fd).st_size == end:
        os.ftruncate(self._fd, end - done)
      raise

  def close(self) -> None:
    with self._lock:
      if self._open:
        self._open = False
        os.close(self._fd)


def _cut_torn_line(fd: int) -> None:
  """Removes what a killed writer left after the last line break."""
  end = size = os.fstat(fd).st_size
  while end:
    begin = max(0, end - (1 << 16))
    at = os.pread(fd, end - begin, begin).rfind(b'\n')
    if at >= 0:
      end = begin + at + 1
      break
    end = begin
  if end < size:
    os.ftruncate(fd, end)


def read_lines(
  path: str | os.PathLike, keep: Callable[[bytes], bool] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
  """(line number, object) of every whole line.

  Args:
    path: the file.
    keep: lines for which it is false are left out unread.

  Raises:
    MalformedLineError: with file and line, for anything but a torn last line.
  """
  with open(path, 'rb') as file:
    number = 0
    while raw := file.readline(LINE_BYTES_MAX):
      number += 1
      if not raw.endswith(b'\n'):
        if len(raw) == LINE_BYTES_MAX:
          raise MalformedLineError(path, number, 'too long')
        return
      if keep is None or keep(raw):
        yield number, decode_line(raw, path, number)


class LineTail:
  """Reads what was appended since the last poll, whole lines only."""

  def __init__(self, path: str | os.PathLike) -> None:
    self.path = pathlib.Path(path)
    self._offset = 0

  def poll(self) -> list[bytes]:
    """New lines; at most POLL_BYTES_MAX at a time, [] without a file."""
    try:
      with open(self.path, 'rb') as file:
        file.seek(self._offset)
        data = file.read(POLL_BYTES_MAX)
    except FileNotFoundError:
      return []
    # Only whole lines are consumed, so that a torn tail that the next writer
    # removes was never counted.
    end = data.rfind(b'\n') + 1
    if not end and len(data) == POLL_BYTES_MAX:
      end = len(data)  # no line is that long: leave it behind
    self._offset += end
    return data[:end].splitlines(keepends=True)


def write_atomic(path: str | os.PathLike, text: str) -> None:
  """Replaces a file at once: a reader sees the old or the new text."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  fd, partial = tempfile.mkstemp(prefix=f'.{path.name}.', dir=path.parent)
  try:
    with open(fd, 'w', encoding='utf-8') as file:
      file.write(text)
      file.flush()
      os.fchmod(file.fileno(), 0o644)
      os.fsync(file.fileno())
    os.replace(partial, path)
  except BaseException:
    pathlib.Path(partial).unlink(missing_ok=True)
    raise
