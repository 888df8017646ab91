"""Versions grow, are durable before anyone hears of them, and come back."""

from typing import Any

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.settings import OVERWRITE
from diloco_jax.protocol.settings import Settings
from diloco_jax.simulation import spans as sp
from diloco_jax.simulation.books import Books
from diloco_jax.simulation.checking import Moment
from diloco_jax.simulation.round_book import RoundBook
from diloco_jax.simulation.work_checks import WorkChecker

SLACK_S = 1e-5  # notes are rounded


class VersionsGrowByOne(WorkChecker):
  """Versions grow by exactly one; a syncer's incarnation is never reused."""

  def __init__(self, settings: Settings, books: Books, rounds: RoundBook):
    super().__init__(settings, books, rounds)
    self._speakers: dict[int, int] = {}  # incarnation -> life

  def _check(
    self, at: Moment, p: int, parent: m.Version, version: m.Version
  ) -> None:
    newest = self.theta.newest(p)
    if parent != newest:
      self.fail(f'fragment {p} grows from {parent}, Θ is at {newest}')
    if version != (at.new.incarnation, parent.merges + 1):
      self.fail(f'fragment {p} goes from {tuple(parent)} to {tuple(version)}')

  def syncer_does_merge(self, at: Moment, merge: a.Merge) -> None:
    self._check(at, merge.fragment, merge.parent, merge.version)

  def syncer_does_write_tape(self, at: Moment, line: a.WriteTape) -> None:
    if line.key.startswith('merge:'):
      fields = dict(line.fields)
      self._check(at, fields['fragment'], fields['parent'], fields['version'])

  def syncer_sees_tape_written(self, at: Moment, event: a.TapeWritten) -> None:
    if not event.key.startswith(('merge:', 'recovered:')):
      return
    there = [self.theta.newest(p) for p in range(self.settings.fragments)]
    said = [x.version for x in at.new.fragments]
    if said != there:
      self.fail(f'after {event.key} the versions are {said}, not {there}')

  def _speaks(self, at: Moment, message: Any) -> None:
    life = self._speakers.setdefault(message.syncer_incarnation, at.life)
    if life != at.life or message.syncer_incarnation != at.new.incarnation:
      self.fail(f'two syncers speak as {message.syncer_incarnation}')

  syncer_sends_welcome = _speaks
  syncer_sends_ask_anchors = _speaks
  syncer_sends_broadcast = _speaks


class DurableBeforeBroadcast(WorkChecker):
  """A version's tape line is durable before anybody is sent the version."""

  def syncer_sends_broadcast(self, at: Moment, message: m.Broadcast) -> None:
    del at
    p = message.fragment
    place = self.theta.place[p].get(message.version)
    if place is None or not self.theta.seeded:
      self.fail(
        f'{tuple(message.version)} of fragment {p} is sent to island '
        f'{message.island} and its tape line is not durable'
      )
      return
    if message.version != self.theta.newest(p):
      self.fail(f'{tuple(message.version)} of fragment {p} is not the newest')
    if message.digest != self.theta.chain[p][place].digest:
      self.fail(f'fragment {p} is sent with a digest that is not on the tape')


class AdoptionIsMonotone(WorkChecker):
  """An island adopts newer versions only, prepared against what it holds."""

  def island_does_step_plan(self, at: Moment, plan: a.StepPlan) -> None:
    if not plan.adopt:
      return
    local = self.books.local(at)
    for order in plan.adopt:
      p, anchor = order.fragment, local.anchor[order.fragment]
      if anchor is not None and order.version <= anchor:
        self.fail(
          f'{at.who} adopts {tuple(order.version)} of fragment {p} and holds '
          f'{tuple(anchor)}'
        )
      stage = local.staging.get((p, order.version))
      if stage is None or stage.base != anchor:
        self.fail(
          f'{at.who} adopts {tuple(order.version)} of fragment {p}, which was '
          f'not prepared against {anchor}'
        )
        return
      if stage.mode != OVERWRITE and stage.capture is not None:
        self._check_taken_back(at, local.pending(p), stage)

  def _check_taken_back(
    self, at: Moment, pending: sp.Spans, stage: a.Stage
  ) -> None:
    assert stage.capture is not None
    local = self.books.local(at)
    key = local.index, stage.capture.incarnation, stage.fragment
    given = self.books.given[(*key, stage.capture.number)]
    if not sp.covers(pending, given.spans):
      self.fail(
        f'{at.who} takes capture {stage.capture} of fragment {stage.fragment} '
        f'out of a value that does not hold it'
      )


class NamesTheRightCapture(WorkChecker):
  """Broadcast and adoption name the last capture of the island in a version."""

  def __init__(self, settings: Settings, books: Books, rounds: RoundBook):
    super().__init__(settings, books, rounds)
    self._named: dict[tuple[str, int, int], m.Broadcast] = {}

  def syncer_sends_broadcast(self, at: Moment, message: m.Broadcast) -> None:
    del at
    last = self.theta.last[message.fragment].get(message.island)
    named = None
    if last is not None and last.given.incarnation == message.incarnation:
      named = m.CaptureId(message.incarnation, last.given.number)
    if message.named != named:
      self.fail(
        f'{tuple(message.version)} of fragment {message.fragment} names '
        f'{message.named} to island {message.island}; it includes {named}'
      )

  def island_gets_broadcast(self, at: Moment, message: m.Broadcast) -> None:
    self._named[at.who, at.life, message.fragment] = message

  def island_does_stage(self, at: Moment, action: a.Stage) -> None:
    if action.capture is None:
      return
    incoming = at.new.held[action.fragment].incoming
    if incoming is None or action.capture != incoming.named:
      self.fail(f'{at.who} stages capture {action.capture}, not the one named')


