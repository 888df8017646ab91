"""The outer step and the merge, against hand-written NumPy."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax import algorithm as A

SHAPES = {'embed/table': (11, 4), 'dense/kernel': (5, 6), 'dense/bias': (6,)}
MARKS = {'embed/table': True, 'dense/kernel': False, 'dense/bias': False}


def random_tree(rng, scale=1.0):
  return {
    name: (scale * rng.standard_normal(shape)).astype(np.float32)
    for name, shape in SHAPES.items()
  }


def on_device(tree):
  return {name: jnp.array(value) for name, value in tree.items()}


def addresses(tree):
  return sorted(x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree))


def oracle_merged(vectors, weights, plain):
  weights = np.float64(weights) / np.sum(weights)
  vectors = [np.float64(v) for v in vectors]
  norms = [np.linalg.norm(v.ravel()) for v in vectors]
  if plain:
    return sum(w * v for w, v in zip(weights, vectors, strict=True))
  direction = sum(
    w * v / n for w, v, n in zip(weights, vectors, norms, strict=True) if n
  )
  return direction * (weights @ norms) / np.linalg.norm(direction.ravel())


class OuterOptimizerTest(parameterized.TestCase):
  @parameterized.product(
    lr=[1.0, 0.7], momentum=[0.0, 0.5, 0.9], nesterov=[True, False]
  )
  def test_equals_the_equation(self, lr, momentum, nesterov):
    rng = np.random.default_rng(0)
    theta = rng.standard_normal(8)
    buffer = np.zeros(8)
    tx = A.outer_optimizer(lr, momentum, nesterov)
    ours = jnp.float32(theta)
    state = tx.init(ours)
    for step in range(4):
      delta = rng.standard_normal(8)
      buffer = momentum * buffer + delta
      theta -= lr * (delta + momentum * buffer if nesterov else buffer)
      updates, state = tx.update(jnp.float32(delta), state, ours)
      ours = optax.apply_updates(ours, updates)
      np.testing.assert_allclose(ours, theta, rtol=1e-5, atol=1e-6)
      if step == 0 and nesterov:
        self.assertEqual(updates.dtype, np.float32)
        np.testing.assert_allclose(
          updates, -lr * (1 + momentum) * delta, rtol=1e-6
        )

  def test_options(self):
    options = A.OuterOptions()
    self.assertEqual((options.rule, options.lr), ('nesterov', 1.0))
    with self.assertRaises(AttributeError):
      options.lr = 2.0


class MergeTest(parameterized.TestCase):
  @parameterized.product(m=[1, 3, 8], rule=['rda', 'mean'], momentum=[0, 0.5])
  def test_equals_the_oracle_over_rounds(self, m, rule, momentum):
    rng = np.random.default_rng(m)
    tx = A.outer_optimizer(0.8, momentum)
    merge = A.make_merge(tx, MARKS, rule)
    expected = random_tree(rng)
    buffers = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    theta = on_device(expected)
    state = tx.init(theta)
    for _ in range(3):
      deltas = [random_tree(rng, 0.1) for _ in range(m)]
      weights = rng.uniform(1, 1000, m).astype('f4')
      theta, state = merge(theta, state, deltas, weights)
      for name in SHAPES:
        vectors = [delta[name] for delta in deltas]
        plain = rule == 'mean' or MARKS[name]
        merged = oracle_merged(vectors, weights, plain)
        buffers[name] = momentum * buffers[name] + merged
        step = merged + momentum * buffers[name]
        expected[name] = expected[name] - 0.8 * step
        np.testing.assert_allclose(
          theta[name], expected[name], rtol=2e-5, atol=2e-6
        )
        self.assertEqual(theta[name].dtype, np.float32)

  def test_marks_matter(self):
    rng = np.random.default_rng(0)
    tx = A.outer_optimizer(1.0, 0.0)
    deltas = [random_tree(rng) for _ in range(4)]
    theta = random_tree(rng)
    marked, _ = A.make_merge(tx, MARKS)(
      on_device(theta), tx.init(theta), deltas, jnp.ones(4)
    )
    bare, _ = A.make_merge(tx, {})(
      on_device(theta), tx.init(theta), deltas, jnp.ones(4)
    )
    for name, mark in MARKS.items():
      same = np.allclose(marked[name], bare[name], atol=1e-3)
      self.assertEqual(same, not mark, name)

  @parameterized.parameters(0.0, 0.5)
  def test_donates(self, momentum):
    rng = np.random.default_rng(0)
    tx = A.outer_optimizer(1.0, momentum)
    theta = on_device(random_tree(rng))
    state = tx.init(theta)
    deltas = [on_device(random_tree(rng)) for _ in range(2)]
    weights = jnp.ones(2)
    merge = A.make_merge(tx, MARKS)
    before = addresses((theta, state))
    new_theta, new_state = merge(theta, state, deltas, weights)
    # Not only given away but used again.
    self.assertEqual(addresses((new_theta, new_state)), before)
    for leaf in jax.tree.leaves((theta, state)):
      self.assertTrue(leaf.is_deleted())
    for leaf in jax.tree.leaves((new_theta, new_state, deltas, weights)):
      self.assertFalse(leaf.is_deleted())
    self.assertEqual(jax.tree.structure(state), jax.tree.structure(new_state))

  def test_compiles_once_for_each_number_of_contributions(self):
    rng = np.random.default_rng(0)
    tx = A.outer_optimizer(1.0, 0.5)
    merge = A.make_merge(tx, MARKS)
    theta = on_device(random_tree(rng))
    state = tx.init(theta)
    for m in (2, 3, 2, 3):
      deltas = tuple(on_device(random_tree(rng)) for _ in range(m))
      theta, state = merge(theta, state, deltas, jnp.arange(1.0, 1.0 + m))
    self.assertEqual(merge._cache_size(), 2)

  @parameterized.parameters('rda', 'mean')
  def test_absent_contributions_change_nothing(self, rule):
    rng = np.random.default_rng(0)
    tx = A.outer_optimizer(1.0, 0.5)
    merge = A.make_merge(tx, MARKS, rule)
    theta = random_tree(rng)
    deltas = [random_tree(rng) for _ in range(3)]
    weights = np.float32([3, 1, 2])
    zeros = {name: np.zeros(shape, 'f4') for name, shape in SHAPES.items()}
    results = []
    for missing in (0, 1, 5):
      start = on_device(theta)
      result = merge(
        start,
        tx.init(start),
        deltas + [zeros] * missing,
        np.r_[weights, np.zeros(missing, 'f4')],
      )
      results.append(jax.tree.leaves(result))
    for other in results[1:]:
      for x, y in zip(results[0], other, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)

  def test_a_contribution_of_weight_zero_is_not_looked_at(self):
    rng = np.random.default_rng(0)
    tx = A.outer_optimizer(1.0, 0.5)
    merge = A.make_merge(tx, MARKS)
    theta = random_tree(rng)
    delta = random_tree(rng)
    results = []
    for scale in (1.0, 1e30, 0.0):
      start = on_device(theta)
      deltas = [delta, random_tree(np.random.default_rng(1), scale)]
      merged, _ = merge(start, tx.init(start), deltas, jnp.float32([2, 0]))
      results.append(merged)
    for other in results[1:]:
      for name in SHAPES:
        np.testing.assert_allclose(
          results[0][name], other[name], rtol=1e-6, atol=1e-6
        )

  @parameterized.parameters('rda', 'mean')
  def test_weights_all_zero_leave_theta(self, rule):
    rng = np.random.default_rng(0)
    tx = A.outer_optimizer(1.0, 0.5)
    theta = random_tree(rng)
    start = on_device(theta)
    deltas = [random_tree(rng) for _ in range(2)]
    merged, _ = A.make_merge(tx, MARKS, rule)(
      start, tx.init(start), deltas, jnp.zeros(2)
    )
    for name, value in theta.items():
      np.testing.assert_array_equal(merged[name], value)

  def test_plain_training(self):
    """One island, η 1, μ 0: Θ becomes what the island has."""
    rng = np.random.default_rng(0)
    tx = A.outer_optimizer(1.0, 0.0)
    theta, local = random_tree(rng), random_tree(rng)
    delta = {name: theta[name] - local[name] for name in SHAPES}
    for rule in ('mean', 'rda'):
      start = on_device(theta)
      merged, _ = A.make_merge(tx, MARKS, rule)(
        start, tx.init(start), [delta], jnp.ones(1)
      )
      for name in SHAPES:
        np.testing.assert_allclose(
          merged[name], local[name], rtol=1e-5, atol=1e-6
        )

  def test_same_inputs_same_bits(self):
    rng = np.random.default_rng(0)
    tx = A.outer_optimizer(1.0, 0.5)
    theta = random_tree(rng)
    deltas = [random_tree(rng) for _ in range(4)]
    merge = A.make_merge(tx, MARKS)
    digests = set()
    for _ in range(3):
      start = on_device(theta)
      merged, _ = merge(start, tx.init(start), deltas, jnp.ones(4))
      digests.add(A.tree_digest(merged))
    self.assertLen(digests, 1)


if __name__ == '__main__':
  absltest.main()
