"""Adoption rules and their identities."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax import algorithm as A

SHAPES = {'a': (4, 3), 'b': (), 'c': (5,)}


def random_tree(seed):
  rng = np.random.default_rng(seed)
  return {
    name: np.asarray(rng.standard_normal(shape), np.float32)
    for name, shape in SHAPES.items()
  }


def assert_equal(one, other):
  for name in SHAPES:
    np.testing.assert_array_equal(one[name], other[name])


def assert_close(one, other):
  for name in SHAPES:
    np.testing.assert_allclose(one[name], other[name], rtol=1e-6, atol=2e-6)


class AdoptTest(parameterized.TestCase):
  def test_overwrite(self):
    local, theta = random_tree(0), random_tree(1)
    assert_equal(A.adopt_overwrite(local, theta), theta)

  @parameterized.parameters(0.0, 0.5, 1.0, 0.3)
  def test_blend(self, alpha):
    local, theta = random_tree(0), random_tree(1)
    expected = {
      name: alpha * np.float64(local[name])
      + (1 - alpha) * np.float64(theta[name])
      for name in SHAPES
    }
    blended = jax.jit(A.adopt_blend)(local, theta, alpha)
    assert_close(blended, expected)
    if alpha == 0:
      assert_equal(blended, A.adopt_overwrite(local, theta))
    if alpha == 1:
      assert_equal(blended, local)

  def test_rebase(self):
    local, theta, anchor, sent = (random_tree(seed) for seed in range(4))
    expected = {
      name: np.float64(theta[name]) + local[name] - anchor[name]
      for name in SHAPES
    }
    assert_close(jax.jit(A.adopt_rebase)(local, theta, anchor), expected)
    expected = {name: expected[name] + sent[name] for name in SHAPES}
    assert_close(jax.jit(A.adopt_rebase)(local, theta, anchor, sent), expected)

  def test_rebase_without_steps_is_overwrite(self):
    local, theta = random_tree(0), random_tree(1)
    assert_equal(A.adopt_rebase(local, theta, local), theta)
    shift = A.rebase_shift(theta, local)
    assert_close({n: local[n] + shift[n] for n in SHAPES}, theta)

  def test_rebase_keeps_steps_after_the_capture(self):
    """Alone with η 1 and μ 0, an island is where it would be by itself."""
    anchor, capture, local = (random_tree(seed) for seed in range(3))
    sent = {name: anchor[name] - capture[name] for name in SHAPES}
    theta = {name: anchor[name] - sent[name] for name in SHAPES}
    assert_close(A.adopt_rebase(local, theta, anchor, sent), local)

  @parameterized.parameters(False, True)
  def test_shift_equals_rebase(self, with_sent):
    local, theta, anchor, sent = (random_tree(seed) for seed in range(4))
    sent = sent if with_sent else None
    shift = A.rebase_shift(theta, anchor, sent)
    for name, value in shift.items():
      self.assertIsInstance(value, np.ndarray)
      self.assertEqual(value.dtype, np.float32)
      self.assertEqual(value.shape, SHAPES[name])
    assert_close(
      {name: local[name] + shift[name] for name in SHAPES},
      A.adopt_rebase(local, theta, anchor, sent),
    )

  def test_arguments_are_left_alone(self):
    trees = [random_tree(seed) for seed in range(4)]
    A.rebase_shift(*trees[1:])
    A.adopt_rebase(*trees)
    for seed, tree in enumerate(trees):
      assert_equal(tree, random_tree(seed))

  def test_dtypes_of_the_local_one_are_kept(self):
    local = {'x': jnp.full(3, 2, jnp.bfloat16)}
    theta, anchor = {'x': np.full(3, 1.5, 'f4')}, {'x': np.full(3, 1, 'f4')}
    for value, expected in (
      (A.adopt_overwrite(local, theta), 1.5),
      (A.adopt_blend(local, theta, 0.5), 1.75),
      (A.adopt_rebase(local, theta, anchor), 2.5),
      (A.adopt_rebase(local, theta, anchor, theta), 4.0),
    ):
      self.assertEqual(value['x'].dtype, jnp.bfloat16)
      np.testing.assert_array_equal(np.float32(value['x']), expected)


if __name__ == '__main__':
  absltest.main()
