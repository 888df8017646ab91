"""Where the text comes from.

By default the Python standard library's own source files: real text on every
machine that runs this, the same for one Python release. Held-out files are
chosen by a hash of their names, so that the split does not move when files
are added.
"""

import functools
import hashlib
import json
import pathlib
import sysconfig
from typing import NamedTuple

import numpy as np

from diloco_jax.errors import Problem
from diloco_jax.errors import UserError

TRAIN = 'train'
TEST = 'test'
HELD_OUT_PERCENT = 4
# Folders of the standard library that are not its own source.
_SKIPPED = ('test', 'tests', 'idle_test', 'site-packages', 'dist-packages',
            '__pycache__', 'lib2to3')  # fmt: skip


class Corpus(NamedTuple):
  """Text in two parts."""

  train: np.ndarray  # [bytes] uint8
  test: np.ndarray  # [bytes] uint8
  sha256: str  # of both
  files: int

  def split(self, name: str) -> np.ndarray:
    return {TRAIN: self.train, TEST: self.test}[name]


def is_held_out(name: str) -> bool:
  """Whether the file or document of this name is for evaluation only."""
  digest = hashlib.sha256(name.encode()).digest()
  return int.from_bytes(digest[:4]) % 100 < HELD_OUT_PERCENT


def _problem(path: pathlib.Path, got: str, expected: str) -> UserError:
  return UserError(
    [
      Problem(
        f'data.path={path}',
        got,
        expected,
        'a text file, a folder of text files, or JSONL with a field "text"',
      )
    ]
  )


def _standard_library() -> list[tuple[str, bytes]]:
  root = pathlib.Path(sysconfig.get_paths()['stdlib'])
  documents = []
  for path in sorted(root.rglob('*.py')):
    relative = path.relative_to(root)
    if not any(part in _SKIPPED for part in relative.parts[:-1]):
      documents.append((relative.as_posix(), path.read_bytes()))
  return documents


def _read_text(path: pathlib.Path) -> bytes:
  data = path.read_bytes()
  try:
    data.decode('utf-8')
  except UnicodeDecodeError as e:
    raise _problem(path, f'byte {e.start} is not UTF-8', 'text in UTF-8') from e
  return data


def _read_jsonl(path: pathlib.Path, name: str) -> list[tuple[str, bytes]]:
  documents = []
  # Not splitlines: a JSON string may hold U+2028 and others as they are.
  lines = _read_text(path).decode('utf-8').split('\n')
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    try:
      text = json.loads(line)['text']
    except (ValueError, KeyError, TypeError) as e:
      raise _problem(
        path, f'line {number}: {e!r}', 'a JSON object with a field "text"'
      ) from e
    if not isinstance(text, str):
      raise _problem(path, f'line {number}: text is not a string', 'a string')
    documents.append((f'{name}:{number}', text.encode()))
  return documents


def _user_documents(path: pathlib.Path) -> list[tuple[str, bytes]]:
  if not path.exists():
    raise _problem(path, 'no such file or folder', 'an existing path')
  if path.is_dir():
    documents = []
    for file in sorted(x for x in path.rglob('*') if x.is_file()):
      relative = file.relative_to(path)
      if any(part.startswith('.') for part in relative.parts):
        continue  # hidden
      if file.suffix == '.jsonl':
        documents.extend(_read_jsonl(file, relative.as_posix()))
      else:
        documents.append((relative.as_posix(), _read_text(file)))
    return documents
  if path.suffix == '.jsonl':
    return _read_jsonl(path, path.name)
  # A single text: pieces of it stand for files, so that some are held out.
  data = _read_text(path)
  piece = max(1, len(data) // 200)
  return [
    (f'{path.name}:{start}', data[start : start + piece])
    for start in range(0, len(data), piece)
  ]


@functools.lru_cache(maxsize=4)
def load(path: str = '') -> Corpus:
  """The corpus at a path, or the standard library's source.

  Args:
    path: a text file, a folder of text files, or JSONL; '': the default.

  Raises:
    UserError: missing, empty, or not UTF-8 text.
  """
  documents = (
    _user_documents(pathlib.Path(path).expanduser())
    if path
    else _standard_library()
  )
  parts = {TRAIN: bytearray(), TEST: bytearray()}
  for name, data in documents:
    parts[TEST if is_held_out(name) else TRAIN] += data
  if path and not (parts[TRAIN] or parts[TEST]):
    raise _problem(pathlib.Path(path), 'no text in it', 'some text')
  if path and not (parts[TRAIN] and parts[TEST]):
    # Few documents: hold out the tail of the text instead.
    text = parts[TRAIN] or parts[TEST]
    cut = len(text) * (100 - HELD_OUT_PERCENT) // 100
    parts = {TRAIN: text[:cut], TEST: text[cut:]}
  digest = hashlib.sha256(parts[TRAIN])
  digest.update(parts[TEST])
  return Corpus(
    train=np.frombuffer(bytes(parts[TRAIN]), np.uint8),
    test=np.frombuffer(bytes(parts[TEST]), np.uint8),
    sha256=digest.hexdigest(),
    files=len(documents),
  )
