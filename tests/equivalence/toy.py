"""A model of seven tensors that trains in milliseconds, and runs of it.

The loss stays noisy, so that gradients never become as small as the rounding
of f32, which Adam would blow up.
"""

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax import config as config_lib
from diloco_jax.launch import threads
from diloco_jax.launch import virtual

VOCAB, WIDTH, ROWS, LENGTH = 12, 8, 8, 3
NOISE = 0.1

# Inner training of every run here; the oracles have their own AdamW.
INNER = {
  'lr': 0.02,
  'warmup_steps': 3,
  'total_steps': 40,
  'min_lr_ratio': 0.1,
  'weight_decay': 0.1,
  'beta1': 0.9,
  'beta2': 0.95,
  'clip': 1.0,
}


class ToyTask:
  """Regression on bags of tokens; a batch follows from (lane, position).

  With `uneven` lane m has m more rows masked in every batch, and one more in
  every third: islands then have different numbers of tokens.
  """

  def __init__(self, seed=0, uneven=False):
    self._seed = seed
    self._uneven = uneven
    self._teacher = np.random.default_rng([seed, 1]).normal(size=VOCAB)

  def init(self, key):
    # One draw for all tensors: random numbers take long to compile.
    draws = jax.random.normal(key, (4, 2 * WIDTH * WIDTH))

    def normal(index, *shape):
      values = draws[index, : np.prod(shape)].reshape(shape)
      return values / np.sqrt(shape[0])

    def dense(index, inputs, outputs):
      kernel = normal(index, inputs, outputs)
      return {'kernel': kernel, 'bias': jnp.full((outputs,), 0.1)}

    params = {
      'embed': normal(0, VOCAB, WIDTH),
      'hidden': {
        'first': dense(1, WIDTH, 2 * WIDTH),
        'second': dense(2, 2 * WIDTH, WIDTH),
      },
      'head': dense(3, WIDTH, 1),
    }
    return params, {}

  def loss(self, params, state, batch, key, train):
    del key, train
    x = jnp.mean(params['embed'][batch['ids']], axis=1)
    for layer in (params['hidden']['first'], params['hidden']['second']):
      x = jnp.tanh(x @ layer['kernel'] + layer['bias'][None])
    y = (x @ params['head']['kernel'])[:, 0] + params['head']['bias']
    squares = jnp.square(y - batch['y']) * batch['mask']
    return jnp.sum(squares) / jnp.sum(batch['mask']), (state, {})

  def batch(self, lane, position):
    rng = np.random.default_rng([self._seed, 2, lane, position])
    ids = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    y = self._teacher[ids].mean(axis=1) + NOISE * rng.normal(size=ROWS)
    mask = np.ones(ROWS, np.float32)
    if self._uneven:
      mask[: lane + (position % 3 == 0)] = 0
    return {'ids': ids, 'y': y.astype(np.float32), 'mask': mask}

  def batches(self, split, lease):
    assert split == 'train', split
    position = lease.begin // ROWS
    while True:
      yield self.batch(lease.lane, position)
      position += 1

  def batch_tokens(self, batch):
    return int(batch['mask'].sum()) * LENGTH


class Evaluated(ToyTask):
  """With a held-out set, on a lane that no island has."""

  def batches(self, split, lease):
    if split == 'test':
      return iter([self.batch(1000, position) for position in range(4)])
    return super().batches(split, lease)


def configured(preset, *, islands, steps, sync=(), outer=(), seed=0):
  """The resolved configuration of a run of the toy task."""
  config = config_lib.default_config()
  config.preset, config.islands, config.steps = preset, islands, steps
  config.seed = seed
  config.data.batch = ROWS
  config.metrics.tensorboard = False
  sections = (
    (config.inner, INNER),
    (config.sync, dict(sync)),
    (config.outer, dict(outer)),
  )
  for section, values in sections:
    for name, value in values.items():
      section[name] = value
  return config_lib.resolve(config)


def trained(task, preset, **settings):
  """The result of a run in threads."""
  run = configured(preset, **settings)
  return threads.run_in_threads(task, run, evaluate=False)


def trained_in_virtual_time(task, preset, **settings):
  """As `trained`, with simulated time."""
  run = configured(preset, **settings)
  return virtual.run_in_virtual_time(task, run, evaluate=False)


def flat(tree, prefix=''):
  """Nested dicts as {path: f64 array}."""
  if not isinstance(tree, dict):
    return {prefix: np.asarray(tree, np.float64)}
  leaves = {}
  for name, value in tree.items():
    leaves.update(flat(value, f'{prefix}/{name}' if prefix else name))
  return leaves


def nested(leaves):
  """The inverse of `flat`, in f32."""
  tree = {}
  for path, value in leaves.items():
    *parents, name = path.split('/')
    level = tree
    for parent in parents:
      level = level.setdefault(parent, {})
    level[name] = np.asarray(value, np.float32)
  return tree


def difference(got, expected):
  """The largest error of any tensor, relative to its largest value."""
  assert got.keys() == expected.keys(), (sorted(got), sorted(expected))
  return max(
    float(np.abs(got[x] - expected[x]).max() / np.abs(expected[x]).max())
    for x in expected
  )
