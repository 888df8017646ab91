"""Bugs that once were: each test states the rule that was broken."""

import json

from absl.testing import absltest

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import island as island_machine
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import records
from diloco_jax.protocol import syncer as syncer_machine
from diloco_jax.protocol import syncer_state as s
from tests.protocol import transcript
from tests.protocol.transcript_island import IslandPlayer
from tests.protocol.transcript_syncer import SyncerPlayer


def play(player, text):
  """Output lines of some commands, one a line."""
  lines = [x.strip() for x in text.splitlines() if x.strip()]
  return player.run(transcript.Block([], lines, []))


def syncer(text):
  player = SyncerPlayer()
  return player, play(player, text)


def island(text):
  player = IslandPlayer()
  return player, play(player, text)


def joined(name, versions, peer=None):
  i, nonce = name.split('.')[0], 'n' + name
  peer = f' peer={peer}' if peer else ''
  return (
    f'hello {i} nonce={nonce}{peer}\n'
    f'report {name} versions={versions} state=restoring{peer}\n'
  )


class DoubleMergeTest(absltest.TestCase):
  """Rule 5.11: a step enters Θ at most once."""

  EACH = """
    syncer islands=2 sizes=4 period=2 overlap=1 steps=40 mode=each
    seeded
  """

  def test_closed_overtakes_the_version_in_each(self):
    # Closed for a slot that made a version would overtake the bulk broadcast:
    # the island would drop the capture that Θ holds.
    player, _ = syncer(
      self.EACH
      + joined('0.1', 'v0')
      + joined('1.1', 'v0')
      + """
      report 0.1 step=2 captured=0
      give 0.1 r0 p0 capture=1 base=v0 steps=2
      inspected 0.1 r0
      merged r0
      taped r0
      """
    )
    out = play(player, 'report 0.1 step=3 captured=0 state=waiting slot=0')
    self.assertEmpty([x for x in out if 'Closed' in x])

  def test_what_closed_does_to_a_merged_capture(self):
    # The other half: even so, the version that names it must take it back.
    player, _ = island("""
      island sizes=1 period=2 overlap=1 mode=each adopt=rebase
      found
      welcome
      broadcast p0 v0
      staged p0
      begin
      boundary 1
      boundary 2
      encoded p0
      pull r0 p0 slot=0
      boundary 3
      closed 0
      boundary 3
      broadcast p0 v1 round=r0 slot=0 named=c1
      staged p0
      boundary 4
    """)
    # Steps 3 and 4 are pending; 1 and 2 are in v1.
    self.assertEqual(player.state.boundary - player.state.held[0].step0, 2)

  def restarted(self, mode):
    player, _ = island(f"""
      island sizes=1 period=2 overlap=1 mode={mode} adopt=rebase
      found
      welcome
      broadcast p0 v0
      staged p0
      begin
      boundary 1
      boundary 2
      encoded p0
      pull r0 p0 slot=0
    """)
    # The lease lapses while the syncer has this contribution; the version
    # comes after the readmission.
    play(
      player,
      """
      begin slot=1
      broadcast p0 v1 round=r0 slot=0 named=c1
      staged p0
      boundary 3
    """,
    )
    return player.state

  def test_start_voids_a_capture_that_is_merged(self):
    for mode in ('lock_step', 'each'):
      state = self.restarted(mode)
      self.assertEqual(state.boundary - state.held[0].step0, 1, mode)

  def test_each_settles_only_by_own_merges(self):
    # v2 is another island's, of a later round: it says nothing of capture 2.
    player, _ = island("""
      island sizes=1 period=2 overlap=1 mode=each adopt=rebase
      found
      welcome
      broadcast p0 v0
      staged p0
      begin
      boundary 1
      boundary 2
      pull r5 p0 slot=0
      broadcast p0 v2 round=r6 slot=7
      staged p0
      boundary 3
    """)
    self.assertIsNotNone(player.state.held[0].capture)

  def test_each_the_named_capture_is_settled_whatever_the_round(self):
    player, _ = island("""
      island sizes=1 period=2 overlap=1 mode=each adopt=rebase
      found
      welcome
      broadcast p0 v0
      staged p0
      begin
      boundary 1
      boundary 2
      pull r5 p0 slot=0
      broadcast p0 v2 round=r4 slot=-1 named=c1
      staged p0
      boundary 3
    """)
    self.assertIsNone(player.state.held[0].capture)

  def test_each_slots_are_the_islands_own(self):
    # Island 0's lost v1 is followed by v2 of island 1's slot 5: the re-sent
    # broadcast must not tell island 0 of slot 5.
    player, _ = syncer(
      self.EACH
      + joined('0.1', 'v0')
      + joined('1.1', 'v0')
      + """
      report 0.1 step=2 captured=0
      give 0.1 r0 p0 capture=1 base=v0 steps=2
      inspected 0.1 r0
      merged r0
      taped r0
      report 1.1 step=2 captured=5
      decline 1.1 r1 p0
      decline 1.1 r2 p0
      give 1.1 r3 p0 capture=1 base=v0 steps=2
      inspected 1.1 r3
      merged r3
      taped r3
      at 30
      """
    )
    out = play(player, 'report 0.1 step=3 captured=0')
    sent = [x for x in out if 'Broadcast 0.1' in x]
    self.assertLen(sent, 1)
    self.assertIn('slot=0', sent[0])


