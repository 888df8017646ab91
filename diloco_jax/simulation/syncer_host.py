"""The syncer's process in virtual time."""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from diloco_jax.chaos import plan
from diloco_jax.protocol import actions as a
from diloco_jax.protocol import invariants
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import recovery
from diloco_jax.protocol import syncer as machine
from diloco_jax.protocol import syncer_state as s
from diloco_jax.simulation import network
from diloco_jax.simulation.contents import SyncerContents
from diloco_jax.simulation.contents import Theta
from diloco_jax.simulation.host import Clock
from diloco_jax.simulation.host import Host

if TYPE_CHECKING:
  from diloco_jax.simulation.world import World


class Snapshot(NamedTuple):
  """Θ and b on disk, with what they are."""

  held: tuple[tuple[m.Version, str], ...]  # version and digest
  arrays: Any


class SyncerHost(Host):
  """One process of the syncer."""

  def __init__(
    self, world: 'World', life: int, clock: Clock, contents: SyncerContents
  ):
    super().__init__(
      world, 'syncer', life, clock, machine.react, invariants.check_syncer
    )
    self.contents = contents
    self.dies_taping = ''
    self._ahead: dict[int, m.Version] = {}  # merged in this life
    self.perform |= {
      a.Send: self._send,
      a.Note: self._note,
      a.WriteTape: self._write,
      a.Inspect: self._inspect,
      a.Merge: self._merge,
      a.TakeSeeds: self._take_seeds,
      a.TakeAnchor: self._take_anchor,
      a.Restore: self._restore,
      a.SaveSnapshot: self._save,
      a.Export: self._export,
      a.Stop: lambda action: None,
    }

  def begin(self) -> None:
    """Read what earlier lives have left, and start."""
    world = self.world
    lines = world.tape.read()
    memory, snapshot = None, world.snapshot
    incarnation = 1
    if self.life:
      memory = recovery.read_tape(world.settings, lines)
      incarnation = memory.incarnation + 1
    old = machine.initial(
      world.settings,
      incarnation=incarnation,
      has_task=world.scenario.has_task,
      memory=memory,
      snapshot=snapshot.held if snapshot is not None else None,
    )
    self.state, actions = machine.begin(old, self.now())
    world.watched(self, old, None, self.state, actions)
    self.perform_all(actions)
    if old.phase == s.SEEDING and world.scenario.has_task:
      self.after(0.1, lambda: self._seeded(None))

  # Messages.

  def receive(
    self, connection: network.Connection, message: m.Message, value: Any
  ) -> None:
    def received() -> None:
      got = message
      if value is not None:
        got = dataclasses.replace(message, payload=self.keep(value))
      self.feed(a.Received(self.now(), connection.name, got))

    self.do(received)

  def _send(self, action: a.Send) -> None:
    message, value = action.message, None
    if type(message) in network.BULK:
      value = self.values[message.payload]
    net = self.world.network
    net.send(
      net.connections.get(action.peer), network.DOWN, message, value
    )  # fmt: skip

  # The tape.

  def _note(self, action: a.Note) -> None:
    self.world.tape.append(self.now(), action.kind, action.fields)

  def _write(self, action: a.WriteTape) -> None:
    world = self.world
    kind = action.key.partition(':')[0]
    count = world.tape.append(self.now(), kind, action.fields)
    if kind == 'merge' and self.dies_taping:
      self._die_taping()
      return
    disk = world.disk(plan.SYNCER)
    took = disk.takes_s(world.scenario.disk.tape_s, self.kernel.now)
    self.after(took, lambda: self._written(action.key, count))

  def _written(self, key: str, count: int) -> None:
    full_s = self.world.disk(plan.SYNCER).full_until - self.kernel.now
    if full_s > 0:  # a line waits for room
      self.after(full_s, lambda: self._written(key, count))
      return
    self.world.tape.sync(count)
    self.feed(a.TapeWritten(self.now(), key))

  def _die_taping(self) -> None:
    kind, self.dies_taping = self.dies_taping, ''
    self.world.fault(kind)
    tape = self.world.tape
    if kind == plan.TAPE_WITHOUT_MERGE:
      tape.sync(len(tape.lines))
    self.world.crash_syncer(keep=0)

  # Arrays.

  def _seeded(self, values: list[Any] | None) -> None:
    made = self.contents.seed(values)
    self.feed(a.Seeded(self.now(), *self._told(made)))

  def _told(self, made: list[Theta]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return tuple(x.digest for x in made), tuple(
      self.keep(x.value) for x in made
    )

  def _take_seeds(self, action: a.TakeSeeds) -> None:
    values = [self.values[x] for x in action.handles]
    self.after(0.1, lambda: self._seeded(values))

  def _inspect(self, action: a.Inspect) -> None:
    value = self.values[action.handle]

    def inspected() -> None:
      reason, norm = self.contents.inspect(action.fragment, value)
      self.feed(
        a.Inspected(
          self.now(), action.round, action.island, action.incarnation, reason,
          norm,
        )
      )  # fmt: skip

    self.after(self.world.delay(self.world.scenario.compute.stage_s), inspected)

  def _merge(self, action: a.Merge) -> None:
    values = [self.values[x.handle] for x in action.inputs]
    took = self.world.delay(self.world.scenario.compute.merge_s)

    def merged() -> None:
      made = self.contents.merge(action, values)
      self._ahead[action.fragment] = action.version
      self.feed(
        a.Merged(
          self.now(), action.round, made.digest_f32, made.digest,
          self.keep(made.value), took,
        )
      )  # fmt: skip

    self.after(took, merged)

  def _take_anchor(self, action: a.TakeAnchor) -> None:
    value = self.values[action.handle]

    def taken() -> None:
      ok = self.contents.take_anchor(action, value)
      self.feed(a.AnchorTaken(self.now(), action.fragment, action.version, ok))

    self.after(self.world.delay(self.world.scenario.compute.stage_s), taken)

  def _restore(self, action: a.Restore) -> None:
    def restored() -> None:
      made = self.contents.restore(action.orders)
      self.feed(a.Restored(self.now(), *self._told(made)))

    self.after(self.world.delay(self.world.scenario.disk.snapshot_s), restored)

  def _save(self, action: a.SaveSnapshot) -> None:
    world = self.world
    digests, arrays = self.contents.save()
    # A merge may be done whose line is not durable yet: it is in there too.
    versions = tuple(
      self._ahead.get(p, told) for p, told in enumerate(action.versions)
    )
    saved = Snapshot(tuple(zip(versions, digests, strict=True)), arrays)
    disk = world.disk(plan.SYNCER)

    def done() -> None:
      ok = not disk.is_full(self.kernel.now)
      if ok:
        world.snapshot = saved
      self.feed(
        a.SnapshotSaved(
          self.now(), action.number, ok, versions if ok else ()
        )
      )  # fmt: skip

    took = disk.takes_s(world.scenario.disk.snapshot_s, self.kernel.now)
    self.after(took, done)

  def _export(self, action: a.Export) -> None:
    del action
    self.after(
      0.1, lambda: self.feed(a.Exported(self.now(), self.contents.export()))
    )
