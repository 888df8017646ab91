"""Opening, filling, closing and merging rounds (sections 5.1-5.5)."""

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import guard
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import schedule
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.settings import EACH
from diloco_jax.protocol.settings import FREE
from diloco_jax.protocol.settings import LOCK_STEP
from diloco_jax.protocol.turn import Turn

# Declined versions remembered for the staleness of one island.
DECLINES_KEPT = 16

# Slots.


def slot_is_due(turn: Turn, island: s.Island, slot: int) -> bool:
  """Whether a slot is open, to be retried, or not opened yet."""
  state = turn.get()
  if turn.settings.mode == EACH:
    open_slots = [x.slot for x in turn.rounds.values() if x.owner == island.id]
    return slot in open_slots or slot > island.opened_slot
  return (
    slot >= state.next_slot
    or slot in state.retries
    or any(x.slot == slot for x in turn.rounds.values())
  )


def next_slot_for(turn: Turn, island: s.Island) -> int:
  """The slot of a newcomer: the lowest open or to be retried, or the next."""
  if turn.settings.mode == EACH:
    return island.opened_slot + 1
  state = turn.get()
  pending = [x.slot for x in turn.rounds.values() if not x.drain]
  return min([state.next_slot, *state.retries, *pending])


# Opening.


def open_due(turn: Turn) -> None:
  """Open every round that is due."""
  if turn.get().phase == s.DRAINING:
    _open_drain(turn)
    return
  if turn.get().phase != s.OPEN:
    return
  if turn.settings.mode == EACH:
    for island in turn.live():
      _open_own(turn, island)
    return
  in_flight_max = max(1, turn.settings.overlap)
  while len(turn.rounds) < in_flight_max:
    state = turn.get()
    retry = bool(state.retries)
    slot = min(state.retries) if retry else state.next_slot
    fragment = slot % len(turn.fragments)
    if any(x.fragment == fragment for x in turn.rounds.values()):
      return
    members = turn.live()
    if not members or not _may_open(turn, members, slot, retry):
      return
    if retry:
      turn.set(retries=tuple(x for x in state.retries if x != slot))
    else:
      turn.set(next_slot=slot + 1)
      if turn.settings.mode == FREE:
        for island in members:
          turn.island(
            island.id,
            credits=schedule.charge(island.credits, turn.settings.stride),
          )
    _open(turn, fragment, slot, [x.id for x in turn.live()])


def _may_open(
  turn: Turn, members: list[s.Island], slot: int, retry: bool
) -> bool:
  settings = turn.settings
  if settings.mode == LOCK_STEP:
    return all(x.captured_slot >= slot for x in members)
  active = [
    x
    for x in members
    if x.step_time_s > 0
    and turn.now - x.reported_at <= turn.limits.active_steps * x.step_time_s
  ]
  if not active:
    return False
  if retry:  # charged when it was opened first
    return True
  holders = sum(x.credits >= settings.stride for x in active)
  return holders >= schedule.holders_needed(len(active), settings.quorum)


def _open_own(turn: Turn, island: s.Island) -> None:
  """`each`: a round of one island, for the next slot that it captured."""
  mine = [x for x in turn.rounds.values() if x.owner == island.id]
  if len(mine) >= max(1, turn.settings.overlap):
    return
  slot = island.opened_slot + 1
  if island.captured_slot < slot:
    return
  turn.island(island.id, opened_slot=slot)
  _open(turn, slot % len(turn.fragments), slot, [island.id], owner=island.id)


def _open_drain(turn: Turn) -> None:
  """The last round of each fragment; as many at once as while training."""
  in_flight_max = max(1, turn.settings.overlap)
  while turn.get().to_drain and len(turn.rounds) < in_flight_max:
    busy = {x.fragment for x in turn.rounds.values()}
    waiting = turn.get().to_drain
    fragment = next((p for p in waiting if p not in busy), -1)
    if fragment < 0:
      return
    turn.set(to_drain=tuple(p for p in waiting if p != fragment))
    members = [x.id for x in turn.live()]
    if members:
      _open(turn, fragment, -1, members, drain=True)