class StuckTest(absltest.TestCase):
  def test_lock_step_islands_with_different_offsets_reach_the_end(self):
    # Rule 5.1, 12.3. Island 0 was readmitted once: it passes `steps` before
    # slot 1 is due to it. Island 1 must not wait for slot 1 for ever.
    player, _ = syncer(
      """
      syncer islands=2 sizes=4,4 period=8 overlap=0 steps=8 mode=lock_step
      seeded
    """
      + joined('0.1', 'v0,v0')
      + joined('1.1', 'v0,v0')
      + """
      report 0.1 step=5 captured=0
      report 1.1 step=4 captured=0
      give 0.1 r0 p0 capture=1 base=v0 steps=5
      inspected 0.1 r0
      give 1.1 r0 p0 capture=1 base=v0 steps=4
      inspected 1.1 r0
      merged r0
      taped r0
      report 0.1 step=8 captured=0 versions=v1,v0 state=waiting slot=-1
      report 1.1 step=8 captured=1 versions=v1,v0 state=waiting slot=1
      """
    )
    self.assertTrue(player.state.rounds, 'neither slot 1 nor the drain opens')

  def test_lock_step_island_at_its_end_declines_what_it_will_not_capture(self):
    player, _ = island("""
      island sizes=1,1 period=8 overlap=0 steps=8 mode=lock_step
      found
      welcome
      broadcast p0 v0
      staged p0
      broadcast p1 v0
      staged p1
      begin slot=0 stop_step=2
      boundary 1
      boundary 2
    """)
    out = play(player, 'pull r0 p0 slot=0\nboundary 2')
    self.assertTrue(any('Declined' in x for x in out), out)

  def test_each_ends_when_all_are_at_their_last_step(self):
    # One contribution was refused: Σ c_steps / live never reaches `steps`.
    player, _ = syncer(
      """
      syncer islands=1 sizes=4 period=2 overlap=1 steps=4 mode=each
      seeded
      """
      + joined('0.1', 'v0')
      + """
      report 0.1 step=2 captured=0
      give 0.1 r0 p0 capture=1 base=v0 steps=2
      inspected 0.1 r0 nonfinite
      report 0.1 step=4 captured=1
      decline 0.1 r1 p0
      report 0.1 step=4 captured=1 state=waiting slot=-1
      """
    )
    self.assertEqual(player.state.phase, s.DRAINING)

  def test_a_lost_start_is_sent_again(self):
    # Nothing else tells the island: it would hold a live lease as `restoring`
    # for restoring_s, and lock step would wait for it.
    player, _ = syncer(
      """
      syncer islands=1 sizes=4 period=2 overlap=1 mode=lock_step
      seeded
      """
      + joined('0.1', 'v0')
    )
    out = []
    for now in range(1, 40):
      out += play(player, f'at {now}\nreport 0.1 state=restoring\ntick')
    self.assertTrue(any('Start' in x for x in out))

  def test_a_start_that_comes_twice_changes_nothing(self):
    # Rule 5.2: welcomes carry sequence numbers.
    player, _ = island("""
      island sizes=1 period=2 overlap=1 mode=lock_step
      found
      welcome
      broadcast p0 v0
      staged p0
      begin
      boundary 1
      boundary 2
    """)
    before = player.state
    play(player, 'begin again=yes')
    self.assertEqual(player.state.next_slot, before.next_slot)
    self.assertEqual(player.state.held[0].capture, before.held[0].capture)

  def test_finished_is_said_again(self):
    # An island that was cut off at that moment would train on for ever.
    player, _ = syncer(
      """
      syncer islands=1 sizes=4 period=2 overlap=1
      seeded
      """
      + joined('0.1', 'v0')
      + """
      report 0.1 step=1
      lost c0
      stop
      exported
      end_taped
      """
    )
    # It is back within leave_s.
    self.assertNotEqual(player.state.phase, s.FINISHED)
    out = play(player, 'report 0.1 step=2 peer=c0')
    self.assertTrue(any('Finished' in x for x in out))

  def test_finished_is_said_again_to_a_report(self):
    player, _ = syncer(
      """
      syncer islands=1 sizes=4 period=2 overlap=1
      seeded
      """
      + joined('0.1', 'v0')
      + """
      report 0.1 step=1
      stop
      exported
      end_taped
      """
    )
    out = play(player, 'at 5\nreport 0.1 step=2')
    self.assertTrue(any('Finished' in x for x in out))

  def test_a_late_hello_of_a_replaced_process_changes_nothing(self):
    # Rule 5.7: messages of an old incarnation are dropped.
    player, _ = syncer("""
      syncer islands=1 sizes=4 period=2
      seeded
      hello 0 nonce=old peer=c1
      hello 0 nonce=new peer=c2
    """)
    out = play(player, 'hello 0 nonce=old peer=c1')
    self.assertFalse(any('c2 <- Superseded' in x for x in out), out)
    self.assertEqual(player.state.islands[0].nonce, 'new')

  def test_a_hello_after_the_entering_lease_is_answered(self):
    player, _ = syncer("""
      syncer islands=1 sizes=4 period=2 restoring_s=30
      seeded
      hello 0 nonce=a
      at 31
      tick
    """)
    out = play(player, 'hello 0 nonce=a')
    self.assertTrue(any('Welcome' in x for x in out))

  def test_a_lost_welcome_that_wants_seeds_is_repeated(self):
    hello = m.Hello(
      protocol_version=1, role='island', island=0, nonce='a',
      fingerprint='layout', config_hash='config', seeds_state=True,
    )  # fmt: skip
    settings = transcript.make_settings({})
    state = syncer_machine.initial(settings, has_task=False)
    state, _ = syncer_machine.react(state, a.Received(0.0, 'c0', hello))
    admitted = a.TapeWritten(0.1, 'admitted:0:1')
    state, first = syncer_machine.react(state, admitted)
    _, again = syncer_machine.react(state, a.Received(2.0, 'c0', hello))
    for actions in (first, again):
      self.assertTrue(any(isinstance(x, a.Send) for x in actions))


