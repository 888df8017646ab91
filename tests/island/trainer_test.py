"""The trainer against NumPy, on a task whose gradients are plain."""

import dataclasses
import math

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.errors import UserError
from diloco_jax.island.sharding import MeshOptions
from diloco_jax.island.trainer import InnerOptions
from diloco_jax.island.trainer import Trainer
from diloco_jax.island.trainer import schedule

START = {
  'embed': np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2),
  'w': np.linspace(2, -1, 8, dtype=np.float32).reshape(4, 2),
  'scale': np.array([1.0, -2.0, 0.5], np.float32),
}
BATCH = 4
OPTIONS = InnerOptions(
  lr=0.1, warmup_steps=3, total_steps=10, weight_decay=0.3, beta2=0.9,
  clip=1.5,
)  # fmt: skip


class Quadratic:
  """Mean over rows of 0.5 a (p - b)^2, summed over the parameters p."""

  def init(self, key):
    del key
    return jax.tree.map(jnp.asarray, START), {'seen': jnp.zeros(())}

  def loss(self, params, state, batch, key, train):
    del key
    rows = [
      expand(batch['a'], x) * (x[None] - expand(batch['b'], x)) ** 2
      for x in jax.tree.leaves(params)
    ]
    loss = 0.5 * sum(jnp.sum(r) for r in rows) / batch['a'].shape[0]
    if train:
      state = {'seen': state['seen'] + batch['a'].shape[0]}
    return loss, (state, {'twice': 2 * loss})

  def batch_tokens(self, batch):
    return int(batch['count'].sum())


def expand(rows, x):
  return rows.reshape(rows.shape + (1,) * x.ndim)


def make_batch(seed, rows=BATCH):
  rng = np.random.default_rng(seed)
  return {
    'a': rng.uniform(0.5, 2, rows).astype(np.float32),
    'b': rng.normal(size=rows).astype(np.float32),
    'count': np.full(rows, seed + 1),
  }


def numpy_rate(options, index):
  if index < options.warmup_steps:
    return options.lr * index / options.warmup_steps
  span = options.total_steps - options.warmup_steps
  done = min(1.0, (index - options.warmup_steps) / span)
  low = options.lr * options.min_lr_ratio
  return low + (options.lr - low) * 0.5 * (1 + math.cos(math.pi * done))


def numpy_train(options, batches, decayed=('w',)):
  """AdamW (Loshchilov and Hutter), clipped, in float64."""
  params = {k: x.astype(np.float64) for k, x in START.items()}
  first = {k: np.zeros(x.shape) for k, x in START.items()}
  second = {k: np.zeros(x.shape) for k, x in START.items()}
  losses = []
  for index, batch in enumerate(batches):
    a, b = batch['a'].astype(np.float64), batch['b'].astype(np.float64)
    losses.append(
      sum(
        np.mean(
          [np.sum(0.5 * i * (x - j) ** 2) for i, j in zip(a, b, strict=True)]
        )
        for x in params.values()
      )
    )
    grads = {k: a.mean() * x - (a * b).mean() for k, x in params.items()}
    norm = math.sqrt(sum(np.sum(g**2) for g in grads.values()))
    if options.clip and norm > options.clip:
      grads = {k: g * options.clip / norm for k, g in grads.items()}
    for k, g in grads.items():
      first[k] = options.beta1 * first[k] + (1 - options.beta1) * g
      second[k] = options.beta2 * second[k] + (1 - options.beta2) * g**2
      m = first[k] / (1 - options.beta1 ** (index + 1))
      v = second[k] / (1 - options.beta2 ** (index + 1))
      update = m / (np.sqrt(v) + 1e-8)
      if k in decayed:
        update = update + options.weight_decay * params[k]
      params[k] = params[k] - numpy_rate(options, index) * update
  return params, losses


def make(options=OPTIONS, batch_size=BATCH, task=None, seed=0):
  return Trainer(
    task or Quadratic(),
    options,
    MeshOptions(),
    seed=seed,
    batch_size=batch_size,
    devices=jax.devices()[:1],
  )


def train(trainer, batches):
  params, losses = trainer.init(), []
  for batch in batches:
    params, loss = trainer.step(params, batch)
    losses.append(loss)
  return jax.device_get(params), [float(x) for x in losses]


