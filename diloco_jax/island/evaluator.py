"""The evaluator: a subscriber that holds Θ and contributes nothing."""

import threading
from typing import Any, NamedTuple

from diloco_jax.island.anchors import Fragments
from diloco_jax.island.driver import IslandDriver
from diloco_jax.island.driver import NoJournal
from diloco_jax.protocol import actions as a
from diloco_jax.protocol import invariants
from diloco_jax.protocol import island as machine
from diloco_jax.protocol import island_state as i
from diloco_jax.protocol import messages as m
from diloco_jax.runtime.clock import Clock
from diloco_jax.runtime.loop import Loop
from diloco_jax.transport import base as transport


class Snapshot(NamedTuple):
  """Θ as this evaluator holds it."""

  params: Any  # NumPy, f32
  global_step: int
  versions: tuple[m.Version, ...]


class Evaluator:
  """Follows the newest version of every fragment, on its own thread."""

  def __init__(
    self,
    *,
    state: i.IslandState,
    fragments: Fragments,
    endpoint: transport.Endpoint,
    params_like: Any,
    clock: Clock,
  ):
    assert state.role == m.EVALUATOR
    self._fragments = fragments
    self._params_like = params_like
    self._clock = clock
    self._endpoint = endpoint
    self._lock = threading.Lock()
    self._driver = IslandDriver(
      fragments=fragments,
      endpoint=endpoint,
      clock=clock,
      journal=NoJournal(),
      on_plan=self._on_plan,
      on_begin=lambda start: None,
      on_seeds=list,
      on_failure=lambda error: self._loop.fail(error),
    )
    self._loop: Loop[i.IslandState] = Loop(
      state=state,
      react=machine.react,
      check=invariants.check_island,
      driver=self._driver,
      clock=clock,
    )
    self._driver.feed = self._loop.feed
    self._thread = threading.Thread(
      target=self._run, name='evaluator', daemon=True
    )

  def begin(self) -> None:
    self._thread.start()
    self._loop.feed(a.PeerFound(self._clock.now(), transport.SYNCER))

  def _run(self) -> None:
    while not self._loop.stopped.is_set():
      self._loop.once()

  def _on_plan(self, plan: a.StepPlan) -> None:
    with self._lock:
      for order in plan.adopt:
        self._fragments.adopt(None, order.fragment, order.version)

  def snapshot(self) -> Snapshot | None:
    """The newest Θ, or None before every fragment has come."""
    with self._lock:
      if any(anchor is None for anchor in self._fragments.anchors):
        return None
      params = self._fragments.assembled(self._params_like)
    state = self._loop.state
    return Snapshot(
      params=params,
      global_step=state.global_step,
      versions=tuple(x.anchor for x in state.held if x.anchor is not None),
    )

  @property
  def global_step(self) -> int:
    """The newest that was heard of."""
    return self._loop.state.global_step

  @property
  def failure(self) -> BaseException | None:
    """What ended this evaluator before its time."""
    return self._loop.failure

  @property
  def finished(self) -> threading.Event:
    """Set when the run is over, after the final Θ has come."""
    return self._loop.stopped

  def close(self) -> None:
    if not self._loop.stopped.is_set():
      self._loop.feed(a.StopRequested(self._clock.now(), 'closed'))
    self._thread.join(10.0)
    self._driver.close()
    self._endpoint.close()
