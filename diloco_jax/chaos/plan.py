"""The vocabulary of faults, and plans of them drawn from a seed.

A plan is a value: a tuple of faults, each with its moment and its target. The
simulator strikes with it in virtual time, and the shrinker takes faults away
from it.
"""

from collections.abc import Iterable, Sequence
import random
from typing import NamedTuple

SYNCER = -1  # as a target; islands are 0, 1, ...


class Fault(NamedTuple):
  """One thing that goes wrong.

  `at` and `lasts` are seconds of the run. What `count` and `how` mean is said
  in KINDS; an armed fault waits from `at` on for its moment.
  """

  at: float
  kind: str
  target: int  # island index, or SYNCER
  lasts: float = 0.0
  count: int = 0
  how: str = ''


# Processes.
CRASH_ISLAND = 'crash_island'
CRASH_SYNCER = 'crash_syncer'
CRASH_BOTH = 'crash_both'
STALE_INCARNATION = 'stale_incarnation'
NO_PROGRESS = 'no_progress'
PAUSE = 'pause'
STRAGGLER = 'straggler'
CLOCK_RATE = 'clock_rate'
JOIN_LATE = 'join_late'
LEAVE = 'leave'
DONOR_LEAVES = 'donor_leaves'
# Disks.
TORN_CHECKPOINT = 'torn_checkpoint'
MISSING_CHECKPOINT = 'missing_checkpoint'
TAPE_WITHOUT_MERGE = 'tape_without_merge'
MERGE_WITHOUT_TAPE = 'merge_without_tape'
DISK_FULL = 'disk_full'
SLOW_DISK = 'slow_disk'
# Messages, on one island's link.
LOSE = 'lose'
DELAY = 'delay'
DUPLICATE = 'duplicate'
REORDER = 'reorder'
CORRUPT = 'corrupt'
LOST_BROADCAST = 'lost_broadcast'
PARTITION = 'partition'
ONE_WAY_CUT = 'one_way_cut'
# Contents.
BAD_CONTRIBUTION = 'bad_contribution'

# Kind -> what happens.
KINDS = {
  CRASH_ISLAND: 'an island dies after `count` more actions, and comes back '
  'after `lasts` (how: checkpoint, empty, never)',
  CRASH_SYNCER: 'the syncer dies after `count` more actions, and comes back',
  CRASH_BOTH: 'the syncer and an island die at once, and come back',
  STALE_INCARNATION: 'an island freezes, is replaced, and speaks up again '
  'after `lasts`',
  NO_PROGRESS: 'an island reports and answers, and makes no step',
  PAUSE: 'a process stands still (SIGSTOP)',
  STRAGGLER: 'steps take `count` times as long',
  CLOCK_RATE: 'a clock runs at another speed (how: the rate)',
  JOIN_LATE: 'an island is not there at the start',
  LEAVE: 'an island leaves politely and comes back after `lasts`',
  DONOR_LEAVES: 'a donor dies in mid-transfer (armed)',
  TORN_CHECKPOINT: 'a crash in the middle of a save: the one before it is '
  'the newest (armed)',
  MISSING_CHECKPOINT: 'a crash in the middle of a save, and the folder is '
  'gone (armed)',
  TAPE_WITHOUT_MERGE: 'the syncer dies when a line is on disk, before it '
  'knows (armed)',
  MERGE_WITHOUT_TAPE: 'the syncer dies when a merge is done, before its line '
  'is on disk (armed)',
  DISK_FULL: 'nothing can be saved for `lasts`; tape lines wait',
  SLOW_DISK: 'saves and tape lines take `count` times as long',
  LOSE: 'one message in `count` is lost for `lasts`',
  DELAY: 'one message in `count` takes long for `lasts`',
  DUPLICATE: 'one message in `count` comes twice for `lasts`',
  REORDER: 'one message in `count` is overtaken for `lasts`',
  CORRUPT: 'one bulk message in `count` changes on its way (how: frame, which '
  'the checksum sees; value, which only the digest sees)',
  LOST_BROADCAST: 'the next `count` broadcasts to an island are lost (armed)',
  PARTITION: 'an island cannot reach the syncer, nor be reached',
  ONE_WAY_CUT: 'an island and the syncer hear each other one way (how: up '
  'or down is cut)',
  BAD_CONTRIBUTION: 'the next `count` contributions of an island are wrong '
  '(how: one of CONTENTS; armed)',
}  # fmt: skip
CONTENTS = (
  'nonfinite', 'shape', 'outlier', 'layout', 'timeline', 'stale_base',
)  # fmt: skip
# Bytes of one stream do not overtake each other.
DATAGRAMS_ONLY = (REORDER,)
OF_THE_SYNCER = (CRASH_SYNCER, TAPE_WITHOUT_MERGE, MERGE_WITHOUT_TAPE)
_OF_ANYBODY = (PAUSE, CLOCK_RATE, DISK_FULL, SLOW_DISK)
_RATES = ('0.9', '0.98', '1.02', '1.1')


def draw(
  rng: random.Random,
  *,
  islands: int,
  until_s: float,
  count: int,
  kinds: Sequence[str] = tuple(KINDS),
) -> tuple[Fault, ...]:
  """A plan of `count` faults, the first in the order of their moments.

  Args:
    rng: the only source of chance.
    islands: 0 <= index < islands are targets.
    until_s: faults begin before this; those that last end after it at most by
      how long they last.
    count: of faults.
    kinds: to choose from.
  """
  faults = [_draw_one(rng, rng.choice(kinds), islands, until_s) for _ in
            range(count)]  # fmt: skip
  return tuple(sorted(faults))


def _draw_one(
  rng: random.Random, kind: str, islands: int, until_s: float
) -> Fault:
  at = rng.uniform(0.5, until_s)
  target = rng.randrange(islands)
  lasts = rng.choice([0.5, 3.0, 10.0, 30.0])
  count, how = 0, ''
  if kind in OF_THE_SYNCER or (kind in _OF_ANYBODY and rng.random() < 0.4):
    target = SYNCER
  if kind in (CRASH_ISLAND, CRASH_SYNCER, CRASH_BOTH):
    count = rng.choice([0, 0, 1, 2, 3, 5, 8])
    how = rng.choice(['checkpoint', 'checkpoint', 'empty', 'never'])
    lasts = (
      min(lasts, 10.0) if target == SYNCER or kind == CRASH_BOTH else lasts
    )
  elif kind in (STRAGGLER, SLOW_DISK):
    count = rng.choice([3, 10, 20])
  elif kind == CLOCK_RATE:
    how = rng.choice(_RATES)
  elif kind in (LOSE, DELAY, DUPLICATE, REORDER, CORRUPT):
    count = rng.choice([2, 5, 20])
    how = rng.choice(['frame', 'value']) if kind == CORRUPT else ''
  elif kind == LOST_BROADCAST:
    count = rng.choice([1, 2, 4])
  elif kind == BAD_CONTRIBUTION:
    count = rng.choice([1, 1, 2, 4])
    how = rng.choice(CONTENTS)
  elif kind == ONE_WAY_CUT:
    how = rng.choice(['up', 'down'])
  elif kind == JOIN_LATE:
    at, lasts = 0.0, at
  return Fault(round(at, 3), kind, target, round(lasts, 3), count, how)


def ends_at(faults: Iterable[Fault]) -> float:
  """When the last of them is over; armed ones are disarmed then."""
  return max((x.at + x.lasts for x in faults), default=0.0)
