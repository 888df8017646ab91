"""The working copy in which the syncer handles one event.

`syncer.react` opens a Turn on a state, the rules below it change the Turn,
and `close` freezes it. The state that went in is never changed.
"""

from collections.abc import Iterator, Mapping, Sequence
import operator
from typing import Any

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import schedule
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.replacing import replaced
from diloco_jax.protocol.settings import EACH


class Turn:
  """A shallow, mutable copy of a SyncerState, and the actions so far."""

  def __init__(self, state: s.SyncerState, now: float):
    self._state = state
    self.settings = state.settings
    self.limits = state.settings.limits
    # A clock that steps backwards must not lengthen a lease.
    self.now = max(now, state.now)
    self.fragments = list(state.fragments)
    self.islands = dict(state.islands)
    self.rounds = dict(state.rounds)
    self._fields: dict[str, Any] = {}
    self.actions: list[a.Action] = []

  def get(self) -> s.SyncerState:
    """The scalar fields as changed so far; containers live on the Turn."""
    if self._fields:
      self._state = replaced(self._state, self._fields)
      self._fields = {}
    return self._state

  def set(self, **fields: Any) -> None:
    self._fields.update(fields)

  def close(self) -> tuple[s.SyncerState, tuple[a.Action, ...]]:
    before = self._state
    # What has not changed stays the same object: it need not be checked.
    if not _same_items(self.fragments, before.fragments):
      self._fields['fragments'] = tuple(self.fragments)
    if not _same_values(self.islands, before.islands):
      self._fields['islands'] = self.islands
    if not _same_values(self.rounds, before.rounds):
      self._fields['rounds'] = self.rounds
    self._fields['now'] = self.now
    return self.get(), tuple(self.actions)

  # Small verbs.

  def act(self, action: a.Action) -> None:
    self.actions.append(action)

  def note(self, kind: str, **fields: Any) -> None:
    self.actions.append(a.Note(kind=kind, fields=tuple(fields.items())))

  def send(self, peer: str, message: m.Message, priority: int = 0) -> None:
    if peer:
      self.actions.append(a.Send(peer, message, priority))

  def release(self, handle: int) -> None:
    if handle:
      self.actions.append(a.Release(handle=handle))

  def island(self, island: int, **fields: Any) -> s.Island:
    changed = replaced(self.islands[island], fields)
    self.islands[island] = changed
    return changed

  def round(self, round_id: m.RoundId, **fields: Any) -> s.Round:
    changed = replaced(self.rounds[round_id], fields)
    self.rounds[round_id] = changed
    return changed

  def member(self, rnd: s.Round, island: int, **fields: Any) -> s.Round:
    members = tuple(
      replaced(x, fields) if x.island == island else x for x in rnd.members
    )
    return self.round(rnd.id, members=members)

  # Small questions.

  def with_status(self, *statuses: str) -> Iterator[s.Island]:
    """Islands (not evaluators) in a standing, by id."""
    for key in sorted(self.islands):
      island = self.islands[key]
      if key >= 0 and island.status in statuses:
        yield island

  def live(self) -> list[s.Island]:
    return list(self.with_status(s.LIVE))

  def slowest_step_s(self) -> float:
    times = [x.step_time_s for x in self.live() if x.step_time_s > 0]
    return schedule.slowest_step_s(times, self.limits.winsor_factor)

  def resend_after(self, island: s.Island) -> float:
    """How long an unanswered pull or broadcast waits before its repeat."""
    transfer = self.get().estimates.transfer_s or 0.0
    return max(
      self.limits.resend_floor_s,
      self.limits.resend_steps * island.step_time_s,
      4 * transfer,
    )

  def wanted(self, island: s.Island, fragment: int) -> m.Version:
    """The version that the island should hold.

    The newest; with rounds of one island only, what its own last merge made,
    unless what it gives relative to that would be refused as too old.
    """
    piece = self.fragments[fragment]
    if (
      self.settings.mode != EACH
      or island.is_evaluator
      or island.status in (s.ENTERING, s.READY)
    ):
      return piece.version
    own = piece.included.get(island.id)
    # A version of before a restart of the syncer is no base any more.
    oldest = m.Version(self.get().incarnation, 0)
    wanted = oldest
    if own is not None and own.incarnation == island.incarnation:
      wanted = max(own.version, oldest)
    held = island.versions[fragment] if island.versions else wanted
    if self.is_stale(island.id, fragment, max(wanted, held)):
      return piece.version
    return wanted

  def is_stale(self, index: int, fragment: int, base: m.Version) -> bool:
    """Whether work relative to a version is too old to be merged."""
    limit = self.settings.staleness_max
    if limit < 0:
      return False
    piece = self.fragments[fragment]
    # Versions for which the island had no step to give do not make it stale.
    declined = piece.declined.get(index, ())
    behind: float = piece.version.merges - base.merges
    behind -= sum(count > base.merges for count in declined)
    if self.settings.mode == EACH:
      behind /= max(1, len(self.live()))
    return behind > limit

  def broadcast(self, island: s.Island, fragment: int) -> None:
    """Send the newest version of a fragment, unless one is on its way."""
    piece = self.fragments[fragment]
    in_flight = island.sent.get(fragment)
    if in_flight is not None:
      # One at a time: a newer one follows the report that it has arrived.
      if self.now - in_flight[1] < self.resend_after(island):
        return
    if not island.peer or self.get().phase == s.SEEDING:
      return  # Θ(0) is not durable before it is open
    own = piece.included.get(island.id)
    named = (
      own.capture
      if own is not None and own.incarnation == island.incarnation
      else None
    )
    state = self.get()
    slot = piece.slot
    if self.settings.mode == EACH and not island.is_evaluator:
      slot = own.slot if named is not None and own is not None else -1
    self.send(
      island.peer,
      m.Broadcast(
        island=island.id,
        incarnation=island.incarnation,
        syncer_incarnation=state.incarnation,
        fragment=fragment,
        version=piece.version,
        round=piece.round,
        slot=slot,
        digest=piece.digest,
        named=named,
        global_step=state.global_step,
        payload=piece.handle,
      ),
    )
    self.island(
      island.id,
      sent={**island.sent, fragment: (piece.version, self.now)},
    )

  def refuse(self, reason: str) -> None:
    """Count a refusal."""
    refusals = dict(self.get().refusals)
    refusals[reason] = refusals.get(reason, 0) + 1
    self.set(refusals=refusals)


def _same_items(new: Sequence[Any], old: Sequence[Any]) -> bool:
  return len(new) == len(old) and all(map(operator.is_, new, old))


def _same_values(new: Mapping[Any, Any], old: Mapping[Any, Any]) -> bool:
  """Also in the same order, which a working copy keeps where it can."""
  return (
    len(new) == len(old)
    and all(map(operator.is_, new.values(), old.values()))
    and all(map(operator.eq, new, old))
  )
