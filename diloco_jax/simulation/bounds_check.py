"""Everything that could pile up has a bound."""

from typing import Any

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import island_state as i
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.settings import EACH
from diloco_jax.protocol.settings import Settings
from diloco_jax.simulation.books import Books
from diloco_jax.simulation.checking import Moment
from diloco_jax.simulation.round_book import RoundBook
from diloco_jax.simulation.work_checks import WorkChecker

SLACK_S = 1e-5


class Bounds(WorkChecker):
  """Rounds, captures, broadcasts and payloads are bounded."""

  def __init__(self, settings: Settings, books: Books, rounds: RoundBook):
    super().__init__(settings, books, rounds)
    overlap = max(1, settings.overlap)
    islands = max(settings.islands, settings.islands_max)
    self._rounds_max = overlap
    self._here_max = 3 * settings.fragments + 8 + islands * (overlap + 1)
    self._there_max = 4 * settings.fragments + 8
    # (island, incarnation) -> fragment -> what was sent, and when
    self._sent: dict[tuple[int, int], dict[int, tuple[m.Version, float]]] = {}
    self._held: dict[tuple[str, int], set[int]] = {}

  # Rounds, captures, broadcasts.

  def syncer_notes_round_opened(self, at: Moment, note: dict[str, Any]) -> None:
    del at
    rounds = list(self.rounds.rounds.values())
    if self.settings.mode == EACH:  # so many for each island
      owner = note['members'][0]
      rounds = [x for x in rounds if owner in x.members and not x.drain]
    elif any(x.fragment == note['fragment'] for x in rounds):
      self.fail(f'two rounds of fragment {note["fragment"]} are in flight')
    if len(rounds) + 1 > self._rounds_max:
      self.fail(
        f'{len(rounds) + 1} rounds in flight, at most {self._rounds_max}'
      )

  def island_does_step_plan(self, at: Moment, plan: a.StepPlan) -> None:
    for order in plan.capture:
      kept = self.books.local(at).kept.get(order.fragment)
      if kept is not None:
        self.fail(
          f'{at.who} captures fragment {order.fragment} while its capture '
          f'{kept.number} is kept'
        )

  def syncer_sends_broadcast(self, at: Moment, message: m.Broadcast) -> None:
    key = message.island, message.incarnation
    mine = self._sent.setdefault(key, {})
    sent = mine.get(message.fragment)
    mine[message.fragment] = message.version, at.now
    floor = self.settings.limits.resend_floor_s
    if sent is not None and at.now - sent[1] < floor - SLACK_S:
      self.fail(
        f'island {key[0]}.{key[1]} is sent {tuple(message.version)} of '
        f'fragment {message.fragment} while {tuple(sent[0])} is on its way'
      )

  def syncer_gets_report(self, at: Moment, report: m.Report) -> None:
    mine = self._sent.get((report.island, report.incarnation))
    if not mine or not report.versions:
      return
    known = at.old.islands.get(report.island)
    if known is None or report.seq <= known.seq:
      return
    for p in list(mine):
      if report.versions[p] >= mine[p][0]:
        del mine[p]

  def _forget(self, island: s.Island) -> None:
    self._sent.pop((island.id, island.incarnation), None)

  def syncer_sees_peer_lost(self, at: Moment, event: a.PeerLost) -> None:
    for island in at.old.islands.values():
      if island.peer == event.peer:
        self._forget(island)

  def syncer_gets_hello(self, at: Moment, message: m.Hello) -> None:
    for island in at.old.islands.values():
      if island.nonce == message.nonce:
        self._forget(island)

  def syncer_starts(self, at: Moment) -> None:
    del at
    self._sent = {}

  # Payloads.

  def _take(self, at: Moment, handle: int, most: int) -> None:
    held = self._held.setdefault((at.who, at.life), set())
    if handle:
      held.add(handle)
      if len(held) > most + 1:
        self.fail(f'{at.who} holds {len(held)} payloads, at most {most}')

  def _release(self, at: Moment, action: a.Release) -> None:
    held = self._held.setdefault((at.who, at.life), set())
    if action.handle not in held:
      self.fail(f'{at.who} releases payload {action.handle}, not held')
    held.discard(action.handle)

  def _syncer_takes(self, at: Moment, message: Any) -> None:
    if at.old.phase != s.FINISHED:
      self._take(at, message.payload, self._here_max)

  syncer_gets_contribution = _syncer_takes
  syncer_gets_seed = _syncer_takes
  syncer_gets_anchor_value = _syncer_takes
  syncer_gets_donation = _syncer_takes

  def syncer_sees_merged(self, at: Moment, event: a.Merged) -> None:
    self._take(at, event.handle, self._here_max)

  def _syncer_starts(self, at: Moment, event: Any) -> None:
    for handle in event.handles:
      self._take(at, handle, self._here_max)

  syncer_sees_seeded = _syncer_starts
  syncer_sees_restored = _syncer_starts
  syncer_does_release = _release
  island_does_release = _release

  def _island_takes(self, at: Moment, message: Any) -> None:
    if at.old.phase != i.STOPPED:
      self._take(at, message.payload, self._there_max)

  island_gets_broadcast = _island_takes
  island_gets_donation = _island_takes

  def _island_makes(self, at: Moment, event: Any) -> None:
    if at.old.phase != i.STOPPED:
      self._take(at, event.handle, self._there_max)

  island_sees_encoded = _island_makes
  island_sees_anchor_ready = _island_makes
  island_sees_donated = _island_makes

  def island_sees_seeds_ready(self, at: Moment, event: a.SeedsReady) -> None:
    for handle in event.handles:
      self._take(at, handle, self._there_max)
