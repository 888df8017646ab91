"""Both machines in virtual time, under every fault that a plan names.

Drivers and network are written apart from `diloco_jax.simulation`; they carry
sets of steps where real ones carry arrays, and `chaos_ledger` looks at them.
"""

import dataclasses
import hashlib

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import invariants
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import syncer as syncer_machine
from diloco_jax.protocol import syncer_state as s
from diloco_jax.simulation.kernel import Kernel
from tests.protocol import chaos_ledger
from tests.protocol.chaos_island import SYNCER
from tests.protocol.chaos_island import Process
from tests.protocol.chaos_island import Timers


class ChaosWorld:
  """A syncer, its islands, and what goes wrong between them."""

  def __init__(self, plan):
    self.plan, self.settings = plan, plan.settings
    self.kernel = Kernel(plan.seed)
    self._streams, self._order, self._hash = {}, {}, hashlib.sha256()
    self.theta = chaos_ledger.Theta(plan.settings.sizes)
    self.processes_made = 0
    self.conns, self.cut, self.stops, self.notes = {}, {}, [], []
    self.log = None  # a list: keep the whole trace
    self.events, self.handles_made, self.handles = 0, 1000, {}
    self.flying = self.flying_max = self.handles_max = 0
    self.timers = Timers(
      self.kernel, lambda name: self.feed(a.TimerFired(self.kernel.now, name))
    )
    self.syncer, actions = syncer_machine.begin(
      syncer_machine.initial(plan.settings), 0.0
    )
    self.perform_all(actions)
    values = [self.keep(('value', p)) for p in range(plan.settings.fragments)]
    digests = tuple(f'd{p}' for p in range(plan.settings.fragments))
    self.kernel.at(
      0.3, lambda: self.feed(a.Seeded(self.kernel.now, digests, tuple(values)))
    )
    self.everyone = []
    self.current = {}
    for index in range(plan.settings.islands):
      self.launch(index)
    self.schedule_faults()

  # Randomness, one stream a purpose.

  def stream(self, name):
    if name not in self._streams:
      self._streams[name] = self.kernel.stream(name)
    return self._streams[name]

  def draw(self, name, most):
    return self.stream(name).uniform(0, most)

  def chance(self, name, share):
    if self.kernel.now > self.plan.until:
      return False
    return self.stream(name).random() < share

  def noisy(self, name, mean, cv):
    if not cv:
      return mean
    shape = 1 / cv**2
    return self.stream(name).gammavariate(shape, mean / shape)

  def trace(self, who, what):
    text = f'{self.kernel.now:.6f} {who} {what!r}'
    self._hash.update(text.encode())
    if self.log is not None:
      self.log.append(text)
    self.events += 1

  @property
  def digest(self):
    return self._hash.hexdigest()

  @property
  def finished(self):
    return self.syncer.phase == s.FINISHED

  # Faults.

  def launch(self, index, step=0):
    process = Process(self, index, step)
    self.everyone.append(process)
    self.current[index] = process
    self.kernel.after(self.draw('launch', 1.0), process.connect)

  def schedule_faults(self):
    kernel = self.kernel
    for when, index, back, zombie, checkpoint in self.plan.kills:
      kernel.at(
        when,
        lambda x=index, b=back, z=zombie, c=checkpoint: self.kill(x, b, z, c),
      )
    for start, end, index, way in self.plan.cuts:
      for name in ('up', 'down') if way == 'both' else (way,):
        key = (index, name)
        kernel.at(start, lambda k=key: self.cut.update({k: self.kernel.now}))
        kernel.at(end, lambda k=key: self.heal(k))
    for when, index, gap in self.plan.reconnects:
      kernel.at(when, lambda x=index, g=gap: self.reconnect(x, g))
    for when, index, gap in self.plan.pauses:
      kernel.at(when, lambda x=index, g=gap: self.pause(x, g))

  def kill(self, index, back, zombie, checkpoint):
    process = self.current[index]
    step = process.step // 2 if checkpoint else 0
    if not zombie:
      process.die()
    self.kernel.after(back, lambda: self.launch(index, step))

  def heal(self, key):
    """Streams do not survive a cut: they come back as new connections."""
    self.cut.pop(key, None)
    if self.plan.streams:
      self.reconnect(key[0], 0.1)

  def reconnect(self, index, gap):
    process = self.current[index]
    process.disconnect()
    self.kernel.after(gap, process.connect)

  def pause(self, index, gap):
    process = self.current[index]
    process.pause(self.kernel.now + gap)

  # Network.

  def lost(self, conn):
    self.conns.pop(conn, None)
    self.kernel.after(
      self.draw('notice', 3.0),
      lambda: self.feed(a.PeerLost(self.kernel.now, conn, 'reset')),
    )

  def transmit(self, conn, way, message, content):
    process = self.conns.get(conn)
    if process is None or (process.index, way) in self.cut:
      return
    copies = 1 + self.chance('duplicate', self.plan.duplicate)
    for _ in range(copies):
      if self.chance('loss', self.plan.loss):
        continue
      delay = self.noisy('latency', self.plan.latency_s, 0.5)
      if self.chance('tail', self.plan.tail):
        delay += self.draw('long', 40 * self.plan.latency_s)
      at = self.kernel.now + delay
      if self.plan.streams:
        channel = (conn, way, isinstance(message, m.BULK))
        at = self._order[channel] = max(at, self._order.get(channel, 0.0))
      self.flying += 1
      self.flying_max = max(self.flying_max, self.flying)
      self.kernel.at(at, lambda: self.deliver(conn, way, message, content))

  def deliver(self, conn, way, message, content):
    self.flying -= 1
    process = self.conns.get(conn)
    if process is None or (way == 'up' and self.finished):
      return
    if way == 'down':
      process.receive(message, content)
      return
    if content is not None:
      message = dataclasses.replace(message, payload=self.keep(content))
    self.feed(a.Received(self.kernel.now, conn, message))

  # The syncer's driver.

  def keep(self, content):
    self.handles_made += 1
    self.handles[self.handles_made] = content
    self.handles_max = max(self.handles_max, len(self.handles))
    return self.handles_made

  def feed(self, event):
    old = self.syncer
    self.trace(SYNCER, event)
    self.syncer, actions = syncer_machine.react(old, event)
    invariants.check_syncer(old, self.syncer)
    self.perform_all(actions)

  def perform_all(self, actions):
    for action in actions:
      self.trace(SYNCER, action)
      self.perform(action)

  def perform(self, action):
    kernel = self.kernel
    match action:
      case a.Send():
        content = None
        if isinstance(action.message, m.BULK):
          content = self.handles[action.message.payload]
        self.transmit(action.peer, 'down', action.message, content)
      case a.SetTimer():
        self.timers.set(action.name, action.at)
      case a.Inspect():
        assert action.handle in self.handles
        reason = 'nonfinite' if self.chance('sick', self.plan.sick) else ''
        event = (action.round, action.island, action.incarnation, reason, 1.0)
        kernel.after(
          self.draw('inspect', 0.1),
          lambda: self.feed(a.Inspected(kernel.now, *event)),
        )
      case a.Merge():
        kernel.after(self.plan.merge_s, lambda: self.merged(action))
      case a.WriteTape():
        self.write(action)
      case a.Export():
        kernel.after(0.1, lambda: self.feed(a.Exported(kernel.now, 'digest')))
      case a.Note():
        self.notes.append((kernel.now, action.kind, dict(action.fields)))
      case a.Release():
        del self.handles[action.handle]
      case a.Stop():
        pass
      case _:
        raise TypeError(f'{action!r}')

  def merged(self, action):
    self.deltas = [self.handles[x.handle] for x in action.inputs]
    digest = f'd{action.fragment}-{action.version.merges}'
    handle = self.keep(('value', action.fragment))
    self.merging = (action.round, self.deltas)
    self.feed(
      a.Merged(
        self.kernel.now, action.round, digest, digest, handle, self.plan.merge_s
      )
    )

  def write(self, action):
    if action.key.startswith('merge:'):
      line = dict(action.fields)
      number, deltas = self.merging
      assert line['round'] == number
      self.theta.add(line, deltas)
    self.kernel.after(
      self.draw('tape', 0.05),
      lambda: self.feed(a.TapeWritten(self.kernel.now, action.key)),
    )

  # Running.

  def run(self):
    """Until the run is over, or for so long that it must be stuck."""
    until = 0.0
    while until < self.plan.deadline and not self.finished:
      until += 5.0
      self.kernel.run(until, 400_000)
    if self.finished:
      self.kernel.run(until + 60.0, 400_000)
    return self
