"""A whole run folder, read into memory."""

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import json
import os
import pathlib
import re
from typing import Any

from diloco_jax import errors
from diloco_jax.telemetry import lines
from diloco_jax.telemetry import processes
from diloco_jax.telemetry import tape as tape_lib

Row = dict[str, Any]

CONFIG = 'config.json'
TAPE = 'tape/syncer.jsonl'
METRICS = 'metrics'
SYNCER_METRICS = 'metrics/syncer.jsonl'
EVALUATOR_METRICS = 'metrics/evaluator.jsonl'
PROCESSES = 'processes.json'
ISLAND_FILE = re.compile(r'island_(\d+)\.jsonl')


@dataclasses.dataclass(frozen=True, slots=True)
class RunFolder:
  """What a run wrote. Files that are not there are empty, and listed."""

  workdir: pathlib.Path
  config: Row  # the resolved configuration, nested
  config_hash: str
  tape: list[Row]  # the syncer's, without `event` lines
  islands: dict[int, list[Row]]  # metrics rows by island, in order
  syncer: list[Row]
  evaluator: list[Row]
  processes: list[Row]
  missing: tuple[str, ...]  # files
  problems: tuple[str, ...]  # files that could not be read, and why

  def kind(self, *kinds: str) -> list[Row]:
    """The tape's lines of these kinds, in order."""
    return [line for line in self.tape if line['kind'] in kinds]

  def setting(self, path: str) -> Any:
    """A setting by its dotted path; None where unknown."""
    value: Any = self.config
    for name in path.split('.'):
      if not isinstance(value, dict):
        return None
      value = value.get(name)
    return value

  @property
  def rows(self) -> list[Row]:
    """All islands' metrics rows."""
    return [row for key in sorted(self.islands) for row in self.islands[key]]


class _Reader:
  """Reads one file after the other and notes what is missing or wrong."""

  def __init__(self, workdir: pathlib.Path, strict: bool) -> None:
    self.workdir = workdir
    self.strict = strict
    self.missing: list[str] = []
    self.problems: list[str] = []

  def read(
    self, name: str, reader: Callable[[pathlib.Path], Iterable[Row]]
  ) -> list[Row]:
    """The rows of a file, up to the first that is malformed."""
    rows: list[Row] = []
    try:
      for row in reader(self.workdir / name):
        rows.append(row)  # those before an error count
    except FileNotFoundError:
      self.missing.append(name)
    except (lines.MalformedLineError, OSError) as e:
      if self.strict:
        raise
      self.problems.append(str(e))
    return rows


def _read_config(path: pathlib.Path) -> list[Row]:
  try:
    document = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as e:
    raise lines.MalformedLineError(path, 1, f'not JSON: {e}') from e
  if not isinstance(document, dict):
    raise lines.MalformedLineError(path, 1, 'not a JSON object')
  return [document]


def iterate_rows(path: pathlib.Path) -> Iterator[Row]:
  """Metrics rows; a torn last line is left out."""
  for number, row in lines.read_lines(path):
    t_s = row.get('t_s')
    if isinstance(t_s, bool) or not isinstance(t_s, (int, float)):
      raise lines.MalformedLineError(path, number, 't_s is not a number')
    yield row


def read_rows(path: pathlib.Path) -> list[Row]:
  """The rows of `iterate_rows`, all of them."""
  return list(iterate_rows(path))


def island_files(workdir: pathlib.Path) -> dict[int, pathlib.Path]:
  """The metrics file of every island that has one, by index."""
  folder = workdir / METRICS
  names = sorted(os.listdir(folder)) if folder.is_dir() else []
  found = {}
  for name in names:
    match = ISLAND_FILE.fullmatch(name)
    if match:
      found[int(match[1])] = folder / name
  return dict(sorted(found.items()))


def load(workdir: str | os.PathLike, strict: bool = True) -> RunFolder:
  """Reads a run folder; files may be missing, as in an interrupted run.

  Args:
    workdir: DIR.
    strict: raise for a malformed file; otherwise it is left out and listed.

  Raises:
    UserError: it is not the folder of a run.
    MalformedLineError: with file and line.
  """
  workdir = pathlib.Path(workdir)
  reader = _Reader(workdir, strict)
  document = (reader.read(CONFIG, _read_config) or [{}])[0]
  tape = reader.read(
    TAPE, lambda path: tape_lib.iterate_tape(path, events=False)
  )
  islands = {
    index: reader.read(f'{METRICS}/{path.name}', iterate_rows)
    for index, path in island_files(workdir).items()
  }
  run = RunFolder(
    workdir=workdir,
    config=document.get('config') or {},
    config_hash=str(document.get('config_hash') or ''),
    tape=tape,
    islands=islands,
    syncer=reader.read(SYNCER_METRICS, iterate_rows),
    evaluator=reader.read(EVALUATOR_METRICS, iterate_rows),
    processes=reader.read(PROCESSES, processes.read_processes),
    missing=(
      *reader.missing,
      *(() if islands else (f'{METRICS}/island_K.jsonl',)),
    ),
    problems=tuple(reader.problems),
  )
  if CONFIG in run.missing and TAPE in run.missing and not islands:
    raise errors.UserError(
      [
        errors.Problem(
          '--workdir',
          str(workdir),
          'the folder of a run (config.json, tape/, metrics/)',
          'give the folder that a run was started with',
        )
      ]
    )
  return run
