"""A syncer, its islands, their links and disks, in virtual time.

The machines of `protocol/` run as they are. The scenario says how long things
take and what goes wrong; observers are told of every event.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import syncer_state as s
from diloco_jax.simulation import contents as contents_lib
from diloco_jax.simulation.checking import Observer
from diloco_jax.simulation.host import Clock
from diloco_jax.simulation.host import Host
from diloco_jax.simulation.island_host import IslandHost
from diloco_jax.simulation.kernel import Kernel
from diloco_jax.simulation.network import Network
from diloco_jax.simulation.scenario import Scenario
from diloco_jax.simulation.storage import Checkpoints
from diloco_jax.simulation.storage import Disk
from diloco_jax.simulation.storage import TapeFile
from diloco_jax.simulation.striking import Striker
from diloco_jax.simulation.syncer_host import Snapshot
from diloco_jax.simulation.syncer_host import SyncerHost

SLICE_S = 5.0
CALLBACKS_MAX = 2_000_000  # of one run: a storm of messages ends here
RELAUNCH_S = 3.0


class Contents(Protocol):
  """Makes the arrays behind each process."""

  def island(
    self, index: int, saved: Any | None
  ) -> contents_lib.IslandContents: ...

  def syncer(self, saved: Any | None) -> contents_lib.SyncerContents: ...


class Timing:
  """Handles only."""

  def __init__(self, fragments: int):
    self._fragments = fragments

  def island(
    self, index: int, saved: Any | None
  ) -> contents_lib.IslandContents:
    del index
    return contents_lib.TimingIsland(self._fragments, saved)

  def syncer(self, saved: Any | None) -> contents_lib.SyncerContents:
    return contents_lib.TimingSyncer(self._fragments, saved)


class World:
  """One simulated run."""

  def __init__(
    self,
    scenario: Scenario,
    observers: Sequence[Observer] = (),
    contents: Contents | None = None,
    on_fault: Callable[[Any, str], None] | None = None,
  ):
    self.scenario = scenario
    self.settings = scenario.settings
    self.observers = tuple(observers)
    self.events = 0
    self.faults: dict[str, int] = {}
    self.kernel = Kernel(scenario.seed)
    self._rng = self.kernel.stream('delays')
    self._on_fault = on_fault
    self._contents = contents or Timing(scenario.settings.fragments)
    self.network = Network(
      scenario.network, self.kernel, scenario.settings.sizes, self.fault
    )
    self.network.to_syncer = lambda *args: self.syncer.receive(*args)
    self.network.tell_syncer = self._tell_syncer
    self.tape = TapeFile()
    self.snapshot: Snapshot | None = None
    self._disks: dict[int, Disk] = {}
    self.checkpoints = [Checkpoints() for _ in range(self.settings.islands)]
    self._lives = 0
    self._syncer_clock = self._clock()
    self.syncer = SyncerHost(
      self, 0, self._syncer_clock, self._contents.syncer(None)
    )
    self.syncer.begin()
    self.islands: dict[int, IslandHost] = {}  # the newest process of each
    self.striker = Striker(self)
    for index in range(self.settings.islands):
      if index not in self.striker.late:
        self.launch(index)
    self.striker.schedule()

  # Chance.

  def delay(self, mean: float) -> float:
    return self._rng.uniform(0.0, 2 * mean) if self.scenario.jitter else mean

  def _clock(self) -> Clock:
    most = self.scenario.clocks_differ_s
    reads = self._rng.uniform(0.0, most) if most else self.kernel.now
    return Clock(self.kernel.now, reads)

  # Watching.

  def watched(
    self, host: Host, old: Any, event: Any, new: Any,
    actions: tuple[a.Action, ...],
  ) -> None:  # fmt: skip
    self.events += 1
    for observer in self.observers:
      observer.on_react(self, host.who, host.life, old, event, new, actions)

  def fault(self, kind: str) -> None:
    """A fault strikes now."""
    self.faults[kind] = self.faults.get(kind, 0) + 1
    if self._on_fault is not None:
      self._on_fault(self, kind)

  def crashed(self, host: Host) -> None:
    for observer in self.observers:
      observer.on_crash(self, host.who)

  # Machines.

  def disk(self, index: int) -> Disk:
    if index not in self._disks:
      self._disks[index] = Disk(
        self.scenario.disk, self.kernel.stream(f'disk/{index}')
      )
    return self._disks[index]

  def launch(self, index: int, *, from_checkpoint: bool = False) -> IslandHost:
    """Start a process of an island, which replaces the one before it."""
    self._lives += 1
    saved = self.checkpoints[index].newest if from_checkpoint else None
    contents = self._contents.island(index, saved.arrays if saved else None)
    host = IslandHost(self, index, self._lives, self._clock(), contents, saved)
    self.islands[index] = host
    for observer in self.observers:
      observer.on_start(self, host.who)
    host.after(self.network.uniform(1.0), host.connect)
    return host

  def crash_island(self, host: IslandHost) -> None:
    """It dies, and comes back if it has no successor yet."""
    host.die()
    if self.islands[host.index] is host:
      self.kernel.after(RELAUNCH_S, lambda: self._relaunch(host))

  def crash_syncer(self, keep: int | None = None) -> None:
    """The syncer dies; so many lines beyond the durable ones are on disk."""
    if not self.syncer.alive or self.finished:
      return
    self.syncer.end()
    self.crashed(self.syncer)
    pending = len(self.tape.lines) - self.tape.durable
    self.tape.crash(self._rng.randint(0, pending) if keep is None else keep)
    for connection in list(self.network.connections.values()):
      self.network.end(connection)
    self.kernel.after(self.striker.outage_s(), self._restart_syncer)

  def _restart_syncer(self) -> None:
    self.syncer = SyncerHost(
      self,
      self.syncer.life + 1,
      self._syncer_clock,
      self._contents.syncer(self.snapshot.arrays if self.snapshot else None),
    )
    for observer in self.observers:
      observer.on_start(self, 'syncer')
    self.syncer.begin()
    # Whoever was told that the run is at its end may be needed again.
    for host in list(self.islands.values()):
      if host.stopped == 'finished' and host.index not in self.striker.away:
        self.kernel.after(RELAUNCH_S, lambda x=host: self._relaunch(x))

  def _tell_syncer(self, connection: Any) -> None:
    syncer = self.syncer
    if not self.finished:
      syncer.do(
        lambda: syncer.feed(a.PeerLost(syncer.now(), connection.name, 'gone'))
      )

  def on_stopped(self, host: IslandHost) -> None:
    """A process that stopped for no good reason is started again."""
    if host is not self.islands[host.index] or host.stopped == 'finished':
      return
    if host.index in self.striker.away:
      return
    self.kernel.after(RELAUNCH_S, lambda: self._relaunch(host))

  def _relaunch(self, host: IslandHost) -> None:
    if self.islands[host.index] is host and not self.finished:
      self.launch(host.index, from_checkpoint=True)

  # Running.

  @property
  def finished(self) -> bool:
    return bool(self.syncer.state.phase == s.FINISHED)

  def run(self, until: float) -> None:
    self.kernel.run(until, CALLBACKS_MAX)

  def run_to_end(self) -> None:
    """Until the run is over, or for so long that it must be stuck."""
    until = 0.0
    while not self.finished and until < self.scenario.deadline_s:
      until += SLICE_S
      self.run(until)
    if self.finished:
      self.run(until + 60.0)  # whoever is still there hears of it