class HostileTest(absltest.TestCase):
  def test_hello_with_too_few_versions(self):
    # Rule 5.14: refused, not an IndexError of the syncer.
    settings = transcript.make_settings({})
    state, _ = syncer_machine.begin(syncer_machine.initial(settings), 0.0)
    state, _ = syncer_machine.react(state, a.Seeded(0.0, ('a', 'b'), (1, 2)))
    hello = m.Hello(
      protocol_version=1, role='island', island=0, nonce='a',
      fingerprint='layout', config_hash='config', versions=(m.Version(1, 0),),
    )  # fmt: skip
    syncer_machine.react(state, a.Received(0.0, 'c0', hello))

  def test_a_number_too_large_for_a_float(self):
    report = m.Report(
      island=0, incarnation=1, seq=1, step=1, tokens=1, step_time_s=1.0,
      versions=(),
    )  # fmt: skip
    text = json.dumps({**records.to_plain(report), 'step_time_s': 10**400})
    with self.assertRaises(records.MalformedError):
      records.message_from_plain(json.loads(text))

  def test_restarts_do_not_pile_up(self):
    # Rule 5.13: a process that restarts for ever fills no memory.
    player, _ = syncer('syncer islands=1 sizes=4 period=2\nseeded')
    for k in range(3000):
      player.hello('0', f'n{k}')
    self.assertLess(len(player.state.past), 2000)


