"""Opening, filling, closing and merging rounds (sections 5.1-5.5)."""

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import guard
from diloco_jax.protocol import merging
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import schedule
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.settings import EACH
from diloco_jax.protocol.settings import FREE
from diloco_jax.protocol.settings import LOCK_STEP
from diloco_jax.protocol.turn import Turn

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


def at_its_end(turn: Turn, island: s.Island) -> bool:
  """Lock step: it has made its steps and waits to be drained."""
  return (
    island.state == m.WAITING
    and island.slot < 0
    and island.step >= turn.settings.steps
  )


def owes_nothing(turn: Turn, island: s.Island) -> bool:
  """Whether an island may be re-admitted: no merge of it is out.

  In lock step a start voids the outstanding captures; one that is merged must
  have come back before.
  """
  if turn.settings.mode == FREE:
    return True
  for rnd in turn.rounds.values():
    for member in rnd.contributed:
      if (member.island, member.incarnation) == (
        island.id,
        island.incarnation,
      ):
        return False
  return all(
    _holds_own_work(turn, island, p) for p in range(len(turn.fragments))
  )


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
    captured = [x.captured_slot >= slot for x in members]
    return any(captured) and all(
      done or at_its_end(turn, x)
      for done, x in zip(captured, members, strict=True)
    )
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
  held = island.versions[fragment] if island.versions else None
  # After a restart of the syncer: a base of its own timeline first.
  if held is not None and held.incarnation < turn.get().incarnation:
    return False
  if own is None or own.incarnation != island.incarnation:
    return True
  return held is not None and held >= own.version


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
  if member.status != s.ASKED:
    return  # asked on a connection that is gone
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
      # What an island has given stays, unless a start will void it.
      given = member.status in (s.CONTRIBUTED, s.INSPECTING)
      free = turn.settings.mode == FREE
      keeps = given and (why == 'left' or (why == 'lapsed' and free))
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
  if rnd.quorum_at >= 0 and contributed < max(1, quorum):
    # What made up the quorum was taken out: its grace window is void.
    rnd = turn.round(round_id, quorum_at=-1.0, grace_s=0.0, grace_until=s.NEVER)
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
    merging.merge_next(turn, rnd.fragment)


def _skip_or_retry(turn: Turn, rnd: s.Round) -> None:
  """After an empty round: nobody had a step to give, or try again."""
  state = turn.get()
  if rnd.owner >= 0:
    return  # the owner declined or is gone; its next slot comes in its time
  if all(x.status == s.DECLINED for x in rnd.members):
    turn.set(slots_done=state.slots_done + 1)
    turn.note('slot_skipped', slot=rnd.slot)
  else:
    turn.set(retries=(*state.retries, rnd.slot))


def _count_participation(turn: Turn, rnd: s.Round) -> None:
  for member in rnd.members:
    island = turn.islands[member.island]
    if island.incarnation != member.incarnation:
      continue
    if member.status != s.DECLINED:
      turn.island(island.id, participating=member.status == s.CONTRIBUTED)
