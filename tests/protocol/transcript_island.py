"""The commands of an island's transcript."""

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import invariants
from diloco_jax.protocol import island as island_machine
from diloco_jax.protocol import messages as m
from tests.protocol import transcript as t
from tests.protocol.transcript_player import Player


class IslandPlayer(Player):
  """Plays the syncer, the trainer and the driver against one island."""

  def __init__(self):
    super().__init__()
    self.handles = 0
    self.stages, self.encodes = {}, {}
    self.who = (0, 1)
    self.starts = 0

  def verbs(self):
    return {
      'island': self.start, 'at': self.at, 'found': self.found,
      'lost': self.lost, 'welcome': self.welcome, 'begin': self.begin,
      'broadcast': self.broadcast, 'staged': self.staged, 'pull': self.pull,
      'encoded': self.encoded, 'boundary': self.boundary,
      'finished_step': self.finished_step, 'closed': self.closed,
      'refusal': self.refusal, 'superseded': self.superseded,
      'finished': self.finished, 'refused': self.refused, 'timer': self.timer,
      'stop': self.stop, 'declare': self.declare, 'show': self.summary,
    }  # fmt: skip

  def feed(self, event):
    old = self.state
    self.state, actions = island_machine.react(old, event)
    invariants.check_island(old, self.state)
    for action in actions:
      if isinstance(action, a.Stage):
        self.stages[action.fragment] = action
      if isinstance(action, a.Encode):
        self.encodes[action.fragment] = action.capture
    self.show(actions)

  def receive(self, message):
    self.feed(a.Received(self.now, 'syncer', message))

  def start(self, **options):
    role = options.pop('role', m.ISLAND)
    self.state = island_machine.initial(
      t.make_settings(options), nonce='n', island=0, role=role
    )

  def found(self):
    self.feed(a.PeerFound(self.now, 'syncer'))

  def lost(self):
    self.feed(a.PeerLost(self.now, 'syncer', 'reset'))

  def welcome(self, name='0.1', *, entry=m.FRESH):
    self.who = t.who(name)
    self.receive(
      m.Welcome(
        island=self.who[0],
        incarnation=self.who[1],
        syncer_incarnation=1,
        entry=entry,
        versions=(),
        lease_s=15.0,
        report_every_s=1.0,
      )
    )

  def begin(self, *, slot=0, stop_step=-1, again=''):
    """A Start message; again=yes: a copy of the last one's number."""
    self.starts += not again
    self.receive(
      m.Start(
        island=self.who[0],
        incarnation=self.who[1],
        global_step=0,
        rate_index=0,
        rewarm_steps=0,
        next_slot=int(slot),
        due_step=-1,
        stop_step=int(stop_step),
        samples=m.SampleRange(0, 1, 0, -1),
        seq=self.starts,
      )
    )

  def broadcast(
    self, p, version, *, made_by='-', slot=-1, named='-', digest=None, to=None,
    syncer=1,
  ):  # fmt: skip
    p = t.integer(p, 'p')
    made = t.version(version)
    island, incarnation = t.who(to) if to else self.who
    self.handles += 1
    self.receive(
      m.Broadcast(
        island=island,
        incarnation=incarnation,
        syncer_incarnation=int(syncer),
        fragment=p,
        version=made,
        round=t.round_id(made_by),
        slot=int(slot),
        digest=digest or f'd{p}.{made.merges}',
        named=(
          None
          if named == '-'
          else m.CaptureId(incarnation, t.integer(named, 'c'))
        ),
        global_step=0,
        payload=self.handles,
      )
    )

  def staged(self, p, ok='ok'):
    """The answer to the newest `stage` of this fragment."""
    stage = self.stages[t.integer(p, 'p')]
    self.feed(
      a.Staged(
        self.now, stage.fragment, stage.version, stage.base, stage.capture,
        stage.mode, ok == 'ok',
      )
    )  # fmt: skip

  def pull(self, round_id, p, *, slot=-1, drain=''):
    self.receive(
      m.Pull(
        island=self.who[0],
        incarnation=self.who[1],
        round=t.round_id(round_id),
        fragment=t.integer(p, 'p'),
        slot=int(slot),
        drain=bool(drain),
      )
    )

  def encoded(self, p, *, capture=0):
    """The answer to an `encode` of this fragment, the newest if not said."""
    p = t.integer(p, 'p')
    encode = self.encodes[p]
    if capture:
      encode = m.CaptureId(self.who[1], int(capture))
    self.handles += 1
    self.feed(a.Encoded(self.now, p, encode, self.handles, 0.1))

  def boundary(self, step):
    self.feed(a.Boundary(self.now, int(step), 100 * int(step)))

  def finished_step(self, step):
    self.feed(a.StepsFinished(self.now, int(step), 100 * int(step), 1.0))

  def closed(self, slot):
    self.receive(
      m.Closed(island=self.who[0], incarnation=self.who[1], slot=int(slot))
    )

  def refusal(self, reason):
    self.receive(m.Refusal(reason=reason, detail='detail'))

  def refused(self, round_id, p, reason):
    self.receive(
      m.Refused(
        island=self.who[0],
        incarnation=self.who[1],
        round=t.round_id(round_id),
        fragment=t.integer(p, 'p'),
        reason=reason,
      )
    )

  def superseded(self, name):
    island, incarnation = t.who(name)
    self.receive(m.Superseded(island=island, incarnation=incarnation))

  def finished(self, versions):
    self.receive(
      m.Finished(reason='steps', global_step=40, versions=t.versions(versions))
    )

  def timer(self, name):
    self.feed(a.TimerFired(self.now, name))

  def stop(self, reason='interrupted'):
    self.feed(a.StopRequested(self.now, reason))

  def declare(self, state):
    self.feed(a.StateDeclared(self.now, state))

  def summary(self):
    state = self.state
    self.output.append(
      f'{state.phase} {state.state} at {state.boundary}, merged'
      f' {state.merged}, lost {state.lost} ({state.lost_steps} steps)'
    )
    for p, x in enumerate(state.held):
      capture = '-'
      if x.capture is not None:
        c = x.capture
        capture = f'{t.word(c.id)} of {t.word(c.round)}, {c.c_steps} steps'
        capture += ', detached' if c.detached else ''
      self.output.append(
        f'p{p} anchor {t.word(x.anchor)} counts {state.boundary - x.step0},'
        f' capture {capture}'
      )
