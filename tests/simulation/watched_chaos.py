"""The chaos world of tests/protocol, with restarts of the syncer, watched.

It is written apart from `diloco_jax.simulation`: here the checkers and the
planted bugs are tried against a world that shares nothing with theirs.
"""

import dataclasses
import json
import random

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import invariants
from diloco_jax.protocol import island as island_machine
from diloco_jax.protocol import island_state
from diloco_jax.protocol import records
from diloco_jax.protocol import recovery
from diloco_jax.protocol import syncer as syncer_machine
from diloco_jax.protocol import syncer_state as s
from diloco_jax.simulation import liveness
from diloco_jax.simulation.checkers import Checkers
from tests.protocol import chaos_island
from tests.protocol import chaos_plan
from tests.protocol import chaos_world

SAMPLES = 4  # per step
QUIET_S = 30.0  # what has struck before the last fault is over after this


class Process(chaos_island.Process):
  """An island that saves, gives its anchors and donates."""

  def __init__(self, world, index, saved=None):
    super().__init__(world, index, saved[0].step if saved else 0)
    self.life = world.processes_made
    self.digests = [''] * world.settings.fragments
    if saved is None:
      self.state = self.state._replace(samples_per_step=SAMPLES)
      return
    self.state = island_state.restored(
      world.settings, saved[0], nonce=self.nonce, samples_per_step=SAMPLES
    )
    self.tokens = self.state.tokens
    self.local.anchor = list(saved[0].versions)
    self.digests = list(saved[0].digests)
    self.local.pending = [set(x) for x in saved[1]]

  def feed(self, event):
    kernel = self.world.kernel
    if not self.alive:
      return
    if self.asleep(
      lambda: self.feed(dataclasses.replace(event, now=kernel.now))
    ):
      return
    old = self.state
    self.world.trace(self.nonce, event)
    if isinstance(event, a.Staged) and event.ok:
      key = dataclasses.replace(event, now=0.0)
      self.prepared[event.fragment, event.version] = self.staging[key]
    self.state, actions = island_machine.react(old, event)
    self.world.observer.on_react(
      self.world, f'island/{self.index}', self.life, old, event, self.state,
      actions,
    )  # fmt: skip
    invariants.check_island(old, self.state)
    plan = None
    for action in actions:
      if isinstance(action, a.StepPlan):
        plan = action
      self.perform(action)
    if plan is not None:
      self.follow(plan)
    elif self.waiting and self.alive:
      self.feed(a.Boundary(kernel.now, self.step, self.tokens))

  def perform(self, action):
    kernel, world = self.world.kernel, self.world
    match action:
      case a.Stage():
        key = action.fragment, action.version
        world.contents[self.nonce, key] = self.handles[action.handle][1]
      case a.StepPlan():
        for order in action.adopt:
          key = order.fragment, order.version
          self.digests[order.fragment] = world.contents[self.nonce, key]
        super().perform(action)
        if action.save:
          pending = [set(x) for x in self.local.pending]
          saved = island_state.checkpoint(self.state), pending
          kernel.after(
            world.draw('save', 1.0), lambda: self.saved(action.save, saved)
          )
        if action.donate:
          done = a.Donated(kernel.now, action.step, 'm', self.keep('moments'))
          kernel.after(0.1, lambda: self.alive and self.feed(done))
        return
      case a.GiveAnchor():
        content = ('value', self.digests[action.fragment])
        done = a.AnchorReady(
          kernel.now, action.fragment, action.version, self.keep(content)
        )
        kernel.after(0.1, lambda: self.alive and self.feed(done))
        return
      case a.TakeDonation():
        kernel.after(0.1, lambda: self.feed(a.DonationTaken(kernel.now, True)))
        return
    super().perform(action)

  def saved(self, number, saved):
    if self.alive:
      self.world.saves[self.index] = saved
      self.feed(a.CheckpointSaved(self.world.kernel.now, number, True))


