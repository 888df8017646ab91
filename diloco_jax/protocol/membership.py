"""Joining, leases, reports, leaving (section 5.7 of the design)."""

from diloco_jax.protocol import donors
from diloco_jax.protocol import ledger
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import rounds
from diloco_jax.protocol import schedule
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol import waiting
from diloco_jax.protocol.settings import FREE
from diloco_jax.protocol.turn import Turn

CONNECTED = (s.ENTERING, s.READY, s.LIVE, s.QUARANTINED)


def welcome(turn: Turn, index: int, seed_wanted: bool = False) -> None:
  island = turn.islands[index]
  turn.send(
    island.peer,
    m.Welcome(
      island=index,
      incarnation=island.incarnation,
      syncer_incarnation=turn.get().incarnation,
      entry=island.entry,
      versions=tuple(x.version for x in turn.fragments),
      lease_s=turn.limits.lease_s,
      report_every_s=turn.limits.report_every_s,
      seed_wanted=seed_wanted,
    ),
  )
  if not seed_wanted and turn.fragments:
    offer_newest(turn, index)


def offer_newest(turn: Turn, index: int) -> None:
  """Send every fragment that the island reports too old a version of."""
  for fragment in range(len(turn.fragments)):
    island = turn.islands[index]
    held = island.versions[fragment] if island.versions else None
    if held is None or held < turn.wanted(island, fragment):
      turn.broadcast(island, fragment)


def on_report(turn: Turn, peer: str, report: m.Report) -> None:
  island = turn.islands.get(report.island)
  if island is None:
    return
  if report.incarnation != island.incarnation:
    if report.incarnation < island.incarnation:
      turn.send(
        peer,
        m.Superseded(island=island.id, incarnation=island.incarnation),
      )
    return
  if report.seq <= island.seq or island.status == s.LEFT:
    return
  if turn.get().params_digest:
    say_finished(turn, peer)
  if len(report.versions) not in (0, len(turn.fragments)):
    return
  progress = report.step > island.step
  island = _record(turn, peer, island, report)
  if island.status == s.LAPSED and (progress or report.state != m.TRAINING):
    if _holds_all(turn, island) and turn.get().started:
      if rounds.owes_nothing(turn, island):
        readmit(turn, island.id)
    else:
      turn.island(island.id, status=s.ENTERING, since=turn.now)
  donors.attend(turn, island.id)
  island = turn.islands[island.id]
  if island.status == s.ENTERING and _may_start(turn, island):
    turn.island(
      island.id, status=s.READY, since=turn.now, lease_until=_lease(turn)
    )
    if turn.get().first_ready_at < 0 and not island.is_evaluator:
      turn.set(first_ready_at=turn.now)
    start_ready(turn)
  island = turn.islands[island.id]
  lost_start = island.status == s.LIVE and report.state == m.RESTORING
  waited = turn.now - island.started_at >= turn.resend_after(island)
  if lost_start and waited:
    _send_start(turn, island.id)
  offer_newest(turn, island.id)
  waiting.answer(turn, island.id, report)


def _lease(turn: Turn) -> float:
  return turn.now + turn.limits.lease_s


def _holds_all(turn: Turn, island: s.Island) -> bool:
  """Every fragment, and none without the work that its index gave to Θ.

  A restored checkpoint may hold steps as pending that a merge has taken in
  since; the version that this merge made must have replaced them.
  """
  if not island.versions or ledger.owed(turn, island.id, island.incarnation):
    return False
  oldest = m.Version(turn.get().incarnation, 0)
  for piece, held in zip(turn.fragments, island.versions, strict=True):
    own = piece.included.get(island.id)
    if held < oldest or (own is not None and held < own.version):
      return False
  return True


def _may_start(turn: Turn, island: s.Island) -> bool:
  waits = island.entry == m.PEER_STATE and not island.has_inner_state
  return _holds_all(turn, island) and not waits


