"""Merging a closed round: weights, the tape line, the commit (section 5.4)."""

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import schedule
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.recovery import Inclusion
from diloco_jax.protocol.turn import Turn

# Declined versions remembered for the staleness of one island.
DECLINES_KEPT = 16


def merge_next(turn: Turn, fragment: int) -> None:
  """Start the merge of the first closed round of a fragment, one at a time."""
  mine = [x for x in turn.rounds.values() if x.fragment == fragment]
  if any(x.phase in (s.MERGING, s.TAPING) for x in mine):
    return
  queued = [x for x in mine if x.phase == s.QUEUED]
  if not queued:
    return
  rnd = min(queued, key=lambda x: (x.closed_at, x.id))
  piece = turn.fragments[fragment]
  version = m.Version(turn.get().incarnation, piece.version.merges + 1)
  assert version > piece.version
  inputs = []
  for member in rnd.contributed:
    c = member.contribution
    assert c is not None and c.c_steps > 0
    inputs.append(
      a.MergeInput(
        island=c.island,
        weight=c.c_tokens * c.c_tokens / c.c_steps,
        handle=c.payload,
      )
    )
  turn.round(rnd.id, phase=s.MERGING, version=version)
  turn.act(
    a.Merge(
      round=rnd.id,
      fragment=fragment,
      parent=piece.version,
      version=version,
      inputs=tuple(inputs),
    )
  )


def on_merged(turn: Turn, event: a.Merged) -> None:
  rnd = turn.rounds[event.round]
  assert rnd.phase == s.MERGING and rnd.version is not None
  old = turn.get().estimates
  turn.set(
    estimates=old._replace(
      merge_s=schedule.moving(
        old.merge_s, event.merge_s, turn.limits.estimate_decay
      )
    )
  )
  rnd = turn.round(
    rnd.id,
    phase=s.TAPING,
    digest_f32=event.digest_f32,
    digest=event.digest,
    handle=event.handle,
  )
  turn.act(
    a.WriteTape(key=tape_key(rnd.id), fields=tuple(_line(turn, rnd).items()))
  )


def tape_key(round_id: m.RoundId) -> str:
  return f'merge:{round_id.incarnation}:{round_id.number}'


def _line(turn: Turn, rnd: s.Round) -> dict[str, object]:
  """The tape line of a merge: what recovery and replay need."""
  assert rnd.version is not None
  inputs = []
  for member in rnd.contributed:
    c = member.contribution
    assert c is not None
    inputs.append(
      (c.island, c.incarnation, c.capture.number, c.c_steps, c.c_tokens,
       c.c_tokens * c.c_tokens / c.c_steps, c.step)
    )  # fmt: skip
  return {
    'round': rnd.id,
    'fragment': rnd.fragment,
    'slot': rnd.slot,
    'version': rnd.version,
    'parent': turn.fragments[rnd.fragment].version,
    'digest_f32': rnd.digest_f32,
    'digest': rnd.digest,
    'global_step': turn.get().global_step,
    'steps_done': turn.get().steps_done + _steps_done(turn, rnd),
    'owner': rnd.owner,
    'drain': rnd.drain,
    'reason': rnd.reason,
    'inputs': tuple(inputs),
    'left_out': tuple(
      (x.island, x.why) for x in rnd.members if x.status != s.CONTRIBUTED
    ),
    'steps': tuple((x.id, x.step) for x in turn.live()),
  }


def commit(turn: Turn, rnd: s.Round) -> None:
  """The tape line is durable: the merge counts, and everyone may know."""
  assert rnd.phase == s.TAPING and rnd.version is not None
  piece = turn.fragments[rnd.fragment]
  included = dict(piece.included)
  size = turn.settings.sizes[rnd.fragment]
  merged = 0
  for member in rnd.contributed:
    c = member.contribution
    assert c is not None
    included[c.island] = Inclusion(
      c.incarnation, rnd.version, c.capture, rnd.slot, c.step
    )
    merged += c.c_tokens * size
    _credit_merged(turn, c, c.c_tokens * size)
    turn.release(c.payload)
  turn.release(piece.handle)
  turn.fragments[rnd.fragment] = piece._replace(
    version=rnd.version,
    digest=rnd.digest,
    handle=rnd.handle,
    round=rnd.id,
    slot=max(rnd.slot, piece.slot) if rnd.owner < 0 else -1,
    included=included,
    declined=_with_declined(piece, rnd),
  )
  del turn.rounds[rnd.id]
  _count_merge(turn, rnd, merged)
  for key in sorted(turn.islands):
    island = turn.islands[key]
    if island.status in (s.LAPSED, s.LEFT):
      continue
    if rnd.owner >= 0 and not (island.is_evaluator or key == rnd.owner):
      continue
    turn.broadcast(island, rnd.fragment)
  merge_next(turn, rnd.fragment)


def _with_declined(
  piece: s.Fragment, rnd: s.Round
) -> dict[int, tuple[int, ...]]:
  assert rnd.version is not None
  declined = dict(piece.declined)
  for member in rnd.members:
    if member.status == s.DECLINED:
      counts = (*declined.get(member.island, ()), rnd.version.merges)
      declined[member.island] = counts[-DECLINES_KEPT:]
  return declined


def _credit_merged(turn: Turn, c: m.Contribution, token_params: int) -> None:
  island = turn.islands.get(c.island)
  if island is not None and island.incarnation == c.incarnation:
    turn.island(c.island, merged=island.merged + token_params)
    return
  past = tuple(
    x._replace(merged=x.merged + token_params)
    if (x.id, x.incarnation) == (c.island, c.incarnation)
    else x
    for x in turn.get().past
  )
  turn.set(past=past)


def _steps_done(turn: Turn, rnd: s.Round) -> float:
  """`each`: what a merge adds to the global step."""
  if rnd.drain:
    return 0.0
  share = turn.settings.sizes[rnd.fragment] / sum(turn.settings.sizes)
  steps = sum(x.contribution.c_steps for x in rnd.contributed if x.contribution)
  return share * steps / max(1, len(turn.live()))


def _count_merge(turn: Turn, rnd: s.Round, merged: int) -> None:
  state = turn.get()
  turn.set(
    merges=state.merges + 1,
    merged_token_params=state.merged_token_params + merged,
    slots_done=state.slots_done + (not rnd.drain),
    steps_done=state.steps_done + _steps_done(turn, rnd),
    estimates=state.estimates._replace(
      round_s=schedule.moving(
        state.estimates.round_s,
        # The grace window is not needed: it is given up where time is short.
        max(0.0, turn.now - rnd.opened_at - rnd.grace_s),
        turn.limits.estimate_decay,
      )
    ),
  )
