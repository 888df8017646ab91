"""The island's side of a chaos world: processes, with sets for arrays."""

import dataclasses

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import invariants
from diloco_jax.protocol import island as island_machine
from diloco_jax.protocol import island_state as i
from diloco_jax.protocol import messages as m
from tests.protocol import chaos_ledger

SYNCER = 'syncer'


class Timers:
  """Named timers; setting one again replaces it."""

  def __init__(self, kernel, fire):
    self._kernel, self._fire = kernel, fire
    self._current = {}

  def set(self, name, at):
    token = self._current[name] = object()

    def fire():
      if self._current.get(name) is token:
        del self._current[name]
        self._fire(name)

    self._kernel.at(at, fire)

  def __len__(self):
    return len(self._current)


class Process:
  """One island process: a machine, its steps and its connection."""

  def __init__(self, world, index, step=0):
    self.world, self.index = world, index
    world.processes_made += 1
    self.nonce = f'n{world.processes_made}'
    self.state = island_machine.initial(
      world.settings,
      nonce=self.nonce,
      island=index,
      step=step,
      tokens=sum(map(chaos_ledger.tokens_of, range(1, step + 1))),
      has_inner_state=step > 0,
    )
    self.step, self.first_step = step, step
    self.tokens = self.state.tokens
    self.local = chaos_ledger.Local(world.theta, world.settings.fragments)
    self.alive, self.begun, self.waiting = True, False, False
    self.conn = ''
    self.conns = 0
    self.paused_until = 0.0
    self.backlog = []
    self.handles, self.handles_made = {}, 0
    self.staging, self.prepared = {}, {}
    self.stopped = ''
    self.timers = Timers(
      world.kernel, lambda name: self.feed(a.TimerFired(world.kernel.now, name))
    )

  @property
  def who(self):
    return self.index, self.state.incarnation

  def connect(self):
    if self.stopped or not self.alive or self.conn or self.world.finished:
      return
    self.conns += 1
    self.conn = f'{self.nonce}.{self.conns}'
    self.world.conns[self.conn] = self
    self.feed(a.PeerFound(self.world.kernel.now, SYNCER))

  def disconnect(self, reason='cut'):
    conn, self.conn = self.conn, ''
    if conn:
      self.world.lost(conn)
      self.feed(a.PeerLost(self.world.kernel.now, SYNCER, reason))

  def die(self):
    """Gone without a word; the syncer's end notices when it notices."""
    self.alive = False
    if self.conn:
      self.world.lost(self.conn)
    self.conn = ''

  def pause(self, until):
    self.paused_until = max(self.paused_until, until)
    self.world.kernel.at(until, self.resume)

  def asleep(self, later):
    """Whether it is paused; then `later` is done afterwards, in order."""
    if self.world.kernel.now < self.paused_until:
      self.backlog.append(later)
      return True
    return False

  def resume(self):
    if self.world.kernel.now < self.paused_until:
      return
    backlog, self.backlog = self.backlog, []
    for later in backlog:
      later()

  def receive(self, message, content):
    if not self.alive:
      return
    if self.asleep(lambda: self.receive(message, content)):
      return  # it waits in the transport
    if content is not None:
      message = dataclasses.replace(message, payload=self.keep(content))
    self.feed(a.Received(self.world.kernel.now, SYNCER, message))

  def keep(self, content):
    self.handles_made += 1
    self.handles[self.handles_made] = content
    return self.handles_made

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
    invariants.check_island(old, self.state)
    plan = None
    for action in actions:
      self.world.trace(self.nonce, action)
      if isinstance(action, a.StepPlan):
        plan = action
      self.perform(action)
    self.check()
    if plan is not None:
      self.follow(plan)
    elif self.waiting and self.alive:
      self.feed(a.Boundary(kernel.now, self.step, self.tokens))

  def perform(self, action):
    kernel, world = self.world.kernel, self.world
    match action:
      case a.Send():
        content = None
        if isinstance(action.message, m.BULK):
          content = self.handles[action.message.payload]
        world.transmit(self.conn, 'up', action.message, content)
      case a.SetTimer():
        self.timers.set(action.name, action.at)
      case a.StepPlan():
        for order in action.adopt:
          key = (order.fragment, order.version)
          assert key in self.prepared, f'adopts {key}: not prepared'
          mode, base, inside = self.prepared[key]
          assert base == self.local.anchor[order.fragment], 'wrong base'
          self.local.adopt(
            order.fragment, order.version, mode, inside, self.who
          )
        for order in action.capture:
          self.local.capture(order.fragment, order.capture, self.who)
      case a.Encode():
        steps = self.local.captures[action.fragment][action.capture]
        assert steps
        delta = (*self.who, action.fragment, action.capture.number)
        kernel.after(
          world.draw('encode', 0.2),
          lambda: self.encoded(action.fragment, action.capture, delta),
        )
      case a.Stage():
        assert action.handle in self.handles
        inside = frozenset()
        if action.capture is not None:  # Δ_c goes into what is prepared
          inside = self.local.captures[action.fragment][action.capture]
        delay = world.draw('stage', 0.1)
        kernel.after(delay, lambda: self.staged(action, inside))
      case a.Begin():
        assert not self.begun, 'began twice'
        self.begun = True
        kernel.after(world.draw('phase', 1.0), self.dispatch)
      case a.Stop():
        self.stopped, self.waiting = action.reason, False
        world.stops.append((kernel.now, self.index, self.nonce, action.reason))
        kernel.after(8.0, self.die)  # what was sent goes out first
      case a.Release():
        del self.handles[action.handle]
      case a.DropCapture():
        self.local.drop(action.fragment, action.capture)
      case a.Note():
        pass
      case _:
        raise TypeError(f'{action!r}')

  def encoded(self, fragment, capture, delta):
    if self.alive:
      handle = self.keep(delta)
      self.feed(
        a.Encoded(self.world.kernel.now, fragment, capture, handle, 0.1)
      )

  def staged(self, action, inside):
    corrupt = self.world.chance('corrupt', self.world.plan.corrupt)
    event = a.Staged(
      self.world.kernel.now, action.fragment, action.version, action.base,
      action.capture, action.mode, not corrupt,
    )  # fmt: skip
    self.staging[dataclasses.replace(event, now=0.0)] = (
      action.mode,
      action.base,
      inside,
    )
    self.feed(event)

  def follow(self, plan):
    """Do the step that a plan allows."""
    self.waiting = plan.wait and self.begun
    if plan.stop:
      self.begun = False
      self.feed(a.StopRequested(self.world.kernel.now, 'finished'))
    elif self.begun and not plan.wait and self.state.phase == i.TRAINING:
      self.dispatch()

  def dispatch(self):
    if not (self.alive and self.begun):
      return
    world = self.world
    mean = 1.0 / world.plan.speeds[self.index]
    took = world.noisy('step', mean, world.plan.step_cv)
    world.kernel.after(took, lambda: self.step_done(took))

  def step_done(self, took):
    kernel = self.world.kernel
    if not (self.alive and self.begun):
      return
    if self.asleep(lambda: self.step_done(took)):
      return
    self.step += 1
    self.tokens += chaos_ledger.tokens_of(self.step)
    self.local.step(self.step)
    step, tokens = self.step, self.tokens
    kernel.after(
      self.world.plan.finish_lag_s,
      lambda: self.feed(a.StepsFinished(kernel.now, step, tokens, took)),
    )
    self.feed(a.Boundary(kernel.now, step, tokens))

  def check(self):
    """The machine's counters are what is in the arrays; memory is bounded."""
    state, local = self.state, self.local
    for p, held in enumerate(state.held):
      if held.anchor is None:
        continue
      assert held.anchor == local.anchor[p]
      counted = state.boundary - held.step0
      there = len([x for x in local.pending[p] if x <= state.boundary])
      assert counted == there, (
        f'island {self.who} counts {counted} steps of fragment {p}, not {there}'
      )
      kept = set(local.captures[p])
      want = {held.capture.id} if held.capture is not None else set()
      assert kept == want, f'{kept} kept, {want} known'
    fragments = len(state.held)
    assert len(self.handles) <= 4 * fragments + 8, 'payloads pile up'
    assert len(self.timers) <= 2, 'timers pile up'