def _record(
  turn: Turn, peer: str, island: s.Island, report: m.Report
) -> s.Island:
  """Take over what a report says: credits, lease, versions."""
  rise = report.step - island.step
  credits = island.credits
  if island.baseline and rise > 0 and turn.settings.mode == FREE:
    credits += rise
  state_since = island.state_since
  if report.state != island.state:
    state_since = turn.now
  lease_until = island.lease_until
  if rise > 0 or _state_is_valid(turn, island, report, state_since):
    lease_until = max(lease_until, _lease(turn))
  step_time_s = island.step_time_s
  if report.step_time_s > 0:
    step_time_s = schedule.moving(
      step_time_s or None, report.step_time_s, turn.limits.estimate_decay
    )
  sent = island.sent
  if sent and report.versions:
    sent = {p: x for p, x in sent.items() if report.versions[p] < x[0]}
  return turn.island(
    island.id,
    peer=peer,
    seq=report.seq,
    reported_at=turn.now,
    step=max(report.step, island.step),
    tokens=max(report.tokens, island.tokens),
    baseline=island.baseline or island.status == s.LIVE,
    credits=credits,
    lease_until=lease_until,
    state=report.state,
    state_since=state_since,
    step_time_s=step_time_s,
    versions=report.versions or island.versions,
    sent=sent,
    slot=report.slot,
    captured_slot=report.captured_slot,
    trained=report.trained_token_params,
    lost=report.lost_token_params,
    lost_steps=report.lost_steps,
    carried=report.carried_token_params,
    healthy=report.healthy,
    has_inner_state=report.has_inner_state,
    loss=report.loss,
  )


def _state_is_valid(
  turn: Turn, island: s.Island, report: m.Report, since: float
) -> bool:
  """Whether a declared state renews the lease: the syncer can check it."""
  limits = turn.limits
  if report.state == m.WAITING:
    if report.slot < 0:  # at the end of its steps, waiting to be drained
      return turn.settings.mode != FREE
    return rounds.slot_is_due(turn, island, report.slot)
  allowed = {
    m.COMPILING: limits.compiling_s,
    m.RESTORING: limits.restoring_s,
    m.SAVING: limits.saving_s,
    m.EVALUATING: limits.evaluating_s,
  }.get(report.state, 0.0)
  return turn.now - since <= allowed


def start_ready(turn: Turn) -> None:
  """Let islands train that hold every fragment.

  The first start waits until every configured island is ready, or until
  start_timeout after the first one, so that nobody sails on alone. Later
  ones start at once.
  """
  ready = list(turn.with_status(s.READY))
  if not ready:
    return
  state = turn.get()
  if not state.started:
    waited = turn.now - state.first_ready_at
    missing = turn.settings.islands - len(ready)
    if missing > 0 and waited < turn.limits.start_timeout_s:
      return
    turn.set(started=True)
    if missing > 0:
      turn.note('started_without', missing=missing)
  for island in ready:
    _start(turn, island.id)
    turn.note(
      'joined',
      island=island.id,
      incarnation=island.incarnation,
      entry=island.entry,
    )


def _start(turn: Turn, index: int) -> None:
  turn.island(
    index,
    status=s.LIVE,
    since=turn.now,
    lease_until=_lease(turn),
    credits=0,
    baseline=False,
    captured_slot=-1,
    participating=False,
    starts=turn.islands[index].starts + 1,
  )
  _send_start(turn, index)


def _send_start(turn: Turn, index: int) -> None:
  settings = turn.settings
  state = turn.get()
  island = turn.island(index, started_at=turn.now)
  needs_rewarm = island.entry == m.PARAMETERS_ONLY and island.trained == 0
  turn.send(
    island.peer,
    m.Start(
      island=index,
      incarnation=island.incarnation,
      global_step=state.global_step,
      rate_index=state.global_step,
      rewarm_steps=settings.rewarm_steps if needs_rewarm else 0,
      next_slot=rounds.next_slot_for(turn, island),
      due_step=-1,
      stop_step=-1 if settings.mode == FREE else settings.steps,
      samples=m.SampleRange(
        lane=index,
        lanes=max(settings.islands_max, settings.islands),
        begin=island.begin,
        end=-1,
      ),
      seq=island.starts,
    ),
  )


