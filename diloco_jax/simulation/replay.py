"""Feeds the tapes of a run through the machines that wrote them.

A tape follows from its own events: each is fed to the machine again, and what
the machine decides must be what stands there, to the byte. Then the tapes are
compared with each other: what was received is what was sent.
"""

from collections import deque
from collections.abc import Callable, Iterator
import json
import os
import pathlib
from typing import Any, NamedTuple

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import invariants
from diloco_jax.protocol import island as island_machine
from diloco_jax.protocol import island_state
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import records
from diloco_jax.protocol import syncer as syncer_machine
from diloco_jax.protocol import syncer_state
from diloco_jax.telemetry import lines
from diloco_jax.telemetry import machine_lines
from diloco_jax.telemetry import tape as tape_lib

SHOWN = 200  # characters of a line in a difference
# What tells one contribution from another, and what it says of its content.
_GIVEN = (
  'round', 'fragment', 'base', 'c_steps', 'c_tokens', 'step',
)  # fmt: skip


class DifferenceError(Exception):
  """A tape is not what its machine would have written."""

  def __init__(self, path: str | os.PathLike, line: int, got: Any, want: Any):
    self.line = line
    super().__init__(
      f'{path}:{line}: got {_shown(got)}, expected {_shown(want)}'
    )


def _shown(thing: Any) -> str:
  text = thing if isinstance(thing, str) else json.dumps(thing)
  return text if len(text) <= SHOWN else f'{text[:SHOWN]}...'


class Told(NamedTuple):
  """What one tape holds."""

  path: pathlib.Path
  events: int
  decisions: int
  ended: bool  # its process has closed the tape
  digests: dict[tuple[int, m.Version], str]  # made here, by fragment
  heard: list[tuple[int, m.Broadcast]]  # (line, message)
  sent: dict[tuple[int, int, int, int], m.Contribution]
  got: list[tuple[int, m.Contribution]]
  lines: int = 0


class _Machine:
  """The machine of one tape, while it is fed."""

  def __init__(self, path: pathlib.Path, line: dict[str, Any]):
    self.path = path
    settings = machine_lines.settings_of(line)
    self.now = float(line['now'])
    self.expected: deque[bytes] = deque()
    self.digest = ''
    self.closed = False
    self.state: Any
    self._react: Callable[[Any, a.Event], Any]
    if line['role'] == machine_lines.SYNCER:
      self._react = syncer_machine.react
      self._check: Callable[[Any, Any], None] = invariants.check_syncer
      first = syncer_state.initial(settings, **line['given'])
      self.state, actions = syncer_machine.begin(first, self.now)
      self._expect(actions)
    else:
      self._react = island_machine.react
      self._check = invariants.check_island
      self.state = island_state.initial(settings, **line['given'])

  def _expect(self, actions: tuple[a.Action, ...]) -> None:
    for kind, fields in machine_lines.decisions(actions):
      self.expected.append(_line(self.now, kind, fields))

  def feed(
    self, number: int, line: dict[str, Any]
  ) -> tuple[a.Event, tuple[a.Action, ...]]:
    """One event line. Raises DifferenceError."""
    self._nothing_missing(number, line)
    try:
      event = records.event_from_plain(line['event'])
    except (KeyError, records.MalformedError) as e:
      raise DifferenceError(self.path, number, str(e), 'an event') from e
    old = self.state
    try:
      self.state, actions = self._react(old, event)
      self._check(old, self.state)
    except (AssertionError, KeyError, TypeError, ValueError) as e:
      want = f'an event that fits what stands before it ({e!r})'
      raise DifferenceError(self.path, number, _compared(line), want) from e
    self.now = event.now
    self.digest = machine_lines.chained(self.digest, event, actions)
    fields = machine_lines.event_fields(event, actions, self.digest)
    want = _line(self.now, tape_lib.EVENT, fields)
    if json.loads(want) != line:
      raise DifferenceError(
        self.path, number, _compared(line), _compared(json.loads(want))
      )
    self._expect(actions)
    return event, actions

  def decision(self, number: int, line: dict[str, Any]) -> None:
    """One line that is no event. Raises DifferenceError."""
    if self.closed or not self.expected:
      raise DifferenceError(self.path, number, line, 'an event')
    want = json.loads(self.expected.popleft())
    if want != line:
      raise DifferenceError(self.path, number, line, want)

  def _nothing_missing(self, number: int, line: dict[str, Any]) -> None:
    if self.expected:
      want = json.loads(self.expected[0])
      raise DifferenceError(self.path, number, line, want)

  def close(self, number: int, line: dict[str, Any]) -> None:
    """The process has closed its tape. Raises DifferenceError."""
    self._nothing_missing(number, line)
    fields = {'digest': self.digest}
    want = json.loads(_line(self.now, machine_lines.CLOSED, fields))
    if want != line or self.closed:
      raise DifferenceError(self.path, number, line, want)
    self.closed = True


