"""What must hold after every event, in every runtime.

Each function raises InvariantError with a sentence that says what broke.
"""

from diloco_jax.protocol import island_state as i
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.settings import EACH
from diloco_jax.protocol.settings import FREE


class InvariantError(AssertionError):
  """The protocol has done something wrong; the run must not go on."""


def _broken(sentence: str) -> None:
  raise InvariantError(sentence)


def check_syncer(old: s.SyncerState, new: s.SyncerState) -> None:
  """Invariants of the syncer's state, and of the step from the last one."""
  if old.fragments and new.fragments is not old.fragments:
    for p, after in enumerate(new.fragments):
      before = old.fragments[p]
      if before is not after:
        _check_fragment(p, before, after)
  if old.phase == s.RECOVERING:
    return  # what was lost is counted; there is nothing to grow from
  if new.rounds is not old.rounds:
    _check_rounds(old, new)
  if new.islands is not old.islands:
    for key, island in new.islands.items():
      before_island = old.islands.get(key)
      if before_island is not island and before_island is not None:
        _check_known_island(before_island, island)
  if new.merges - old.merges not in (0, 1):
    _broken('merges grew by more than one')
  if new.global_step < old.global_step:
    _broken('the global step fell')


def _check_known_island(before: s.Island, after: s.Island) -> None:
  if after.incarnation < before.incarnation:
    _broken(f'island {after.id}: incarnation fell')
  if after.incarnation == before.incarnation and (
    after.step < before.step
    or after.seq < before.seq
    or after.merged < before.merged
  ):
    _broken(f'island {after.id}: steps, reports or merged work fell')


def _check_fragment(p: int, before: s.Fragment, after: s.Fragment) -> None:
  if after.version != before.version and not (
    after.version.incarnation > before.version.incarnation
    or after.version.merges == before.version.merges + 1
  ):
    _broken(f'fragment {p}: version {before.version} -> {after.version}')
  if after.included is before.included:
    return
  for island, inclusion in after.included.items():
    last = before.included.get(island)
    if last is None or last is inclusion:
      continue
    if not (
      inclusion.version > last.version
      and inclusion.incarnation >= last.incarnation
      and inclusion.capture > last.capture
    ):
      _broken(f'fragment {p}: work of island {island} entered twice')


def _check_rounds(old: s.SyncerState, new: s.SyncerState) -> None:
  settings = new.settings
  if settings.mode != EACH:
    if len(new.rounds) > max(1, settings.overlap):
      _broken(f'{len(new.rounds)} rounds in flight, at most {settings.overlap}')
    fragments = [x.fragment for x in new.rounds.values()]
    if len(set(fragments)) != len(fragments):
      _broken('two rounds of one fragment in flight')
  merging = [
    x.fragment for x in new.rounds.values() if x.phase in (s.MERGING, s.TAPING)
  ]
  if len(set(merging)) != len(merging):
    _broken('two merges of one fragment at once')
  for key, rnd in new.rounds.items():
    if old.rounds.get(key) is not rnd:
      _check_round(rnd)


def _check_round(rnd: s.Round) -> None:
  before = -1
  for member in rnd.members:
    if member.island <= before:
      _broken(f'{rnd.id}: members not in order')
    before = member.island
    if member.status in (s.CONTRIBUTED, s.INSPECTING):
      c = member.contribution
      if (
        c is None
        or c.island != member.island
        or c.incarnation != member.incarnation
        or c.fragment != rnd.fragment
        or c.round != rnd.id
      ):
        _broken(
          f'{rnd.id}: contribution of island {member.island} does not fit'
        )
  if rnd.phase != s.COLLECTING and not rnd.contributed:
    _broken(f'{rnd.id}: closed with nothing contributed and still there')


def check_island(old: i.IslandState, new: i.IslandState) -> None:
  """Invariants of an island's state, and of the step from the last one."""
  if new.boundary < new.step:
    _broken('more steps finished than dispatched')
  if new.seq < old.seq or new.step < old.step:
    _broken('steps fell')
  if new.held is old.held:
    return
  for p, after in enumerate(new.held):
    before = old.held[p]
    if before is not after:
      _check_held(p, before, after, new)


def _check_held(
  p: int, before: i.Held, after: i.Held, new: i.IslandState
) -> None:
  if before.anchor is not None and (
    after.anchor is None or after.anchor < before.anchor
  ):
    _broken(f'fragment {p}: anchor {before.anchor} -> {after.anchor}')
  if new.boundary < after.step0 or new.tokens < after.tokens0:
    _broken(f'fragment {p}: counters below zero')
  capture = after.capture
  if capture is not None:
    if capture.c_steps <= 0 or capture.id.incarnation != new.incarnation:
      _broken(f'fragment {p}: capture {capture.id} is not of this incarnation')
    if (
      not capture.detached
      and new.settings.mode == FREE
      and new.boundary - after.step0 < capture.c_steps
    ):
      _broken(
        f'fragment {p}: capture {capture.id} has more steps than are left'
      )
  if (
    after.incoming is not None
    and after.anchor is not None
    and after.incoming.version <= after.anchor
  ):
    _broken(f'fragment {p}: an older version waits to be adopted')
