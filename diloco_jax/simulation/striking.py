"""Lets the faults of a plan strike a world."""

from typing import TYPE_CHECKING

from diloco_jax.chaos import plan
from diloco_jax.simulation import network

if TYPE_CHECKING:
  from diloco_jax.simulation.host import Host
  from diloco_jax.simulation.island_host import IslandHost
  from diloco_jax.simulation.world import World

_EMPTY, _NEVER = 'empty', 'never'


class Striker:
  """Performs one plan."""

  def __init__(self, world: 'World'):
    self._world = world
    self._rng = world.kernel.stream('faults')
    self._outage_s = 1.0
    faults = world.scenario.faults
    self.late = {x.target for x in faults if x.kind == plan.JOIN_LATE}
    self.away: set[int] = set()  # islands that a fault keeps away

  def schedule(self) -> None:
    for fault in self._world.scenario.faults:
      at = fault.lasts if fault.kind == plan.JOIN_LATE else fault.at
      self._world.kernel.at(at, lambda x=fault: self._strike(x))
    ends_at = plan.ends_at(self._world.scenario.faults)
    self._world.kernel.at(ends_at, self._disarm)

  def outage_s(self) -> float:
    """How long the syncer is away."""
    return self._outage_s

  def _strike(self, fault: plan.Fault) -> None:
    if not self._world.finished:
      getattr(self, f'_{fault.kind}')(fault)

  # Who is meant.

  def _island(self, fault: plan.Fault) -> 'IslandHost | None':
    host = self._world.islands.get(fault.target)
    return host if host is not None and host.alive else None

  def _host(self, fault: plan.Fault) -> 'Host | None':
    if fault.target != plan.SYNCER:
      return self._island(fault)
    return self._world.syncer if self._world.syncer.alive else None

  def _until(self, fault: plan.Fault) -> float:
    return self._world.kernel.now + fault.lasts

  def _others_alive(self, index: int) -> bool:
    return any(
      x.alive and not x.stopped and k != index
      for k, x in self._world.islands.items()
    )

  # Processes.

  def _back(self, index: int, how: str, after: float) -> None:
    """Start an island again; some never come back if others are there."""
    if how == _NEVER and self._others_alive(index):
      self.away.add(index)
      return

    def launch() -> None:
      self.away.discard(index)
      if not self._world.finished:
        self._world.launch(index, from_checkpoint=how != _EMPTY)

    self._world.kernel.after(after, launch)

  def _kill(self, fault: plan.Fault, host: 'IslandHost', kind: str) -> None:
    self._world.fault(kind)
    host.die()
    if self._world.islands[host.index] is host:
      self._back(host.index, fault.how, fault.lasts)

  def _crash_island(self, fault: plan.Fault) -> None:
    host = self._island(fault)
    if host is not None:
      host.crash = lambda: self._kill(fault, host, fault.kind)
      self._crash_in(host, fault.count)

  def _crash_syncer(self, fault: plan.Fault) -> None:
    self._outage_s = fault.lasts
    syncer = self._world.syncer
    if syncer.alive:
      syncer.crash = lambda: self._end_syncer(fault.kind)
      self._crash_in(syncer, fault.count)

  def _end_syncer(self, kind: str) -> None:
    if not self._world.finished:
      self._world.fault(kind)
      self._world.crash_syncer()

  def _crash_in(self, host: 'Host', actions: int) -> None:
    if actions == 0:
      host.crash()
    else:
      host.crash_in = actions

  def _crash_both(self, fault: plan.Fault) -> None:
    self._outage_s = fault.lasts
    host, syncer = self._island(fault), self._world.syncer
    if host is not None and syncer.alive:
      self._kill(fault, host, fault.kind)
      self._world.crash_syncer()

  def _stale_incarnation(self, fault: plan.Fault) -> None:
    host = self._island(fault)
    if host is not None:
      self._world.fault(fault.kind)
      host.pause(self._until(fault))
      self._world.launch(host.index, from_checkpoint=self._rng.random() < 0.5)

  def _no_progress(self, fault: plan.Fault) -> None:
    host = self._island(fault)
    if host is not None:
      self._world.fault(fault.kind)
      host.times.stall(self._until(fault))

  def _pause(self, fault: plan.Fault) -> None:
    host = self._host(fault)
    if host is not None:
      self._world.fault(fault.kind)
      host.pause(self._until(fault))

  def _straggler(self, fault: plan.Fault) -> None:
    host = self._island(fault)
    if host is not None:
      self._world.fault(fault.kind)
      host.times.straggle(fault.count, self._until(fault))

  def _clock_rate(self, fault: plan.Fault) -> None:
    host = self._host(fault)
    if host is not None:
      self._world.fault(fault.kind)
      host.clock.set_rate(self._world.kernel.now, float(fault.how))

  def _join_late(self, fault: plan.Fault) -> None:
    if fault.target not in self._world.islands:
      self._world.fault(fault.kind)
      self._world.launch(fault.target)

  def _leave(self, fault: plan.Fault) -> None:
    host = self._island(fault)
    if host is None or host.stopped or host.stands:
      return
    self._world.fault(fault.kind)
    self.away.add(host.index)
    host.leave('leaves')
    self._back(host.index, fault.how, fault.lasts)

  def _donor_leaves(self, fault: plan.Fault) -> None:
    del fault
    for host in self._world.islands.values():
      host.dies_donating = True

  # Disks.

  def _torn_checkpoint(self, fault: plan.Fault) -> None:
    host = self._island(fault)
    if host is not None:
      host.dies_saving = fault.kind

  _missing_checkpoint = _torn_checkpoint

  def _tape_without_merge(self, fault: plan.Fault) -> None:
    self._outage_s = min(fault.lasts, 10.0)
    self._world.syncer.dies_taping = fault.kind

  _merge_without_tape = _tape_without_merge

  def _disk_full(self, fault: plan.Fault) -> None:
    self._world.fault(fault.kind)
    disk = self._world.disk(fault.target)
    disk.full_until = max(disk.full_until, self._until(fault))

  def _slow_disk(self, fault: plan.Fault) -> None:
    self._world.fault(fault.kind)
    self._world.disk(fault.target).slow(fault.count, self._until(fault))

  # Messages.

  def _rate(self, fault: plan.Fault) -> None:
    link = self._world.network.link(fault.target)
    link.rates[fault.kind] = (fault.count, self._until(fault), fault.how)

  _lose = _delay = _duplicate = _reorder = _corrupt = _rate

  def _lost_broadcast(self, fault: plan.Fault) -> None:
    self._world.network.link(fault.target).lose_broadcasts += fault.count

  def _cut(self, fault: plan.Fault, *ways: str) -> None:
    self._world.fault(fault.kind)
    net = self._world.network
    net.cut(fault.target, *ways)
    self._world.kernel.after(fault.lasts, lambda: net.heal(fault.target, *ways))

  def _partition(self, fault: plan.Fault) -> None:
    self._cut(fault, network.UP, network.DOWN)

  def _one_way_cut(self, fault: plan.Fault) -> None:
    self._cut(fault, fault.how)

  # Contents.

  def _bad_contribution(self, fault: plan.Fault) -> None:
    host = self._island(fault)
    if host is not None:
      host.spoil += [fault.how] * fault.count

  def _disarm(self) -> None:
    """The last fault is over: what still waits for its moment never comes."""
    self._world.syncer.dies_taping = ''
    for host in self._world.islands.values():
      host.dies_saving, host.dies_donating, host.spoil = '', False, []
    for link in self._world.network.links.values():
      link.lose_broadcasts = 0