def _open(
  turn: Turn,
  fragment: int,
  slot: int,
  members: list[int],
  *,
  owner: int = -1,
  drain: bool = False,
) -> None:
  state, limits = turn.get(), turn.limits
  everyone = turn.settings.mode != FREE or drain or turn.settings.quorum == 0
  if drain:
    timeout_at = state.ends_at
  elif turn.settings.mode != FREE:
    timeout_at = s.NEVER  # only lapsed leases shrink a round
  else:
    timeout_at = turn.now + max(
      limits.quorum_timeout_floor_s,
      limits.quorum_timeout_steps * turn.slowest_step_s(),
    )
  round_id = m.RoundId(state.incarnation, state.next_round)
  turn.set(next_round=state.next_round + 1)
  turn.rounds[round_id] = s.Round(
    id=round_id,
    fragment=fragment,
    slot=slot,
    opened_at=turn.now,
    timeout_at=timeout_at,
    quorum=(
      len(members) if everyone else min(turn.settings.quorum, len(members))
    ),
    members=tuple(
      s.Member(island=x, incarnation=turn.islands[x].incarnation)
      for x in members
    ),
    owner=owner,
    drain=drain,
  )
  turn.note(
    'round_opened',
    round=round_id,
    fragment=fragment,
    slot=slot,
    members=tuple(members),
  )
  ask_members(turn, round_id)


def ask_members(turn: Turn, round_id: m.RoundId) -> None:
  """Pull from the members that may be asked; repeat unanswered pulls.

  A member may be asked once it reports at least the version made by the last
  merge of this fragment that included it: otherwise a lost broadcast would
  merge the same work twice.
  """
  rnd = turn.rounds[round_id]
  for member in rnd.members:
    island = turn.islands[member.island]
    if member.status == s.ASKED:
      if turn.now - member.asked_at < turn.resend_after(island):
        continue
    elif member.status != s.PENDING:
      continue
    if not island.peer or not _holds_own_work(turn, island, rnd.fragment):
      continue
    rnd = turn.member(rnd, island.id, status=s.ASKED, asked_at=turn.now)
    turn.send(
      island.peer,
      m.Pull(
        island=island.id,
        incarnation=island.incarnation,
        round=rnd.id,
        fragment=rnd.fragment,
        slot=rnd.slot,
        drain=rnd.drain,
      ),
    )


def _holds_own_work(turn: Turn, island: s.Island, fragment: int) -> bool:
  own = turn.fragments[fragment].included.get(island.id)
  if own is None or own.incarnation != island.incarnation:
    return True
  return bool(island.versions) and island.versions[fragment] >= own.version


# Filling.


def on_contribution(turn: Turn, c: m.Contribution) -> None:
  island = turn.islands.get(c.island)
  if island is None or c.incarnation != island.incarnation:
    turn.refuse('incarnation')
    turn.release(c.payload)
    return
  rnd = turn.rounds.get(c.round)
  member = None
  if rnd is not None:
    member = next((x for x in rnd.members if x.island == c.island), None)
  if member is not None and member.status in (s.INSPECTING, s.CONTRIBUTED):
    turn.release(c.payload)  # a repeat of what is already here
    return
  reason = guard.problem(turn, c, rnd, member)
  if reason or rnd is None or member is None:
    _refuse(turn, c, reason or 'round')
    if rnd is not None and member is not None and rnd.phase == s.COLLECTING:
      if member.status in (s.PENDING, s.ASKED):
        turn.member(rnd, c.island, status=s.REFUSED, why=reason)
        evaluate(turn, c.round)
    return
  _estimate(turn, c, member)
  turn.member(rnd, c.island, status=s.INSPECTING, contribution=c)
  turn.act(
    a.Inspect(
      round=c.round,
      island=c.island,
      incarnation=c.incarnation,
      fragment=c.fragment,
      handle=c.payload,
    )
  )


def _refuse(turn: Turn, c: m.Contribution, reason: str) -> None:
  turn.refuse(reason)
  turn.release(c.payload)
  turn.note(
    'refused',
    island=c.island,
    incarnation=c.incarnation,
    fragment=c.fragment,
    round=c.round,
    reason=reason,
  )
  island = turn.islands[c.island]
  turn.send(
    island.peer,
    m.Refused(
      island=c.island,
      incarnation=c.incarnation,
      round=c.round,
      fragment=c.fragment,
      reason=reason,
    ),
  )
  guard.count_offence(turn, c.island, reason)


