"""Arithmetic of pace and grace, against values worked out by hand."""

import math

from absl.testing import absltest
from absl.testing import parameterized

from diloco_jax.protocol import schedule


class SlowestStepTest(parameterized.TestCase):
  @parameterized.parameters(
    ((), 0.0),
    ((2.0,), 2.0),
    ((1.0, 1.5), 1.5),
    ((1.0, 1.0, 1.9), 1.9),
    ((1.0, 1.0, 50.0), 2.0),  # winsorised at 2 x the median
    ((1.0, 50.0), 50.0),  # median 25.5
    ((3.0, 1.0, 2.0, 100.0), 5.0),
  )
  def test_values(self, times, want):
    self.assertEqual(schedule.slowest_step_s(times, 2.0), want)


class HoldersNeededTest(parameterized.TestCase):
  @parameterized.parameters(
    # active, quorum, needed
    (1, 1, 1),
    (2, 1, 2),  # the slower paces
    (3, 1, 2),
    (4, 1, 3),
    (8, 1, 5),
    (8, 6, 6),  # K above the majority
    (3, 5, 3),  # no more than there are
    (5, 0, 5),  # all
    (0, 1, 0),
  )
  def test_values(self, active, quorum, needed):
    self.assertEqual(schedule.holders_needed(active, quorum), needed)


class ChargeTest(parameterized.TestCase):
  @parameterized.parameters(
    # credits, n, after
    (2, 2, 0),
    (0, 2, -2),
    (-2, 2, -4),
    (-3, 2, -4),  # no debt beyond 2 n
    (100, 2, 2),  # no saving beyond n
    (3, 2, 1),
  )
  def test_values(self, credits, stride, after):
    self.assertEqual(schedule.charge(credits, stride), after)

  def test_bounds_hold_everywhere(self):
    for stride in (1, 2, 5):
      for credits in range(-50, 51):
        after = schedule.charge(credits, stride)
        self.assertBetween(after, -2 * stride, stride)
        self.assertLessEqual(after, max(credits, -2 * stride))


class GraceTest(parameterized.TestCase):
  def grace(self, **changes):
    values = {
      'gamma': 0.8, 'overlap_steps': 4, 'step_s': 1.0, 'quorum_s': 0.5,
      'sync_s': 1.0, 'cap_s': 10.0, **changes,
    }  # fmt: skip
    return schedule.grace_s(**values)

  def test_equation(self):
    # 0.8 (4 x 1 - 0.5 - 1)
    self.assertAlmostEqual(self.grace(), 2.0)

  def test_the_budget_counts_all_steps_of_the_overlap(self):
    # τ n steps, not τ: the paper's budget at n = 1 is ours.
    self.assertAlmostEqual(self.grace(overlap_steps=2), 0.4)

  @parameterized.parameters(
    ({'cap_s': 1.0}, 1.0),
    ({'quorum_s': 100.0}, 0.0),
    ({'sync_s': None}, 10.0),
    ({'sync_s': None, 'cap_s': 0.0}, 0.0),
    ({'overlap_steps': 0}, 0.0),
    ({'cap_s': 0.0}, 0.0),
    ({'gamma': 0.0}, 0.0),
  )
  def test_clipped(self, changes, want):
    self.assertEqual(self.grace(**changes), want)


class PeriodTest(parameterized.TestCase):
  @parameterized.parameters(
    # P, τ, round time in steps, H allowed, at H = 24
    (24, 2, 1.5, 24.0),
    (24, 2, 2.25, 27.0),  # latency of half a step: 1.12 H
    (8, 2, 4.0, 24.0),
    (24, 0, 2.0, 48.0),  # at least one round in flight
    (24, 1, 2.0, 48.0),
    (1, 1, 30.0, 30.0),
  )
  def test_values(self, fragments, overlap, round_steps, want):
    got = schedule.round_period_steps(
      period=24, fragments=fragments, overlap=overlap, round_steps=round_steps
    )
    self.assertAlmostEqual(got, want)


class MovingTest(absltest.TestCase):
  def test_first_value_stands(self):
    self.assertEqual(schedule.moving(None, 3.0, 0.25), 3.0)

  def test_newest_weighs_decay(self):
    self.assertEqual(schedule.moving(1.0, 5.0, 0.25), 2.0)

  def test_zero_is_a_value(self):
    self.assertEqual(schedule.moving(0.0, 4.0, 0.5), 2.0)

  def test_converges(self):
    value = None
    for _ in range(60):
      value = schedule.moving(value, 7.0, 0.5)
    self.assertTrue(math.isclose(value, 7.0))


if __name__ == '__main__':
  absltest.main()
