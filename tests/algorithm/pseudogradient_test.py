"""Weights and means, against float64 NumPy."""

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax import algorithm as A

SHAPES = {'a': (7, 5), 'b': (), 'c': (33,), 'd': (2, 3, 4)}


def random_deltas(m, seed=0, scale=1.0):
  rng = np.random.default_rng(seed)
  return [
    {
      name: (scale * rng.standard_normal(shape)).astype(np.float32)
      for name, shape in SHAPES.items()
    }
    for _ in range(m)
  ]


def oracle_mean(vectors, weights):
  weights = np.asarray(weights, np.float64)
  if weights.sum() == 0:
    return np.zeros_like(vectors[0], np.float64)
  total = np.zeros_like(vectors[0], np.float64)
  for vector, weight in zip(vectors, weights, strict=True):
    total += weight / weights.sum() * np.float64(vector)
  return total


def oracle_rda(vectors, weights):
  """The equation as it is printed; the mean where directions cancel."""
  weights = np.asarray(weights, np.float64)
  norms = [np.sqrt(np.sum(np.float64(v) ** 2)) for v in vectors]
  radius = sum(w * n for w, n in zip(weights, norms, strict=True))
  units = [
    np.float64(v) / n if n else np.zeros_like(v, np.float64)
    for v, n in zip(vectors, norms, strict=True)
  ]
  direction = oracle_mean(units, weights)
  length = np.sqrt(np.sum(direction**2))
  if length < 1e-6:
    return oracle_mean(vectors, weights)
  return radius / weights.sum() * direction / length


class TokenWeightTest(parameterized.TestCase):
  def test_quantity_times_quality(self):
    self.assertEqual(A.token_weight(100, 10), 1000)

  def test_many_small_batches_weigh_less(self):
    self.assertLess(A.token_weight(100, 20), A.token_weight(100, 10))

  @parameterized.parameters((0, 0), (100, 0), (0, 10))
  def test_nothing_done_weighs_nothing(self, tokens, steps):
    self.assertEqual(A.token_weight(tokens, steps), 0)


