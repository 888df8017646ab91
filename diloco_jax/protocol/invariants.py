"""What must hold after every event, in every runtime.

Each function raises InvariantError with a sentence that says what broke.
"""

from diloco_jax.protocol import island_state as i
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.settings import EACH
from diloco_jax.protocol.settings import FREE


class InvariantError(AssertionError):
  """The protocol has done something wrong; the run must not go on."""


def _require(condition: bool, sentence: str) -> None:
  if not condition:
    raise InvariantError(sentence)


def check_syncer(old: s.SyncerState, new: s.SyncerState) -> None:
  """Invariants of the syncer's state, and of the step from the last one."""
  if old.fragments:
    for p, (before, after) in enumerate(
      zip(old.fragments, new.fragments, strict=True)
    ):
      if before is not after:
        _check_fragment(p, before, after)
  if old.phase == s.RECOVERING:
    return  # what was lost is counted; there is nothing to grow from
  if new.rounds is not old.rounds:
    _check_rounds(new)
  for key, island in new.islands.items():
    before_island = old.islands.get(key)
    if before_island is island or before_island is None:
      continue
    _require(
      island.incarnation >= before_island.incarnation,
      f'island {key}: incarnation fell',
    )
    if island.incarnation == before_island.incarnation:
      _require(
        island.step >= before_island.step
        and island.seq >= before_island.seq
        and island.merged >= before_island.merged,
        f'island {key}: steps, reports or merged work fell',
      )
  _require(new.merges - old.merges in (0, 1), 'merges grew by more than one')
  _require(new.global_step >= old.global_step, 'the global step fell')


def _check_fragment(p: int, before: s.Fragment, after: s.Fragment) -> None:
  if after.version != before.version:
    _require(
      after.version.incarnation > before.version.incarnation
      or after.version.merges == before.version.merges + 1,
      f'fragment {p}: version {before.version} -> {after.version}',
    )
  for island, inclusion in after.included.items():
    last = before.included.get(island)
    if last is None or last is inclusion:
      continue
    _require(
      inclusion.version > last.version
      and inclusion.incarnation >= last.incarnation
      and inclusion.capture > last.capture,
      f'fragment {p}: work of island {island} entered twice',
    )


def _check_rounds(new: s.SyncerState) -> None:
  settings = new.settings
  if settings.mode != EACH:
    _require(
      len(new.rounds) <= max(1, settings.overlap),
      f'{len(new.rounds)} rounds in flight, at most {settings.overlap}',
    )
    fragments = [x.fragment for x in new.rounds.values()]
    _require(
      len(set(fragments)) == len(fragments),
      'two rounds of one fragment in flight',
    )
  merging = [
    x.fragment for x in new.rounds.values() if x.phase in (s.MERGING, s.TAPING)
  ]
  _require(
    len(set(merging)) == len(merging), 'two merges of one fragment at once'
  )
  for rnd in new.rounds.values():
    ids = [x.island for x in rnd.members]
    _require(ids == sorted(set(ids)), f'{rnd.id}: members not in order')
    _require(
      rnd.phase == s.COLLECTING or bool(rnd.contributed),
      f'{rnd.id}: closed with nothing contributed and still there',
    )
    for member in rnd.members:
      if member.status in (s.CONTRIBUTED, s.INSPECTING):
        c = member.contribution
        _require(
          c is not None
          and c.island == member.island
          and c.incarnation == member.incarnation
          and c.fragment == rnd.fragment
          and c.round == rnd.id,
          f'{rnd.id}: contribution of island {member.island} does not fit',
        )


def check_island(old: i.IslandState, new: i.IslandState) -> None:
  """Invariants of an island's state, and of the step from the last one."""
  _require(new.boundary >= new.step, 'more steps finished than dispatched')
  _require(new.seq >= old.seq and new.step >= old.step, 'steps fell')
  for p, (before, after) in enumerate(zip(old.held, new.held, strict=True)):
    if before is after:
      continue
    if before.anchor is not None:
      _require(
        after.anchor is not None and after.anchor >= before.anchor,
        f'fragment {p}: anchor {before.anchor} -> {after.anchor}',
      )
    _require(
      new.boundary >= after.step0 and new.tokens >= after.tokens0,
      f'fragment {p}: counters below zero',
    )
    capture = after.capture
    if capture is not None:
      _require(
        capture.c_steps > 0 and capture.id.incarnation == new.incarnation,
        f'fragment {p}: capture {capture.id} is not of this incarnation',
      )
      if not capture.detached and new.settings.mode == FREE:
        _require(
          new.boundary - after.step0 >= capture.c_steps,
          f'fragment {p}: capture {capture.id} has more steps than are left',
        )
    if after.incoming is not None and after.anchor is not None:
      _require(
        after.incoming.version > after.anchor,
        f'fragment {p}: an older version waits to be adopted',
      )
