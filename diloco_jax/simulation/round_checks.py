"""Rounds open, ask, wait and close by the rules."""

from typing import Any

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.settings import FREE
from diloco_jax.protocol.settings import Settings
from diloco_jax.simulation import round_book
from diloco_jax.simulation.books import Books
from diloco_jax.simulation.checking import Moment
from diloco_jax.simulation.round_book import RoundBook
from diloco_jax.simulation.work_checks import WorkChecker

SLACK_S = 1e-5  # notes are rounded


class ReasonIsTrue(WorkChecker):
  """A round closes for the reason that it gives, and leaves out whom it says."""

  def syncer_notes_round_closed(self, at: Moment, note: dict[str, Any]) -> None:
    rnd = self.rounds.rounds.get(note['round'])
    if rnd is None or rnd.closed:
      self.fail(f'{note["round"]} closes and is not open')
      return
    inside = rnd.having(round_book.IN)
    waiting = rnd.having(round_book.WAITED_FOR)
    told = (note['contributed'], sorted(x for x, _ in note['left_out']))
    there = (len(inside), sorted(rnd.members.keys() - set(inside)))
    if told != there:
      self.fail(f'{rnd.id} says {told} came and did not; it was {there}')
    wrong = self._wrong(at, rnd, note, len(inside), len(waiting))
    if wrong:
      self.fail(f'{rnd.id} closes {note["reason"]}, but {wrong}')

  def _wrong(
    self,
    at: Moment,
    rnd: round_book.Round,
    note: dict[str, Any],
    inside: int,
    waiting: int,
  ) -> str:
    """What speaks against the reason; '' if nothing does."""
    reason, now = note['reason'], at.now
    if (reason == s.EMPTY) != (inside == 0):
      return f'{inside} have contributed'
    timed_out = self._timed_out(at, rnd)
    if reason == s.EMPTY:
      return f'{waiting} are waited for' if waiting and not timed_out else ''
    if reason == s.ALL_IN:
      return f'{waiting} are waited for' if waiting else ''
    if reason == s.QUORUM_TIMEOUT:
      return '' if timed_out else 'its time is not over'
    if inside < round_book.quorum_of(rnd):
      return f'{inside} are no quorum of {rnd.quorum}'
    since = now if rnd.quorum_at is None else rnd.quorum_at
    if now < since + note['grace_s'] - SLACK_S:
      return f'{since + note["grace_s"] - now} s of the window are left'
    return ''

  def _timed_out(self, at: Moment, rnd: round_book.Round) -> bool:
    if rnd.drain:
      return at.now >= at.old.ends_at
    if self.settings.mode != FREE:
      return False
    return at.now >= rnd.opened_at + timeout_s(self.settings, rnd) - SLACK_S


def timeout_s(settings: Settings, rnd: round_book.Round) -> float:
  return max(
    settings.limits.quorum_timeout_floor_s,
    settings.limits.quorum_timeout_steps * rnd.step_s,
  )


class WaitingEnds(WorkChecker):
  """A grace window lasts at most a step, a round at most its timeout."""

  def __init__(self, settings: Settings, books: Books, rounds: RoundBook):
    super().__init__(settings, books, rounds)
    self._ticked_at = 0.0

  def syncer_starts(self, at: Moment) -> None:
    self._ticked_at = at.now

  def syncer_sees_timer_fired(self, at: Moment, event: a.TimerFired) -> None:
    """Whatever was over at the last tick must have been closed by it."""
    if event.name != 'tick':
      return
    ticked_at, self._ticked_at = self._ticked_at, at.now
    for rnd in self.rounds.rounds.values():
      if rnd.closed:
        continue
      if rnd.ends_at is not None and rnd.ends_at + SLACK_S < ticked_at:
        self.fail(
          f'{rnd.id} had its quorum at {rnd.quorum_at} and is open at {at.now}'
        )
      if self.settings.mode != FREE or rnd.drain:
        continue
      if rnd.opened_at + timeout_s(self.settings, rnd) + SLACK_S < ticked_at:
        self.fail(f'{rnd.id}, of {rnd.opened_at}, is still open at {at.now}')


class OpeningChargesAll(WorkChecker):
  """A round opens for enough credits and charges every live island."""

  def __init__(self, settings: Settings, books: Books, rounds: RoundBook):
    super().__init__(settings, books, rounds)
    self._opened: list[int] = []

  def syncer_notes_round_opened(self, at: Moment, note: dict[str, Any]) -> None:
    if self.settings.mode == FREE and note['slot'] >= at.old.next_slot:
      self._opened.append(note['slot'])

  def syncer_ends(self, at: Moment) -> None:
    if not self._opened:
      return
    opened, self._opened = self._opened, []
    live = [
      x for x in at.new.islands.values() if x.id >= 0 and x.status == s.LIVE
    ]
    purse = {x.id: self._before(at, x) for x in live}
    active = [
      x.id
      for x in live
      if x.step_time_s > 0
      and at.now - x.reported_at
      <= self.settings.limits.active_steps * x.step_time_s
    ]
    n = self.settings.stride
    for slot in opened:
      quorum = self.settings.quorum or len(active)
      need = min(len(active), max(quorum, len(active) // 2 + 1))
      holders = sum(purse[x] >= n for x in active)
      if holders < need or not active:
        self.fail(f'slot {slot} opens for {holders} holders of {need} needed')
      purse = {k: max(-2 * n, min(n, v - n)) for k, v in purse.items()}
    for x in live:
      if x.credits != purse[x.id]:
        self.fail(
          f'slot {opened[-1]} leaves island {x.id} {x.credits} credits; '
          f'charged n = {n} it has {purse[x.id]}'
        )

  def _before(self, at: Moment, island: s.Island) -> int:
    """Its credits when the first round opened."""
    old = at.old.islands.get(island.id)
    if old is None or old.incarnation != island.incarnation:
      return 0
    if old.starts != island.starts:
      return 0
    rise = max(0, island.step - old.step) if old.baseline else 0
    return old.credits + rise


class AskedWithOwnMerge(WorkChecker):
  """A member is asked only when it reports its own last merge."""

  def __init__(self, settings: Settings, books: Books, rounds: RoundBook):
    super().__init__(settings, books, rounds)
    self._reports: dict[tuple[int, int], m.Report] = {}

  def syncer_starts(self, at: Moment) -> None:
    del at
    self._reports = {}

  def syncer_gets_report(self, at: Moment, report: m.Report) -> None:
    del at
    key = report.island, report.incarnation
    known = self._reports.get(key)
    if known is None or known.seq < report.seq:
      if report.versions:
        self._reports[key] = report

  def syncer_sends_pull(self, at: Moment, pull: m.Pull) -> None:
    p = pull.fragment
    report = self._reports.get((pull.island, pull.incarnation))
    who = f'island {pull.island}.{pull.incarnation}, asked for fragment {p},'
    if report is None:
      self.fail(f'{who} has not reported what it holds')
      return
    held = report.versions[p]
    if held.incarnation < at.new.incarnation:
      self.fail(f'{who} holds {tuple(held)}, of before the restart')
    last = self.theta.last[p].get(pull.island)
    if last is None or last.given.incarnation != pull.incarnation:
      return
    if held < last.version:
      self.fail(
        f'{who} reports {tuple(held)}; its last merge made '
        f'{tuple(last.version)}'
      )


EARLY = (ReasonIsTrue,)
CHECKERS = (WaitingEnds, OpeningChargesAll, AskedWithOwnMerge)
