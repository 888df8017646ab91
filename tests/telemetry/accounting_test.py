"""Definitions, on cases small enough to work out by hand."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from diloco_jax.telemetry import accounting
from tests.telemetry import synthetic_run as synthetic


def row(t_s, steps, step_time_s):
  return {'t_s': t_s, 'steps': steps, 'step_time_s': step_time_s}


class TimeTest(parameterized.TestCase):
  def test_steps_of_a_row_are_a_step_time_apart(self):
    times = accounting.finish_times_s([row(10.0, 3, 2.0), row(13.0, 1, 3.0)])
    np.testing.assert_allclose(times, [6.0, 8.0, 10.0, 13.0])

  def test_no_step_is_placed_before_the_row_before(self):
    times = accounting.finish_times_s(
      [row(10.0, 1, 1.0), row(10.5, 3, 1.0), row(11.0, 0, None)]
    )
    np.testing.assert_allclose(times, [10.0, 10.0, 10.0, 10.5])

  def test_the_median_is_over_steps_not_rows(self):
    rows = [row(1.0, 10, 0.1), row(2.0, 1, 5.0), row(3.0, 1, 7.0)]
    self.assertAlmostEqual(accounting.median_step_s(rows), 0.1)
    self.assertIsNone(accounting.median_step_s([row(1.0, 0, None)]))

  @parameterized.parameters(
    # Median step 1 s: a gap counts beyond 10 s.
    ([1.0, 11.0], 0.0),
    ([1.0, 11.5], 0.5),
    ([1.0, 31.0, 32.0, 52.0], 30.0),
    ([1.0], 0.0),
  )
  def test_downtime(self, times, expected):
    self.assertAlmostEqual(
      accounting.downtime_s(np.array(times), 1.0), expected
    )

  def test_a_run_without_faults_has_a_goodput_of_one(self):
    # Two islands, each 50 steps of 0.2 s, as fast as can be.
    times = np.sort(np.tile(np.arange(1, 51) * 0.2, 2))
    train_s = accounting.train_s(times, 0.2)
    self.assertAlmostEqual(train_s, 10.0)
    self.assertAlmostEqual(accounting.goodput(100, 2, train_s, 0.2), 1.0)
    self.assertAlmostEqual(accounting.goodput(50, 2, train_s, 0.2), 0.5)
    self.assertIsNone(accounting.goodput(1, 2, 0.0, 0.2))
    self.assertIsNone(accounting.goodput(1, 2, 1.0, 0.0))


def merge(fragment, steps, inputs=(), drain=False):
  return {
    'kind': 'merge', 'fragment': fragment, 'steps': steps, 'drain': drain,
    'inputs': [[island, 1, 0, 1, 1, 1.0] for island in inputs],
  }  # fmt: skip


class EffectivePeriodTest(absltest.TestCase):
  def test_mean_over_fragments_then_median_over_islands(self):
    tape = [
      merge(0, [[0, 0], [1, 0], [2, 0]]),
      merge(1, [[0, 10], [1, 5], [2, 1]]),
      merge(0, [[0, 20], [1, 10], [2, 2]]),
      merge(0, [[0, 44], [1, 22], [2, 4]]),
      merge(1, [[0, 50], [1, 25], [2, 5]]),
    ]
    # Island 0: (44 / 2 + 40 / 1) / 2 = 31; island 1 half of it; 2: 3.
    self.assertAlmostEqual(accounting.effective_h(tape), 15.5)

  def test_one_merge_of_a_fragment_tells_nothing(self):
    self.assertIsNone(accounting.effective_h([merge(0, [[0, 5]])]))
    self.assertIsNone(accounting.effective_h([]))

  def test_absence_restart_and_drain_are_left_out(self):
    tape = [
      merge(0, [[0, 0], [1, 0]]),
      merge(0, [[0, 10]]),
      merge(0, [[0, 20], [1, 20]]),
      merge(0, [[0, 3], [1, 30]]),  # island 0 is back at an older step
      merge(0, [[0, 13], [1, 40]]),
      merge(0, [[0, 14], [1, 41]], drain=True),
    ]
    self.assertAlmostEqual(accounting.effective_h(tape), 10.0)

  def test_where_rounds_are_ones_own_only_ones_own_count(self):
    tape = [
      merge(0, [[0, 0], [1, 0]], inputs=[0]),
      merge(0, [[0, 4], [1, 4]], inputs=[1]),
      merge(0, [[0, 10], [1, 10]], inputs=[0]),
      merge(0, [[0, 14], [1, 14]], inputs=[1]),
    ]
    self.assertAlmostEqual(accounting.effective_h(tape, each=True), 10.0)
    self.assertAlmostEqual(accounting.effective_h(tape), 14 / 3)


class TokensTest(parameterized.TestCase):
  def test_exact_until_the_last_division(self):
    large = (1 << 70) + 1
    self.assertEqual(accounting.per_parameter(large * 3, 3), large)
    self.assertIsInstance(accounting.per_parameter(6, 3), int)
    self.assertEqual(accounting.per_parameter(7, 2), 3.5)
    self.assertIsNone(accounting.per_parameter(None, 3))
    self.assertIsNone(accounting.per_parameter(7, 0))

  def test_the_books_of_the_example_add_up(self):
    tape = synthetic.tape()
    self.assertEqual(accounting.accounting_problems(tape), ())
    books = accounting.token_params(tape)
    self.assertEqual(books, (1_900_000, 1_469_900, 410_000, 20_100, 30_000))
    self.assertEqual(books.trained, books.merged + books.lost + books.pending)

  def test_what_an_island_had_when_its_lease_lapsed_for_good_is_lost(self):
    tape = synthetic.tape()
    lapsed = synthetic.line(
      12.65, 'lapsed', island=0, incarnation=1, silent_s=15.0
    )
    tape.insert(-5, lapsed)
    books = accounting.token_params(tape)
    self.assertEqual((books.lost, books.pending), (410_100, 20_000))
    back = synthetic.line(12.66, 'readmitted', island=0, incarnation=1)
    tape.insert(-5, back)
    self.assertEqual(accounting.token_params(tape).pending, 20_100)

  @parameterized.parameters('trained', 'merged', 'lost', 'pending')
  def test_each_wrong_figure_is_found(self, name):
    tape = synthetic.tape()
    tape[-3][f'{name}_token_params'] += 1
    problems = accounting.accounting_problems(tape)
    self.assertNotEmpty(problems)
    self.assertIn('island 0, incarnation 1', problems[0])

  def test_negative_figures_are_found(self):
    tape = synthetic.tape()
    tape[-2]['pending_token_params'] -= 30_000
    tape[-2]['lost_token_params'] += 30_000
    self.assertEqual(
      accounting.accounting_problems(tape),
      ('island 1, incarnation 2: merged, lost or pending is negative',),
    )

  def test_merges_without_a_total_are_found(self):
    tape = synthetic.tape()
    del tape[-2]
    self.assertEqual(
      accounting.accounting_problems(tape),
      ('island 1, incarnation 2: merges, but no total',),
    )

  def test_a_restarted_syncer_may_have_given_up_merges(self):
    tape = synthetic.tape()
    tape[5]['inputs'][0][4] += 1
    self.assertLen(accounting.accounting_problems(tape), 1)
    tape.insert(-6, {**tape[0], 't_s': 12.61, 'incarnation': 2})
    self.assertEmpty(accounting.accounting_problems(tape))


class CounterTest(parameterized.TestCase):
  @parameterized.parameters(
    ([], None),
    ([None], None),
    ([5], 5),
    ([1, 5, 5, 9], 9),
    ([1, 5, 2, 4, 1], 10),
    ([1, None, 3.5], 3.5),
  )
  def test_restarts_are_added(self, values, expected):
    self.assertEqual(accounting.counter_total(values), expected)


if __name__ == '__main__':
  absltest.main()
