"""The syncer after a restart: who holds what, and what is taken back (5.9).

Every island is asked which anchors it holds; answering fences the older
incarnations of the syncer. Per fragment the newest value that the tape
confirms is taken back, from the snapshot or from an island, and gets the new
incarnation and the same count. What was merged after it is lost, and counted.
"""

from typing import NamedTuple

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import recovery
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.turn import Turn

FETCHES_MAX = 4  # values on their way at once


def get(turn: Turn) -> s.Recovering:
  state = turn.get().recovering
  assert state is not None
  return state


def put(turn: Turn, **fields: object) -> s.Recovering:
  changed = get(turn)._replace(**fields)  # type: ignore[arg-type]
  turn.set(recovering=changed)
  return changed


# Asking.


def begin(turn: Turn) -> None:
  """The incarnation is durable before anybody hears of it."""
  put(turn, since=turn.now)
  remember(turn)
  turn.act(
    a.WriteTape(
      key=f'recovering:{turn.get().incarnation}',
      fields=(('incarnation', turn.get().incarnation),),
    )
  )


def remember(turn: Turn) -> None:
  """Who was in the run, and the books of those who are not any more."""
  memory = get(turn).memory
  for index in sorted(memory.members):
    member = memory.members[index]
    turn.islands[index] = s.Island(
      id=index,
      incarnation=member.incarnation,
      nonce=member.nonce,
      peer='',
      status=s.LEFT if member.left else s.LAPSED,
      entry=member.entry,
      since=turn.now,
      lease_until=turn.now,
      begin=member.begin,
      first_step=member.first_step,
      samples_per_step=member.samples_per_step,
      merged=memory.merged.get((index, member.incarnation), 0),
      opened_slot=memory.own_slots.get(index, -1),
      starts=turn.get().incarnation << 20,  # beyond all that were sent
    )
  turn.set(past=tuple(_ended(memory)))


def _ended(memory: recovery.Memory) -> list[s.Island]:
  """The books of incarnations that are over."""
  known = {(x.island, x.incarnation): x for x in memory.ended}
  newest = {(x, member.incarnation) for x, member in memory.members.items()}
  islands = []
  for key in sorted((known.keys() | memory.merged.keys()) - newest):
    last = known.get(key)
    island = s.Island(
      id=key[0], incarnation=key[1], nonce='', peer='', status=s.LEFT,
      entry=m.FRESH, since=0.0, lease_until=0.0,
      merged=memory.merged.get(key, 0),
    )  # fmt: skip
    if last is not None:
      island = island._replace(
        step=last.step, tokens=last.tokens, trained=last.trained,
        lost=last.lost, lost_steps=last.lost_steps,
        first_step=last.first_step, carried=last.carried,
      )  # fmt: skip
    islands.append(island)
  return islands


def on_durable(turn: Turn) -> None:
  put(turn, durable=True)
  ask_all(turn)


def ask_all(turn: Turn) -> None:
  for index in sorted(turn.islands):
    ask(turn, index)


def on_message(turn: Turn, peer: str, message: m.Message) -> None:
  """Who holds what; whatever else is said is asked for again later."""
  match message:
    case m.Report():
      on_report(turn, peer, message)
    case m.Anchors():
      on_anchors(turn, message)
    case m.AnchorValue():
      on_anchor_value(turn, message)
    case _:
      turn.release(getattr(message, 'payload', 0))


def on_report(turn: Turn, peer: str, report: m.Report) -> None:
  """An island that trained through the outage is there again."""
  island = turn.islands.get(report.island)
  if island is None or report.incarnation > island.incarnation:
    return
  if report.incarnation < island.incarnation:
    turn.send(
      peer, m.Superseded(island=island.id, incarnation=island.incarnation)
    )
    return
  if peer != island.peer:
    turn.island(island.id, peer=peer)
    put(
      turn, asked={k: v for k, v in get(turn).asked.items() if k != island.id}
    )
  ask(turn, island.id)


