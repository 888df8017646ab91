"""What must hold once a run under faults has ended."""

from diloco_jax.protocol import island_state as i
from diloco_jax.protocol import syncer_state as s
from tests.protocol.chaos_ledger import tokens_of


def where_it_stands(world):
  """A line on a run that did not end."""
  state = world.syncer
  islands = [
    f'{x.id}.{x.incarnation} {x.status} {x.state} slot {x.slot}'
    f' captured {x.captured_slot} step {x.step}'
    for _, x in sorted(state.islands.items())
  ]
  rounds = [
    f'{x.id.number} slot {x.slot} {x.phase} '
    + ','.join(f'{y.island}:{y.status}' for y in x.members)
    for _, x in sorted(state.rounds.items())
  ]
  return (
    f'stuck in {state.phase} at global step {state.global_step} of'
    f' {state.settings.steps}, next slot {state.next_slot}, retries'
    f' {state.retries}; islands {islands}; rounds {rounds}'
  )


def check_end(world):
  """Liveness, books and memory of a whole run."""
  state, settings = world.syncer, world.settings
  assert world.finished, where_it_stands(world)
  if state.end_reason == 'steps' and settings.mode == 'free':
    assert state.global_step >= settings.steps
  check_memory(world)
  check_books(world)
  for process in world.everyone:
    check_island_books(world, process)
  check_stops(world)


def check_memory(world):
  settings = world.settings
  fragments, in_flight = settings.fragments, max(1, settings.overlap)
  values = sorted(str(x) for x in world.handles.values())
  want = sorted(str(('value', p)) for p in range(fragments))
  assert values == want, f'payloads kept at the end: {values}'
  bound = 2 * fragments + 2 + settings.islands * (in_flight + 1)
  assert world.handles_max <= bound, f'{world.handles_max} payloads at once'
  assert len(world.timers) <= 1 + settings.islands * in_flight


def check_books(world):
  """The syncer's totals are those of its tape."""
  state, theta = world.syncer, world.theta
  assert state.merged_token_params == sum(theta.merged.values())
  everyone = [*state.past, *state.islands.values()]
  for island in everyone:
    got = theta.merged[island.id, island.incarnation]
    assert island.merged == got, f'{island.id}.{island.incarnation}: {got}'
  totals = [f for _, kind, f in world.notes if kind == 'island_total']
  assert len(totals) == len(everyone)
  for total in totals:
    parts = [
      total[f'{x}_token_params']
      for x in ('trained', 'merged', 'lost', 'pending')
    ]
    assert parts[0] == sum(parts[1:]) and min(parts) >= 0, total
  assert state.merges == theta.lines
  assert tuple(x.version for x in state.fragments) == tuple(theta.versions)


def check_island_books(world, process):
  """trained = merged + lost + pending, told by the sets."""
  state, theta = process.state, world.theta
  if not state.incarnation:
    return
  trained = range(process.first_step + 1, process.step + 1)
  merged = lost = most = 0
  synced = True
  for p, held in enumerate(state.held):
    if held.anchor is None:
      synced = False
      continue
    size = world.settings.sizes[p]
    inside = theta.steps_in(p, *process.who, theta.versions[p])
    gone = set(trained) - inside - process.local.pending[p]
    merged += size * sum(map(tokens_of, inside))
    lost += size * sum(map(tokens_of, gone))
    most += size * sum(map(tokens_of, trained))
    own = [v for k, v in theta.entered[p].items() if k[:2] == process.who]
    synced &= held.capture is None and held.anchor >= max(own, default=(0, 0))
  assert merged + state.lost <= most, (
    f'island {process.who}: merged {merged} + lost {state.lost} > {most}'
  )
  if synced:
    assert state.lost == lost, f'{process.who}: lost {state.lost}, not {lost}'
    assert state.merged == merged, f'{process.who}: {state.merged} {merged}'


def check_stops(world):
  """Nobody who was in the run is told to go but by its end or a successor."""
  for when, index, _, reason in world.stops:
    fine = reason in ('finished', 'superseded')
    assert fine or reason.startswith('refused: finished'), (
      f'{when}: {index}: {reason}'
    )
  for index, process in sorted(world.current.items()):
    known = world.syncer.islands.get(index)
    if process.stopped == 'superseded' and known is not None:
      by = next(x for x in world.everyone if x.nonce == known.nonce)
      assert by.alive or by.stopped, f'{index} superseded by a dead process'
    here = known is not None and known.nonce == process.nonce
    late = world.notes[-1][0] > world.plan.until + 30  # no fault was left
    if (
      late
      and here
      and process.alive
      and process.conn
      and known.status == s.LIVE
    ):
      assert process.state.phase == i.STOPPED, f'{index} never told to stop'
