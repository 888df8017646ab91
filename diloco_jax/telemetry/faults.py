"""Deaths, freezes and cuts that a run noticed, injected or not."""

import itertools
import math
from typing import Any, NamedTuple

from diloco_jax.telemetry import accounting
from diloco_jax.telemetry import folder
from diloco_jax.telemetry import processes

DEATH = 'death'  # the process is gone
FREEZE = 'freeze'  # silent and without a step, then back
CUT = 'cut'  # silent to the syncer, but stepping

# An island that says goodbye is no fault, unless it says one of these.
BAD_LEAVES = ('crashed', 'error', 'failed', 'killed', 'unhealthy')
# Steps in the beginning of a silence were finished before it.
SILENCE_SHARE = 0.25
# The syncer and whoever starts processes notice one death at two moments.
SLACK_S = 2.0


class Fault(NamedTuple):
  """One fault. Durations count from `t_s`."""

  t_s: float  # seconds since the run's start
  kind: str
  target: str  # island_K, syncer, evaluator
  back_s: float | None  # until it was there again; None: never
  first_merge_s: float | None  # until a merge held its work again


class _Seen(NamedTuple):
  """A fault before it is known what followed."""

  t_s: float
  kind: str
  known_s: float  # when it was noticed; what counts as back comes later


def is_bad_leave(reason: Any) -> bool:
  return str(reason).startswith(BAD_LEAVES)


def find(run: folder.RunFolder) -> list[Fault]:
  """Every fault that the tape and the process table tell of, by time."""
  finished = run.kind('finished')
  end_s = finished[-1]['t_s'] if finished else math.inf
  faults = []
  islands = {
    line['island']
    for line in run.kind('joined', 'lapsed', 'left')
    if line['island'] >= 0
  }
  islands |= {x['index'] for x in run.processes if x['role'] == 'island'}
  for island in sorted(islands):
    faults.extend(_island_faults(run, island, end_s))
  faults.extend(_syncer_faults(run, end_s))
  faults.extend(_evaluator_faults(run, end_s))
  return sorted(faults, key=lambda fault: (fault.t_s, fault.target))


def _died(
  run: folder.RunFolder, role: str, index: int | None, end_s: float
) -> list[folder.Row]:
  """Rows of processes of this role that ended badly before the run's end."""
  return [
    row
    for row in run.processes
    if row['role'] == role
    and index in (None, row['index'])
    and row['ended_s'] is not None
    and row['ended_s'] < end_s
    and processes.is_bad_exit(row['exit'])
  ]


def _fault(
  seen: _Seen, target: str, back: list[float], merges: list[float]
) -> Fault:
  back_at = next((t for t in back if t >= seen.known_s), None)
  merge_at = None
  if back_at is not None:
    merge_at = next((t for t in merges if t >= back_at), None)

  def since(t: float | None) -> float | None:
    return None if t is None else round(t - seen.t_s, 3)

  return Fault(
    t_s=round(seen.t_s, 3),
    kind=seen.kind,
    target=target,
    back_s=since(back_at),
    first_merge_s=since(merge_at),
  )


# Islands.


def _island_faults(
  run: folder.RunFolder, island: int, end_s: float
) -> list[Fault]:
  lines = [line for line in run.tape if line.get('island') == island]
  left = {
    line['incarnation']
    for line in lines
    if line['kind'] == 'left' and not is_bad_leave(line['reason'])
  }
  died = [
    row
    for row in _died(run, 'island', island, end_s)
    if row['incarnation'] is None or row['incarnation'] not in left
  ]
  seen = [_Seen(row['ended_s'], DEATH, row['ended_s']) for row in died]
  for line in lines:
    if line['t_s'] > end_s:
      break
    if line['kind'] == 'left' and is_bad_leave(line['reason']):
      if not _is_told_by(died, line):
        seen.append(_Seen(line['t_s'], DEATH, line['t_s']))
    elif line['kind'] == 'lapsed' and not _is_told_by(died, line):
      seen.append(_lapse(run, line, lines))
  seen.extend(_superseded(run, island, lines, seen))
  back = [x['t_s'] for x in lines if x['kind'] in ('joined', 'readmitted')]
  merges = [
    line['t_s']
    for line in run.kind('merge')
    if any(contribution[0] == island for contribution in line['inputs'])
  ]
  return [_fault(x, f'island_{island}', back, merges) for x in seen]