def ask(turn: Turn, index: int) -> None:
  """Ask for the anchors, again if it was not answered."""
  state = get(turn)
  island = turn.islands[index]
  if not state.durable or not island.peer or island.is_evaluator:
    return
  if index in state.answers or not island.admitted:
    return
  at = state.asked.get(index)
  if at is not None and turn.now - at < turn.limits.resend_floor_s:
    return
  put(turn, asked={**state.asked, index: turn.now})
  turn.send(
    island.peer,
    m.AskAnchors(
      island=index,
      incarnation=island.incarnation,
      syncer_incarnation=turn.get().incarnation,
    ),
  )


def on_anchors(turn: Turn, answer: m.Anchors) -> None:
  island = turn.islands.get(answer.island)
  state = get(turn)
  usable = (
    island is not None
    and answer.incarnation == island.incarnation
    and answer.syncer_incarnation == turn.get().incarnation
    and len(answer.versions) in (0, turn.settings.fragments)
    and len(answer.versions) == len(answer.digests)
  )
  if not usable:
    turn.refuse('anchors')
    return
  put(turn, answers={**state.answers, answer.island: answer})


# Deciding.


def forget(turn: Turn, index: int) -> None:
  """An incarnation is over: what it answered does not count.

  Its successor is waited for as everybody was: it may hold newer anchors than
  those that are being fetched.
  """
  state = get(turn)
  put(
    turn,
    deciding=False,
    answers={k: v for k, v in state.answers.items() if k != index},
    asked={k: v for k, v in state.asked.items() if k != index},
    fetching={k: v for k, v in state.fetching.items() if v.island != index},
    failed=frozenset(x for x in state.failed if x[1] != index),
  )


def _complete(turn: Turn) -> bool:
  """Everyone has answered, or a lease has passed and somebody has.

  Who has just said hello may hold what nobody else does, and is waited for a
  little longer; not for ever, or one that keeps dying would hold up the run.
  """
  state = get(turn)
  away = [
    x
    for x in turn.islands.values()
    if not x.is_evaluator and x.status != s.LEFT and x.id not in state.answers
  ]
  if not away:
    return True
  waited_s = turn.now - state.since
  limits = turn.limits
  coming = [x for x in away if x.peer and turn.now - x.since <= limits.answer_s]
  if coming and waited_s <= limits.recovery_leases_max * limits.lease_s:
    return False
  return waited_s > limits.lease_s and bool(state.answers)


class _Choice(NamedTuple):
  """Where a fragment's value may come from."""

  made: recovery.Made
  source: str
  islands: tuple[int, ...] = ()


def _choice(turn: Turn, fragment: int) -> _Choice | None:
  """The newest version on the tape that somebody holds."""
  state = get(turn)
  for made in reversed(state.memory.history[fragment]):
    if state.snapshot and state.snapshot[fragment] == (
      made.version, made.digest,
    ):  # fmt: skip
      return _Choice(made, a.SNAPSHOT)
    holders = tuple(
      index
      for index in sorted(state.answers)
      if state.answers[index].versions
      and state.answers[index].versions[fragment] == made.version
      and state.answers[index].digests[fragment] == made.digest
      and (fragment, index) not in state.failed
    )
    if holders:
      return _Choice(made, a.ANCHOR, holders)
    if made.version.merges == 0 and turn.get().has_task:
      return _Choice(made, a.START)
  return None


def proceed(turn: Turn) -> None:
  """After every event: decide, fetch, and restore once all is there."""
  state = get(turn)
  if not state.durable or state.orders:
    return
  if not state.deciding:
    if not _complete(turn):
      return
    state = put(turn, deciding=True)
  orders = []
  for p in range(turn.settings.fragments):
    choice = _choice(turn, p)
    if choice is None:
      _give_up(turn, p)
      return
    if choice.source == a.ANCHOR and state.taken.get(p) != choice.made.version:
      _fetch(turn, p, choice)
      continue
    orders.append(
      a.RestoreOrder(
        fragment=p,
        source=choice.source,
        version=choice.made.version,
        momentum=_momentum_fits(turn, p, choice.made),
      )
    )
  if len(orders) == turn.settings.fragments:
    put(turn, orders=tuple(orders))
    turn.act(a.Restore(orders=tuple(orders)))