def _estimate(turn: Turn, c: m.Contribution, member: s.Member) -> None:
  """Moving averages of encoding and of the one-way transfer.

  What the exchange took beyond the island's own share is the pull's and the
  contribution's travel; a pull is small, so it all counts as the transfer.
  """
  old = turn.get().estimates
  decay = turn.limits.estimate_decay
  travel = max(0.0, turn.now - member.asked_at - max(0.0, c.held_s))
  turn.set(
    estimates=old._replace(
      encode_s=schedule.moving(old.encode_s, max(0.0, c.encode_s), decay),
      transfer_s=schedule.moving(old.transfer_s, travel, decay),
    )
  )


def on_inspected(turn: Turn, event: a.Inspected) -> None:
  rnd = turn.rounds.get(event.round)
  if rnd is None:
    return
  member = next((x for x in rnd.members if x.island == event.island), None)
  if member is None or member.status != s.INSPECTING:
    return
  contribution = member.contribution
  assert contribution is not None
  assert member.incarnation == event.incarnation
  reason = event.reason or guard.outlier(turn, rnd.fragment, event.norm)
  if reason:
    turn.member(
      rnd, event.island, status=s.REFUSED, why=reason, contribution=None
    )
    _refuse(turn, contribution, reason)
  else:
    guard.remember_norm(turn, rnd.fragment, event.norm)
    turn.member(rnd, event.island, status=s.CONTRIBUTED)
    turn.island(event.island, offences=0)
  evaluate(turn, event.round)


def on_declined(turn: Turn, message: m.Declined) -> None:
  rnd = turn.rounds.get(message.round)
  if rnd is None or rnd.phase != s.COLLECTING:
    return
  for member in rnd.members:
    if member.island != message.island or member.status != s.ASKED:
      continue
    if member.incarnation == message.incarnation:
      turn.member(rnd, member.island, status=s.DECLINED, why='no_steps')
      evaluate(turn, message.round)


def unask(turn: Turn, island: int) -> None:
  """Pulls to a lost connection are asked again on the next one."""
  for rnd in list(turn.rounds.values()):
    for member in rnd.members:
      if member.island == island and member.status == s.ASKED:
        turn.member(turn.rounds[rnd.id], island, status=s.PENDING)


def drop_from_open(turn: Turn, island: int, incarnation: int, why: str) -> None:
  """An incarnation is over: its part in collecting rounds is gone."""
  for round_id in list(turn.rounds):
    rnd = turn.rounds[round_id]
    if rnd.phase != s.COLLECTING:
      continue
    for member in rnd.members:
      if member.island != island or member.incarnation != incarnation:
        continue
      keeps = why in ('lapsed', 'left') and member.status in (
        s.CONTRIBUTED,
        s.INSPECTING,
      )
      if keeps or member.status in (s.DECLINED, s.REFUSED, s.GONE):
        continue
      if member.contribution is not None:
        turn.release(member.contribution.payload)
      turn.member(
        turn.rounds[round_id],
        island,
        status=s.GONE,
        why=why,
        contribution=None,
      )
      evaluate(turn, round_id)


# Closing.


def evaluate(turn: Turn, round_id: m.RoundId) -> None:
  """Close the round if it is time, or start its grace window."""
  rnd = turn.rounds.get(round_id)
  if rnd is None or rnd.phase != s.COLLECTING:
    return
  eligible = sum(
    x.status not in (s.DECLINED, s.REFUSED, s.GONE) for x in rnd.members
  )
  quorum = min(rnd.quorum, eligible)
  if quorum != rnd.quorum:
    rnd = turn.round(round_id, quorum=quorum)
  contributed = len(rnd.contributed)
  assert contributed <= eligible
  if not rnd.undecided:
    _close(turn, rnd, s.ALL_IN if contributed else s.EMPTY)
  elif contributed and contributed >= quorum and rnd.quorum_at < 0:
    rnd = _start_grace(turn, rnd)
    if rnd.grace_until <= turn.now:
      _close(turn, rnd, s.GRACE_OVER)
    else:
      turn.act(a.SetTimer(f'grace:{round_id.number}', rnd.grace_until))
  elif turn.now >= rnd.grace_until:
    _close(turn, rnd, s.GRACE_OVER)
  elif turn.now >= rnd.timeout_at:
    _close(turn, rnd, s.QUORUM_TIMEOUT if contributed else s.EMPTY)


