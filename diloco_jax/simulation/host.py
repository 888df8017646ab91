"""A process in virtual time: one machine, its clock, its life and its death.

A host performs what its machine asks for, as the drivers do in real time.
Work that takes time is scheduled; it is done only if the process still lives,
and later if it stands still.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diloco_jax.protocol import actions as a

if TYPE_CHECKING:
  from diloco_jax.simulation.world import World

React = Callable[[Any, a.Event], tuple[Any, tuple[a.Action, ...]]]
ALIVE = -1  # no crash is due


class Clock:
  """A machine's own clock, which may run at another speed than the world's."""

  def __init__(self, at: float, reads: float):
    self._at, self._reads, self.rate = at, reads, 1.0

  def read(self, at: float) -> float:
    return self._reads + (at - self._at) * self.rate

  def set_rate(self, at: float, rate: float) -> None:
    self._reads, self._at, self.rate = self.read(at), at, rate


class Host:
  """Base of the syncer's and the islands' hosts."""

  def __init__(
    self, world: 'World', who: str, life: int, clock: Clock, react: React,
    check: Callable[[Any, Any], None],
  ):  # fmt: skip
    self.world = world
    self.kernel = world.kernel
    self.who = who
    self.life = life
    self.clock = clock
    self.alive = True
    self.state: Any
    self.values: dict[int, Any] = {}  # by handle
    self.crash_in = ALIVE  # actions from now
    self.crash: Callable[[], None] = self.end
    self._react = react
    self._check = check
    self._handles = 0
    self._timers: dict[str, float] = {}
    self._stands_until = 0.0
    self._backlog: list[Callable[[], None]] = []
    self.perform: dict[type, Callable[[Any], None]] = {
      a.SetTimer: self._set_timer,
      a.Release: self._release,
    }

  # Time.

  def now(self) -> float:
    return self.clock.read(self.kernel.now)

  def after(self, delay: float, work: Callable[[], None]) -> None:
    """Do it then, if this process is still there."""
    self.kernel.after(delay, lambda: self.do(work))

  def do(self, work: Callable[[], None]) -> None:
    if not self.alive:
      return
    if self.kernel.now < self._stands_until:
      self._backlog.append(work)
    else:
      work()

  def pause(self, until: float) -> None:
    """Stand still; what comes meanwhile is dealt with afterwards, in order."""
    self._stands_until = max(self._stands_until, until)
    self.kernel.at(until, self._resume)

  @property
  def stands(self) -> bool:
    return self.kernel.now < self._stands_until

  def _resume(self) -> None:
    if self.stands or not self.alive:
      return
    backlog, self._backlog = self._backlog, []
    for work in backlog:
      self.do(work)

  def _set_timer(self, action: a.SetTimer) -> None:
    self._timers[action.name] = action.at
    delay = (action.at - self.now()) / self.clock.rate
    self.after(delay, lambda: self._fire(action))

  def _fire(self, action: a.SetTimer) -> None:
    if self._timers.get(action.name) != action.at:
      return
    early = action.at - self.now()
    if early > 1e-9:  # the clock has slowed down since
      self.after(early / self.clock.rate, lambda: self._fire(action))
      return
    del self._timers[action.name]
    self.feed(a.TimerFired(max(self.now(), action.at), action.name))

  # Payloads.

  def keep(self, value: Any) -> int:
    self._handles += 1
    self.values[self._handles] = value
    return self._handles

  def _release(self, action: a.Release) -> None:
    del self.values[action.handle]

  # The machine.

  def feed(self, event: a.Event) -> tuple[a.Action, ...]:
    """React, check, be watched, perform; the process may die on the way."""
    old = self.state
    new, actions = self._react(old, event)
    self._check(old, new)
    self.state = new
    self.world.watched(self, old, event, new, actions)
    self.perform_all(actions)
    return actions

  def perform_all(self, actions: tuple[a.Action, ...]) -> None:
    perform = self.perform
    for action in actions:
      if self.crash_in != ALIVE and not self._survives():
        return
      perform[type(action)](action)

  def _survives(self) -> bool:
    """Count down to a crash between two actions."""
    if not self.alive:
      return False
    if self.crash_in == 0:
      self.crash_in = ALIVE
      self.crash()
      return False
    self.crash_in -= 1
    return True

  def end(self) -> None:
    """Dead from here on, also in the middle of its actions."""
    self.alive = False
    self.crash_in = 0
