"""The language model task: loss, batches, sampling."""

import itertools
import pathlib
import re
import tempfile

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
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    file = pathlib.Path(folder.name) / 'text.txt'
    file.write_bytes(np.random.default_rng(0).bytes(6000).hex().encode())
    cls.path = str(file)
    cls.data = DataOptions(path=cls.path, sequence=16, batch=2)
    cls.task = LanguageModelTask(MODEL, cls.data, seed=0)
    cls.params, cls.state = jax.jit(cls.task.init)(jax.random.key(0))

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
    self.assertEqual(batch['mask'].shape, (2, 16))
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
    self.assertStartsWith(
      self.task.sample(self.params, 5, jax.random.key(0), prompt='if ä'),
      'if ä',
    )

  def test_sampling_without_heat_is_the_likeliest_byte(self):
    # One byte after the other, each from its own window of 16 at most.
    text = list(b'def ')
    logits = jax.jit(self.task.logits)
    while len(text) < 4 + 30:
      window = text[-16:]
      padded = np.zeros((1, 16), np.int32)
      padded[0, : len(window)] = window
      seen = np.asarray(logits(self.params, padded)[0, len(window) - 1])
      text.append(int(seen.argmax()))
    sampled = self.task.sample(
      self.params, 30, jax.random.key(0), temperature=0.0
    )
    self.assertEqual(sampled, bytes(text).decode(errors='replace'))

  def test_temperature_is_that_of_the_distribution(self):
    # The next byte is a with odds 3 to 1 at temperature 1, 9 to 1 at a half.
    params = jax.tree.map(np.zeros_like, self.params)
    params['embed'] = jnp.ones_like(params['embed'])
    params['norm']['scale'] = jnp.ones_like(params['norm']['scale'])
    head = jnp.full_like(params['lm_head'], -10.0)
    width = head.shape[0]
    head = head.at[:, ord('a')].set(np.log(3) / width).at[:, ord('b')].set(0)
    params['lm_head'] = head
    for temperature, wanted in ((1.0, 0.75), (0.5, 0.9)):
      text = self.task.sample(
        params, 1000, jax.random.key(1), temperature=temperature
      )[4:]
      self.assertEqual(set(text), {'a', 'b'})
      # Three standard deviations are 0.04.
      self.assertAlmostEqual(text.count('a') / 1000, wanted, delta=0.04)

  def test_masked_bytes_do_not_count(self):
    tokens = np.random.default_rng(0).integers(0, 256, (2, 17))
    mask = np.zeros((2, 16), bool)
    mask[0, :5] = True
    mask[1, 3] = True
    loss = jax.jit(self.task.loss, static_argnums=4)
    key = jax.random.key(0)

    def alone(row, position):
      only = np.zeros((2, 16), bool)
      only[row, position] = True
      return float(
        loss(self.params, {}, {'tokens': tokens, 'mask': only}, key, False)[0]
      )

    batch = {'tokens': tokens, 'mask': mask}
    measured, (_, metrics) = loss(self.params, {}, batch, key, False)
    wanted = [alone(0, i) for i in range(5)] + [alone(1, 3)]
    self.assertAlmostEqual(float(measured), np.mean(wanted), places=4)
    self.assertAlmostEqual(
      float(metrics['accuracy']) * 6,
      round(float(metrics['accuracy']) * 6),
      places=4,
    )
    self.assertEqual(self.task.batch_tokens(batch), 6)

  def test_names_of_layers_are_strings_in_their_order(self):
    """A checkpoint knows only such keys; '10' sorts before '2'."""
    task = LanguageModelTask(
      ModelOptions(width=8, depth=11, heads=1, vocab=16), self.data, seed=0
    )
    shapes, _ = jax.eval_shape(task.init, jax.random.key(0))
    self.assertCountEqual(shapes['layers'], [str(i) for i in range(11)])
    numbers = itertools.count()
    params = jax.tree.map(lambda x: np.full(x.shape, next(numbers)), shapes)
    module = task.module(params)
    self.assertLen(module.layers, 11)
    for i, layer in enumerate(module.layers):
      for part in ('gate', 'up', 'down'):
        np.testing.assert_array_equal(
          getattr(layer.mlp, part)[...], params['layers'][str(i)]['mlp'][part]
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
