"""The simulated world: links, disks, processes; a hundred islands."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from diloco_jax.chaos import plan
from diloco_jax.protocol import messages as m
from diloco_jax.protocol.settings import Settings
from diloco_jax.simulation import network
from diloco_jax.simulation.compute import ComputeSettings
from diloco_jax.simulation.kernel import Kernel
from diloco_jax.simulation.scenario import Scenario
from diloco_jax.simulation.storage import Checkpoints
from diloco_jax.simulation.storage import TapeFile
from diloco_jax.simulation.world import World


class ManyIslandsTest(parameterized.TestCase):
  """Whoever lives makes the steps it would have made; none of them is lost."""

  UNTIL_S = 56.0

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.calm = cls.world()

  @classmethod
  def world(cls, faults=()):
    settings = Settings(
      islands=100, sizes=(3,) * 4, fingerprint='f', config_hash='c', period=12,
      overlap=2, steps=400,
    )  # fmt: skip
    scenario = Scenario(
      seed=0,
      settings=settings,
      compute=ComputeSettings(step_cv=0.2),
      faults=faults,
    )
    world = World(scenario)
    world.run(cls.UNTIL_S)
    return world

  @parameterized.parameters(1, 50)
  def test_killed_at_once(self, count):
    faults = tuple(
      plan.Fault(20.0, plan.CRASH_ISLAND, index, how='never')
      for index in range(count)
    )
    struck = self.world(faults)
    self.assertEqual(struck.faults, {plan.CRASH_ISLAND: count})
    for index in range(100):
      one, other = self.calm.islands[index], struck.islands[index]
      if index < count:
        self.assertFalse(other.alive)
        self.assertLess(other.step, one.step - 20)
      else:
        self.assertEqual(other.step, one.step)
        self.assertEqual(other.state.lost_steps, 0)
    late = [
      x for x in struck.tape.lines if x['kind'] == 'merge' and x['t_s'] > 38.0
    ]
    self.assertGreater(len(late), 3)
    self.assertTrue(
      all(island >= count for x in late for island, _ in x['steps'])
    )
    reports = struck.syncer.state.islands
    self.assertEqual(sum(x.lost for x in reports.values()), 0)


class End:
  """One end of connections, which notes what it gets."""

  def __init__(self):
    self.got, self.lost = [], []

  def receive(self, connection, message, value):
    self.got.append((message, value))

  def on_lost(self, connection):
    self.lost.append(connection.name)


class NetworkTest(absltest.TestCase):
  def make(self, **settings):
    self.kernel = Kernel(0)
    self.faults = []
    net = network.Network(
      network.NetworkSettings(**settings), self.kernel, (100, 100),
      self.faults.append,
    )  # fmt: skip
    self.syncer, self.island = End(), End()
    net.to_syncer = self.syncer.receive
    net.tell_syncer = self.syncer.on_lost
    self.connection = net.connect(0, self.island)
    return net

  def pull(self, number):
    return m.Pull(0, 1, m.RoundId(1, number), 0)

  def broadcast(self):
    return m.Broadcast(
      0, 1, 1, 0, m.Version(1, 0), None, -1, 'd', None, 0
    )  # fmt: skip

  def numbers(self):
    return [x.round.number for x, _ in self.island.got]

  def send(self, net, *numbers):
    for number in numbers:
      net.send(self.connection, network.DOWN, self.pull(number), None)

  def test_a_stream_keeps_its_order(self):
    net = self.make(latency_s=1.0, latency_cv=1.0)
    self.send(net, *range(20))
    self.kernel.run(100.0)
    self.assertEqual(self.numbers(), list(range(20)))

  def test_single_messages_overtake_each_other(self):
    net = self.make(streams=False, latency_s=1.0, latency_cv=1.0)
    self.send(net, *range(20))
    self.kernel.run(100.0)
    self.assertCountEqual(self.numbers(), range(20))
    self.assertNotEqual(self.numbers(), list(range(20)))

  def test_a_short_cut_delays_a_stream(self):
    net = self.make(keepalive_s=4.0)
    net.cut(0, network.DOWN)
    self.send(net, 1, 2)
    self.kernel.at(3.0, lambda: net.heal(0, network.DOWN))
    self.kernel.run(20.0)
    self.assertEqual(self.numbers(), [1, 2])
    self.assertEmpty(self.island.lost)

  def test_a_long_cut_ends_it_at_both_ends(self):
    net = self.make(keepalive_s=4.0)
    net.cut(0, network.DOWN)
    self.send(net, 1)
    self.assertIsNone(net.connect(0, self.island))
    self.kernel.at(9.0, lambda: net.heal(0, network.DOWN))
    self.kernel.run(20.0)
    self.assertEmpty(self.numbers())
    self.assertLen(self.island.lost, 1)
    self.assertLen(self.syncer.lost, 1)
    self.assertIsNotNone(net.connect(0, self.island))

  def test_bulk_takes_the_time_of_its_size_one_after_the_other(self):
    net = self.make(latency_s=0.0, bandwidth=50.0)
    for _ in range(2):
      net.send(self.connection, network.DOWN, self.broadcast(), 'value')
    self.send(net, 7)
    arrived = []
    for at in (0.5, 2.5, 4.5):
      self.kernel.run(at)
      arrived.append(len(self.island.got))
    # Control traffic does not wait behind it.
    self.assertEqual(arrived, [1, 2, 3])

  def test_faults_strike_one_message_in_so_many(self):
    net = self.make(streams=False)
    net.link(0).rates[plan.LOSE] = (2, 50.0, '')
    self.send(net, *range(200))
    self.kernel.run(100.0)
    self.assertBetween(len(self.numbers()), 60, 140)
    self.assertLen(self.faults, 200 - len(self.numbers()))
    before = len(self.numbers())
    self.kernel.at(60.0, lambda: self.send(net, *range(10)))  # it is over
    self.kernel.run(200.0)
    self.assertLen(self.numbers(), before + 10)

  def test_the_checksum_sees_a_frame_and_the_digest_a_value(self):
    for how, values in (('frame', []), ('value', [('corrupt', 'value')])):
      net = self.make()
      net.link(0).rates[plan.CORRUPT] = (1, 50.0, how)
      net.send(self.connection, network.DOWN, self.broadcast(), 'value')
      self.kernel.run(20.0)
      self.assertEqual([x for _, x in self.island.got], values)
      self.assertLen(self.island.lost, how == 'frame')


class StorageTest(absltest.TestCase):
  def test_a_crash_leaves_what_is_durable_and_perhaps_more(self):
    tape = TapeFile()
    for number in range(5):
      count = tape.append(float(number), 'note', (('n', (number, 1)),))
      if number == 1:
        tape.sync(count)
    tape.crash(keep=1)
    self.assertEqual([x['n'] for x in tape.read()], [[0, 1], [1, 1], [2, 1]])
    self.assertEqual(tape.durable, 3)

  def test_the_newest_checkpoint_counts(self):
    checkpoints = Checkpoints()
    self.assertIsNone(checkpoints.newest)
    for number in range(4):
      checkpoints.commit(number)
    self.assertEqual(checkpoints.newest, 3)
    checkpoints.remove_all()
    self.assertIsNone(checkpoints.newest)


class ProcessTest(absltest.TestCase):
  def scenario(self, *faults):
    settings = Settings(
      islands=2, sizes=(3,), fingerprint='f', config_hash='c', period=4,
      overlap=1, steps=60,
    )  # fmt: skip
    return Scenario(seed=0, settings=settings, faults=faults)

  def test_a_crash_may_fall_between_two_actions(self):
    seen = []

    class Watch:
      def on_react(self, world, who, life, old, event, new, actions):
        if who == 'island/0':
          seen.append((life, world.islands[0].step, len(actions)))

      def on_crash(self, world, who):
        seen.append((who, world.kernel.now))

      def on_start(self, world, who):
        pass

    fault = plan.Fault(10.0, plan.CRASH_ISLAND, 0, 3.0, 4, 'checkpoint')
    world = World(self.scenario(fault), (Watch(),))
    world.run_to_end()
    self.assertTrue(world.finished)
    crash = next(k for k, x in enumerate(seen) if x[0] == 'island/0')
    lives = {x[0] for x in seen[:crash]}
    # The event during which it died was its last one.
    self.assertNotIn(
      lives.pop(), {x[0] for x in seen[crash + 1 :]} - {'island/0'}
    )

  def test_a_clock_that_runs_fast_fires_its_timers_early(self):
    world = World(self.scenario())
    host = world.islands[0]
    host.clock.set_rate(world.kernel.now, 2.0)
    world.run(10.0)
    self.assertAlmostEqual(host.now(), 20.0)

  def test_the_same_scenario_with_other_chance_is_another_run(self):
    scenario = self.scenario()
    scenario = dataclasses.replace(
      scenario, compute=ComputeSettings(step_cv=0.3)
    )
    one = World(scenario)
    other = World(dataclasses.replace(scenario, seed=1))
    for world in (one, other):
      world.run(20.0)
    self.assertNotEqual(one.events, other.events)


if __name__ == '__main__':
  absltest.main()
