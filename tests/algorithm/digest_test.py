"""Digests tell every difference, and nothing else."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from diloco_jax import algorithm as A


class DigestTest(absltest.TestCase):
  def test_every_part_counts(self):
    value = np.arange(6, dtype=np.float32)
    trees = [
      {},
      {'a': value},
      {'b': value},
      {'a': value.reshape(2, 3)},
      {'a': value.reshape(3, 2)},
      {'a': value.view(np.int32)},
      {'a': value.astype('>f4').view('<f4')},
      {'a': value.astype('>f4')},
      {'a': value + np.float32([0, 0, 0, 0, 0, 1e-6])},
      {'a': value, 'b': value},
      {'a': value[:3], 'b': value[3:]},
      {'a': value[:4], 'b': value[4:]},
      {'a': value[3:], 'b': value[:3]},
      {'a': value[:0]},
      {'a': value[:0], 'b': value[:0]},
      {'a': value[:1]},
      {'a': value[0]},
      {'a': value[:1].reshape(1, 1)},
    ]
    digests = [A.tree_digest(tree) for tree in trees]
    self.assertLen(set(digests), len(trees))
    for digest in digests:
      self.assertRegex(digest, '^[0-9a-f]{32}$')

  def test_signs_of_zero_and_nan_bits(self):
    plus, minus = (
      A.tree_digest({'a': np.float32(0)}),
      A.tree_digest({'a': np.float32(-0.0)}),
    )
    self.assertNotEqual(plus, minus)

  def test_types_that_numpy_has_not(self):
    """NumPy calls every one of them a void of so many bytes."""
    raw = np.arange(4, dtype=np.uint8)
    digests = {
      A.tree_digest({'a': raw.view(dtype)})
      for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.uint8)
    }
    self.assertLen(digests, 3)

  def test_layout_and_place_do_not_count(self):
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    expected = A.tree_digest({'a': value, 'b': value[0]})
    strided = np.repeat(value, 2, axis=1)[:, ::2]
    for other in (np.asfortranarray(value), strided, jnp.asarray(value)):
      # The order of a dict neither.
      self.assertEqual(A.tree_digest({'b': value[0], 'a': other}), expected)
    on_device = jax.device_put({'a': value, 'b': value[0]})
    self.assertEqual(A.tree_digest(on_device), expected)

  def test_bfloat16(self):
    value = jnp.arange(4, dtype=jnp.bfloat16)
    self.assertEqual(
      A.tree_digest({'a': value}), A.tree_digest({'a': np.asarray(value)})
    )
    self.assertNotEqual(
      A.tree_digest({'a': value}),
      A.tree_digest({'a': np.asarray(value).view(np.uint16)}),
    )


if __name__ == '__main__':
  absltest.main()
