"""The commands of a syncer's transcript."""

import json

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import invariants
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import recovery
from diloco_jax.protocol import syncer as syncer_machine
from tests.protocol import transcript as t
from tests.protocol.transcript_player import Player


class SyncerPlayer(Player):
  """Plays all islands against a syncer. Island n speaks on connection cn."""

  def __init__(self):
    super().__init__()
    self.reports = {}
    self.tape = []  # as it is on disk
    self.handles = 100

  def verbs(self):
    return {
      'syncer': self.start, 'at': self.at, 'hello': self.hello,
      'report': self.report, 'give': self.give, 'decline': self.decline,
      'inspected': self.inspected, 'merged': self.merged, 'taped': self.taped,
      'leave': self.leave, 'lost': self.lost, 'timer': self.timer,
      'tick': self.tick, 'exported': self.exported, 'end_taped': self.end_taped, 'ask_config': self.ask,
      'restart': self.restart, 'anchors': self.anchors, 'value': self.value,
      'taken': self.taken, 'restored': self.restored,
      'donate': self.donate, 'durable': self.durable,
      'recovered': self.recovered, 'saved': self.saved, 'seeded': self.seeded, 'stop': self.stop, 'show': self.summary,
    }  # fmt: skip

  def feed(self, event):
    old = self.state
    self.state, actions = syncer_machine.react(old, event)
    invariants.check_syncer(old, self.state)
    self.perform(actions)

  def perform(self, actions):
    self.show(actions)
    for action in actions:
      if isinstance(action, a.WriteTape):
        self.write(action.key.split(':')[0], action.fields)
      elif isinstance(action, a.Note):
        self.write(action.kind, action.fields)
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
    self.perform(actions)

  def write(self, kind, fields):
    line = json.loads(json.dumps({'kind': kind, **dict(fields)}))
    self.tape.append(line)

  def restart(self, snapshot='', lines='-0'):
    """The syncer dies, and another one reads its tape, less `lines`.

    snapshot: versions on disk, as 'v1,v0'; their digests are the right ones.
    """
    settings = self.state.settings
    count = len(self.tape) + int(lines)
    self.tape = self.tape[:count]
    memory = recovery.read_tape(settings, self.tape)
    held = ()
    if snapshot:
      held = tuple(
        (version, f'd{p}.{version.merges}')
        for p, version in enumerate(t.versions(snapshot))
      )
    self.state, actions = syncer_machine.begin(
      syncer_machine.initial(
        settings,
        incarnation=memory.incarnation + 1,
        memory=memory,
        snapshot=held,
      ),
      self.now,
    )
    self.output.append(f'syncer {self.state.incarnation} reads the tape')
    self.perform(actions)

  def anchors(self, name, versions, *, step, wrong='', state='training'):
    """Says that it holds these; `wrong`: the digest of this fragment is."""
    island, incarnation = t.who(name)
    held = t.versions(versions)
    digests = [f'd{p}.{x.merges}' for p, x in enumerate(held)]
    if wrong:
      digests[t.integer(wrong, 'p')] = 'another'
    self.receive(
      m.Anchors(
        island=island,
        incarnation=incarnation,
        syncer_incarnation=self.state.incarnation,
        versions=held,
        digests=tuple(digests),
        step=int(step),
        tokens=100 * int(step),
        training=state == 'training',
      ),
      f'c{island}',
    )

  def value(self, name, p, version):
    island, incarnation = t.who(name)
    self.handles += 1
    self.receive(
      m.AnchorValue(
        island=island,
        incarnation=incarnation,
        syncer_incarnation=self.state.incarnation,
        fragment=t.integer(p, 'p'),
        version=t.version(version),
        digest='',
        payload=self.handles,
      ),
      f'c{island}',
    )

  def taken(self, p, version, ok='ok'):
    self.feed(
      a.AnchorTaken(self.now, t.integer(p, 'p'), t.version(version), ok == 'ok')
    )

  def restored(self):
    orders = self.state.recovering.orders
    digests = tuple(f'd{x.fragment}.{x.version.merges}' for x in orders)
    handles = tuple(range(201, 201 + len(orders)))
    self.feed(a.Restored(self.now, digests, handles))

  def durable(self):
    self.feed(a.TapeWritten(self.now, f'recovering:{self.state.incarnation}'))

  def recovered(self):
    self.feed(a.TapeWritten(self.now, f'recovered:{self.state.incarnation}'))

  def end_taped(self):
    self.feed(a.TapeWritten(self.now, f'exported:{self.state.incarnation}'))

  def donate(self, name, to, *, step):
    island, incarnation = t.who(name)
    recipient, recipient_incarnation = t.who(to)
    self.handles += 1
    self.receive(
      m.Donation(
        island=island,
        incarnation=incarnation,
        recipient=recipient,
        recipient_incarnation=recipient_incarnation,
        step=int(step),
        rate_index=int(step),
        versions=(),
        digest='inner',
        payload=self.handles,
      ),
      f'c{island}',
    )

  def saved(self, number, ok='ok'):
    versions = tuple(x.version for x in self.state.fragments)
    self.feed(a.SnapshotSaved(self.now, int(number), ok == 'ok', versions))

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
    config='config', peer=None, inner='', role=m.ISLAND, step=0, versions='-',
    batch=0,
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
        step=int(step),
        global_step=int(step),
        versions=t.versions(versions),
        digests=tuple(
          f'd{p}.{x.merges}' for p, x in enumerate(t.versions(versions))
        ),
        samples_per_step=int(batch),
      ),
      peer or f'c{island}',
    )

  def ask(self, *, protocol=m.PROTOCOL_VERSION, peer='c0'):
    self.receive(m.AskConfig(protocol_version=int(protocol)), peer)

  def report(
    self, name, *, step=None, versions=None, state='training', slot=-1,
    captured=-1, step_s=1.0, seq=None, peer=None, inner='',
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
        has_inner_state=bool(inner) or int(last['step']) > 0,
        trained_token_params=100
        * last['step']
        * sum(self.state.settings.sizes),
      ),
      peer or f'c{island}',
    )

  def give(
    self, name, round_id, p, *, capture, base, steps, tokens=None,
    layout='layout', at=0,
  ):  # fmt: skip
    """at: the island's step at the capture."""
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
        step=int(at),
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
    self.feed(
      a.TapeWritten(
        self.now,
        f'merge:{t.round_id(round_id).incarnation}:{t.round_id(round_id).number}',
      )
    )

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