class StepTest(parameterized.TestCase):
  @parameterized.parameters(0.0, 1.5)
  def test_adamw_schedule_clip_and_mask_are_those_of_numpy(self, clip):
    options = dataclasses.replace(OPTIONS, clip=clip)
    batches = [make_batch(i) for i in range(14)]  # past the horizon
    params, losses = train(make(options), batches)
    want_params, want_losses = numpy_train(options, batches)
    np.testing.assert_allclose(losses, want_losses, rtol=2e-4)
    for name, want in want_params.items():
      np.testing.assert_allclose(params[name], want, rtol=2e-4, atol=2e-5)
    # The oracle can tell: another mask gives other parameters.
    other, _ = numpy_train(options, batches, decayed=('w', 'scale'))
    self.assertGreater(np.abs(other['scale'] - params['scale']).max(), 0.01)

  def test_parts_of_a_batch_give_the_step_of_the_whole(self):
    batches = [make_batch(i, rows=6) for i in range(5)]
    whole, losses = train(make(batch_size=6), batches)
    in_parts = make(dataclasses.replace(OPTIONS, accumulate=3), batch_size=6)
    parts, part_losses = train(in_parts, batches)
    np.testing.assert_allclose(part_losses, losses, rtol=1e-5)
    for name in START:
      np.testing.assert_allclose(parts[name], whole[name], atol=1e-5)
    # Each part passed through the model's state.
    self.assertEqual(float(in_parts.extra['state']['seen']), 30)

  def test_bf16_is_close_to_f32_and_parameters_stay_f32(self):
    batches = [make_batch(i) for i in range(5)]
    exact, _ = train(make(), batches)
    rounded, _ = train(make(dataclasses.replace(OPTIONS, bf16=True)), batches)
    for name in START:
      self.assertEqual(rounded[name].dtype, np.float32)
      np.testing.assert_allclose(rounded[name], exact[name], atol=0.02)
    self.assertTrue(any(np.any(rounded[n] != exact[n]) for n in START))

  def test_parameters_are_donated_and_the_loss_is_not(self):
    trainer = make()
    start = trainer.init()
    state = jax.tree.leaves(trainer.extra['optimizer'])
    params, loss = trainer.step(start, make_batch(0))
    self.assertTrue(all(x.is_deleted() for x in jax.tree.leaves(start)))
    self.assertTrue(all(x.is_deleted() for x in state))
    trainer.step(params, make_batch(1))
    self.assertFalse(loss.is_deleted())
    self.assertEqual((loss.shape, loss.dtype), ((), jnp.float32))
    self.assertTrue(math.isfinite(float(loss)))

  def test_extra_takes_up_where_it_was_left(self):
    batches = [make_batch(i) for i in range(8)]
    whole, losses = train(make(), batches)
    first = make()
    params, _ = train(first, batches[:4])
    # All of it can be taken to the host, and outlives the next step.
    saved = jax.device_get(first.extra)
    for leaf in jax.tree.leaves(saved):
      self.assertIsInstance(leaf, (np.ndarray, np.generic, int))
    first.step(first.put(params), batches[7])
    second = make()
    second.extra = saved
    params = second.put(params)
    rest = []
    for batch in batches[4:]:
      params, loss = second.step(params, batch)
      rest.append(float(loss))
    np.testing.assert_allclose(rest, losses[4:], rtol=1e-6)
    np.testing.assert_allclose(params['w'], whole['w'], rtol=1e-6)

  def test_compiled_ahead_it_takes_the_same_step(self):
    trainer = make()
    trainer.compile(make_batch(0))  # nothing is there yet
    params = trainer.init()
    _, loss = trainer.step(params, make_batch(0))
    _, (want,) = train(make(), [make_batch(0)])
    self.assertEqual(float(loss), want)

  def test_put_makes_fresh_buffers(self):
    trainer = make()
    trainer.init()
    host = jax.tree.map(np.copy, START)
    for _ in range(2):
      placed = trainer.put(host)
      for name in START:
        np.testing.assert_array_equal(placed[name], START[name])
      trainer.step(placed, make_batch(0))
      self.assertTrue(placed['w'].is_deleted())
    # The values are those of the call, whatever becomes of the host's memory.
    placed = trainer.put(host)
    host['w'][:] = 9
    np.testing.assert_array_equal(placed['w'], START['w'])
    host['w'][:] = START['w']
    # Device arrays stay with their owner too.
    mine = trainer.put(host)
    trainer.step(trainer.put(mine), make_batch(0))
    for name in START:
      np.testing.assert_array_equal(host[name], START[name])
      np.testing.assert_array_equal(mine[name], START[name])

  def test_a_batch_that_does_not_divide_is_told(self):
    with self.assertRaisesRegex(UserError, 'data.batch.*multiple of 3'):
      make(dataclasses.replace(OPTIONS, accumulate=3), batch_size=4)


