"""poll -> react -> check -> perform: the only joiner of the two halves.

One lock guards a machine. Whoever has an event (the loop's own thread, a
worker, the training thread at a step boundary) feeds it under that lock;
`perform` only starts work or hands it over, so the lock is held for
microseconds.
"""

from collections.abc import Callable
import concurrent.futures
import heapq
import logging
import threading
from typing import Any, Generic, Protocol, TypeVar

from diloco_jax.protocol import actions as a
from diloco_jax.runtime.clock import Clock

S = TypeVar('S')

# The loop looks up at least this often, whatever the timers say.
IDLE_S = 0.5


class Driver(Protocol):
  """Performs the actions of one machine."""

  def perform(self, action: a.Action) -> tuple[a.Event, ...]: ...

  def poll(self, timeout_s: float) -> list[a.Event]:
    """Events from outside; returns early when woken."""
    ...

  def wake(self) -> None:
    """Make a running poll return."""
    ...


class Tape(Protocol):
  """Where a loop records what went in and what came out."""

  def record(self, event: a.Event, actions: tuple[a.Action, ...]) -> None: ...


class Timers:
  """Named timers; setting one again replaces it."""

  def __init__(self) -> None:
    self._at: dict[str, float] = {}
    self._heap: list[tuple[float, str]] = []

  def set(self, name: str, at: float) -> None:
    self._at[name] = at
    heapq.heappush(self._heap, (at, name))

  def next_at(self) -> float:
    while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
      heapq.heappop(self._heap)
    return self._heap[0][0] if self._heap else float('inf')

  def due(self, now: float) -> list[str]:
    names = []
    while self.next_at() <= now:
      _, name = heapq.heappop(self._heap)
      del self._at[name]
      names.append(name)
    return names


class Loop(Generic[S]):
  """Runs one machine in real time."""

  def __init__(
    self,
    *,
    state: S,
    react: Callable[[S, a.Event], tuple[S, tuple[a.Action, ...]]],
    check: Callable[[S, S], None],
    driver: Driver,
    clock: Clock,
    tape: Tape | None = None,
  ):
    self.state = state
    self.clock = clock
    self.stopped = threading.Event()
    self.stop_reason = ''
    self.failure: BaseException | None = None
    self._react = react
    self._check = check
    self._driver = driver
    self._tape = tape
    self._timers = Timers()
    self._lock = threading.RLock()
    self._posted: list[a.Event] = []
    self._posted_lock = threading.Lock()

  def post(self, event: a.Event) -> None:
    """Hand over an event from any thread; the loop's thread feeds it."""
    with self._posted_lock:
      self._posted.append(event)
    self._driver.wake()

  def feed(self, event: a.Event) -> None:
    """React to one event, check, perform; then to what that brought."""
    with self._lock:
      queue = [event]
      while queue:
        current = queue.pop(0)
        old = self.state
        new, actions = self._react(old, current)
        self._check(old, new)
        self.state = new
        if self._tape is not None:
          self._tape.record(current, actions)
        for action in actions:
          queue.extend(self._perform(action))

  def begin(
    self,
    first: Callable[[S, float], tuple[S, tuple[a.Action, ...]]],
    now: float,
  ) -> None:
    """What a machine does before any event."""
    with self._lock:
      self.state, actions = first(self.state, now)
      for action in actions:
        for event in self._perform(action):
          self.feed(event)

  def _perform(self, action: a.Action) -> tuple[a.Event, ...]:
    if isinstance(action, a.SetTimer):
      self._timers.set(action.name, action.at)
      # The timer may come from another thread than the one that polls.
      if action.at < self.clock.now() + IDLE_S:
        self._driver.wake()
      return ()
    if isinstance(action, a.Stop):
      self.stop_reason = action.reason
      self.stopped.set()
      self._driver.wake()
    return self._driver.perform(action)

  def fail(self, error: BaseException) -> None:
    """A worker failed: the loop cannot go on."""
    logging.error('the protocol loop failed', exc_info=error)
    self.failure = error
    self.stopped.set()
    self._driver.wake()

  def once(self) -> None:
    """Poll once and feed what came. A failure ends the loop and is kept."""
    try:
      self._once()
    except Exception as error:
      logging.exception('the protocol loop failed')
      self.failure = error
      self.stopped.set()

  def _once(self) -> None:
    with self._lock:
      wait = self._timers.next_at() - self.clock.now()
    with self._posted_lock:
      if self._posted:
        wait = 0.0
    for event in self._driver.poll(max(0.0, min(wait, IDLE_S))):
      self.feed(event)
    with self._posted_lock:
      posted, self._posted = self._posted, []
    for event in posted:
      self.feed(event)
    with self._lock:
      names = self._timers.due(self.clock.now())
    for name in names:
      self.feed(a.TimerFired(self.clock.now(), name))


class Worker:
  """One thread for slow work; its results are posted to a loop."""

  def __init__(self, name: str, on_failure: Callable[[BaseException], None]):
    self._pool = concurrent.futures.ThreadPoolExecutor(1, name)
    self._on_failure = on_failure

  def submit(self, work: Callable[..., None], *args: Any) -> None:
    future = self._pool.submit(work, *args)
    future.add_done_callback(self._done)

  def _done(self, future: 'concurrent.futures.Future[None]') -> None:
    if future.cancelled():
      return
    error = future.exception()
    if error is not None:
      self._on_failure(error)

  def close(self) -> None:
    self._pool.shutdown(wait=True, cancel_futures=True)