class World(chaos_world.ChaosWorld):
  """A chaos world whose syncer has a tape and a disk, and is killed."""

  def __init__(self, plan, observer):
    self.observer = observer
    self.rng = random.Random(f'restarts/{plan.seed}')
    self.tape, self.disk, self.saves, self.contents = [], None, {}, {}
    self.aside, self.writing, self.life, self.up = {}, {}, 0, True
    super().__init__(plan)
    for p in range(plan.settings.fragments):
      self.handles[1001 + p] = ('value', f'd{p}')

  def watch(self, old, event, new, actions):
    self.observer.on_react(self, 'syncer', self.life, old, event, new, actions)

  def launch(self, index, step=0):
    saved = self.saves.get(index) if step else None
    process = Process(self, index, saved)
    self.everyone.append(process)
    self.current[index] = process
    self.kernel.after(self.draw('launch', 1.0), process.connect)

  def kill(self, index, back, zombie, checkpoint):
    """Some never come back, as long as others are there."""
    alive = sum(x.alive for x in self.current.values())
    if not zombie and alive > 2 and self.rng.random() < 0.3:
      self.current[index].die()
    else:
      super().kill(index, back, zombie, checkpoint)

  def schedule_faults(self):
    super().schedule_faults()
    for _ in range(self.rng.choice([0, 1, 2, 3])):
      when = self.rng.uniform(5.0, max(10.0, self.plan.until))
      self.kernel.at(when, self.crash)

  def crash(self):
    if not self.up or self.finished:
      return
    self.up = False
    self.life += 1
    for key in list(self.writing):  # some are on the disk all the same
      if self.rng.random() < 0.5:
        self.tape.append(self.writing[key])
    self.writing, self.handles, self.aside = {}, {}, {}
    self.timers._current = {}
    for conn in list(self.conns):
      process = self.conns.pop(conn)
      process.conn = ''
      process.feed(a.PeerLost(self.kernel.now, 'syncer', 'gone'))
    self.kernel.after(self.rng.uniform(0.5, 8.0), self.restart)

  def restart(self):
    self.up = True
    settings = self.settings
    memory = recovery.read_tape(settings, self.tape)
    old = syncer_machine.initial(
      settings, incarnation=memory.incarnation + 1, memory=memory,
      snapshot=self.disk,
    )  # fmt: skip
    self.syncer, actions = syncer_machine.begin(old, self.kernel.now)
    self.watch(old, None, self.syncer, actions)
    self.perform_all(actions)
    if old.phase != s.RECOVERING:
      self.kernel.after(0.1, self.seed)
    for index in sorted(self.current):
      self.kernel.after(self.draw('back', 4.0), self.current[index].connect)

  def seed(self):
    fragments = range(self.settings.fragments)
    handles = tuple(self.keep(('value', f'd{p}')) for p in fragments)
    digests = tuple(f'd{p}' for p in fragments)
    self.feed(a.Seeded(self.kernel.now, digests, handles))

  def deliver(self, conn, way, message, content):
    if self.up or way == 'down':
      super().deliver(conn, way, message, content)

  def feed(self, event):
    if not self.up:
      return
    old = self.syncer
    self.trace('syncer', event)
    self.syncer, actions = syncer_machine.react(old, event)
    self.watch(old, event, self.syncer, actions)
    invariants.check_syncer(old, self.syncer)
    self.perform_all(actions)

  def later(self, delay, make):
    life = self.life
    self.kernel.after(
      delay, lambda: self.life == life and self.feed(make(self.kernel.now))
    )

  def perform(self, action):
    match action:
      case a.Send() if action.peer not in self.conns:
        pass
      case a.Note():
        super().perform(action)
        self.tape.append(_line(action.kind, action.fields))
      case a.Inspect():
        sick = 'nonfinite' if self.chance('sick', self.plan.sick) else ''
        told = action.round, action.island, action.incarnation, sick, 1.0
        self.later(
          self.draw('inspect', 0.1), lambda now: a.Inspected(now, *told)
        )
      case a.Merge():
        digest = f'd{action.fragment}-{action.version}'

        def merged(now):
          handle = self.keep(('value', digest))
          return a.Merged(now, action.round, digest, digest, handle, 0.1)

        self.later(self.plan.merge_s, merged)
      case a.WriteTape():
        self.writing[action.key] = _line(
          action.key.partition(':')[0], action.fields
        )

        def written(now):
          self.tape.append(self.writing.pop(action.key))
          return a.TapeWritten(now, action.key)

        self.later(self.draw('tape', 0.05), written)
      case a.SaveSnapshot():
        held = tuple((x.version, x.digest) for x in self.syncer.fragments)

        def saved(now):
          self.disk = held
          return a.SnapshotSaved(now, action.number, True, action.versions)

        self.later(self.draw('disk', 1.0), saved)
      case a.TakeAnchor():
        ok = self.handles[action.handle] == ('value', action.digest)
        if ok:
          self.aside[action.fragment] = action.digest
        told = action.fragment, action.version, ok
        self.later(0.1, lambda now: a.AnchorTaken(now, *told))
      case a.Restore():
        self.later(0.2, lambda now: self.restored(now, action))
      case a.Export():
        self.later(0.1, lambda now: a.Exported(now, 'digest'))
      case _:
        super().perform(action)

  def restored(self, now, action):
    digests = []
    for order in action.orders:
      p = order.fragment
      if order.source == a.ANCHOR:
        digests.append(self.aside[p])
      elif order.source == a.SNAPSHOT:
        digests.append(self.disk[p][1])
      else:
        digests.append(f'd{p}')
    handles = tuple(self.keep(('value', x)) for x in digests)
    return a.Restored(now, tuple(digests), handles)


def _line(kind, fields):
  return json.loads(records.to_json({'kind': kind, **dict(fields)}))


def draw(seed, mode=None, adopt=None):
  """The plan of a seed, with snapshots, checkpoints and donors."""
  plan = chaos_plan.draw(seed, mode, adopt)
  rng = random.Random(f'limits/{seed}')
  limits = dataclasses.replace(
    plan.settings.limits,
    snapshot_every_s=rng.choice([0.0, 5.0, 20.0]),
    checkpoint_every_s=rng.choice([0.0, 4.0, 15.0]),
    donors_max=rng.choice([0, 2]),
  )
  settings = dataclasses.replace(plan.settings, limits=limits)
  return dataclasses.replace(plan, settings=settings)


def run_seed(seed, observer_of, mode=None, adopt=None):
  """A whole run; `observer_of(settings)` is told of every react."""
  plan = draw(seed, mode, adopt)
  return World(plan, observer_of(plan.settings)).run()


def run_checked(seed, mode=None, adopt=None):
  """A whole run with all checkers, liveness among them."""
  plan = draw(seed, mode, adopt)
  bound = liveness.bound_s(
    plan.settings,
    step_s=2 / min(plan.speeds),
    exchange_s=20 * plan.latency_s + plan.merge_s + 1,
  )
  alive = liveness.EveryFragmentAdvances(plan.settings, bound)
  alive.heal(plan.until + QUIET_S)
  return World(plan, Checkers(plan.settings, alive)).run()
