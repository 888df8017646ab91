"""Once faults have stopped, every fragment advances within a stated bound."""

from typing import Any

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.settings import Settings
from diloco_jax.simulation.checking import LIVENESS
from diloco_jax.simulation.checking import Checker
from diloco_jax.simulation.checking import Moment
from diloco_jax.simulation.checking import Watch

PERIODS = 4  # of the slowest island; a debt of credits costs up to three


def bound_s(settings: Settings, *, step_s: float, exchange_s: float) -> float:
  """The longest time without a merge of a fragment, once all is well.

  Waits that may follow each other after the last fault, at their longest: the
  syncer asks for anchors and a lease passes; a dead island's lease passes; the
  first start waits; a newcomer tries its donors; a quarantine ends; a round
  is left to its timeout; messages are repeated. Then every fragment has its
  turn, in PERIODS periods or as fast as rounds follow each other.

  Args:
    settings: of the run.
    step_s: mean inner step of the slowest island.
    exchange_s: a pull, its answer, the merge and the broadcast, on the slowest
      link and disk.
  """
  limits = settings.limits
  resend_s = max(limits.resend_floor_s, limits.resend_steps * step_s)
  timeout_s = max(
    limits.quorum_timeout_floor_s, limits.quorum_timeout_steps * step_s
  )
  once_s = (
    3 * limits.lease_s
    + limits.start_timeout_s
    + limits.donors_max * limits.donation_s
    + limits.quarantine_s
    + limits.hello_retry_s
    + 2 * timeout_s
    + 4 * (resend_s + 4 * exchange_s)
  )
  round_s = exchange_s + step_s
  rounds_s = settings.fragments * round_s
  return once_s + PERIODS * max(settings.period * step_s, rounds_s)


class EveryFragmentAdvances(Checker):
  """After the last fault each fragment is merged again and again, to the end."""

  code = LIVENESS

  def __init__(self, settings: Settings, bound: float):
    self.settings = settings
    self.bound_s = bound
    self.healed_at: float | None = None  # by the kernel's clock
    self._moved_at = [0.0] * settings.fragments
    self._phase = s.SEEDING
    self._phase_at = 0.0

  def heal(self, now: float) -> None:
    """From now on nothing goes wrong any more."""
    self.healed_at = now

  def syncer_sees_tape_written(self, at: Moment, event: a.TapeWritten) -> None:
    if event.key.startswith('merge:'):
      for p, piece in enumerate(at.new.fragments):
        if piece is not at.old.fragments[p]:
          self._moved_at[p] = at.world.kernel.now

  def syncer_sees_timer_fired(self, at: Moment, event: a.TimerFired) -> None:
    if event.name != 'tick':
      return
    if at.new.phase != self._phase:
      self._phase, self._phase_at = at.new.phase, at.world.kernel.now
    self.check(at.world, at.new)

  def check(self, world: Any, state: s.SyncerState) -> None:
    """Also to be called where a run ends, or has nothing left to do."""
    if self.healed_at is None or state.phase == s.FINISHED:
      return
    now = world.kernel.now
    if state.phase in (s.DRAINING, s.EXPORTING):
      limits = self.settings.limits
      ends_at = max(self._phase_at, self.healed_at) + self.bound_s
      ends_at += limits.drain_timeout_s + limits.leave_s
      if now > ends_at:
        self.fail(
          f'{state.phase} since {self._phase_at:.1f} s: {_where(state)}'
        )
      return
    for p, moved_at in enumerate(self._moved_at):
      since = max(moved_at, self.healed_at)
      if now - since > self.bound_s:
        self.fail(
          f'fragment {p} is not merged from {since:.1f} s to {now:.1f} s, all '
          f'faults being over; at most {self.bound_s:.1f} s: {_where(state)}'
        )


def _where(state: s.SyncerState) -> str:
  islands = ' '.join(
    f'{x.id}.{x.incarnation}:{x.status}/{x.state}@{x.step}'
    for x in state.islands.values()
  )
  rounds = ' '.join(
    f'{x.id.number}(slot {x.slot}, {x.phase}: '
    + ', '.join(f'{y.island} {y.status}' for y in x.members)
    + ')'
    for x in state.rounds.values()
  )
  return (
    f'{state.phase} at global step {state.global_step}, next slot '
    f'{state.next_slot}, retries {state.retries}; islands {islands}; '
    f'rounds {rounds}'
  )


class Liveness(Watch):
  """The observer of the second phase."""

  def __init__(self, settings: Settings, bound: float):
    self.checker = EveryFragmentAdvances(settings, bound)
    super().__init__([self.checker])
