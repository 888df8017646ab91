"""The end of a recovery: what was taken back is Θ, and the run goes on (5.9)."""

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import recovery
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.recovering import get
from diloco_jax.protocol.recovering import put
from diloco_jax.protocol.turn import Turn


def on_restored(turn: Turn, event: a.Restored) -> None:
  """Write down what was taken back, before anybody hears of it."""
  state = put(turn, restored=event)
  parents = tuple(x.version for x in state.orders)
  lost = sum(
    sum(x.is_merge for x in recovery.after(made, parent))
    for made, parent in zip(state.memory.history, parents, strict=True)
  )
  turn.act(
    a.WriteTape(
      key=f'recovered:{turn.get().incarnation}',
      fields=(
        ('incarnation', turn.get().incarnation),
        ('parents', parents),
        ('digests', event.digests),
        ('sources', tuple(x.source for x in state.orders)),
        ('momentum', tuple(x.momentum for x in state.orders)),
        ('merges_lost', lost),
      ),
    )
  )


def reopen(turn: Turn) -> None:
  """Θ is there and durable: the run goes on. Islands say what they hold."""
  state = get(turn)
  assert state.restored is not None
  incarnation = turn.get().incarnation
  memory = recovery.taken_back(
    state.memory,
    incarnation,
    [x.version for x in state.orders],
    state.restored.digests,
  )
  turn.fragments = [
    s.Fragment(
      version=made[-1].version,
      digest=made[-1].digest,
      handle=handle,
      slot=made[-1].slot,
      included=made[-1].included,
    )
    for made, handle in zip(memory.history, state.restored.handles, strict=True)
  ]
  turn.set(
    phase=s.OPEN,
    recovering=None,
    merges=memory.merges,
    merged_token_params=sum(memory.merged.values()),
    slots_done=len(memory.slots),
    next_slot=memory.next_slot,
    retries=tuple(x for x in range(memory.next_slot) if x not in memory.slots),
    past=tuple(
      x._replace(merged=memory.merged.get((x.id, x.incarnation), 0))
      for x in turn.get().past
    ),
  )
  for index in sorted(turn.islands):
    _take_in(turn, index, state.answers.get(index), memory)


def _take_in(
  turn: Turn, index: int, answer: m.Anchors | None, memory: recovery.Memory
) -> None:
  island = turn.islands[index]
  merged = memory.merged.get((index, island.incarnation), 0)
  island = turn.island(index, merged=merged)
  if answer is None or island.status == s.LEFT:
    return
  turn.island(
    index,
    status=s.LIVE if answer.training else s.ENTERING,
    since=turn.now,
    state_since=turn.now,
    lease_until=turn.now
    + (turn.limits.lease_s if answer.training else turn.limits.restoring_s),
    step=answer.step,
    tokens=answer.tokens,
    versions=answer.versions,
    baseline=False,
    credits=0,
    sent={},
  )
  if answer.training:
    turn.set(started=True)
