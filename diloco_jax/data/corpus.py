"""Where the text comes from.

By default the Python standard library's own source files: real text on every
machine that runs this, the same for one Python release. Held-out files are
chosen by a hash of their names, so that the split does not move when files
are added.
"""

import functools
import hashlib
import json
import os
import pathlib
import sysconfig
from typing import NamedTuple

from absl import logging
import numpy as np

from diloco_jax.errors import Problem
from diloco_jax.errors import UserError

TRAIN = 'train'
TEST = 'test'
HELD_OUT_PERCENT = 4
# Folders of the standard library that are not its own source.
_SKIPPED = (
  '__pycache__', 'dist-packages', 'idle_test', 'site-packages', 'test', 'tests',
)  # fmt: skip
# Written when a Python is built, so they differ between machines.
_GENERATED = ('_sysconfigdata', 'config-')
PROBLEMS_MAX = 20  # told at once


class Corpus(NamedTuple):
  """Text in two parts."""

  train: np.ndarray  # [bytes] uint8
  test: np.ndarray  # [bytes] uint8
  sha256: str  # hex, of train and then test
  documents: int

  def split(self, name: str) -> np.ndarray:
    return {TRAIN: self.train, TEST: self.test}[name]


def is_held_out(name: str) -> bool:
  """Whether the file or document of this name is for evaluation only."""
  digest = hashlib.sha256(name.encode()).digest()
  return int.from_bytes(digest[:4]) % 100 < HELD_OUT_PERCENT


def _problem(path: pathlib.Path, got: str, expected: str) -> Problem:
  return Problem(
    f'data.path={path}',
    got,
    expected,
    'a text file, a folder of text files, or JSONL with a field "text"',
  )


class _Reader:
  """Documents as (name, text), and what is wrong with the others."""

  def __init__(self) -> None:
    self.documents: list[tuple[str, bytes]] = []
    self.problems: list[Problem] = []

  def read(self, path: pathlib.Path, name: str) -> None:
    """One file: a document, or in JSONL one on each line."""
    try:
      data = path.read_bytes()
    except OSError as e:
      self._wrong(path, e.strerror or str(e), 'a readable file')
      return
    try:
      text = data.decode('utf-8')
    except UnicodeDecodeError as e:
      self._wrong(path, f'byte {e.start} is not UTF-8', 'text in UTF-8')
      return
    if path.suffix != '.jsonl':
      self.documents.append((name, data))
      return
    # Not splitlines: a JSON string may hold U+2028 and others as they are.
    for number, line in enumerate(text.split('\n'), start=1):
      if line.strip():
        self._read_line(path, number, line, name)

  def _read_line(
    self, path: pathlib.Path, number: int, line: str, name: str
  ) -> None:
    try:
      text = json.loads(line)['text']
    except (ValueError, KeyError, TypeError) as e:
      self._wrong(
        path, f'line {number}: {e!r}', 'a JSON object with a field "text"'
      )
      return
    if isinstance(text, str):
      self.documents.append((f'{name}:{number}', text.encode()))
    else:
      self._wrong(path, f'line {number}: text is not a string', 'a string')

  def _wrong(self, path: pathlib.Path, got: str, expected: str) -> None:
    self.problems.append(_problem(path, got, expected))


def _files(root: pathlib.Path) -> list[tuple[str, pathlib.Path]]:
  """(name, path) of every file below a folder that is not hidden, sorted."""
  found = []
  for path in root.rglob('*'):
    relative = path.relative_to(root)
    if path.is_file() and not any(x.startswith('.') for x in relative.parts):
      found.append((relative.as_posix(), path))
  return sorted(found)


def _standard_library() -> list[tuple[str, bytes]]:
  root = pathlib.Path(sysconfig.get_paths()['stdlib'])
  found = []
  # Folders are left out before they are walked: site-packages may be large.
  for folder, folders, files in os.walk(root):
    folders[:] = [
      x for x in folders if x not in _SKIPPED and not x.startswith(_GENERATED)
    ]
    for file in files:
      if file.endswith('.py') and not file.startswith(_GENERATED):
        path = pathlib.Path(folder, file)
        found.append((path.relative_to(root).as_posix(), path))
  return [(name, path.read_bytes()) for name, path in sorted(found)]


def _user_documents(path: pathlib.Path) -> list[tuple[str, bytes]]:
  if not path.exists():
    raise UserError(
      [_problem(path, 'no such file or folder', 'an existing path')]
    )
  reader = _Reader()
  for name, file in _files(path) if path.is_dir() else [(path.name, path)]:
    reader.read(file, name)
    if len(reader.problems) >= PROBLEMS_MAX:
      break
  if reader.problems:
    raise UserError(reader.problems[:PROBLEMS_MAX])
  if not any(data for _, data in reader.documents):
    raise UserError([_problem(path, 'no text in it', 'some text')])
  return reader.documents


@functools.lru_cache(maxsize=4)
def load(path: str = '') -> Corpus:
  """The corpus at a path, or the standard library's source.

  Args:
    path: a text file, a folder of text files, or JSONL; '': the default.

  Raises:
    UserError: missing, empty, or not UTF-8 text; every such file at once, up
      to PROBLEMS_MAX.
  """
  documents = (
    _user_documents(pathlib.Path(path).expanduser())
    if path
    else _standard_library()
  )
  parts: dict[str, list[bytes]] = {TRAIN: [], TEST: []}
  for name, data in documents:
    parts[TEST if is_held_out(name) else TRAIN].append(data)
  train, test = b''.join(parts[TRAIN]), b''.join(parts[TEST])
  if not (train and test):
    # One document, or few: the tail of the text is held out instead.
    text = train or test
    cut = len(text) * (100 - HELD_OUT_PERCENT) // 100
    train, test = text[:cut], text[cut:]
  digest = hashlib.sha256(train)
  digest.update(test)
  loaded = Corpus(
    train=np.frombuffer(train, np.uint8),
    test=np.frombuffer(test, np.uint8),
    sha256=digest.hexdigest(),
    documents=len(documents),
  )
  logging.info(
    'corpus %s: %d documents, %d bytes to train on, %d held out, sha256 %s',
    path or 'of the standard library', loaded.documents, loaded.train.size,
    loaded.test.size, loaded.sha256,
  )  # fmt: skip
  return loaded
