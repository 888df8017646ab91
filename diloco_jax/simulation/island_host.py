"""An island's process in virtual time."""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from diloco_jax.chaos import plan
from diloco_jax.protocol import actions as a
from diloco_jax.protocol import invariants
from diloco_jax.protocol import island as machine
from diloco_jax.protocol import island_state as i
from diloco_jax.protocol import messages as m
from diloco_jax.simulation import network
from diloco_jax.simulation.compute import StepTimes
from diloco_jax.simulation.contents import IslandContents
from diloco_jax.simulation.host import Clock
from diloco_jax.simulation.host import Host

if TYPE_CHECKING:
  from diloco_jax.simulation.world import World

SYNCER = 'syncer'
GOES_OUT_S = 8.0  # what a process has sent still goes out after it stopped
SAMPLES_PER_STEP = 4


class Saved(NamedTuple):
  """A checkpoint: the machine's part and the arrays."""

  machine: i.Checkpoint
  arrays: Any


class IslandHost(Host):
  """One process of one island. Its successor is another object."""

  def __init__(
    self, world: 'World', index: int, life: int, clock: Clock,
    contents: IslandContents, saved: Saved | None,
  ):  # fmt: skip
    super().__init__(
      world, f'island/{index}', life, clock, machine.react,
      invariants.check_island,
    )  # fmt: skip
    self.index = index
    self.contents = contents
    self.state = self._first_state(saved)
    self.step, self.tokens = self.state.boundary, self.state.tokens
    self.times = StepTimes(
      world.scenario.compute, index, world.kernel.stream(f'steps/{life}')
    )
    self.connection: network.Connection | None = None
    self.begun = False
    self.stopped = ''
    self.spoil: list[str] = []  # how the next contributions are wrong
    self.dies_saving = ''
    self.dies_donating = False
    self._waiting = False
    self._plan: a.StepPlan | None = None
    self._told = self.step
    self._since = 0.0
    self.perform |= {
      a.Send: self._send,
      a.StepPlan: self._on_plan,
      a.Encode: self._encode,
      a.Stage: self._stage,
      a.DropCapture: lambda action: contents.forget(action.capture),
      a.Begin: self._begin,
      a.GiveSeeds: self._give_seeds,
      a.GiveAnchor: self._give_anchor,
      a.TakeDonation: self._take_donation,
      a.Note: lambda action: None,
      a.Stop: self._stop,
    }

  def _first_state(self, saved: Saved | None) -> i.IslandState:
    settings, nonce = self.world.settings, f'n{self.life}'
    if saved is not None:
      return i.restored(
        settings, saved.machine, nonce=nonce, samples_per_step=SAMPLES_PER_STEP
      )
    return i.initial(
      settings,
      nonce=nonce,
      island=self.index,
      seeds_state=not self.world.scenario.has_task,
      samples_per_step=SAMPLES_PER_STEP,
    )

  # The connection.

  def connect(self) -> None:
    """Try until it is there."""
    if self.stopped or self.connection is not None or self.world.finished:
      return
    net = self.world.network
    made = None
    if self.world.syncer.alive:
      made = net.connect(self.index, self)
    if made is None:
      self.after(0.1 + net.uniform(net.settings.retry_s), self.connect)
      return
    self.connection = made
    self.after(
      net.settings.latency_s,
      lambda: made.open and self.feed(a.PeerFound(self.now(), SYNCER)),
    )

  def on_lost(self, connection: network.Connection) -> None:
    """This end has noticed that a connection is gone."""

    def noticed() -> None:
      if self.connection is connection:
        self.connection = None
        self.feed(a.PeerLost(self.now(), SYNCER, 'gone'))
        self.after(
          self.world.network.uniform(self.world.network.settings.retry_s),
          self.connect,
        )

    self.do(noticed)

  def receive(
    self, connection: network.Connection, message: m.Message, value: Any
  ) -> None:
    def received() -> None:
      if self.connection is not connection:
        return
      got = message
      if value is not None:
        got = dataclasses.replace(message, payload=self.keep(value))
      self.feed(a.Received(self.now(), SYNCER, got))

    self.do(received)

  def _send(self, action: a.Send) -> None:
    message, value = action.message, None
    if type(message) in network.BULK:
      value = self.values[message.payload]
      if self.spoil and type(message) is m.Contribution:
        message, value = self._spoiled(message, value)
    self.world.network.send(self.connection, network.UP, message, value)

  def _spoiled(
    self, message: m.Contribution, value: Any
  ) -> tuple[m.Contribution, Any]:
    if self.spoil[0] == 'stale_base':
      # A wrong base that is newer than the own last merge is no base that
      # anybody could tell from the right one.
      fragments = self.world.syncer.state.fragments
      included = fragments[message.fragment].included if fragments else {}
      own = included.get(message.island)
      if own is None or (own.incarnation, own.version.incarnation) != (
        message.incarnation, message.base.incarnation,
      ):  # fmt: skip
        return message, value
    self.world.fault(plan.BAD_CONTRIBUTION)
    return spoiled(message, value, self.spoil.pop(0))

  # Steps.

  def feed(self, event: a.Event) -> tuple[a.Action, ...]:
    if self.stopped or not self.alive:
      return ()
    self._plan = None
    actions = super().feed(event)
    if self.alive:
      if self._plan is not None:
        self._follow(self._plan)
      elif self._waiting and type(event) is not a.Boundary:
        self.feed(a.Boundary(self.now(), self.step, self.tokens))
    return actions

  def _on_plan(self, action: a.StepPlan) -> None:
    for order in action.adopt:
      self.contents.adopt(order.fragment, order.version)
    for capture in action.capture:
      self.contents.capture(capture.fragment, capture.capture)
    if action.donate:
      self._donate(action.step)
    if action.save:
      self._save(action.save)
    self._plan = action

  def _follow(self, step_plan: a.StepPlan) -> None:
    self._plan = None
    self._waiting = step_plan.wait and self.begun
    if step_plan.stop:
      self.begun = False
      self.leave('finished')
    elif self.begun and not step_plan.wait and self.state.phase == i.TRAINING:
      self._dispatch()

  def _begin(self, action: a.Begin) -> None:
    self.contents.begin(action.start)
    if self.begun:
      return
    self.begun = True
    compute = self.world.scenario.compute
    phase = self.world.network.uniform(compute.step_s)
    self.after(phase, self._dispatch)

  def _dispatch(self) -> None:
    if self.begun:
      self._since = self.kernel.now
      self.after(self.times.next_s(self.kernel.now), self._step_done)

  def _step_done(self) -> None:
    if not self.begun:
      return
    stalled = self.times.stalled_for(self.kernel.now)
    if stalled:
      self.after(stalled, self._step_done)
      return
    self.step += 1
    tokens, loss = self.contents.step(self.step)
    self.tokens += tokens
    took = self.kernel.now - self._since
    finished = (self.step, self.tokens, took, loss)
    lag_s = self.world.scenario.compute.lag_s
    if lag_s:
      self.after(lag_s, lambda: self._finished(*finished))
      self.feed(a.Boundary(self.now(), self.step, self.tokens))
      return
    self.feed(a.Boundary(self.now(), self.step, self.tokens))
    self._finished(*finished)

  def _finished(
    self, step: int, tokens: int, took: float, loss: float | None
  ) -> None:
    if self.alive and step > self._told:
      self._told = step
      self.feed(a.StepsFinished(self.now(), step, tokens, took, loss))

  def leave(self, reason: str) -> None:
    """Close the books on what is trained, and go politely."""
    self._finished(self.step, self.tokens, 0.0, None)
    if self.alive:
      self.feed(a.StopRequested(self.now(), reason))

  def _stop(self, action: a.Stop) -> None:
    self.stopped, self.begun, self._waiting = action.reason, False, False
    self.world.on_stopped(self)
    self.after(GOES_OUT_S, self.die)

  def die(self) -> None:
    """Gone without a word; the other end notices when it notices."""
    if not self.alive:
      return
    self.end()
    self.world.crashed(self)
    if self.connection is not None:
      self.world.network.end(self.connection)

  # Work that takes time.

  def _encode(self, action: a.Encode) -> None:
    took = self.world.delay(self.world.scenario.compute.encode_s)

    def encoded() -> None:
      made = self.contents.delta(action.fragment, action.capture)
      if made is not None:
        value, healthy = made
        self.feed(
          a.Encoded(
            self.now(), action.fragment, action.capture, self.keep(value),
            took, healthy,
          )
        )  # fmt: skip

    self.after(took, encoded)

  def _stage(self, action: a.Stage) -> None:
    value = self.values[action.handle]

    def staged() -> None:
      ok = self.contents.stage(action, value)
      self.feed(
        a.Staged(
          self.now(), action.fragment, action.version, action.base,
          action.capture, action.mode, ok,
        )
      )  # fmt: skip

    self.after(self.world.delay(self.world.scenario.compute.stage_s), staged)

  def _give_seeds(self, action: a.GiveSeeds) -> None:
    del action
    handles = tuple(self.keep(x) for x in self.contents.seeds())
    self.after(0.0, lambda: self.feed(a.SeedsReady(self.now(), handles)))

  def _give_anchor(self, action: a.GiveAnchor) -> None:
    value = self.contents.anchor(action.fragment)
    told = action.fragment, action.version
    self.after(
      self.world.delay(self.world.scenario.compute.encode_s),
      lambda: self.feed(a.AnchorReady(self.now(), *told, self.keep(value))),
    )

  def _donate(self, step: int) -> None:
    digest, value = self.contents.donation()

    def donated() -> None:
      self.feed(a.Donated(self.now(), step, digest, self.keep(value)))
      if self.dies_donating:
        self.world.fault(plan.DONOR_LEAVES)
        self.world.crash_island(self)

    self.after(self.world.delay(self.world.scenario.compute.encode_s), donated)

  def _take_donation(self, action: a.TakeDonation) -> None:
    value = self.values[action.handle]

    def taken() -> None:
      ok = self.contents.take_donation(action.digest, value)
      self.feed(a.DonationTaken(self.now(), ok))

    self.after(self.world.delay(self.world.scenario.compute.stage_s), taken)

  def _save(self, number: int) -> None:
    world = self.world
    saved = Saved(i.checkpoint(self.state), self.contents.save())
    disk = world.disk(self.index)
    took = disk.takes_s(world.scenario.disk.checkpoint_s, self.kernel.now)
    if self.dies_saving:
      kind, self.dies_saving = self.dies_saving, ''
      self.after(took / 2, lambda: self._die_saving(kind))

    def done() -> None:
      ok = not disk.is_full(self.kernel.now)
      if ok:
        world.checkpoints[self.index].commit(saved)
      self.feed(a.CheckpointSaved(self.now(), number, ok))

    self.after(took, done)

  def _die_saving(self, kind: str) -> None:
    self.world.fault(kind)
    if kind == plan.MISSING_CHECKPOINT:
      self.world.checkpoints[self.index].remove_all()
    self.world.crash_island(self)


def spoiled(
  c: m.Contribution, value: Any, how: str
) -> tuple[m.Contribution, Any]:
  """A contribution as an island with a fault would send it."""
  if how == 'layout':
    return dataclasses.replace(c, fingerprint='another'), value
  if how == 'timeline':
    base = c.base._replace(merges=c.base.merges + 1000)
    return dataclasses.replace(c, base=base), value
  if how == 'stale_base':
    base = c.base._replace(merges=0)
    return dataclasses.replace(c, base=base), value
  return c, ('spoiled', how, value)
