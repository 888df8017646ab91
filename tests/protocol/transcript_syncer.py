"""The commands of a syncer's transcript."""

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import invariants
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import syncer as syncer_machine
from tests.protocol import transcript as t
from tests.protocol.transcript_player import Player


class SyncerPlayer(Player):
  """Plays all islands against a syncer. Island n speaks on connection cn."""

  def __init__(self):
    super().__init__()
    self.reports = {}
    self.handles = 100

  def verbs(self):
    return {
      'syncer': self.start, 'at': self.at, 'hello': self.hello,
      'report': self.report, 'give': self.give, 'decline': self.decline,
      'inspected': self.inspected, 'merged': self.merged, 'taped': self.taped,
      'leave': self.leave, 'lost': self.lost, 'timer': self.timer,
      'tick': self.tick, 'exported': self.exported, 'ask_config': self.ask,
      'seeded': self.seeded, 'stop': self.stop, 'show': self.summary,
    }  # fmt: skip

  def feed(self, event):
    old = self.state
    self.state, actions = syncer_machine.react(old, event)
    invariants.check_syncer(old, self.state)
    self.show(actions)
    for action in actions:
      if isinstance(action, a.WriteTape):
        if action.key.split(':')[0] in t.AT_ONCE:
          self.feed(a.TapeWritten(self.now, action.key))

  def receive(self, message, peer):
    self.feed(a.Received(self.now, peer, message))

  def start(self, **options):
    self.state, actions = syncer_machine.begin(
      syncer_machine.initial(t.make_settings(options)), self.now
    )
    self.show(actions)

  def seeded(self):
    count = self.state.settings.fragments
    self.feed(
      a.Seeded(
        self.now,
        tuple(f'd{p}.0' for p in range(count)),
        tuple(range(1, count + 1)),
      )
    )

  def hello(
    self, island, nonce, *, protocol=m.PROTOCOL_VERSION, layout='layout',
    config='config', peer=None, inner='', role=m.ISLAND,
  ):  # fmt: skip
    self.receive(
      m.Hello(
        protocol_version=int(protocol),
        role=role,
        island=int(island),
        nonce=nonce,
        fingerprint=layout,
        config_hash=config,
        has_inner_state=bool(inner),
      ),
      peer or f'c{island}',
    )

  def ask(self, *, protocol=m.PROTOCOL_VERSION, peer='c0'):
    self.receive(m.AskConfig(protocol_version=int(protocol)), peer)

  def report(
    self, name, *, step=None, versions=None, state='training', slot=-1,
    captured=-1, step_s=1.0, seq=None, peer=None,
  ):  # fmt: skip
    """What is not said is as in the last report."""
    island, incarnation = t.who(name)
    last = self.reports.get(name, {'seq': 0, 'step': 0, 'versions': '-'})
    last = {
      'seq': last['seq'] + 1,
      'step': int(step or last['step']),
      'versions': versions or last['versions'],
    }
    if seq is None:
      self.reports[name] = last
    self.receive(
      m.Report(
        island=island,
        incarnation=incarnation,
        seq=int(seq or last['seq']),
        step=last['step'],
        tokens=100 * last['step'],
        step_time_s=float(step_s) if state == 'training' and step else 0.0,
        versions=t.versions(last['versions']),
        state=state,
        slot=int(slot),
        captured_slot=int(captured),
        trained_token_params=100
        * last['step']
        * sum(self.state.settings.sizes),
      ),
      peer or f'c{island}',
    )

  def give(
    self, name, round_id, p, *, capture, base, steps, tokens=None,
    layout='layout',
  ):  # fmt: skip
    island, incarnation = t.who(name)
    self.handles += 1
    self.receive(
      m.Contribution(
        island=island,
        incarnation=incarnation,
        round=t.round_id(round_id),
        fragment=t.integer(p, 'p'),
        capture=m.CaptureId(incarnation, int(capture)),
        base=t.version(base),
        c_steps=int(steps),
        c_tokens=int(tokens or 100 * int(steps)),
        held_s=0.0,
        encode_s=0.0,
        fingerprint=layout,
        payload=self.handles,
      ),
      f'c{island}',
    )

  def decline(self, name, round_id, p):
    island, incarnation = t.who(name)
    self.receive(
      m.Declined(
        island=island,
        incarnation=incarnation,
        round=t.round_id(round_id),
        fragment=t.integer(p, 'p'),
      ),
      f'c{island}',
    )

  def inspected(self, name, round_id, reason='', *, norm=1.0):
    self.feed(
      a.Inspected(
        self.now, t.round_id(round_id), *t.who(name), reason, float(norm)
      )
    )

  def merged(self, round_id):
    rid = t.round_id(round_id)
    rnd = self.state.rounds[rid]
    self.handles += 1
    digest = f'd{rnd.fragment}.{rnd.version.merges}'
    self.feed(a.Merged(self.now, rid, 'f32', digest, self.handles, 0.0))

  def taped(self, round_id):
    self.feed(a.TapeWritten(self.now, f'merge:1:{t.round_id(round_id).number}'))

  def leave(self, name, reason='bye'):
    island, incarnation = t.who(name)
    self.receive(
      m.Leave(island=island, incarnation=incarnation, reason=reason),
      f'c{island}',
    )

  def lost(self, peer):
    self.feed(a.PeerLost(self.now, peer, 'reset'))

  def timer(self, name):
    self.feed(a.TimerFired(self.now, name))

  def tick(self):
    self.timer('tick')

  def exported(self):
    self.feed(a.Exported(self.now, 'digest'))

  def stop(self, reason='interrupted'):
    self.feed(a.StopRequested(self.now, reason))

  def summary(self):
    """The state, in a few lines."""
    state = self.state
    self.output.append(
      f'{state.phase} at global step {state.global_step}, next slot'
      f' {state.next_slot}, retries {t.word(state.retries)}'
    )
    for key, x in sorted(state.islands.items()):
      self.output.append(
        f'island {key}.{x.incarnation} {x.status} credits {x.credits}'
        f' merged {x.merged} offences {x.offences}'
      )
    for x in state.rounds.values():
      members = ' '.join(f'{y.island}:{y.status}' for y in x.members)
      self.output.append(
        f'{t.word(x.id)} p{x.fragment} {x.phase} K={x.quorum} {members}'
      )
    for p, x in enumerate(state.fragments):
      inside = ' '.join(
        f'{k}.{y.incarnation}:{t.word(y.version)}/{t.word(y.capture)}'
        for k, y in sorted(x.included.items())
      )
      self.output.append(f'p{p} {t.word(x.version)} {inside}'.rstrip())
