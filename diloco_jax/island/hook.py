"""The public hook: what turns a training loop into an island.

```python
island = diloco_jax.connect(address, params, token=token)
params = island.params
while not island.should_stop:
  params, loss = train_step(params, ...)
  params = island.step(params, tokens=tokens_in_batch, loss=loss)
```

`step` never waits for another island, for the syncer or for the network
(except in lock-step presets, which are made of waiting). It may wait for this
island's own device, so that a step counts only when it is finished.
"""

import collections
from collections.abc import Callable
import math
import threading
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.island.anchors import Fragments
from diloco_jax.island.driver import IslandDriver
from diloco_jax.island.driver import Journal
from diloco_jax.island.driver import NoJournal
from diloco_jax.protocol import actions as a
from diloco_jax.protocol import invariants
from diloco_jax.protocol import island as machine
from diloco_jax.protocol import island_state as i
from diloco_jax.protocol import messages as m
from diloco_jax.runtime.clock import Clock
from diloco_jax.runtime.clock import RealClock
from diloco_jax.runtime.loop import Loop
from diloco_jax.runtime.loop import Tape
from diloco_jax.transport import base as transport

# How long lock step sleeps between two looks at an unfinished wait; it is
# woken as soon as something arrives.
WAIT_S = 0.05


class JoinError(RuntimeError):
  """The syncer would not have this island, or the connection was refused."""


class Mark(NamedTuple):
  """A dispatched step, and the scalar that tells when it is finished."""

  step: int
  tokens: int  # cumulative
  scalar: jax.Array
  is_loss: bool


class Unfinished:
  """Steps that were dispatched and that the device has not finished."""

  def __init__(self, ahead_max: int):
    self._ahead_max = ahead_max
    self._steps: collections.deque[Mark] = collections.deque()
    self._seen_at = time.monotonic()
    self._seen_step = 0

  def add(self, mark: Mark) -> None:
    self._steps.append(mark)

  def reset_clock(self) -> None:
    """Time that was not spent on steps does not make them slow."""
    self._seen_at = time.monotonic()

  def settle(self, *, all_of_them: bool = False) -> Mark | None:
    """Wait until few enough are left; returns the newest finished."""
    limit = 0 if all_of_them else self._ahead_max
    newest = None
    while self._steps:
      scalar = self._steps[0].scalar
      if len(self._steps) <= limit and not scalar.is_ready():
        break
      scalar.block_until_ready()
      newest = self._steps.popleft()
    return newest

  def step_time_s(self, step: int) -> float:
    """Mean time of the steps since the last call, for a newest `step`."""
    now = time.monotonic()
    steps = max(1, step - self._seen_step)
    mean = (now - self._seen_at) / steps
    self._seen_at, self._seen_step = now, step
    return mean


def ahead_max() -> int:
  """Steps that may be unfinished when the next one is dispatched.

  None on CPU: several devices of one process abort inside XLA when the
  collectives of two steps overlap, and XLA may run the next step before the
  copy that a capture is, which then comes a step too late. Accelerators run
  what is enqueued in its order.
  """
  return 0 if jax.default_backend() == 'cpu' else 2


