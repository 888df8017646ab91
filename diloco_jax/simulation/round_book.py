"""What became of every round and of every member of it, from what was seen."""

import dataclasses
from typing import Any

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.settings import FREE
from diloco_jax.protocol.settings import Settings
from diloco_jax.simulation.checking import Moment

WAITED_FOR = 'waited for'  # not asked yet, asked, or looked at
IN = 'in'
DECLINED = 'declined'
REFUSED = 'refused'
GONE = 'gone'


@dataclasses.dataclass(slots=True)
class Member:
  """One island in one round."""

  incarnation: int
  status: str = WAITED_FOR
  asked: bool = False
  contribution: m.Contribution | None = None


@dataclasses.dataclass(slots=True)
class Round:
  """One attempt to merge a fragment."""

  id: m.RoundId
  fragment: int
  slot: int
  members: dict[int, Member]
  quorum: int
  opened_at: float
  drain: bool
  closed: str = ''  # the reason
  quorum_at: float | None = None
  ends_at: float | None = None  # of the longest grace window
  step_s: float = 0.0  # the slowest live island's, when it was opened
  merge: a.Merge | None = None

  def having(self, *statuses: str) -> list[int]:
    return [k for k, x in self.members.items() if x.status in statuses]


class RoundBook:
  """The listener that keeps every round in flight."""

  def __init__(self, settings: Settings):
    self.settings = settings
    self.rounds: dict[m.RoundId, Round] = {}
    self._touched: list[Round] = []

  def _collecting(self) -> list[Round]:
    return [x for x in self.rounds.values() if not x.closed]

  def _member(
    self, round_id: m.RoundId, island: int, incarnation: int
  ) -> tuple[Round, Member] | tuple[None, None]:
    """A member of a round that is still collected, if it is one."""
    rnd = self.rounds.get(round_id)
    if rnd is None or rnd.closed:
      return None, None
    member = rnd.members.get(island)
    if member is None or member.incarnation != incarnation:
      return None, None
    self._touched.append(rnd)
    return rnd, member

  def syncer_starts(self, at: Moment) -> None:
    del at
    self.rounds, self._touched = {}, []  # what was open is void

  def syncer_notes_stood_still(self, at: Moment, note: dict[str, Any]) -> None:
    """What was open is waited for longer, by as long as it was away."""
    del note
    for rnd in self._collecting():
      rnd.opened_at += at.now - at.old.now

  def syncer_notes_round_opened(self, at: Moment, note: dict[str, Any]) -> None:
    state = at.new
    drain = state.phase == s.DRAINING
    islands = note['members']
    everyone = self.settings.mode != FREE or drain or not self.settings.quorum
    self.rounds[note['round']] = Round(
      id=note['round'],
      fragment=note['fragment'],
      slot=note['slot'],
      members={x: Member(state.islands[x].incarnation) for x in islands},
      quorum=(
        len(islands) if everyone else min(self.settings.quorum, len(islands))
      ),
      opened_at=at.now,
      drain=drain,
      step_s=slowest_step_s(self.settings, state),
    )

  def syncer_sends_pull(self, at: Moment, pull: m.Pull) -> None:
    del at
    _, member = self._member(pull.round, pull.island, pull.incarnation)
    if member is not None:
      member.asked = True

  def syncer_sees_peer_lost(self, at: Moment, event: a.PeerLost) -> None:
    gone = [x.id for x in at.old.islands.values() if x.peer == event.peer]
    for rnd in self._collecting():
      for island in gone:
        if island in rnd.members:
          rnd.members[island].asked = False

  def syncer_gets_declined(self, at: Moment, message: m.Declined) -> None:
    del at
    _, member = self._member(message.round, message.island, message.incarnation)
    if member is None or not member.asked:
      return
    if member.status == WAITED_FOR and member.contribution is None:
      member.status = DECLINED

  def syncer_does_inspect(self, at: Moment, action: a.Inspect) -> None:
    _, member = self._member(action.round, action.island, action.incarnation)
    if member is not None:
      member.contribution = at.event.message

  def syncer_sees_inspected(self, at: Moment, event: a.Inspected) -> None:
    del at
    _, member = self._member(event.round, event.island, event.incarnation)
    if member is None or member.status != WAITED_FOR:
      return
    if member.contribution is not None:
      member.status = REFUSED if event.reason else IN

  def syncer_notes_refused(self, at: Moment, note: dict[str, Any]) -> None:
    del at
    _, member = self._member(note['round'], note['island'], note['incarnation'])
    if member is not None and member.status in (WAITED_FOR, IN):
      member.status = REFUSED

  def _leaves(self, note: dict[str, Any], given_stays: bool) -> None:
    """An island is out of all rounds that are still collected."""
    for rnd in self._collecting():
      member = rnd.members.get(note['island'])
      if member is None or member.incarnation != note['incarnation']:
        continue
      given = member.status == IN or member.contribution is not None
      if member.status in (IN, WAITED_FOR) and not (given and given_stays):
        member.status = GONE
        self._touched.append(rnd)

  def syncer_notes_lapsed(self, at: Moment, note: dict[str, Any]) -> None:
    del at
    self._leaves(note, given_stays=self.settings.mode == FREE)

  def syncer_notes_left(self, at: Moment, note: dict[str, Any]) -> None:
    del at
    self._leaves(note, given_stays=True)

  def syncer_notes_quarantined(self, at: Moment, note: dict[str, Any]) -> None:
    del at
    self._leaves(note, given_stays=False)

  def syncer_notes_ended(self, at: Moment, note: dict[str, Any]) -> None:
    del at
    self._leaves(note, given_stays=False)

  def syncer_notes_round_closed(self, at: Moment, note: dict[str, Any]) -> None:
    del at
    rnd = self.rounds.get(note['round'])
    if rnd is not None:
      rnd.closed = note['reason']
      if rnd.closed == s.EMPTY:
        del self.rounds[rnd.id]

  def syncer_does_merge(self, at: Moment, action: a.Merge) -> None:
    del at
    if action.round in self.rounds:
      self.rounds[action.round].merge = action

  def syncer_sees_tape_written(self, at: Moment, event: a.TapeWritten) -> None:
    del at
    if event.key.startswith('merge:'):
      _, incarnation, number = event.key.split(':')
      self.rounds.pop(m.RoundId(int(incarnation), int(number)), None)

  def syncer_sees_stop_requested(
    self, at: Moment, event: a.StopRequested
  ) -> None:
    del at, event
    for rnd in self._collecting():
      del self.rounds[rnd.id]

  def syncer_ends(self, at: Moment) -> None:
    """When a quorum was reached, and how long its grace may last."""
    if not self._touched:
      return
    for rnd in self._touched:
      if rnd.closed:
        continue
      reached = len(rnd.having(IN)) >= max(1, quorum_of(rnd))
      if not reached:  # or not any more
        rnd.quorum_at = rnd.ends_at = None
      elif rnd.quorum_at is None:
        rnd.quorum_at = at.now
        window = self.settings.grace_steps_max * slowest_step_s(
          self.settings, at.new
        )
        rnd.ends_at = at.now + window
    self._touched = []


def quorum_of(rnd: Round) -> int:
  """K, or all of those who may still give."""
  return min(rnd.quorum, len(rnd.having(IN, WAITED_FOR)))


def slowest_step_s(settings: Settings, state: s.SyncerState) -> float:
  """The slowest live island's step, at most a factor of the median one."""
  times = sorted(
    x.step_time_s
    for x in state.islands.values()
    if x.id >= 0 and x.status == s.LIVE and x.step_time_s > 0
  )
  if not times:
    return 0.0
  half = len(times) // 2
  median = (times[half] + times[-half - 1]) / 2
  return min(times[-1], settings.limits.winsor_factor * median)