def _give_up(turn: Turn, fragment: int) -> None:
  """Nobody who has answered holds any version; others may yet come."""
  away = any(
    x.status != s.LEFT and x.id not in get(turn).answers
    for x in turn.islands.values()
    if not x.is_evaluator
  )
  if away:
    put(turn, deciding=False, since=turn.now)
    return
  turn.note('nothing_to_recover', fragment=fragment)
  turn.set(phase=s.FINISHED, end_reason='nothing to recover')
  turn.act(a.Stop(reason='nothing to recover'))


def _momentum_fits(turn: Turn, fragment: int, made: recovery.Made) -> bool:
  """Whether the snapshot's b is of this ancestry and near enough."""
  state = get(turn)
  if not state.snapshot:
    return False
  version, _ = state.snapshot[fragment]
  behind = made.version.merges - version.merges
  known = any(x.version == version for x in state.memory.history[fragment])
  return known and 0 <= behind <= turn.limits.momentum_merges_max


def _fetch(turn: Turn, fragment: int, choice: _Choice) -> None:
  """Ask a holder for its value; again if it is late; another if it is gone."""
  state = get(turn)
  now = state.fetching.get(fragment)
  if now is not None and now.version == choice.made.version:
    if turn.now - now.since > turn.limits.lease_s:
      put(
        turn,
        fetching={k: v for k, v in state.fetching.items() if k != fragment},
        failed=state.failed | {(fragment, now.island)},
      )
      return  # the next event chooses again
    if turn.now - now.asked_at <= turn.limits.answer_s:
      return
    if turn.islands[now.island].peer:
      _send_fetch(turn, fragment, now._replace(asked_at=turn.now))
    return
  if now is None and len(state.fetching) >= FETCHES_MAX:
    return
  # One that is not connected at the moment may come back.
  reachable = [x for x in choice.islands if turn.islands[x].peer]
  island = reachable[0] if reachable else choice.islands[0]
  fetch = s.Fetch(island, choice.made.version, turn.now, turn.now)
  _send_fetch(turn, fragment, fetch)


def _send_fetch(turn: Turn, fragment: int, fetch: s.Fetch) -> None:
  put(turn, fetching={**get(turn).fetching, fragment: fetch})
  island = turn.islands[fetch.island]
  turn.send(
    island.peer,
    m.AskAnchor(
      island=island.id,
      incarnation=island.incarnation,
      syncer_incarnation=turn.get().incarnation,
      fragment=fragment,
      version=fetch.version,
    ),
  )


def on_anchor_value(turn: Turn, value: m.AnchorValue) -> None:
  state = get(turn)
  fetch = state.fetching.get(value.fragment)
  wanted = (
    fetch is not None
    and fetch.island == value.island
    and fetch.version == value.version
    and value.syncer_incarnation == turn.get().incarnation
  )
  if wanted:
    digest = state.answers[value.island].digests[value.fragment]
    turn.act(
      a.TakeAnchor(
        fragment=value.fragment,
        version=value.version,
        digest=digest,
        handle=value.payload,
      )
    )
  turn.release(value.payload)


def on_anchor_taken(turn: Turn, event: a.AnchorTaken) -> None:
  state = turn.get().recovering
  if state is None:  # it was late, and done without
    return
  fetch = state.fetching.get(event.fragment)
  if fetch is None or fetch.version != event.version:
    return
  fetching = {k: v for k, v in state.fetching.items() if k != event.fragment}
  if event.ok:
    taken = {**state.taken, event.fragment: event.version}
    put(turn, fetching=fetching, taken=taken)
  else:
    failed = state.failed | {(event.fragment, fetch.island)}
    put(turn, fetching=fetching, failed=failed)