class Island:
  """One island, seen from its training loop. Made by `connect`."""

  def __init__(
    self,
    *,
    state: i.IslandState,
    fragments: Fragments,
    endpoint: transport.Endpoint,
    params: Any,
    put: Any,
    clock: Clock | None = None,
    journal: Journal | None = None,
    tape: Tape | None = None,
  ):
    self.params = params
    self.extra: Any = None
    self.start: m.Start | None = None
    self.exchange_s = 0.0  # of the last call of `step`
    self.finished_step = 0  # newest that the device has finished
    self.finished_tokens = 0
    self.step_time_s = 0.0
    self.loss: float | None = None
    self.adopted_at = time.monotonic()
    self._put = put
    self._fragments = fragments
    self._clock = clock or RealClock()
    self._endpoint = endpoint
    self._begun = threading.Event()
    self._changed = threading.Condition()
    self._plan: a.StepPlan | None = None
    self._training = False
    self._stop = False
    self._step = state.step
    self._tokens = state.step_tokens
    self._unfinished = Unfinished(ahead_max())
    self._probe = jax.jit(lambda x: jnp.ravel(x)[:1].astype(jnp.float32))
    self._driver = IslandDriver(
      fragments=fragments,
      endpoint=endpoint,
      clock=self._clock,
      journal=journal or NoJournal(),
      on_plan=self._on_plan,
      on_begin=self._on_begin,
      on_seeds=self._on_seeds,
      on_failure=self._on_failure,
    )
    self._loop: Loop[i.IslandState] = Loop(
      state=state,
      react=machine.react,
      check=invariants.check_island,
      driver=self._driver,
      clock=self._clock,
      tape=tape,
    )
    self._driver.feed = self._feed
    self._thread = threading.Thread(
      target=self._run, name='island', daemon=True
    )

  # Joining.

  def join(
    self,
    timeout_s: float | None = None,
    should_leave: Callable[[], str] | None = None,
  ) -> None:
    """Connect, get every fragment, and wait until training may start.

    Raises:
      JoinError: refused, or nothing came within timeout_s.
    """
    self._thread.start()
    self._feed(a.PeerFound(self._clock.now(), transport.SYNCER))
    waited = 0.0
    while not self._begun.wait(0.2):
      waited += 0.2
      if self._loop.stopped.is_set():
        self._raise_if_failed()
        if self._loop.stop_reason == 'finished':
          self._stop = True
          return
        raise JoinError(self._loop.stop_reason or 'stopped before it began')
      if should_leave is not None and should_leave():
        self.leave(should_leave())
        return
      if timeout_s is not None and waited > timeout_s:
        raise JoinError(f'could not join within {timeout_s:g} s')
    self.params = self._put(self._fragments.assembled(self.params))
    self._unfinished.reset_clock()
    self._training = True

  def warm_up(self, params: Any) -> None:
    """Compile what happens at step boundaries, before the first of them."""
    self._fragments.warm_up(params)
    self._probe(jax.tree.leaves(params)[0])

  def declare(self, state: str) -> None:
    """Say what this island is busy with other than steps: 'compiling', ..."""
    self._feed(a.StateDeclared(self._clock.now(), state))

  # Training.

  def step(
    self,
    params: Any,
    *,
    tokens: int,
    loss: jax.Array | None = None,
    extra: Any = None,
  ) -> Any:
    """Call after each inner step; returns the parameters to go on with.

    Args:
      params: the parameters after the step; they may be donated.
      tokens: in the step's batch.
      loss: a scalar of the step, not donated later; tells when it is done.
      extra: what belongs to training besides the parameters.

    Returns:
      The parameters, with what was received put in place.
    """
    began = time.monotonic()
    self._raise_if_failed()
    self._step += 1
    self._tokens += tokens
    self.extra = extra
    is_loss = loss is not None
    scalar = loss
    if scalar is None:
      scalar = self._probe(jax.tree.leaves(params)[0])
    self._unfinished.add(Mark(self._step, self._tokens, scalar, is_loss))
    self.params = params
    newest, waited = self._wait_for_device()
    plan = self._boundary()
    self._tell(newest)
    if plan.wait or plan.stop:
      waited += self._settle()
    while plan.wait and not self._loop.stopped.is_set():
      with self._changed:
        if self._plan is plan:
          self._changed.wait(WAIT_S)
      plan = self._boundary()
    if plan.stop or self._loop.stopped.is_set():
      self._end()
    self.exchange_s = time.monotonic() - began - waited
    return self.params

  def _boundary(self) -> a.StepPlan:
    self._plan = None
    self._loop.feed(a.Boundary(self._clock.now(), self._step, self._tokens))
    if self._plan is None:  # the machine has stopped
      return a.StepPlan(step=self._step, stop=True)
    return self._plan

  def _wait_for_device(
    self, all_of_them: bool = False
  ) -> tuple[Mark | None, float]:
    """The newest finished step, and the seconds waited for it."""
    began = time.monotonic()
    newest = self._unfinished.settle(all_of_them=all_of_them)
    return newest, time.monotonic() - began

  def _settle(self) -> float:
    """Wait until every step is finished, and tell; seconds waited."""
    newest, waited = self._wait_for_device(all_of_them=True)
    self._tell(newest)
    return waited

  def _tell(self, newest: Mark | None) -> None:
    """Tell the machine what the device has finished."""
    if newest is not None:
      loss = None
      if newest.is_loss:
        value = float(np.asarray(newest.scalar))
        loss = value if math.isfinite(value) else None
      self.finished_step, self.finished_tokens = newest.step, newest.tokens
      self.step_time_s = self._unfinished.step_time_s(newest.step)
      self.loss = loss
      self._loop.feed(
        a.StepsFinished(
          now=self._clock.now(),
          step=newest.step,
          tokens=newest.tokens,
          step_time_s=self.step_time_s,
          loss=loss,
        )
      )

  def _end(self) -> None:
    """The run is over: close the books on finished steps, and leave."""
    self._stop = True
    self._settle()
    if not self._loop.stopped.is_set():
      self._loop.feed(a.StopRequested(self._clock.now(), 'finished'))
    self.close()

  def leave(self, reason: str) -> None:
    """Leave politely, before the run is over."""
    if not self._loop.stopped.is_set():
      self._settle()
      self._loop.feed(a.StopRequested(self._clock.now(), reason))
    self._stop = True
    self.close()

  def close(self) -> None:
    """End the threads and the connection; what was sent still goes out."""
    self._stop = True
    if self._thread.is_alive():
      self._thread.join(10.0)
    self._driver.close()
    self._endpoint.close()

  # What a loop may ask.

  @property
  def should_stop(self) -> bool:
    return self._stop

  @property
  def index(self) -> int:
    """This island's index in the run."""
    return self._loop.state.island

  @property
  def incarnation(self) -> int:
    return self._loop.state.incarnation

  @property
  def lease(self) -> m.SampleRange | None:
    """The samples that this island may train on."""
    return self.start.samples if self.start is not None else None

  @property
  def state(self) -> str:
    return self._loop.state.state

  @property
  def stop_reason(self) -> str:
    return self._loop.stop_reason

  @property
  def anchors_age_s(self) -> float:
    """Seconds since a fragment was last adopted."""
    return time.monotonic() - self.adopted_at

  # What the driver asks.

  def _on_plan(self, plan: a.StepPlan) -> None:
    params = self.params if self._training else None
    for adopt in plan.adopt:
      params = self._fragments.adopt(params, adopt.fragment, adopt.version)
    for order in plan.capture:
      self._fragments.capture(params, order.fragment, order.capture)
    if self._training:
      self.params = params
      self._plan = plan
    if plan.adopt:
      self.adopted_at = time.monotonic()

  def _on_begin(self, start: m.Start) -> None:
    self.start = start
    self._begun.set()

  def _on_seeds(self) -> list[transport.Payload]:
    count = len(self._fragments.partition.sizes)
    return [self._fragments.seed(self.params, p) for p in range(count)]

  def _feed(self, event: a.Event) -> None:
    self._loop.feed(event)
    with self._changed:
      self._changed.notify_all()

  def _on_failure(self, error: BaseException) -> None:
    self._loop.fail(error)

  def _run(self) -> None:
    while not self._loop.stopped.is_set():
      self._loop.once()
      with self._changed:
        self._changed.notify_all()

  def _raise_if_failed(self) -> None:
    if self._loop.failure is not None:
      raise RuntimeError('the exchange failed') from self._loop.failure
