"""Samples: lanes, epochs, and positions."""

import itertools

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from diloco_jax.data import samples
from diloco_jax.data.samples import Lease
from diloco_jax.errors import UserError

WINDOWS = 48
SEQUENCE = 4
OPTIONS = samples.DataOptions(sequence=SEQUENCE, batch=4)
# Window w is [w, w, w, w, w + 1]: its first token names it.
TEXT = np.repeat(np.arange(WINDOWS + 1), SEQUENCE).astype(np.uint8)
TEXT = TEXT[: WINDOWS * SEQUENCE + 1]


def stream(lane, lanes, begin=0, end=-1, seed=0):
  return samples.Samples(TEXT, OPTIONS, Lease(lane, lanes, begin, end), seed)


def take(batches, count):
  """The names of the windows of `count` batches."""
  rows = [b['tokens'][:, 0] for b in itertools.islice(batches, count)]
  return [int(x) for x in np.concatenate(rows)]


class SamplesTest(absltest.TestCase):
  def test_batches(self):
    batch = next(stream(0, 1))['tokens']
    self.assertEqual((batch.shape, batch.dtype), ((4, 5), np.int32))
    for row in batch:
      w = row[0]
      np.testing.assert_array_equal(row, [w, w, w, w, w + 1])

  def test_lanes_are_disjoint_and_cover_an_epoch(self):
    lanes = 3
    per_lane = WINDOWS // lanes
    for epoch in range(2):
      seen: list[int] = []
      for lane in range(lanes):
        batches = stream(lane, lanes, begin=epoch * per_lane)
        seen.extend(take(batches, per_lane // OPTIONS.batch))
      self.assertCountEqual(seen, range(WINDOWS))

  def test_lanes_are_the_residues_of_one_sequence(self):
    whole = take(stream(0, 1), 2 * WINDOWS // OPTIONS.batch)
    for lane in range(3):
      mine = take(stream(lane, 3), 2 * WINDOWS // 3 // OPTIONS.batch)
      self.assertEqual(mine, whole[lane::3])

  def test_each_epoch_and_seed_has_its_own_order(self):
    per_epoch = WINDOWS // OPTIONS.batch
    batches = stream(0, 1)
    orders = [take(batches, per_epoch) for _ in range(3)]
    orders.append(take(stream(0, 1, seed=1), per_epoch))
    for order in orders:
      self.assertCountEqual(order, range(WINDOWS))
    self.assertLen({tuple(order) for order in orders}, 4)
    self.assertNotIn(tuple(range(WINDOWS)), {tuple(o) for o in orders})

  def test_a_position_taken_up_gives_the_same_batches(self):
    batches = stream(1, 2)
    take(batches, 9)
    position = batches.position
    self.assertEqual(position, 36)
    rest = take(batches, 10)
    self.assertEqual(take(stream(1, 2, begin=position), 10), rest)

  def test_a_lease_ends(self):
    self.assertLen(list(stream(0, 2, begin=4, end=12)), 2)
    # No sample outside the lease is touched for a last batch.
    self.assertLen(list(stream(0, 2, begin=4, end=11)), 1)

  def test_position_can_be_set(self):
    batches = stream(1, 2)
    first = take(batches, 3)
    batches.position = 0
    self.assertEqual(take(batches, 3), first)

  def test_too_little_text(self):
    short = TEXT[: 7 * SEQUENCE + 1]
    with self.assertRaisesRegex(UserError, '7 windows.*at least 8'):
      samples.Samples(short, OPTIONS, Lease(0, 2, 0, -1), 0)
    with self.assertRaisesRegex(UserError, 'data.path'):
      next(samples.held_out(TEXT[:1], OPTIONS))


class HeldOutTest(parameterized.TestCase):
  @parameterized.parameters(2, 5, 6, 17, 40, 101, 240)
  def test_every_byte_but_the_first_is_predicted_once(self, size):
    text = np.arange(size).astype(np.uint8)
    predicted = []
    for batch in samples.held_out(text, OPTIONS):
      tokens, mask = batch['tokens'], batch['mask']
      self.assertEqual((tokens.shape, tokens.dtype), ((4, 5), np.int32))
      self.assertEqual((mask.shape, mask.dtype), ((4, 4), bool))
      self.assertTrue(mask.any())
      # A predicted byte comes after the byte that it comes after.
      np.testing.assert_array_equal(
        tokens[:, 1:][mask], tokens[:, :-1][mask] + 1
      )
      predicted.extend(tokens[:, 1:][mask].tolist())
    self.assertCountEqual(predicted, range(1, size))

  def test_a_part_is_fixed_spread_and_of_no_batch_size(self):
    parts = []
    for batch_size in (4, 7):
      options = samples.DataOptions(sequence=SEQUENCE, batch=batch_size)
      batches = list(samples.held_out(TEXT, options, tokens=8 * SEQUENCE))
      self.assertEqual(sum(b['mask'].sum() for b in batches), 8 * SEQUENCE)
      rows = np.concatenate([b['tokens'][b['mask'][:, 0], 0] for b in batches])
      parts.append(sorted(rows.tolist()))
    self.assertEqual(parts[0], parts[1])
    gaps = np.diff([*parts[0], parts[0][0] + WINDOWS])
    self.assertLessEqual(max(gaps), 2 * WINDOWS / 8)

  def test_more_than_there_is(self):
    batches = samples.held_out(TEXT, OPTIONS, tokens=samples.SUBSET_TOKENS)
    self.assertEqual(sum(b['mask'].sum() for b in batches), WINDOWS * SEQUENCE)


if __name__ == '__main__':
  absltest.main()