def _start_grace(turn: Turn, rnd: s.Round) -> s.Round:
  settings = turn.settings
  step_s = turn.slowest_step_s()
  window = schedule.grace_s(
    gamma=settings.grace_gamma,
    overlap_steps=settings.overlap * settings.stride,
    step_s=step_s,
    quorum_s=turn.now - rnd.opened_at,
    sync_s=turn.get().estimates.sync_s,
    cap_s=settings.grace_steps_max * step_s,
  )
  return turn.round(
    rnd.id,
    quorum_at=turn.now,
    grace_s=window,
    grace_until=turn.now + window,
  )


def _close(turn: Turn, rnd: s.Round, reason: str) -> None:
  assert rnd.phase == s.COLLECTING
  assert (reason == s.EMPTY) == (not rnd.contributed)
  state = turn.get()
  closes = dict(state.closes)
  closes[reason] = closes.get(reason, 0) + 1
  turn.set(closes=closes)
  # What is still being looked at comes too late.
  for member in rnd.undecided:
    if member.contribution is not None:
      turn.release(member.contribution.payload)
    why = 'holds_old_version' if member.status == s.PENDING else 'late'
    rnd = turn.member(
      rnd, member.island, status=s.LATE, why=why, contribution=None
    )
  rnd = turn.round(rnd.id, phase=s.QUEUED, reason=reason, closed_at=turn.now)
  _count_participation(turn, rnd)
  left_out = tuple(
    (x.island, x.why) for x in rnd.members if x.status != s.CONTRIBUTED
  )
  if reason == s.EMPTY:
    del turn.rounds[rnd.id]
    if not rnd.drain:
      _skip_or_retry(turn, rnd)
  live = turn.live()
  turn.note(
    'round_closed',
    round=rnd.id,
    fragment=rnd.fragment,
    slot=rnd.slot,
    reason=reason,
    members=len(rnd.members),
    contributed=len(rnd.contributed),
    left_out=left_out,
    live=len(live),
    participating=sum(x.participating for x in live),
    duration_s=round(turn.now - rnd.opened_at, 6),
    grace_s=round(rnd.grace_s, 6),
    global_step=turn.get().global_step,
  )
  if reason != s.EMPTY:
    merge_next(turn, rnd.fragment)


def _skip_or_retry(turn: Turn, rnd: s.Round) -> None:
  """After an empty round: nobody had a step to give, or try again."""
  state = turn.get()
  if rnd.owner >= 0:
    return  # the owner declined or is gone; its next slot comes in its time
  if all(x.status == s.DECLINED for x in rnd.members):
    turn.set(slots_done=state.slots_done + 1)
  else:
    turn.set(retries=(*state.retries, rnd.slot))


def _count_participation(turn: Turn, rnd: s.Round) -> None:
  for member in rnd.members:
    island = turn.islands[member.island]
    if island.incarnation != member.incarnation:
      continue
    if member.status != s.DECLINED:
      turn.island(island.id, participating=member.status == s.CONTRIBUTED)


# Merging.


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
       c.c_tokens * c.c_tokens / c.c_steps)
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
    included[c.island] = s.Inclusion(c.incarnation, rnd.version, c.capture)
    merged += c.c_tokens * size
    _credit_merged(turn, c, c.c_tokens * size)
    turn.release(c.payload)
  turn.release(piece.handle)
  turn.fragments[rnd.fragment] = piece._replace(
    version=rnd.version,
    digest=rnd.digest,
    handle=rnd.handle,
    round=rnd.id,
    slot=max(rnd.slot, piece.slot) if rnd.owner < 0 else rnd.slot,
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


def _count_merge(turn: Turn, rnd: s.Round, merged: int) -> None:
  state = turn.get()
  steps = sum(x.contribution.c_steps for x in rnd.contributed if x.contribution)
  turn.set(
    merges=state.merges + 1,
    merged_token_params=state.merged_token_params + merged,
    slots_done=state.slots_done + (not rnd.drain),
    steps_done=state.steps_done + steps / max(1, len(turn.live())),
    estimates=state.estimates._replace(
      round_s=schedule.moving(
        state.estimates.round_s,
        turn.now - rnd.opened_at,
        turn.limits.estimate_decay,
      )
    ),
  )