def _line(now: float, kind: str, fields: dict[str, Any]) -> bytes:
  return lines.encode_line({'t_s': round(now, 6), 'kind': kind, **fields})


def _compared(line: dict[str, Any]) -> dict[str, Any]:
  """Of an event line, what says most in little room."""
  event = line.get('event')
  name = event.get('_') if isinstance(event, dict) else event
  return {
    't_s': line.get('t_s'),
    'event': name,
    'digest': line.get('digest'),
    'actions': line.get('actions'),
  }


def replay_tape(path: pathlib.Path) -> Told:
  """One tape through its machine.

  Raises:
    DifferenceError: a line is missing, altered or too much.
    MalformedLineError: a line is not JSON.
    OSError: the file cannot be read.
  """
  told = Told(path, 0, 0, False, {}, [], {}, [])
  events = decisions = number = 0
  machine: _Machine | None = None
  for number, line in lines.read_lines(path):
    kind = tape_lib.check_line(line, path, number)['kind']
    if kind == machine_lines.MACHINE:
      machine = _begin(path, number, line)
    elif machine is None:
      raise DifferenceError(path, number, line, 'the line of a machine')
    elif kind == machine_lines.CLOSED:
      machine.close(number, line)
    elif kind == tape_lib.EVENT:
      events += 1
      _collect(told, number, *machine.feed(number, line))
    else:
      decisions += 1
      machine.decision(number, line)
      _keep_digest(told, line)
  if machine is None:
    raise DifferenceError(path, number + 1, 'the end', 'the line of a machine')
  return told._replace(
    events=events, decisions=decisions, ended=machine.closed, lines=number
  )


def _begin(path: pathlib.Path, number: int, line: dict[str, Any]) -> _Machine:
  try:
    return _Machine(path, line)
  except (KeyError, TypeError, ValueError, AssertionError) as e:
    raise DifferenceError(path, number, repr(e), 'a machine that begins') from e


def _keep_digest(told: Told, line: dict[str, Any]) -> None:
  if line['kind'] == 'merge':
    version = m.Version(*line['version'])
    told.digests[line['fragment'], version] = line['digest']
  elif line['kind'] == 'seeded':
    for p, digest in enumerate(line['digests']):
      told.digests[p, m.Version(line['incarnation'], 0)] = digest


def _collect(
  told: Told, number: int, event: a.Event, actions: tuple[a.Action, ...]
) -> None:
  """What the tapes of others must agree with."""
  if isinstance(event, a.Received):
    if isinstance(event.message, m.Broadcast):
      told.heard.append((number, event.message))
    elif isinstance(event.message, m.Contribution):
      told.got.append((number, event.message))
  for action in actions:
    if isinstance(action, a.Send) and isinstance(
      action.message, m.Contribution
    ):
      told.sent[_key(action.message)] = action.message


def _key(c: m.Contribution) -> tuple[int, int, int, int]:
  return c.island, c.incarnation, c.fragment, c.capture.number


def compare(syncer: Told, islands: list[Told]) -> None:
  """What was received is what was sent. Raises DifferenceError."""
  for island in islands:
    for number, broadcast in island.heard:
      want = syncer.digests.get((broadcast.fragment, broadcast.version))
      if want != broadcast.digest:
        raise DifferenceError(island.path, number, broadcast.digest, want)
  sent = {key: x for island in islands for key, x in island.sent.items()}
  # An island whose tape is elsewhere, or ends early, may have sent more.
  known = {key[:2] for x in islands if x.ended for key in x.sent}
  for number, got in syncer.got:
    key = _key(got)
    mine = sent.get(key)
    if mine is None and key[:2] not in known:
      continue
    want_fields = mine and {x: getattr(mine, x) for x in _GIVEN}
    got_fields = {x: getattr(got, x) for x in _GIVEN}
    if want_fields != got_fields:
      raise DifferenceError(syncer.path, number, got_fields, want_fields)


def tapes(workdir: pathlib.Path) -> Iterator[pathlib.Path]:
  """The syncer's first."""
  folder = workdir / 'tape'
  if (folder / 'syncer.jsonl').exists():
    yield folder / 'syncer.jsonl'
  yield from sorted(folder.glob('island_*.jsonl'))


def replay(workdir: pathlib.Path, may_end: set[str]) -> list[Told]:
  """All tapes of a run.

  Args:
    workdir: of the run.
    may_end: names of tapes (as `island_2`) whose processes were killed: they
      may end anywhere.

  Raises:
    DifferenceError: with file, line, what is there and what should be.
    MalformedLineError, OSError: as `replay_tape`.
  """
  told = [replay_tape(path) for path in tapes(workdir)]
  for one in told:
    if not one.ended and one.path.stem not in may_end:
      raise DifferenceError(one.path, one.lines + 1, 'the end', 'more lines')
  syncers = [x for x in told if x.path.stem == machine_lines.SYNCER]
  if syncers:
    compare(syncers[0], [x for x in told if x is not syncers[0]])
  return told