class BooksTest(absltest.TestCase):
  def test_trained_of_a_restored_island_is_its_incarnations_own(self):
    # Rule 5.11, per (island, incarnation): the restored tokens were trained,
    # and perhaps merged, by an older one.
    settings = transcript.make_settings({'sizes': '1'})
    state = island_machine.initial(settings, nonce='n', step=7, tokens=700)
    state, _ = island_machine.react(state, a.PeerFound(0.0, 'syncer'))
    welcome = m.Welcome(
      island=0, incarnation=2, syncer_incarnation=1, entry=m.OWN_CHECKPOINT,
      versions=(), lease_s=15.0, report_every_s=1.0,
    )  # fmt: skip
    _, actions = island_machine.react(state, a.Received(0.0, '', welcome))
    report = next(
      x.message for x in actions
      if isinstance(x, a.Send) and isinstance(x.message, m.Report)
    )  # fmt: skip
    self.assertEqual(report.trained_token_params, 0)

  def test_pending_is_never_below_zero(self):
    # A report at a boundary: lost counts the step in flight, trained does not.
    player, _ = island("""
      island sizes=1 period=2 overlap=1 mode=lock_step adopt=overwrite
      found
      welcome
      broadcast p0 v0
      staged p0
      begin
      boundary 1
      finished_step 1
      boundary 2
      finished_step 2
      pull r0 p0 slot=0
      encoded p0
      broadcast p0 v1 round=r0 slot=0 named=c1
      staged p0
    """)
    event = a.Boundary(player.now, 3, 300)
    _, actions = island_machine.react(player.state, event)
    pending = [
      x.message.pending_token_params for x in actions
      if isinstance(x, a.Send) and isinstance(x.message, m.Report)
    ]  # fmt: skip
    self.assertGreaterEqual(min(pending), 0)

  def test_each_global_step_counts_fragments_once(self):
    # Rule 12.7: two fragments, each merged 4 steps of one island: 4, not 8.
    player, _ = syncer(
      """
      syncer islands=1 sizes=4,4 period=4 overlap=1 steps=40 mode=each
      seeded
      """
      + joined('0.1', 'v0,v0')
      + """
      report 0.1 step=4 captured=1
      give 0.1 r0 p0 capture=1 base=v0 steps=4
      inspected 0.1 r0
      merged r0
      taped r0
      give 0.1 r1 p1 capture=2 base=v0 steps=4
      inspected 0.1 r1
      merged r1
      taped r1
      """
    )
    self.assertEqual(player.state.global_step, 4)

  def test_each_global_step_leaves_the_drain_out(self):
    player, _ = syncer(
      """
      syncer islands=1 sizes=4 period=2 overlap=1 steps=2 mode=each
      seeded
      """
      + joined('0.1', 'v0')
      + """
      report 0.1 step=2 captured=0
      give 0.1 r0 p0 capture=1 base=v0 steps=2
      inspected 0.1 r0
      merged r0
      taped r0
      report 0.1 step=3 versions=v1
      give 0.1 r1 p0 capture=2 base=v1 steps=1
      inspected 0.1 r1
      merged r1
      taped r1
      """
    )
    self.assertEqual(player.state.merges, 2)
    self.assertEqual(player.state.global_step, 2)


class SmallTest(absltest.TestCase):
  def test_one_capture_of_a_fragment_in_a_plan(self):
    # Else the first is dropped before the plan that makes it, and a driver
    # keeps it for ever.
    player, _ = island("""
      island sizes=1 period=2 overlap=0 mode=lock_step steps=40
      found
      welcome
      broadcast p0 v0
      staged p0
      begin
      boundary 1
      pull r9 p0 drain=1
    """)
    out = play(player, 'boundary 2')
    self.assertLen([x for x in out if x.startswith('encode')], 1, out)

  def test_nothing_is_sent_again_to_those_who_left(self):
    # Rule 5.2: to every live island.
    player, _ = syncer(
      """
      syncer islands=2 sizes=4 period=2 overlap=1 grace_steps_max=0
      seeded
      """
      + joined('0.1', 'v0')
      + joined('1.1', 'v0')
      + """
      report 0.1 step=1
      report 1.1 step=1
      report 0.1 step=3
      report 1.1 step=3
      give 0.1 r0 p0 capture=1 base=v0 steps=3
      inspected 0.1 r0
      merged r0
      taped r0
      leave 1.1
      """
    )
    out = play(player, 'at 20\ntick\nat 40\ntick')
    self.assertFalse(any('Broadcast 1.1' in x for x in out), out)

  def test_a_contribution_of_an_unasked_member_is_not_its_last_word(self):
    # After a reconnect the member is `pending`; bulk may overtake the report.
    player, _ = syncer(
      """
      syncer islands=2 sizes=4 period=2 overlap=1 mode=lock_step
      seeded
      """
      + joined('0.1', 'v0')
      + joined('1.1', 'v0')
      + """
      report 0.1 step=2 captured=0
      report 1.1 step=2 captured=0
      lost c0
      give 0.1 r0 p0 capture=1 base=v0 steps=2
      """
    )
    members = player.state.rounds[m.RoundId(1, 0)].members
    self.assertNotEqual(members[0].status, s.REFUSED)


if __name__ == '__main__':
  absltest.main()
