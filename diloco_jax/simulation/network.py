"""Links between islands and the syncer: slow, lossy, cut, or broken.

Either connections are streams, as in production: in order on each of their
two channels, and lost only as a whole. Or every message is on its own: lost,
repeated and overtaken one by one, which asks more of the protocol.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from diloco_jax.chaos import plan
from diloco_jax.protocol import messages as m
from diloco_jax.simulation.compute import noisy
from diloco_jax.simulation.kernel import Kernel

UP, DOWN = 'up', 'down'
BULK = frozenset(m.BULK)


@dataclasses.dataclass(frozen=True)
class NetworkSettings:
  """Seconds of virtual time."""

  streams: bool = True
  latency_s: float = 0.05  # one way, each message
  latency_cv: float = 0.0
  bandwidth: float = 0.0  # parameters a second, each way of a link; 0: any
  notice_s: float = 2.0  # an end notices within this that the other is gone
  keepalive_s: float = 4.0  # a cut that lasts this long ends a connection
  retry_s: float = 2.0  # between two attempts to connect, at most
  late_s: float = 5.0  # a late message takes this much longer, at most


class Connection:
  """One connection of one island process with one syncer process."""

  __slots__ = ('index', 'island', 'name', 'open', 'order', 'stalled')

  def __init__(self, name: str, index: int, island: Any):
    self.name = name
    self.index = index
    self.island = island
    self.open = True
    self.order: dict[tuple[str, bool], float] = {}
    self.stalled: list[tuple[str, m.Message, Any]] = []


class Link:
  """What is wrong between one island and the syncer."""

  def __init__(self) -> None:
    self.cuts = {UP: 0, DOWN: 0}
    self.busy = {UP: 0.0, DOWN: 0.0}  # bulk, until
    self.rates: dict[str, tuple[int, float, str]] = {}  # one in, until, how
    self.lose_broadcasts = 0


class Network:
  """All links. `deliver` and `lost` are the two ends of the world."""

  def __init__(
    self,
    settings: NetworkSettings,
    kernel: Kernel,
    sizes: tuple[int, ...],
    on_fault: Callable[[str], None],
  ):
    self.settings = settings
    self._kernel = kernel
    self._sizes = sizes
    self._on_fault = on_fault
    self._rng = kernel.stream('network')
    self.links: dict[int, Link] = {}
    self.connections: dict[str, Connection] = {}
    self._made = 0
    self.to_syncer: Callable[[Connection, m.Message, Any], None]
    self.tell_syncer: Callable[[Connection], None]

  def link(self, index: int) -> Link:
    if index not in self.links:
      self.links[index] = Link()
    return self.links[index]

  def uniform(self, most: float) -> float:
    return self._rng.uniform(0.0, most)

  # Connections.

  def connect(self, index: int, island: Any) -> Connection | None:
    """A new connection, or None where a cut is in the way."""
    link = self.link(index)
    if link.cuts[UP] or link.cuts[DOWN]:
      return None
    self._made += 1
    connection = Connection(f'c{self._made}', index, island)
    self.connections[connection.name] = connection
    return connection

  def end(self, connection: Connection) -> None:
    """It is over; each end notices in its own time."""
    if not connection.open:
      return
    connection.open = False
    connection.stalled.clear()
    del self.connections[connection.name]
    notice_s = self.settings.notice_s
    self._kernel.after(
      self.uniform(notice_s), lambda: connection.island.on_lost(connection)
    )
    self._kernel.after(
      self.uniform(notice_s), lambda: self.tell_syncer(connection)
    )

  def of(self, index: int) -> list[Connection]:
    return [x for x in self.connections.values() if x.index == index]

  # Cuts.

  def cut(self, index: int, *ways: str) -> None:
    link = self.link(index)
    for way in ways:
      link.cuts[way] += 1
    if self.settings.streams:
      for connection in self.of(index):
        self._kernel.after(
          self.settings.keepalive_s, lambda c=connection: self._still_cut(c)
        )

  def _still_cut(self, connection: Connection) -> None:
    link = self.link(connection.index)
    if link.cuts[UP] or link.cuts[DOWN]:
      self.end(connection)

  def heal(self, index: int, *ways: str) -> None:
    link = self.link(index)
    for way in ways:
      link.cuts[way] -= 1
    for connection in self.of(index):
      stalled, connection.stalled = connection.stalled, []
      for way, message, value in stalled:
        self.send(connection, way, message, value)

  # Messages.

  def send(
    self, connection: Connection | None, way: str, message: m.Message,
    value: Any,
  ) -> None:  # fmt: skip
    """Put a message on its way; whether it arrives is another matter."""
    if connection is None or not connection.open:
      return
    link = self.links[connection.index]
    if link.cuts[way]:
      if self.settings.streams:
        connection.stalled.append((way, message, value))
      return
    if link.lose_broadcasts and type(message) is m.Broadcast:
      link.lose_broadcasts -= 1
      self._on_fault(plan.LOST_BROADCAST)
      return
    delay = noisy(self._rng, self.settings.latency_s, self.settings.latency_cv)
    bulk = type(message) in BULK
    if link.rates:
      for kind in self._faults_of(link, bulk):
        if kind == plan.LOSE or kind == 'frame':
          if self.settings.streams or kind == 'frame':
            self.end(connection)
          return
        if kind == 'value':
          value = ('corrupt', value)
        elif kind == plan.DUPLICATE:
          self._travel(connection, way, message, value, 2 * delay, bulk)
        else:
          delay += self.uniform(self.settings.late_s)
    if bulk and self.settings.bandwidth:
      now = self._kernel.now
      size = (
        self._sizes[message.fragment]
        if hasattr(message, 'fragment')
        else (sum(self._sizes))
      )
      begin = max(now, link.busy[way])
      link.busy[way] = begin + size / self.settings.bandwidth
      delay += link.busy[way] - now
    self._travel(connection, way, message, value, delay, bulk)

  def _faults_of(self, link: Link, bulk: bool) -> list[str]:
    """What strikes this message."""
    now, found = self._kernel.now, []
    for kind, (one_in, until, how) in list(link.rates.items()):
      if now >= until:
        del link.rates[kind]
      elif (kind != plan.CORRUPT or bulk) and not self._rng.randrange(one_in):
        self._on_fault(kind)
        found.append(how if kind == plan.CORRUPT else kind)
    return found

  def _travel(
    self, connection: Connection, way: str, message: m.Message, value: Any,
    delay: float, bulk: bool,
  ) -> None:  # fmt: skip
    at = self._kernel.now + delay
    if self.settings.streams:
      channel = (way, bulk)
      at = connection.order[channel] = max(at, connection.order.get(channel, 0))

    def arrive() -> None:
      if not connection.open:
        return
      if way == UP:
        self.to_syncer(connection, message, value)
      else:
        connection.island.receive(connection, message, value)

    self._kernel.at(at, arrive)
