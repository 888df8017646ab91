"""The checkers hold in a world written apart from theirs, and their books."""

from absl.testing import absltest
from absl.testing import parameterized

from diloco_jax.protocol import messages as m
from diloco_jax.simulation import checkers
from diloco_jax.simulation import checking
from diloco_jax.simulation import coverage
from diloco_jax.simulation import liveness
from diloco_jax.simulation import spans
from diloco_jax.simulation.books import Given
from diloco_jax.simulation.books import Made
from diloco_jax.simulation.books import Theta
from diloco_jax.simulation.round_book import RoundBook
from tests.protocol import chaos_plan
from tests.simulation import watched_chaos


class SpansTest(absltest.TestCase):
  def test_without_leaves_what_is_left_and_right(self):
    self.assertEqual(
      spans.without(((0, 0, 9), (1, 0, 3)), ((0, 2, 5),)),
      ((0, 0, 2), (0, 5, 9), (1, 0, 3)),
    )
    self.assertEqual(spans.without(((0, 2, 5),), ((0, 0, 9),)), ())
    self.assertEqual(spans.without(((0, 2, 5),), ((1, 0, 9),)), ((0, 2, 5),))

  def test_covers_every_step_or_not(self):
    self.assertTrue(spans.covers(((0, 0, 5), (1, 0, 2)), ((0, 0, 5),)))
    self.assertTrue(spans.covers(((0, 0, 5), (0, 5, 9)), ((0, 3, 7),)))
    self.assertFalse(spans.covers(((0, 0, 5),), ((0, 3, 6),)))
    self.assertFalse(spans.covers(((0, 0, 5),), ((1, 0, 5),)))


class ThetaTest(absltest.TestCase):
  def made(self, merges, number, *parts):
    given = Given(0, 1, number, parts, m.Version(1, 0), 10, parts[-1][2])
    return Made(0, m.Version(1, merges), f'd{merges}', (given,))

  def setUp(self):
    super().setUp()
    self.theta = Theta((3,))
    self.theta.seed(1, ('d0',))
    self.theta.add(self.made(1, 1, (7, 0, 4)))
    self.theta.add(self.made(2, 2, (7, 4, 6)))

  def test_what_is_inside(self):
    self.assertEqual(self.theta.inside(0, ((7, 5, 8),)), (7, 5, 6))
    self.assertEqual(self.theta.inside(0, ((7, 0, 1),)), (7, 0, 1))
    self.assertIsNone(self.theta.inside(0, ((7, 6, 8), (8, 0, 4))))
    self.assertIsNone(self.theta.inside(0, ((7, 4, 8),), m.Version(1, 1)))
    self.assertEqual(self.theta.newest_step(0, 1), 6)
    self.assertEqual(self.theta.merged_total, 60)

  def test_what_is_taken_back_may_enter_again(self):
    lives = self.theta.take_back(0, m.Version(1, 1))
    self.assertEqual(lives, {7})
    self.assertIsNone(self.theta.inside(0, ((7, 4, 8),)))
    self.assertEqual(self.theta.last[0][0].version, m.Version(1, 1))
    self.assertEqual(self.theta.merged_total, 30)
    self.assertEqual(self.theta.merges, 1)


class WatchTest(absltest.TestCase):
  def test_a_name_that_means_nothing_is_an_error(self):
    class Wrong:
      def syncer_sends_nonsense(self, at, message):
        pass

    with self.assertRaises(KeyError):
      checking.Watch([Wrong()])

  def test_every_checker_says_what_it_holds(self):
    table = checkers.table()
    self.assertGreaterEqual(len(table), 16)
    for name, sentence in table.items():
      self.assertTrue(sentence.endswith('.'), name)


class CheckersTest(parameterized.TestCase):
  @parameterized.product(
    seed=tuple(range(8)), mode=('free', 'lock_step', 'each')
  )
  def test_nothing_is_found_in_the_protocol(self, seed, mode):
    watched_chaos.run_checked(seed, mode)


class CoverageTest(absltest.TestCase):
  def test_faults_are_told_by_what_goes_on(self):
    class Watched(checking.Watch):
      def __init__(self, settings, tally):
        rounds = RoundBook(settings)
        self._coverage = coverage.Coverage(rounds, tally)
        super().__init__([rounds, self._coverage])

      def on_react(self, *args):
        super().on_react(*args)
        self._coverage.on_fault(None, 'nothing')

    tally = coverage.Tally()
    for seed in (3, 8, 10):
      one = coverage.Tally()
      watched_chaos.run_seed(seed, lambda x, t=one: Watched(x, t), 'free')
      tally.add(one)
    for phase in coverage.PHASES:
      self.assertGreater(tally.faults['nothing', phase], 0, phase)
    self.assertContainsSubset(
      {'all_in', 'grace_over', 'quorum_timeout'}, tally.closes
    )
    holes = tally.holes(['nothing', 'worse'])
    self.assertIn('worse while merging', holes)
    self.assertNotIn('nothing while merging', holes)


class LivenessTest(absltest.TestCase):
  def watch(self, bound):
    def make(settings):
      watch = liveness.Liveness(settings, bound)
      watch.checker.heal(0.0)
      return watch

    return make

  def test_a_run_that_goes_on_is_alive(self):
    settings = chaos_plan.draw(0, 'free').settings
    bound = liveness.bound_s(settings, step_s=4.0, exchange_s=20.0)
    watched_chaos.run_seed(0, self.watch(bound), 'free')

  def test_a_bound_that_is_not_met_is_told(self):
    with self.assertRaises(checking.CheckFailure) as caught:
      watched_chaos.run_seed(0, self.watch(1.0), 'free')
    self.assertEqual(caught.exception.code, checking.LIVENESS)
    self.assertIn('is not merged from', caught.exception.sentence)


if __name__ == '__main__':
  absltest.main()