class OwnOptimizer(Quadratic):
  """Plain gradient descent at a rate of its own, 0.25 / (1 + index)."""

  def __init__(self):
    self.asked = None

  def inner_optimizer(self, options):
    self.asked = options

    def update(grads, state, params=None, *, index, **others):
      del params, others
      return jax.tree.map(lambda g: -0.25 / (1 + index) * g, grads), state

    return optax.GradientTransformationExtraArgs(
      lambda params: optax.EmptyState(), update
    )


class OwnOptimizerTest(absltest.TestCase):
  def test_it_replaces_rate_decay_and_clipping(self):
    task = OwnOptimizer()
    trainer = make(task=task)
    self.assertIs(task.asked, OPTIONS)
    trainer.index = 3
    trainer.rewarm(2)
    params = trainer.init()
    wanted = {k: x.astype(np.float64) for k, x in START.items()}
    for index, ramp in ((3, 0.5), (4, 1.0), (5, 1.0)):
      batch = make_batch(index)
      params, _ = trainer.step(params, batch)
      a, b = batch['a'], batch['b']
      for name, x in wanted.items():
        grad = a.mean() * x - (a * b).mean()
        wanted[name] = x - ramp * 0.25 / (1 + index) * grad
    for name, x in wanted.items():
      np.testing.assert_allclose(params[name], x, rtol=1e-5, atol=1e-6)


class Noise(Quadratic):
  """Its loss is a draw."""

  def loss(self, params, state, batch, key, train):
    loss, rest = super().loss(params, state, batch, key, train)
    return 0 * loss + jax.random.uniform(key), rest


class NoiseTest(absltest.TestCase):
  def draws(self, index=0, seed=0, accumulate=1):
    options = dataclasses.replace(OPTIONS, accumulate=accumulate)
    trainer = make(options, task=Noise(), seed=seed)
    trainer.index = index
    return train(trainer, [make_batch(0)] * 3)[1]

  def test_draws_are_a_function_of_seed_and_index(self):
    draws = self.draws()
    self.assertLen(set(draws), 3)
    self.assertEqual(self.draws(index=1)[:2], draws[1:])
    self.assertEmpty(set(self.draws(seed=1)) & set(draws))

  def test_parts_of_a_batch_draw_each_for_itself(self):
    self.assertEmpty(set(self.draws(accumulate=2)) & set(self.draws()))


class RateTest(absltest.TestCase):
  def test_schedule(self):
    rate = schedule(OPTIONS)
    for index in range(40):
      want = numpy_rate(OPTIONS, index)
      self.assertAlmostEqual(float(rate(index)), want, places=6)
    self.assertAlmostEqual(float(rate(10_000)), 0.01, places=6)

  def test_the_rate_follows_the_index(self):
    trainer = make()
    trainer.index = 7
    self.assertAlmostEqual(trainer.rate(), numpy_rate(OPTIONS, 7), places=6)
    params = trainer.init()
    trainer.step(params, make_batch(0))
    self.assertEqual(trainer.index, 8)

  def test_a_newcomer_warms_up_again(self):
    trainer = make()
    trainer.index = 4
    trainer.rewarm(4)
    ramp = []
    for index in range(4, 12):
      trainer.index = index
      ramp.append(trainer.rate() / numpy_rate(OPTIONS, index))
    np.testing.assert_allclose(
      ramp, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1], rtol=1e-5
    )
    trainer.rewarm(0)
    self.assertAlmostEqual(trainer.rate(), numpy_rate(OPTIONS, 11), places=6)


class EvaluateTest(absltest.TestCase):
  def test_batches_count_by_their_tokens(self):
    trainer = make()
    params = trainer.put(START)
    batches = [make_batch(0), make_batch(4)]
    losses = [numpy_train(OPTIONS, [batch])[1][0] for batch in batches]
    measured = trainer.evaluate(params, batches)
    self.assertEqual(measured['tokens'], 4 * 1 + 4 * 5)
    want = (losses[0] * 4 + losses[1] * 20) / 24
    self.assertAlmostEqual(measured['loss'], want, places=4)
    self.assertAlmostEqual(measured['twice'], 2 * want, places=4)
    self.assertFalse(params['w'].is_deleted())

  def test_no_batch(self):
    trainer = make()
    self.assertEqual(trainer.evaluate(trainer.put(START), []), {'tokens': 0})


if __name__ == '__main__':
  absltest.main()