def readmit(turn: Turn, index: int) -> None:
  """Take a lapsed or quarantined island back under its incarnation."""
  island = turn.islands[index]
  turn.note('readmitted', island=index, incarnation=island.incarnation)
  _start(turn, index)
  offer_newest(turn, index)


def on_leave(turn: Turn, message: m.Leave) -> None:
  island = turn.islands.get(message.island)
  if island is None or island.incarnation != message.incarnation:
    return
  if island.status == s.LEFT:
    return
  turn.island(island.id, status=s.LEFT, since=turn.now, sent={})
  turn.note(
    'left',
    island=island.id,
    incarnation=island.incarnation,
    reason=message.reason,
  )
  rounds.drop_from_open(turn, island.id, island.incarnation, 'left')


def on_peer_lost(turn: Turn, peer: str) -> None:
  """What was on its way to this connection is lost; the lease decides."""
  for key in sorted(turn.islands):
    island = turn.islands[key]
    if island.peer != peer:
      continue
    turn.island(key, peer='', sent={})
    rounds.unask(turn, key)


def tick(turn: Turn) -> None:
  """Leases, quarantine, the first start."""
  for key in sorted(turn.islands):
    island = turn.islands[key]
    silent = turn.now - max(island.reported_at, island.since)
    if island.status == s.LIVE and turn.now > island.lease_until:
      turn.island(key, status=s.LAPSED, since=turn.now)
      turn.note(
        'lapsed',
        island=key,
        incarnation=island.incarnation,
        silent_s=round(silent, 3),
      )
      rounds.drop_from_open(turn, key, island.incarnation, 'lapsed')
    elif (
      island.status in (s.ENTERING, s.READY)
      and turn.now > island.lease_until
      and not island.is_evaluator
    ):
      turn.island(key, status=s.LAPSED, since=turn.now)
    elif island.status == s.ENTERING:
      donors.attend(turn, key)
    elif (
      island.status == s.QUARANTINED
      and turn.now - island.since > turn.limits.quarantine_s
    ):
      turn.island(key, offences=0)
      readmit(turn, key)
  start_ready(turn)


def say_finished(turn: Turn, peer: str) -> None:
  """The run is over; said again to whoever seems not to know."""
  state = turn.get()
  turn.send(
    peer,
    m.Finished(
      reason=state.end_reason,
      global_step=state.global_step,
      versions=tuple(x.version for x in turn.fragments),
    ),
  )


def note_total(turn: Turn, island: s.Island) -> None:
  """Close the books of one incarnation.

  What its successor restored from a checkpoint is in the successor's books.
  """
  lost = island.lost
  # An island that died may have given steps that it had not reported yet.
  trained = max(island.trained, island.merged + lost)
  heirs = (*turn.get().past, *turn.islands.values())
  carried = sum(
    x.carried
    for x in heirs
    if (x.id, x.incarnation) == (island.id, island.incarnation + 1)
  )
  carried = min(carried, trained - island.merged - lost)
  turn.note(
    'island_total',
    island=island.id,
    incarnation=island.incarnation,
    steps=island.step - island.first_step,
    tokens=island.tokens,
    trained_token_params=trained - carried,
    merged_token_params=island.merged,
    lost_token_params=lost,
    pending_token_params=trained - carried - island.merged - lost,
    lost_steps=island.lost_steps,
    alive=turn.islands.get(island.id) is island,
  )


def quarantine_offenders(turn: Turn) -> None:
  """Repeat offenders are asked for nothing until quarantine_s has passed."""
  for island in turn.live():
    if island.offences < turn.limits.offences_max:
      continue
    turn.island(island.id, status=s.QUARANTINED, since=turn.now)
    turn.note(
      'quarantined',
      island=island.id,
      incarnation=island.incarnation,
      offences=island.offences,
    )
    rounds.drop_from_open(turn, island.id, island.incarnation, 'quarantined')
