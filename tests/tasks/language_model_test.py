"""The language model task: loss, batches, sampling."""

import pathlib
import re

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax import algorithm as A
from diloco_jax.data import corpus
from diloco_jax.data.samples import DataOptions
from diloco_jax.data.samples import Lease
from diloco_jax.models.transformer import ModelOptions
from diloco_jax.tasks.language_model import LanguageModelTask

MODEL = ModelOptions(width=16, depth=1, heads=2)


class LanguageModelTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    file = pathlib.Path(self.create_tempdir().full_path) / 'text.txt'
    file.write_bytes(np.random.default_rng(0).bytes(6000).hex().encode())
    self.path = str(file)
    self.data = DataOptions(path=self.path, sequence=16, batch=2)
    self.task = LanguageModelTask(MODEL, self.data, seed=0)
    self.params, self.state = jax.jit(self.task.init)(jax.random.key(0))

  def test_loss_is_the_mean_cross_entropy_of_the_next_byte(self):
    batch = next(self.task.batches('train', Lease(0, 1, 0, -1)))
    key = jax.random.key(0)
    loss, (state, metrics) = jax.jit(self.task.loss, static_argnums=4)(
      self.params, self.state, batch, key, False
    )
    self.assertEqual(state, {})
    logits = np.asarray(
      jax.jit(self.task.logits)(self.params, batch['tokens'][:, :-1]),
      np.float64,
    )
    wanted, hits = [], []
    for row in range(2):
      for position in range(16):
        z, target = logits[row, position], batch['tokens'][row, position + 1]
        wanted.append(np.log(np.exp(z).sum()) - z[target])
        hits.append(int(np.argmax(z)) == target)
    self.assertAlmostEqual(float(loss), np.mean(wanted), places=4)
    self.assertAlmostEqual(float(metrics['accuracy']), np.mean(hits), places=6)

  def test_loss_in_bf16_follows_the_parameters(self):
    batch = next(self.task.batches('train', Lease(0, 1, 0, -1)))
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), self.params)
    loss = jax.jit(self.task.loss, static_argnums=4)
    key = jax.random.key(0)
    exact, _ = loss(self.params, {}, batch, key, True)
    rounded, _ = loss(low, {}, batch, key, True)
    self.assertEqual(rounded.dtype, jnp.float32)
    self.assertAlmostEqual(float(exact), float(rounded), delta=0.02)
    self.assertNotEqual(float(exact), float(rounded))

  def test_batches_are_of_the_split(self):
    text = corpus.load(self.path)
    batch = next(self.task.batches('test', None))
    np.testing.assert_array_equal(batch['tokens'][0], text.test[:17])
    train = next(self.task.batches('train', Lease(1, 4, 0, -1)))
    self.assertIn(
      train['tokens'][0].astype(np.uint8).tobytes(), text.train.tobytes()
    )
    self.assertEqual(self.task.batch_tokens(train), 32)

  def test_sampling_is_a_function_of_the_key(self):
    one, again, other = (
      self.task.sample(self.params, 24, jax.random.key(k)) for k in (0, 0, 1)
    )
    self.assertEqual(one, again)
    self.assertNotEqual(one, other)
    self.assertStartsWith(one, 'def ')

  def test_sampling_follows_the_model(self):
    # A model whose logits are all for one byte writes that byte.
    params = jax.tree.map(jnp.zeros_like, self.params)
    params['embed'] = jnp.ones_like(params['embed'])
    params['norm']['scale'] = jnp.ones_like(params['norm']['scale'])
    params['lm_head'] = params['lm_head'].at[:, ord('x')].set(100.0)
    self.assertEqual(
      self.task.sample(params, 9, jax.random.key(0)), 'def xxxxx'
    )

  def test_rules_cover_every_matrix(self):
    rules = self.task.sharding_rules()
    tree = jax.tree_util.tree_flatten_with_path(self.params)[0]
    for path, leaf in tree:
      name = jax.tree_util.keystr(path, simple=True, separator='/')
      found = [a for r, a in rules.items() if re.search(r, name)]
      self.assertLen(found, 1, name)
      self.assertLen(found[0], leaf.ndim, name)
      if leaf.ndim == 2:
        self.assertCountEqual(found[0], ('fsdp', 'tensor'), name)

  def test_the_default_model_has_balanced_fragments(self):
    task = LanguageModelTask(ModelOptions(), DataOptions(), seed=0)
    shapes, _ = jax.eval_shape(task.init, jax.random.key(0))
    leaves = jax.tree.leaves(shapes)
    self.assertGreaterEqual(len(leaves), 14)
    total = sum(leaf.size for leaf in leaves)
    self.assertBetween(total, 105_000, 135_000)
    sizes = A.partition(shapes, 12).sizes
    self.assertEqual(sum(sizes), total)
    self.assertLessEqual(max(sizes), 2 * min(sizes))


if __name__ == '__main__':
  absltest.main()
