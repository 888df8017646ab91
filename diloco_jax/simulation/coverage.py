"""What a swarm has exercised: faults by what was going on, and reasons."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import syncer_state as s
from diloco_jax.simulation.checking import Moment
from diloco_jax.simulation.round_book import RoundBook

ROUND_OPEN, QUORUM_REACHED, MERGING, SAVING, ADOPTING = PHASES = (
  'round open', 'quorum reached', 'merging', 'saving', 'adopting',
)  # fmt: skip
CLOSES = (s.ALL_IN, s.GRACE_OVER, s.QUORUM_TIMEOUT, s.EMPTY)
# Of contributions; an island that misbehaves is needed for the second line.
REFUSALS = (
  'late', 'round', 'gone', 'incarnation', 'stale',
  'layout', 'timeline', 'stale_base', 'nonfinite', 'shape', 'outlier',
)  # fmt: skip


class Tally:
  """Counts, of one run or of many."""

  def __init__(self) -> None:
    self.faults: Counter[tuple[str, str]] = Counter()  # (kind, phase)
    self.kinds: Counter[str] = Counter()
    self.closes: Counter[str] = Counter()
    self.refusals: Counter[str] = Counter()

  def add(self, other: 'Tally') -> None:
    self.faults.update(other.faults)
    self.kinds.update(other.kinds)
    self.closes.update(other.closes)
    self.refusals.update(other.refusals)

  def holes(self, kinds: Iterable[str]) -> list[str]:
    """What has never occurred."""
    missing = [
      f'{kind} while {phase}'
      for kind in kinds
      for phase in PHASES
      if not self.faults[kind, phase]
    ]
    missing += [f'a round closed {x}' for x in CLOSES if not self.closes[x]]
    missing += [f'refused: {x}' for x in REFUSALS if not self.refusals[x]]
    return missing

  def to_plain(self) -> dict[str, Any]:
    return {
      'faults': {f'{k} / {p}': n for (k, p), n in sorted(self.faults.items())},
      'kinds': dict(sorted(self.kinds.items())),
      'closes': dict(sorted(self.closes.items())),
      'refusals': dict(sorted(self.refusals.items())),
    }


class Coverage:
  """The listener that counts; it stands behind the book of rounds.

  The world tells it of each fault as it strikes. A fault that changes the
  world (a crash) is told before it takes effect.
  """

  def __init__(self, rounds: RoundBook, tally: Tally | None = None):
    self.tally = tally if tally is not None else Tally()
    self._rounds = rounds
    self._saving: set[tuple[str, int]] = set()
    self._adopting: set[tuple[str, int, int]] = set()

  def on_fault(self, world: Any, kind: str) -> None:
    del world
    self.tally.kinds[kind] += 1
    for phase in self.phases():
      self.tally.faults[kind, phase] += 1

  def phases(self) -> set[str]:
    """What is going on at the moment."""
    phases = set()
    for rnd in self._rounds.rounds.values():
      if rnd.closed:
        phases.add(MERGING)
      else:
        phases.add(ROUND_OPEN if rnd.quorum_at is None else QUORUM_REACHED)
    if self._saving:
      phases.add(SAVING)
    if self._adopting:
      phases.add(ADOPTING)
    return phases

  def crashed(self, world: Any, who: str) -> None:
    del world
    self._saving = {x for x in self._saving if x[0] != who}
    self._adopting = {x for x in self._adopting if x[0] != who}

  def syncer_does_save_snapshot(self, at: Moment, action: Any) -> None:
    del action
    self._saving.add((at.who, at.life))

  def _saved(self, at: Moment, event: Any) -> None:
    del event
    self._saving.discard((at.who, at.life))

  syncer_sees_snapshot_saved = _saved
  island_sees_checkpoint_saved = _saved

  def island_does_stage(self, at: Moment, action: a.Stage) -> None:
    self._adopting.add((at.who, at.life, action.fragment))

  def island_does_step_plan(self, at: Moment, plan: a.StepPlan) -> None:
    for order in plan.adopt:
      self._adopting.discard((at.who, at.life, order.fragment))
    if plan.save:
      self._saving.add((at.who, at.life))

  def syncer_notes_round_closed(self, at: Moment, note: dict[str, Any]) -> None:
    del at
    self.tally.closes[note['reason']] += 1

  def syncer_ends(self, at: Moment) -> None:
    new, old = at.new.refusals, at.old.refusals
    if new is not old:
      for reason, count in new.items():
        if count > old.get(reason, 0):
          self.tally.refusals[reason] += count - old.get(reason, 0)