class NewcomersSeedNothing(WorkChecker):
  """Nobody gives Θ(0) once there is one: not while an island or disk has it."""

  def _check(self, what: str) -> None:
    if self.theta.seeded:
      self.fail(f'{what}, and Θ is there already')

  def syncer_sends_welcome(self, at: Moment, message: m.Welcome) -> None:
    del at
    if message.seed_wanted:
      self._check(f'island {message.island} is asked for Θ(0)')

  def syncer_does_take_seeds(self, at: Moment, action: a.TakeSeeds) -> None:
    del at, action
    self._check('Θ(0) is taken from an island')

  def syncer_sees_seeded(self, at: Moment, event: a.Seeded) -> None:
    del at, event
    self._check('Θ(0) is put in place')

  def syncer_does_restore(self, at: Moment, action: a.Restore) -> None:
    del at
    for order in action.orders:
      if order.source == a.START and order.version.merges:
        self.fail(f'{order} starts again from Θ(0)')


class MergedWorkComesBack(WorkChecker):
  """After a restart the newest version that somebody holds is taken back."""

  def __init__(self, settings: Settings, books: Books, rounds: RoundBook):
    super().__init__(settings, books, rounds)
    self._answers: dict[int, m.Anchors] = {}
    self._asked: dict[tuple[int, int], float] = {}  # (fragment, island)
    self._spoilt: set[tuple[int, int]] = set()
    self._bests: list[int] = []
    self._said: set[int] = set()  # islands that have answered at all
    self._began = 0.0

  def syncer_starts(self, at: Moment) -> None:
    self._said, self._began = set(), at.now
    self._answers, self._asked, self._spoilt = {}, {}, set()

  def syncer_gets_anchors(self, at: Moment, message: m.Anchors) -> None:
    known = at.old.islands.get(message.island)
    if message.syncer_incarnation != at.new.incarnation or known is None:
      return
    if message.incarnation == known.incarnation:
      self._said.add(message.island)
      if message.versions:
        self._answers[message.island] = message

  def syncer_sees_peer_lost(self, at: Moment, event: a.PeerLost) -> None:
    for island in at.old.islands.values():
      if island.peer == event.peer:
        self._answers.pop(island.id, None)

  def syncer_notes_ended(self, at: Moment, note: dict[str, Any]) -> None:
    del at
    self._answers.pop(note['island'], None)
    self._said.discard(note['island'])

  def syncer_notes_stood_still(self, at: Moment, note: dict[str, Any]) -> None:
    del note
    self._began += at.now - at.old.now

  def syncer_sends_ask_anchor(self, at: Moment, message: m.AskAnchor) -> None:
    self._asked.setdefault((message.fragment, message.island), at.now)

  def syncer_sees_anchor_taken(self, at: Moment, event: a.AnchorTaken) -> None:
    del at
    if not event.ok:
      self._spoilt.update(x for x in self._asked if x[0] == event.fragment)

  def syncer_does_restore(self, at: Moment, action: a.Restore) -> None:
    """What is answered from here on comes too late."""
    del action
    known = at.old.recovering.memory.members
    away = [
      x.id
      for x in at.new.islands.values()
      if x.id in known and x.status != s.LEFT and x.id not in self._said
    ]
    if away and at.now - self._began < self.settings.limits.lease_s - SLACK_S:
      self.fail(f'islands {away} may hold newer values and were not waited for')
    count = self.settings.fragments
    self._bests = [self._best(at, p) for p in range(count)]

  def syncer_does_write_tape(self, at: Moment, line: a.WriteTape) -> None:
    if not line.key.startswith('recovered:'):
      return
    fields = dict(line.fields)
    snapshot = at.old.recovering.snapshot
    for p, parent in enumerate(fields['parents']):
      place = self.theta.place[p].get(self.books.known(p, parent))
      if place is None:
        self.fail(f'fragment {p} goes back to {parent}, not of this ancestry')
        return
      if fields['digests'][p] != self.theta.chain[p][place].digest:
        self.fail(f'fragment {p} goes back to another value than {parent}')
      best = self._bests[p]
      if snapshot:
        best = max(best, self.theta.place[p].get(snapshot[p][0], -1))
      for key, cut in self.books.cuts.items():
        if key != line.key:  # it may be on the tape
          best = min(best, self.theta.place[p].get(cut[p], best))
      if place < best:
        version = self.theta.chain[p][best].version
        self.fail(
          f'fragment {p} goes back to {tuple(parent)}; {tuple(version)} is '
          f'on the tape and is held'
        )

  def _best(self, at: Moment, p: int) -> int:
    """The place of the newest version that an island could have given."""
    best = -1
    for island, answer in self._answers.items():
      asked = self._asked.get((p, island), at.now)
      late = at.now - asked >= self.settings.limits.lease_s
      place = self.theta.place[p].get(answer.versions[p])
      if place is None or late or (p, island) in self._spoilt:
        continue
      if answer.digests[p] == self.theta.chain[p][place].digest:
        best = max(best, place)
    return best


EARLY = (AdoptionIsMonotone,)
CHECKERS = (
  VersionsGrowByOne, DurableBeforeBroadcast, NamesTheRightCapture,
  NewcomersSeedNothing, MergedWorkComesBack,
)  # fmt: skip