class MeansTest(parameterized.TestCase):
  @parameterized.product(
    m=[1, 2, 8], weights=['equal', 'unequal', 'one absent'], seed=[0, 1]
  )
  def test_equals_the_oracle_tensor_by_tensor(self, m, weights, seed):
    deltas = random_deltas(m, seed)
    # Tensors of different size must not share a norm.
    for delta in deltas:
      delta['c'] *= 1000
    w = {
      'equal': np.ones(m),
      'unequal': np.arange(1, m + 1) ** 2,
      'one absent': np.r_[3.0, np.ones(m - 1)[1:], np.zeros(min(1, m - 1))],
    }[weights]
    mean = A.weighted_mean(deltas, w)
    rda = A.radial_directional_mean(deltas, w)
    for name in SHAPES:
      vectors = [delta[name] for delta in deltas]
      scale = max(np.abs(v).max() for v in vectors)
      np.testing.assert_allclose(
        mean[name], oracle_mean(vectors, w), rtol=1e-5, atol=1e-6 * scale
      )
      expected = oracle_rda(vectors, w)
      np.testing.assert_allclose(
        rda[name], expected, rtol=2e-5, atol=3e-6 * np.abs(expected).max()
      )
      self.assertEqual(rda[name].dtype, np.float32)
      self.assertEqual(rda[name].shape, SHAPES[name])

  def test_one_island_is_the_identity(self):
    deltas = random_deltas(1)
    for mean in (A.weighted_mean, A.radial_directional_mean):
      result = mean(deltas, [1234.5])
      for name, value in deltas[0].items():
        np.testing.assert_array_equal(result[name], value)

  @parameterized.parameters(1e-18, 1e-3, 1.0, 1e18, 1e30)
  def test_one_island_among_absent_ones(self, scale):
    (one,) = random_deltas(1, scale=scale)
    (absent,) = random_deltas(1, seed=9)
    result = A.radial_directional_mean([absent, one, absent], [0, 7, 0])
    for name, value in one.items():
      np.testing.assert_allclose(result[name], value, rtol=1e-6)

  @parameterized.parameters(0.0, 1e-30, 1e20, 3e38)
  def test_weight_zero_is_absence(self, size):
    """Also where the norm of the absent one is beyond f32."""
    deltas = random_deltas(2)
    absent = {name: np.full(x, size, 'f4') for name, x in SHAPES.items()}
    for mean in (A.weighted_mean, A.radial_directional_mean):
      expected = mean(deltas, [1, 3])
      result = mean([deltas[0], absent, deltas[1]], [1, 0, 3])
      for name in SHAPES:
        np.testing.assert_allclose(
          result[name], expected[name], rtol=1e-6, atol=1e-7
        )

  @parameterized.parameters(2, 4, 8)
  def test_orthogonal_keep_their_norm(self, m):
    rng = np.random.default_rng(m)
    q, _ = np.linalg.qr(rng.standard_normal((64, m)))
    deltas = [{'x': (3 * q[:, k]).astype('f4')} for k in range(m)]
    rda = A.radial_directional_mean(deltas, np.ones(m))['x']
    mean = A.weighted_mean(deltas, np.ones(m))['x']
    self.assertAlmostEqual(np.linalg.norm(rda), 3, places=5)
    self.assertAlmostEqual(np.linalg.norm(mean), 3 / m**0.5, places=5)

  @parameterized.parameters(1e-20, 1e-3, 7.0, 1e12, 1e30)
  def test_scale_of_the_weights_does_not_matter(self, scale):
    deltas = random_deltas(3)
    w = np.float32([1, 2, 5])
    for mean in (A.weighted_mean, A.radial_directional_mean):
      one, other = mean(deltas, w), mean(deltas, w * np.float32(scale))
      for name in SHAPES:
        np.testing.assert_allclose(one[name], other[name], rtol=3e-6, atol=1e-7)

  @parameterized.parameters(1e-10, 1e-25, 1e10, 1e25, 1e30)
  def test_rda_where_squares_leave_f32(self, scale):
    deltas = random_deltas(4, seed=3, scale=scale)
    rda = A.radial_directional_mean(deltas, [1, 2, 3, 4])
    for name in SHAPES:
      expected = oracle_rda([delta[name] for delta in deltas], [1, 2, 3, 4])
      np.testing.assert_allclose(
        rda[name], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
      )

  def test_one_large_one_small(self):
    """Both count by their direction, and the norms are averaged."""
    large = np.float32([1e25, 0])
    small = np.float32([0, 1e-25])
    rda = A.radial_directional_mean([large, small], [1, 1])
    np.testing.assert_allclose(rda, np.full(2, 1e25 / 8**0.5), rtol=1e-5)

  def test_cancelling_directions_fall_back_to_the_mean(self):
    v = np.float32([1, -2, 3])
    rda = A.radial_directional_mean([v, -v], [1, 1])
    np.testing.assert_array_equal(rda, np.zeros(3))
    rda = A.radial_directional_mean([3 * v, -v], [1, 1])
    np.testing.assert_allclose(rda, v, rtol=1e-6)

  def test_zeros(self):
    zeros = {name: np.zeros(shape, 'f4') for name, shape in SHAPES.items()}
    rda = A.radial_directional_mean([zeros, zeros], [1, 2])
    for name, value in rda.items():
      np.testing.assert_array_equal(value, zeros[name])
    # A zero has no direction but counts in the mean of the norms.
    v = np.float32([3, 4])
    rda = A.radial_directional_mean([v, 0 * v], [1, 1])
    np.testing.assert_allclose(rda, v / 2, rtol=1e-6)

  def test_weights_all_zero(self):
    deltas = random_deltas(3)
    for mean in (A.weighted_mean, A.radial_directional_mean):
      for value in mean(deltas, np.zeros(3)).values():
        np.testing.assert_array_equal(value, np.zeros_like(value))

  @hypothesis.settings(deadline=None, max_examples=60, derandomize=True)
  @hypothesis.given(
    st.lists(
      st.tuples(
        st.sampled_from(
          [0.0, 1.0, -1.0, 1e30, -1e30, 3e38, 1e-30, 1e-38, 1e-42, -1e-45]
        ),
        st.sampled_from([0.0, 1e-30, 1.0, 1e30]),
      ),
      min_size=3,
      max_size=3,
    )
  )
  def test_extremes_give_finite_values(self, drawn):
    pattern = np.float32([1, 0.5, -0.25, 0])
    deltas = [np.float32(scale) * pattern for scale, _ in drawn]
    weights = np.float32([weight for _, weight in drawn])
    for mean in (A.weighted_mean, A.radial_directional_mean):
      value = np.asarray(mean(deltas, weights))
      self.assertTrue(np.isfinite(value).all(), value)
      # A mean is no longer than the longest.
      top = max((np.abs(d).max() for d in deltas), default=0)
      self.assertLessEqual(np.abs(value).max(), 4 * np.float64(top) + 1e-37)

  def test_lower_precision_is_accumulated_in_f32(self):
    deltas = [jnp.full(4, 1 + k / 128, jnp.bfloat16) for k in range(8)]
    expected = np.full(4, 1 + 3.5 / 128)
    np.testing.assert_allclose(
      A.weighted_mean(deltas, np.ones(8)), expected, rtol=1e-6
    )
    rda = A.radial_directional_mean(deltas, np.ones(8))
    np.testing.assert_allclose(rda, expected, rtol=1e-6)

  def test_large_tensors_are_summed_well(self):
    rng = np.random.default_rng(0)
    deltas = [rng.standard_normal(2**20).astype('f4') + 1 for _ in range(2)]
    rda = A.radial_directional_mean(deltas, [1, 3])
    expected = oracle_rda(deltas, [1, 3])
    np.testing.assert_allclose(rda, expected, rtol=1e-5, atol=1e-6)

  def test_under_jit_and_eagerly_alike(self):
    deltas = random_deltas(3)
    w = jnp.float32([1, 2, 3])
    for mean in (A.weighted_mean, A.radial_directional_mean):
      eager, jitted = mean(deltas, w), jax.jit(mean)(deltas, w)
      for name in SHAPES:
        np.testing.assert_allclose(
          eager[name], jitted[name], rtol=1e-5, atol=1e-6
        )


if __name__ == '__main__':
  absltest.main()
