"""Islands and a syncer in virtual time: handles only, no arrays.

The machines of `protocol/` run as they are. Compute, links and disks are
delays drawn from named streams; invariants are checked after every event.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import invariants
from diloco_jax.protocol import island as island_machine
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import syncer as syncer_machine
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.settings import Settings
from diloco_jax.simulation.kernel import Kernel


@dataclasses.dataclass(frozen=True)
class Delays:
  """How long things take, in seconds of virtual time."""

  step_s: float = 1.0  # mean inner step of every island
  step_cv: float = 0.0  # standard deviation / mean
  speeds: tuple[float, ...] = ()  # factor per island; 1 where not given
  latency_s: float = 0.05  # one way, each message
  latency_cv: float = 0.0
  merge_s: float = 0.005
  tape_s: float = 0.002
  encode_s: float = 0.005
  tokens_per_step: int = 100


class Timers:
  """Named timers of one machine; setting one again replaces it."""

  def __init__(self, kernel: Kernel, feed: Callable[[a.Event], None]):
    self._kernel = kernel
    self._feed = feed
    self._at: dict[str, float] = {}

  def set(self, action: a.SetTimer) -> None:
    self._at[action.name] = action.at
    self._kernel.at(action.at, lambda: self._fire(action))

  def _fire(self, action: a.SetTimer) -> None:
    if self._at.get(action.name) == action.at:
      del self._at[action.name]
      self._feed(a.TimerFired(self._kernel.now, action.name))


class IslandSim:
  """One island: its machine, its steps and its links."""

  def __init__(self, world: 'World', index: int):
    self.world = world
    self.index = index
    self.alive = True
    self.state = island_machine.initial(
      world.settings, nonce=f'island-{index}', island=index
    )
    self.timers = Timers(world.kernel, self.feed)
    self.step = 0
    self.tokens = 0
    self.plans: list[a.StepPlan] = []
    self.waiting = False
    self.begun = False
    self.stopped = ''
    self.step_times = world.kernel.stream(f'step/{index}')
    self._handles = 0
    self._since = 0.0

  def feed(self, event: a.Event) -> None:
    if not self.alive:
      return
    old = self.state
    self.state, actions = island_machine.react(old, event)
    invariants.check_island(old, self.state)
    self.world.events += 1
    for action in actions:
      self._perform(action)
    if self.waiting and not isinstance(event, a.Boundary):
      self._boundary()

  def _perform(self, action: a.Action) -> None:
    kernel, delays = self.world.kernel, self.world.delays
    match action:
      case a.Send():
        self.world.to_syncer(self, action.message)
      case a.SetTimer():
        self.timers.set(action)
      case a.StepPlan():
        self.plans.append(action)
        self.waiting = action.wait and self.begun
        if action.stop:
          self._finish()
      case a.Encode():
        self._handles += 1
        encoded = (action.fragment, action.capture, self._handles)
        kernel.after(
          delays.encode_s,
          lambda: self.feed(
            a.Encoded(kernel.now, *encoded, encode_s=delays.encode_s)
          ),
        )
      case a.Stage():
        staged = (
          action.fragment, action.version, action.base, action.capture,
          action.mode,
        )  # fmt: skip
        kernel.after(
          0.0, lambda: self.feed(a.Staged(kernel.now, *staged, ok=True))
        )
      case a.Begin():
        self.begun = True
        self._since = kernel.now
        kernel.after(self.world.phase(self.index), self._dispatch)
      case a.Stop():
        self.stopped = action.reason
        self.alive = False
      case a.Release() | a.Note() | a.DropCapture():
        pass
      case _:
        raise TypeError(f'{action!r}')

  def _finish(self) -> None:
    kernel = self.world.kernel
    self.begun = False
    kernel.after(
      0.0, lambda: self.feed(a.StopRequested(kernel.now, 'finished'))
    )

  def _dispatch(self) -> None:
    if not self.alive or not self.begun:
      return
    delays = self.world.delays
    speed = 1.0
    if self.index < len(delays.speeds):
      speed = delays.speeds[self.index]
    mean = delays.step_s / speed
    duration = mean
    if delays.step_cv:
      # Gamma noise: positive, with the mean and variation asked for.
      shape = 1 / delays.step_cv**2
      duration = self.step_times.gammavariate(shape, mean / shape)
    self.world.kernel.after(duration, self._step_done)

  def _step_done(self) -> None:
    if not self.alive or not self.begun:
      return
    kernel = self.world.kernel
    self.step += 1
    self.tokens += self.world.delays.tokens_per_step
    took = kernel.now - self._since
    self._since = kernel.now
    finished = a.StepsFinished(kernel.now, self.step, self.tokens, took)
    self._boundary(finished)

  def _boundary(self, finished: a.StepsFinished | None = None) -> None:
    kernel = self.world.kernel
    was_waiting = self.waiting
    self.waiting = False
    count = len(self.plans)
    self.feed(a.Boundary(kernel.now, self.step, self.tokens))
    if finished is not None:
      self.feed(finished)
    if not self.begun or not self.alive or len(self.plans) == count:
      return
    if not self.plans[-1].wait:
      if was_waiting:
        self._since = kernel.now
      self._dispatch()


class World:
  """A syncer and its islands, wired by links with latency."""

  def __init__(
    self,
    settings: Settings,
    delays: Delays,
    *,
    seed: int = 0,
    on_syncer: Callable[[a.Action], None] | None = None,
  ):
    self.settings = settings
    self.delays = delays
    self.kernel = Kernel(seed)
    self.timers = Timers(self.kernel, self.feed)
    self.on_syncer = on_syncer
    self.events = 0
    self.tape: list[dict[str, Any]] = []
    self.notes: list[tuple[float, a.Note]] = []
    self.latency = self.kernel.stream('latency')
    self.phases = self.kernel.stream('phase')
    self._offsets: dict[int, float] = {}
    self.syncer = syncer_machine.initial(settings)
    self._handles = 1000
    self.islands = [IslandSim(self, x) for x in range(settings.islands)]
    self.syncer, actions = syncer_machine.begin(self.syncer, 0.0)
    self._perform_all(actions)
    digests = tuple(f'd{p}' for p in range(settings.fragments))
    handles = tuple(range(1, settings.fragments + 1))
    self.kernel.at(
      0.0, lambda: self.feed(a.Seeded(self.kernel.now, digests, handles))
    )
    for island in self.islands:
      found = a.PeerFound(0.0, 'syncer')
      self.kernel.at(0.0, lambda x=island, e=found: x.feed(e))

  def phase(self, index: int) -> float:
    """Islands do not start their steps at one moment."""
    return self._offsets.setdefault(
      index, self.phases.uniform(0, self.delays.step_s)
    )

  def kill(self, index: int) -> None:
    self.islands[index].alive = False

  def run(self, until: float) -> None:
    self.kernel.run(until)

  @property
  def finished(self) -> bool:
    return self.syncer.phase == s.FINISHED

  def _travel(self) -> float:
    delays = self.delays
    if not delays.latency_cv:
      return delays.latency_s
    shape = 1 / delays.latency_cv**2
    return self.latency.gammavariate(shape, delays.latency_s / shape)

  def to_syncer(self, island: IslandSim, message: m.Message) -> None:
    peer = f'c{island.index}'
    if isinstance(message, m.Contribution):
      self._handles += 1
      message = dataclasses.replace(message, payload=self._handles)
    self.kernel.after(
      self._travel(),
      lambda: self.feed(a.Received(self.kernel.now, peer, message)),
    )

  def feed(self, event: a.Event) -> None:
    old = self.syncer
    self.syncer, actions = syncer_machine.react(old, event)
    invariants.check_syncer(old, self.syncer)
    self.events += 1
    self._perform_all(actions)

  def _perform_all(self, actions: tuple[a.Action, ...]) -> None:
    for action in actions:
      if self.on_syncer is not None:
        self.on_syncer(action)
      self._perform(action)

  def _perform(self, action: a.Action) -> None:
    kernel, delays = self.kernel, self.delays
    match action:
      case a.Send():
        island = self.islands[int(action.peer[1:])]
        received = action.message
        kernel.after(
          self._travel(),
          lambda: island.feed(a.Received(kernel.now, 'syncer', received)),
        )
      case a.SetTimer():
        self.timers.set(action)
      case a.Inspect():
        looked = (action.round, action.island, action.incarnation)
        kernel.after(
          0.0, lambda: self.feed(a.Inspected(kernel.now, *looked, '', 1.0))
        )
      case a.Merge():
        self._handles += 1
        digest = f'd{action.fragment}-{action.version}'
        merged = (action.round, digest, digest, self._handles, delays.merge_s)
        kernel.after(
          delays.merge_s, lambda: self.feed(a.Merged(kernel.now, *merged))
        )
      case a.WriteTape():
        key = action.key
        if key.startswith('merge:'):
          self.tape.append({'t_s': kernel.now, **dict(action.fields)})
        kernel.after(
          delays.tape_s, lambda: self.feed(a.TapeWritten(kernel.now, key))
        )
      case a.Export():
        kernel.after(0.0, lambda: self.feed(a.Exported(kernel.now, 'digest')))
      case a.Note():
        self.notes.append((kernel.now, action))
      case a.Release() | a.Stop():
        pass
      case _:
        raise TypeError(f'{action!r}')

  def periods(self) -> dict[int, float]:
    """For each island, its inner steps between merges of one fragment."""
    first: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], tuple[int, int]] = {}
    for line in self.tape:
      if line['drain']:
        continue
      for island, step in line['steps']:
        key = (island, line['fragment'])
        first.setdefault(key, step)
        count = last.get(key, (0, -1))[1] + 1
        last[key] = (step, count)
    result: dict[int, float] = {}
    for island in range(self.settings.islands):
      spans = [
        (last[key][0] - first[key]) / last[key][1]
        for key in first
        if key[0] == island and last[key][1] > 0
      ]
      if spans:
        result[island] = sum(spans) / len(spans)
    return result