def _is_told_by(died: list[folder.Row], line: folder.Row) -> bool:
  """Whether a process that ended is what the syncer noticed."""
  begun_s = line['t_s'] - line.get('silent_s', 0.0)
  for row in died:
    if row['ended_s'] > line['t_s']:
      continue
    if row['incarnation'] == line['incarnation']:
      return True
    if row['incarnation'] is None and row['ended_s'] >= begun_s - SLACK_S:
      return True
  return False


def _lapse(
  run: folder.RunFolder, line: folder.Row, lines: list[folder.Row]
) -> _Seen:
  """What a lapsed lease was: its steps tell a cut, its return a freeze."""
  island, incarnation = line['island'], line['incarnation']
  begun_s = line['t_s'] - line['silent_s']
  since = begun_s + SILENCE_SHARE * line['silent_s']
  stepped = any(
    accounting.steps_of(row)
    and row.get('incarnation') == incarnation
    and since < row['t_s'] <= line['t_s']
    for row in run.islands.get(island, ())
  )
  returned = any(
    x['kind'] == 'readmitted'
    and x['incarnation'] == incarnation
    and x['t_s'] >= line['t_s']
    for x in lines
  )
  running = any(
    row['role'] == 'island'
    and row['index'] == island
    and row['incarnation'] == incarnation
    and (row['ended_s'] is None or row['ended_s'] > line['t_s'])
    for row in run.processes
  )
  if stepped:
    kind = CUT
  elif returned or running:
    kind = FREEZE
  else:
    kind = DEATH
  return _Seen(begun_s, kind, line['t_s'])


def _superseded(
  run: folder.RunFolder,
  island: int,
  lines: list[folder.Row],
  seen: list[_Seen],
) -> list[_Seen]:
  """Restarts that nothing else tells of: a new incarnation within the lease."""
  found = []
  before = None  # the line by which the island was last seen to be there
  for line in lines:
    if line['kind'] == 'left':
      before = None
    if line['kind'] not in ('joined', 'readmitted'):
      continue
    if (
      before is not None
      and line['incarnation'] > before['incarnation']
      and not any(before['t_s'] <= x.t_s <= line['t_s'] for x in seen)
    ):
      last = [
        row['t_s']
        for row in run.islands.get(island, ())
        if row.get('incarnation') == before['incarnation']
        and row['t_s'] <= line['t_s']
      ]
      t_s = max([before['t_s'], *last])
      found.append(_Seen(t_s, DEATH, line['t_s']))
    before = line
  return found


# Syncer and evaluators.


def _syncer_faults(run: folder.RunFolder, end_s: float) -> list[Fault]:
  seen = [
    _Seen(row['ended_s'], DEATH, row['ended_s'])
    for row in _died(run, 'syncer', None, end_s)
  ]
  starts = [line['t_s'] for line in run.kind('run_started')]
  # Every start but the first follows a death, told of by the table or not.
  for begun, again in itertools.pairwise(starts):
    if not any(begun <= x.t_s <= again for x in seen):
      last = max(x['t_s'] for x in run.tape if begun <= x['t_s'] < again)
      seen.append(_Seen(last, DEATH, again))
  merges = [line['t_s'] for line in run.kind('merge')]
  return [_fault(x, 'syncer', starts, merges) for x in seen]


def _evaluator_faults(run: folder.RunFolder, end_s: float) -> list[Fault]:
  starts = [x['started_s'] for x in run.processes if x['role'] == 'evaluator']
  return [
    _fault(
      _Seen(row['ended_s'], DEATH, row['ended_s']), 'evaluator', starts, []
    )
    for row in _died(run, 'evaluator', None, end_s)
  ]
