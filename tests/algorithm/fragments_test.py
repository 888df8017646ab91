"""Partition: each tensor once, balanced, the same everywhere."""

import dataclasses
import itertools

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax import algorithm as A


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
  kernel: object
  bias: object


def nested():
  rng = np.random.default_rng(0)

  def array(*shape):
    return np.asarray(rng.standard_normal(shape), np.float32)

  return {
    'embed': {'table': array(20, 4)},
    'layers': [Layer(array(4, 8), array(8)), Layer(array(8, 4), array(4))],
    'norm': (array(4), array()),
  }


def flat(sizes):
  return {
    f't{k:02d}': jax.ShapeDtypeStruct((size,), 'float32')
    for k, size in enumerate(sizes)
  }


def best_makespan(sizes, bins):
  """The smallest possible largest sum, by trying everything."""
  return min(
    max(
      sum(s for s, b in zip(sizes, assignment, strict=True) if b == k)
      for k in range(bins)
    )
    for assignment in itertools.product(range(bins), repeat=len(sizes))
  )


class PartitionTest(parameterized.TestCase):
  @hypothesis.settings(deadline=None, max_examples=50, derandomize=True)
  @hypothesis.given(st.lists(st.integers(0, 500), min_size=1, max_size=30))
  def test_every_tensor_once(self, sizes):
    for bins in {1, (len(sizes) + 1) // 2, len(sizes)}:
      parts = A.partition(flat(sizes), bins)
      names = [name for part in parts.names for name in part]
      self.assertCountEqual(names, flat(sizes))
      self.assertLen(parts.names, bins)
      self.assertTrue(all(parts.names))
      self.assertEqual(sum(parts.sizes), sum(sizes))
      for part in parts.names:
        self.assertEqual(list(part), sorted(part))

  @hypothesis.settings(deadline=None, max_examples=40, derandomize=True)
  @hypothesis.given(
    st.lists(st.integers(1, 60), min_size=3, max_size=7), st.integers(1, 3)
  )
  def test_bound(self, sizes, bins):
    largest = max(A.partition(flat(sizes), bins).sizes)
    bound = 4 / 3 - 1 / (3 * bins)
    self.assertLessEqual(largest, bound * best_makespan(sizes, bins) + 1e-9)

  def test_greedy_by_hand(self):
    parts = A.partition(flat([5, 7, 5, 3, 3]), 2)
    # 7 | 5, then 5 to the second, 3 to the first, 3 by index to the first.
    self.assertEqual(parts.names, (('t01', 't03', 't04'), ('t00', 't02')))
    self.assertEqual(parts.sizes, (13, 10))

  def test_order_of_dicts_does_not_matter(self):
    tree = flat([3, 1, 4, 1, 5, 9, 2, 6])
    other = dict(reversed(list(tree.items())))
    one, two = A.partition(tree, 3), A.partition(other, 3)
    self.assertEqual(one.names, two.names)
    self.assertEqual(one.fingerprint, two.fingerprint)

  def test_abstract_and_concrete_alike(self):
    tree = nested()
    one = A.partition(tree, 3)
    two = A.partition(jax.eval_shape(lambda: tree), 3)
    self.assertEqual(one, two)
    self.assertEqual(one.fingerprint, two.fingerprint)

  def test_names_and_specs(self):
    parts = A.partition(nested(), 1)
    self.assertEqual(
      parts.names[0],
      (
        'embed/table', 'layers/0/bias', 'layers/0/kernel', 'layers/1/bias',
        'layers/1/kernel', 'norm/0', 'norm/1',
      ),
    )  # fmt: skip
    half = {'x': jnp.zeros((2, 3), jnp.bfloat16)}
    spec = A.partition(half, 1).specs(0)
    self.assertEqual(spec, {'x': jax.ShapeDtypeStruct((2, 3), 'float32')})

  def test_embeddings(self):
    parts = A.partition(nested(), 2)
    marked = [name for name, mark in parts.is_embedding.items() if mark]
    self.assertEqual(marked, ['embed/table'])
    own = A.partition(nested(), 2, is_embedding=lambda x: x.startswith('norm'))
    marked = [name for name, mark in own.is_embedding.items() if mark]
    self.assertEqual(marked, ['norm/0', 'norm/1'])

  @parameterized.parameters(0, -1, 8, 100)
  def test_number_out_of_range(self, number):
    with self.assertRaisesRegex(ValueError, f'{number} .*expected 1 to 7'):
      A.partition(nested(), number)

  def test_unknown_strategy(self):
    with self.assertRaisesRegex(ValueError, "'layers', expected balanced"):
      A.partition(nested(), 2, strategy='layers')

  def test_two_of_one_name(self):
    with self.assertRaisesRegex(ValueError, 'same path'):
      A.partition({'a/b': np.zeros(1), 'a': {'b': np.zeros(1)}}, 1)


class TakePutTest(parameterized.TestCase):
  def assert_inverse(self, tree, fragments):
    parts = A.partition(tree, fragments)
    changed = jax.tree.map(lambda x: x + 1, tree)
    rebuilt = tree
    for p in range(fragments):
      taken = parts.take(changed, p)
      self.assertEqual(tuple(taken), parts.names[p])
      before = jax.tree.leaves(rebuilt)
      rebuilt = parts.put(rebuilt, p, taken)
      after = jax.tree.leaves(rebuilt)
      changes = sum(x is not y for x, y in zip(before, after, strict=True))
      self.assertEqual(changes, len(taken))
      for name, value in parts.take(rebuilt, p).items():
        self.assertIs(value, taken[name])
    self.assertEqual(jax.tree.structure(rebuilt), jax.tree.structure(tree))
    for x, y in zip(
      jax.tree.leaves(rebuilt), jax.tree.leaves(changed), strict=True
    ):
      self.assertIs(x, y)

  @parameterized.parameters(1, 3, 7)
  def test_nested(self, fragments):
    self.assert_inverse(nested(), fragments)

  def test_single_leaf(self):
    self.assert_inverse([jnp.ones(3)], 1)

  def test_nnx_state(self):
    model = nnx.Sequential(
      nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 2, rngs=nnx.Rngs(1))
    )
    state = nnx.state(model, nnx.Param)
    self.assert_inverse(state, 2)
    parts = A.partition(state, 2)
    self.assertEqual(parts.fingerprint, A.partition(state, 2).fingerprint)
    self.assertLen(parts.shapes, 4)

  def test_under_jit(self):
    tree = nested()
    parts = A.partition(tree, 2)
    put = jax.jit(lambda x, y: parts.put(x, 1, parts.take(y, 1)))
    result = put(tree, jax.tree.map(np.zeros_like, tree))
    for value in parts.take(result, 1).values():
      np.testing.assert_array_equal(value, 0 * value)
    for name, value in parts.take(result, 0).items():
      np.testing.assert_array_equal(value, parts.take(tree, 0)[name])

  def test_put_of_another_fragment(self):
    tree = nested()
    parts = A.partition(tree, 2)
    with self.assertRaisesRegex(ValueError, 'fragment 0 has the tensors'):
      parts.put(tree, 0, parts.take(tree, 1))


class FingerprintTest(parameterized.TestCase):
  def test_sensitive(self):
    def tree(name='b', shape=(2, 3), dtype='float32'):
      return {
        'a': jax.ShapeDtypeStruct((4,), 'float32'),
        name: jax.ShapeDtypeStruct(shape, dtype),
      }

    prints = [
      A.partition(tree(), 1),
      A.partition(tree('c'), 1),
      A.partition(tree(shape=(3, 2)), 1),
      A.partition(tree(shape=(6,)), 1),
      A.partition(tree(dtype='bfloat16'), 1),
      A.partition(tree(), 2),
      A.partition(tree(), 1, is_embedding=lambda name: name == 'a'),
      A.partition(tree(), 1, is_embedding=lambda name: name == 'b'),
    ]
    prints = [parts.fingerprint for parts in prints]
    self.assertLen(set(prints), len(prints))
    for value in prints:
      self.assertRegex(value, '^[0-9a-f]{64}$')

  def test_assignment(self):
    parts = A.partition(flat([4, 3, 2, 1]), 2)
    other = dataclasses.replace(parts, names=parts.names[::-1])
    self.assertNotEqual(parts.fingerprint, other.fingerprint)


if __name__ == '__main__':
  absltest.main()
